"""SGLang: both pods meet in a room of the prefill pod's bootstrap server."""

from __future__ import annotations

from typing import Any, ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random
from proxy.disagg.connector import Connector, Split, host_of, port_of

BOOTSTRAP_PORT = 8998


class Sglang(Connector):
    name: ClassVar[str] = "sglang"
    at_once: ClassVar[bool] = True
    needs_pair: ClassVar[bool] = True
    begins_answer: ClassVar[bool] = True

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        room = {
            "bootstrap_host": host_of(prefill),
            "bootstrap_port": port_of(prefill, BOOTSTRAP_PORT),
            "bootstrap_room": int(random.random() * 2**63),
        }
        return Split(room, room)

    def hand_over(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        return None
