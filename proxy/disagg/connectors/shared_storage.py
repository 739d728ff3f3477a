"""vLLM's ExampleConnector, once SharedStorageConnector: the decode pod finds the blocks in a common directory."""

from __future__ import annotations

from typing import ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random
from proxy.disagg.connector import Connector, Split


class SharedStorage(Connector):
    name: ClassVar[str] = "shared-storage"

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        return Split({}, None)  # the decode pod finds the blocks by the hash of the prompt
