"""vLLM's P2pNcclConnector: the request's id names the addresses of both pods, and the prefill pod pushes."""

from __future__ import annotations

from typing import ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random
from proxy.disagg.connector import Connector, Split, host_of, only_once, port_of

TRANSFER_PORT = 14579


class P2pNccl(Connector):
    name: ClassVar[str] = "p2p-nccl"
    needs_pair: ClassVar[bool] = True

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        both = (_address(prefill), _address(decode))
        name = only_once(request_id, random)
        return Split({}, None, f"___prefill_addr_{both[0]}___decode_addr_{both[1]}_{name}")


def _address(endpoint: Endpoint) -> str:
    return f"{host_of(endpoint)}:{port_of(endpoint, TRANSFER_PORT)}"
