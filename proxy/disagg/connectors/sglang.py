"""SGLang: both pods meet at the prefill pod's bootstrap server, under a number (`bootstrap_room`).

A decode pod finds the data-parallel rank that has the cache by a field of its request; older versions use the
remainder of that number.
"""

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
    generates_first_token: ClassVar[bool] = True

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        number, ranks = int(random.random() * 2**53), len(prefill.ranks)
        meeting: dict[str, Any] = {
            "bootstrap_host": host_of(prefill),
            "bootstrap_port": port_of(prefill, BOOTSTRAP_PORT),
            "bootstrap_room": number * ranks + (prefill.rank or 0),
        }
        if prefill.rank is None:
            return Split(meeting, meeting)
        return Split(meeting, {**meeting, "disagg_prefill_dp_rank": prefill.rank})
