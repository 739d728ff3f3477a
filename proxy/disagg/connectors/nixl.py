"""vLLM's NixlConnector: the decode pod pulls the blocks that the prefill pod names in its response.

The prefill pod keeps the blocks until they are pulled or expire (VLLM_NIXL_ABORT_REQUEST_TIMEOUT).
"""

from __future__ import annotations

from typing import Any, ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Random
from proxy.disagg.connector import Connector, Split

REQUESTED = {
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
        return Split({"kv_transfer_params": REQUESTED}, None)

    def hand_over(self, response: dict[str, Any]) -> dict[str, Any] | None:
        """Return None for parameters that would stop the decode pod's engine: without an engine id, or with fields of
        other types than vLLM's."""
        params = response.get("kv_transfer_params")
        if not isinstance(params, dict) or not params.get("remote_engine_id"):
            return None
        is_usable = all(is_valid(params.get(name)) for name, is_valid in _FIELDS.items())
        return {"kv_transfer_params": params} if is_usable else None


def _is_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _is_number(value: Any) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**31)


def _are_blocks(value: Any, depth: int = 2) -> bool:
    """Return whether the value is a list of block ids, or of one such list per group of layers."""
    if isinstance(value, list):
        return depth > 0 and all(_are_blocks(each, depth - 1) for each in value)
    return _is_number(value)


_FIELDS = {
    "remote_engine_id": _is_text,
    "remote_request_id": _is_text,
    "remote_host": _is_text,
    "remote_port": _is_number,
    "tp_size": _is_number,
    "remote_block_ids": _are_blocks,
}
