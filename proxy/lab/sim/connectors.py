"""The connectors of vLLM and SGLang that transfer KV cache between pods."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from proxy.lab.sim.fields import ENGINE_FAILED, SimError, internal
from proxy.lab.sim.sequence import BYTES_PER_TOKEN, Sequence, SequenceTransfer, text_hash
from proxy.lab.sim.transfer import (
    EngineStops,
    Fabric,
    HeldCache,
    Incoming,
    Outgoing,
    SimConnector,
    TransferRequest,
)


class SimNixl(SimConnector):
    """The NIXL connector. A pod accepts both prefill and decode requests, whatever its role."""

    def arrange(self, request: TransferRequest, sequences: Items[Sequence]) -> None:
        params = request.params()
        if params.get("do_remote_decode"):
            for index, sequence in enumerate(sequences):
                request_id = f"cmpl-{request.id}-{index}-{uuid4().hex[:8]}"
                holding = self.hold(_key(*self.where(), self.engine_id, request_id), sequence)
                sequence.transfer = Outgoing(self, holding, request.is_lost, request_id)
        elif params.get("do_remote_prefill"):
            if "remote_engine_id" not in params:
                raise EngineStops("KeyError: 'remote_engine_id'")
            names = ("remote_host", "remote_port", "remote_engine_id", "remote_request_id")
            for sequence in sequences:
                sequence.transfer = Incoming(self, request, _key(*map(params.get, names)))

    def params(self, sequences: Items[Sequence]) -> dict[str, Any] | None:
        """Return the parameters of the first sequence; caches of other sequences expire."""
        first = sequences[0]
        if not isinstance(first.transfer, Outgoing) or not first.transfer.was_kept:
            return None
        host, port = self.where()
        tokens = first.progress.prompt_tokens
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(range(1, 1 + -(-tokens // self.config.block_size)))],
            "remote_engine_id": self.engine_id,
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


def _key(*parts: Any) -> str:
    return "nixl " + " ".join(map(str, parts))


ADDRESSES = re.compile(r"___prefill_addr_[^_:]+:\d+___decode_addr_[^_:]+:\d+_")


class SimP2pNccl(SimConnector):
    def arrange(self, request: TransferRequest, sequences: Items[Sequence]) -> None:
        for index, sequence in enumerate(sequences):
            key = f"p2p-nccl {request.id} {index}"
            if self.config.role == "prefill":
                if not ADDRESSES.search(request.id):
                    raise internal(ENGINE_FAILED)  # the request id does not contain hostname and port
                sequence.transfer = Pushed(self.fabric, key, request.is_lost)
            elif self.config.role == "decode":
                sequence.transfer = Incoming(self, request, key)


@dataclass(frozen=True, slots=True)
class Pushed(SequenceTransfer):
    """A transfer that keeps nothing: the other pod has the cache as soon as it is computed."""

    fabric: Fabric
    key: str
    is_lost: bool

    def computed(self, sequence: Sequence) -> None:
        if not self.is_lost:
            holding = HeldCache(lambda: self.fabric.holdings.pop(self.key, None))
            holding.computed()
            self.fabric.announce(self.key, holding)


class SimMooncake(SimConnector):
    """The Mooncake connector. Requests without a transfer id are served without a transfer."""

    def arrange(self, request: TransferRequest, sequences: Items[Sequence]) -> None:
        params = request.params()
        if not params.get("transfer_id"):
            return
        for index, sequence in enumerate(sequences):
            key = f"mooncake {params['transfer_id']} {index}"
            if params.get("do_remote_decode"):
                sequence.transfer = Outgoing(self, self.hold(key, sequence), request.is_lost)
            elif params.get("do_remote_prefill"):
                sequence.transfer = Incoming(self, request, key, self.scaled(self.config.transfer.failure))


class SimSglang(SimConnector):
    """SGLang's connector. A pod with a role refuses requests without a bootstrap id, and a prefill pod's response ends
    when its cache is fetched."""

    def arrange(self, request: TransferRequest, sequences: Items[Sequence]) -> None:
        if self.config.role not in ("prefill", "decode"):
            return
        for sequence, number in zip(sequences, _bootstrap_ids(request.body, len(sequences)), strict=True):
            key = f"sglang {number}"
            if self.config.role == "prefill":
                sequence.transfer = Fetched(self, self.hold(key, sequence), request.is_lost)
            else:
                sequence.transfer = Incoming(self, request, key, self.scaled(self.config.transfer.failure))


class Fetched(Outgoing):
    async def done(self) -> None:
        if not await asyncio.shield(self.holding.ended):  # the client may leave first
            raise internal(ENGINE_FAILED)  # the decode instance did not come for its KV cache


def _bootstrap_ids(body: Mapping[str, Any], count: int) -> list[int]:
    """Return one bootstrap id for each sequence; a request with several sequences has a list."""
    given = body.get("bootstrap_room")
    found = [one for one in (given if isinstance(given, list) else [given]) if isinstance(one, int)]
    if len(found) != count:
        raise SimError("Invalid request: Disaggregated request received without bootstrap room id.")
    return found


class SimSharedStorage(SimConnector):
    cached: ClassVar[bool] = True

    def arrange(self, request: TransferRequest, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            sequence.transfer = Filed(self, request, sequence)


class Filed(Incoming):
    def __init__(self, connector: SimConnector, request: TransferRequest, sequence: Sequence) -> None:
        super().__init__(connector, request, "")
        block = connector.config.block_size
        self._files = connector.fabric.files
        self._tokens = (sequence.tokens - 1) // block * block
        self._hash = text_hash(sequence.prompt[: self._tokens * BYTES_PER_TOKEN] + b"%d" % sequence.root)

    def arrives(self, cached: int) -> bool:
        return self._tokens > cached and self._hash in self._files

    async def found(self) -> bool:
        return not self.request.is_lost

    def claim(self) -> bool:
        return True

    def computed(self, sequence: Sequence) -> None:
        if self._tokens and not self.request.is_lost:
            self._files.add(self._hash)


CONNECTORS: Mapping[str, type[SimConnector]] = {
    "": SimConnector,
    "nixl": SimNixl,
    "shared-storage": SimSharedStorage,
    "mooncake": SimMooncake,
    "sglang": SimSglang,
    "p2p-nccl": SimP2pNccl,
}
