"""Transfer of KV cache and embeddings between simulated pods: the part that all connectors share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar
from uuid import uuid4

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.driver import EngineDriver
from proxy.lab.sim.faults import Fault, FaultKind
from proxy.lab.sim.sequence import Sequence, SequenceTransfer


class HeldCache:
    """The KV cache of one prompt that a pod has, or will have, for another pod. It is gone after it was fetched, has
    expired, or was lost; `ended` is then whether it was fetched."""

    def __init__(self, give_back: Callable[[], object]) -> None:
        self.ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.expiry: asyncio.TimerHandle | None = None
        self._give_back = give_back
        self._decided = asyncio.Event()

    @property
    def is_gone(self) -> bool:
        return self.ended.done()

    def computed(self) -> None:
        self._decided.set()

    async def ready(self) -> bool:
        """Wait until it is computed; return False if it never will be."""
        await self._decided.wait()
        return not self.is_gone

    def end(self, *, fetched: bool = False) -> None:
        """Return its blocks to the pod."""
        if self.is_gone:
            return
        self.ended.set_result(fetched)
        self._decided.set()
        if self.expiry is not None:
            self.expiry.cancel()
        self._give_back()


class Fabric:
    """The connections between the pods of a fleet. Lives as long as the fleet."""

    def __init__(self) -> None:
        self.files: set[int] = set()
        """Prompts whose KV cache is in the common directory, by hash."""
        self.embeddings: set[int] = set()
        """Media whose embeddings are in the common directory."""
        self.encoders: dict[tuple[Any, Any], set[int]] = {}
        """Media whose embeddings are on encode pods, by host and port."""
        self.holdings: dict[str, HeldCache] = {}
        self._announced = asyncio.Event()

    def announce(self, key: str, holding: HeldCache) -> None:
        self.holdings[key] = holding
        self._announced.set()
        self._announced = asyncio.Event()

    async def find(self, key: str, patience: float) -> HeldCache | None:
        """Return a holding; wait this many seconds for its announcement."""
        with suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while key not in self.holdings:
                    await self._announced.wait()
        return self.holdings.get(key)


class EngineStops(Exception):
    """The request stops the engine."""


@dataclass(frozen=True, slots=True)
class TransferRequest:
    """One request: its id, its body, and the fault that it met."""

    id: str
    body: Mapping[str, Any]
    fault: Fault | None = None

    @property
    def is_lost(self) -> bool:
        return self.fault is not None and self.fault.kind is FaultKind.LOST_TRANSFER

    @property
    def slowness(self) -> float:
        return self.fault.factor if self.fault is not None and self.fault.kind is FaultKind.SLOW_TRANSFER else 1.0

    def params(self) -> Mapping[str, Any]:
        """Return the parameters of vLLM's connectors; empty if there are no parameters."""
        params = self.body.get("kv_transfer_params")
        return params if isinstance(params, dict) else {}


class SimConnector:
    """The connector of one pod. `arrange` is called before the sequences of a request are submitted, `close` when the
    pod has died. `where` is the pod's host and port."""

    cached: ClassVar[bool] = False
    """Whether transferred tokens count as cached."""

    def __init__(
        self, config: SimConfig, driver: EngineDriver, fabric: Fabric, where: Callable[[], tuple[str, int]]
    ) -> None:
        self.config = config
        self.driver = driver
        self.fabric = fabric
        self.where = where
        self.engine_id = str(uuid4())
        self._holdings: dict[str, HeldCache] = {}
        self._pulls: set[asyncio.Task[None]] = set()

    def arrange(self, request: TransferRequest, sequences: Items[Sequence]) -> None:
        """Set the transfer of each sequence. Raise SimError and EngineStops."""

    def params(self, sequences: Items[Sequence]) -> dict[str, Any] | None:
        """Return the transfer parameters of the response, for the next pod."""
        return None

    def close(self) -> None:
        for holding in list(self._holdings.values()):
            holding.end()
        for pull in self._pulls:
            pull.cancel()

    def hold(self, key: str, sequence: Sequence) -> HeldCache:
        holding = HeldCache(lambda: self._free(key, sequence))
        self._holdings[key] = holding
        self.fabric.announce(key, holding)
        return holding

    def expire(self, holding: HeldCache, sequence: Sequence) -> None:
        """Give up the holding if no pod fetches it in time."""

        def expired() -> None:
            self.driver.engine_of(sequence).stats.expired_transfers += 1
            holding.end()

        seconds = self.scaled(self.config.transfer.expiry)
        holding.expiry = asyncio.get_running_loop().call_later(seconds, expired)

    def pull(self, incoming: Incoming, sequence: Sequence, tokens: int) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._pull(incoming, sequence, tokens), name="pull")
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        return task

    def scaled(self, seconds: float) -> float:
        return seconds / self.config.time_scale

    async def _pull(self, incoming: Incoming, sequence: Sequence, tokens: int) -> None:
        timing, stats = self.config.transfer, self.driver.engine_of(sequence).stats
        seconds = timing.seconds(tokens) * incoming.request.slowness
        if await incoming.found():
            await asyncio.sleep(self.scaled(seconds))
            if incoming.claim():
                stats.transfers += 1
                stats.transferred_tokens += tokens
                stats.transfer_seconds += seconds
                self.driver.loaded(sequence, cached=self.cached)
                return
        await asyncio.sleep(self.scaled(timing.failure))
        stats.failed_transfers += 1
        self.driver.fail(sequence)

    def _free(self, key: str, sequence: Sequence) -> None:
        self._holdings.pop(key, None)
        self.fabric.holdings.pop(key, None)
        self.driver.give_back(sequence)


