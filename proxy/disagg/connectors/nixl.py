"""vLLM's NixlConnector: the decode pod pulls blocks that the prefill pod names in its answer.

The prefill pod keeps the blocks until they are pulled or expire (VLLM_NIXL_ABORT_REQUEST_TIMEOUT).
"""

from __future__ import annotations

from typing import Any, ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random
from proxy.disagg.connector import Connector, Split

ASKED = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Nixl(Connector):
    name: ClassVar[str] = "nixl"

    def split(self, request_id: str, prefill: Endpoint, decode: Endpoint, random: Random) -> Split:
        return Split({"kv_transfer_params": ASKED}, None)

    def hand_over(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Without an engine id the decode pod's engine would stop."""
        params = answer.get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("remote_engine_id"):
            return None
        return {"kv_transfer_params": params}
