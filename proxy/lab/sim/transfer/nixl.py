"""vLLM's NixlConnector: a pod keeps what it has computed, says where, and another one pulls it.

After facts measured on vLLM 0.32: an answer that is streamed says nothing of what is kept; a decode pod that is not
told which engine has the cache loses its own engine; a pull from a pod, engine or request that is not there fails the
request after some seconds; what was pulled does not count as cached.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any
from uuid import uuid4

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.driver import EngineDriver
from proxy.lab.sim.sequence import Sequence
from proxy.lab.sim.transfer.connector import Asked, Connector, EngineStops, Incoming, Outgoing
from proxy.lab.sim.transfer.fabric import Fabric


class Nixl(Connector):
    """Takes both parts, whatever the pod's role."""

    def __init__(
        self, config: SimConfig, driver: EngineDriver, fabric: Fabric, where: Callable[[], tuple[str, int]]
    ) -> None:
        super().__init__(config, driver, fabric, where)
        self._engine_id = str(uuid4())

    def arrange(self, asked: Asked, sequences: Items[Sequence]) -> None:
        params = asked.params()
        if params.get("do_remote_decode"):
            for index, sequence in enumerate(sequences):
                request_id = f"cmpl-{asked.id}-{index}-{uuid4().hex[:8]}"
                holding = self.hold(_key(*self.where(), self._engine_id, request_id), sequence)
                sequence.transfer = Named(self, holding, request_id, is_lost=asked.is_lost)
        elif params.get("do_remote_prefill"):
            if "remote_engine_id" not in params:
                raise EngineStops("KeyError: 'remote_engine_id'")
            for sequence in sequences:
                sequence.transfer = Incoming(self, asked, _named_in(params))

    def params(self, sequences: Items[Sequence]) -> dict[str, Any] | None:
        """Of the first sequence only: those of others expire."""
        first = sequences[0]
        if not isinstance(first.transfer, Named) or not first.transfer.was_kept:
            return None
        host, port = self.where()
        tokens = first.progress.prompt_tokens
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 + -(-tokens // self.config.block_size)))],
            "remote_engine_id": self._engine_id,
            "remote_request_id": first.transfer.request_id,
            "remote_host": host,
            "remote_port": port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": first.progress.cached_tokens,
        }


class Named(Outgoing):
    def __init__(self, connector: Connector, holding: Any, request_id: str, *, is_lost: bool) -> None:
        super().__init__(connector, holding, is_lost=is_lost)
        self.request_id = request_id
        self.was_kept = False

    def keeps(self, sequence: Sequence) -> bool:
        self.was_kept = True
        return super().keeps(sequence)


def _named_in(params: Any) -> str:
    names = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
    return _key(*(params.get(name) for name in names))


def _key(*parts: Any) -> str:
    return "nixl " + " ".join(map(str, parts))