@dataclass
class Outgoing(SequenceTransfer):
    """A transfer to another pod: it keeps the blocks of its prompt after the end of the sequence."""

    connector: SimConnector
    holding: HeldCache
    is_lost: bool
    request_id: str = ""
    was_kept: bool = False

    def computed(self, sequence: Sequence) -> None:
        if self.is_lost:
            self.holding.end()
        self.holding.computed()

    def keeps(self, sequence: Sequence) -> bool:
        self.was_kept = True
        if self.holding.is_gone:
            return False
        self.connector.expire(self.holding, sequence)
        return True

    def abandon(self) -> None:
        self.holding.end()


class Incoming(SequenceTransfer):
    """A transfer from another pod, which computes the prompt and has announced it, or will within `patience`
    seconds."""

    def __init__(self, connector: SimConnector, request: TransferRequest, key: str, patience: float = 0.0) -> None:
        self.request = request
        self._connector = connector
        self._key = key
        self._patience = patience
        self._holding: HeldCache | None = None
        self._pull: asyncio.Task[None] | None = None

    def arrives(self, cached: int) -> bool:
        return True

    def start(self, sequence: Sequence, tokens: int) -> None:
        self._pull = self._connector.pull(self, sequence, tokens)

    async def found(self) -> bool:
        if self.request.is_lost:
            return False
        self._holding = await self._connector.fabric.find(self._key, self._patience)
        return self._holding is not None and await self._holding.ready()

    def claim(self) -> bool:
        """Take the cache after it was copied. Return False if it is gone."""
        if self._holding is None or self._holding.is_gone:
            return False
        self._holding.end(fetched=True)
        return True

    def abandon(self) -> None:
        """Notify the pod that holds the cache, also before the copy has started."""
        if self._pull is not None and self._pull is not asyncio.current_task():
            self._pull.cancel()
        if (holding := self._connector.fabric.holdings.get(self._key)) is not None:
            holding.end()


TOKENS = 256
"""Number of tokens of one medium."""


class Embeddings:
    """The embeddings of one pod. `close` is called when the pod has died."""

    def __init__(self, config: SimConfig, fabric: Fabric, where: Callable[[], tuple[str, int]]) -> None:
        self._named = config.ec_connector == "nixl"
        self._fabric = fabric
        self._where = where

    def keep(self, sequence: Sequence, *, is_lost: bool) -> None:
        """Store embeddings when they are computed."""
        if self._named:
            kept = self._fabric.encoders.setdefault(self._where(), set())
        else:
            kept = self._fabric.embeddings
        if not is_lost:
            sequence.transfer = _Kept(kept)

    def missing(self, media: Items[int], body: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the media whose embeddings the request does not name."""
        params = body.get("ec_transfer_params")
        if not isinstance(params, dict):
            return tuple(media)
        return tuple(one for one in media if not self._is_named(one, params.get(_digest(one))))

    def params(self, sequences: Items[Sequence]) -> dict[str, Any] | None:
        """Return the transfer parameters of an encode pod's response, for the next pod."""
        media = [one for sequence in sequences for one in sequence.media if isinstance(sequence.transfer, _Kept)]
        if not self._named or not media:
            return None
        host, port = self._where()
        where = {"do_remote_encode": True, "num_encoder_tokens": TOKENS, "remote_host": host, "remote_port": port}
        return {_digest(one): where for one in media}

    def close(self) -> None:
        self._fabric.encoders.pop(self._where(), None)

    def _is_named(self, one: int, where: Any) -> bool:
        if not isinstance(where, dict):
            return False
        return one in self._fabric.encoders.get((where.get("remote_host"), where.get("remote_port")), ())


@dataclass(frozen=True, slots=True)
class _Kept(SequenceTransfer):
    kept: set[int]

    def computed(self, sequence: Sequence) -> None:
        self.kept.update(sequence.media)


def _digest(one: int) -> str:
    return f"{one:016x}"
