"""Keep the pods that encode media."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Filter, plugin
from proxy.core.request import InferenceRequest

ENCODING = frozenset({"encode", "encode-prefill", "encode-prefill-decode"})


@plugin("encode-filter")
@dataclass(frozen=True, slots=True)
class EncodeFilter(Filter):
    """Keeps the roles encode, encode-prefill and encode-prefill-decode."""

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.role in ENCODING]
