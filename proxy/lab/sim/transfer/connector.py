"""What all connectors have in common, and the one that moves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.driver import EngineDriver
from proxy.lab.sim.faults import Fault, Kind
from proxy.lab.sim.sequence import Sequence, Transfer
from proxy.lab.sim.transfer.fabric import Fabric, Holding


class NotServed(Exception):
    """A pod of this role does not take such a request."""


class EngineStops(Exception):
    """The request ends the engine."""


class TransferFailed(Exception):
    pass


@dataclass(frozen=True, slots=True)
class Asked:
    """One call: its request id, its body, and the fault that it met."""

    id: str
    body: Mapping[str, Any]
    fault: Fault | None = None

    @property
    def is_lost(self) -> bool:
        return self.fault is not None and self.fault.kind is Kind.LOST_TRANSFER

    @property
    def slowness(self) -> float:
        return self.fault.factor if self.fault is not None and self.fault.kind is Kind.SLOW_TRANSFER else 1.0

    def params(self) -> Mapping[str, Any]:
        """Of vLLM's connectors; empty without any."""
        params = self.body.get("kv_transfer_params")
        return params if isinstance(params, dict) else {}


class Connector:
    """One pod's. `arrange` is called before the sequences of a call are submitted; `close` when the pod has died.

    `where` is the pod's host and port.
    """

    cached: ClassVar[bool] = False
    """Whether what comes counts as cached."""

    def __init__(
        self, config: SimConfig, driver: EngineDriver, fabric: Fabric, where: Callable[[], tuple[str, int]]
    ) -> None:
        self.config = config
        self.driver = driver
        self.fabric = fabric
        self.where = where
        self._holdings: dict[str, Holding] = {}
        self._pulls: set[asyncio.Task[None]] = set()

    def arrange(self, asked: Asked, sequences: Items[Sequence]) -> None:
        """Sets what becomes of the KV cache of each. Raises NotServed, EngineStops and TransferFailed."""

    def params(self, sequences: Items[Sequence]) -> dict[str, Any] | None:
        """What the answer says to the next pod."""
        return None

    def close(self) -> None:
        for key, holding in self._holdings.items():
            self.fabric.forget(key)
            holding.lose()
        self._holdings.clear()
        for pull in self._pulls:
            pull.cancel()

    def hold(self, key: str, sequence: Sequence) -> Holding:
        holding = Holding(lambda: self._free(key, sequence))
        self._holdings[key] = holding
        self.fabric.announce(key, holding)
        return holding

    def expire(self, holding: Holding) -> None:
        """By and by."""
        holding.expire_in(self.scaled(self.config.transfer.expiry), lambda: self._expired(holding))

    def pull(self, incoming: Incoming, sequence: Sequence, tokens: int) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self._pull(incoming, sequence, tokens), name="pull")
        self._pulls.add(task)
        task.add_done_callback(self._pulls.discard)
        return task

    def scaled(self, seconds: float) -> float:
        return seconds / self.config.time_scale

    async def _pull(self, incoming: Incoming, sequence: Sequence, tokens: int) -> None:
        timing, stats = self.config.transfer, self.driver.engine.stats
        seconds = timing.seconds(tokens) * incoming.asked.slowness
        if await incoming.found():
            await asyncio.sleep(self.scaled(seconds))
            if incoming.take():
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
        self.fabric.forget(key)
        self.driver.give_back(sequence)

    def _expired(self, holding: Holding) -> None:
        self.driver.engine.stats.expired_transfers += 1
        holding.end()


class Outgoing(Transfer):
    """Keeps its prompt's blocks for another pod, from its end on."""

    def __init__(self, connector: Connector, holding: Holding, *, is_lost: bool = False) -> None:
        self.holding = holding
        self._connector = connector
        self._is_lost = is_lost

    def computed(self, sequence: Sequence) -> None:
        if self._is_lost:
            self.holding.end()
        self.holding.computed()

    def keeps(self, sequence: Sequence) -> bool:
        if self.holding.is_gone:
            return False
        self._connector.expire(self.holding)
        return True

    def abandon(self) -> None:
        self.holding.end()


class Incoming(Transfer):
    """Its prompt is computed by another pod, which has announced it, or will within `patience` seconds."""

    def __init__(self, connector: Connector, asked: Asked, key: str, patience: float = 0.0) -> None:
        self.asked = asked
        self._connector = connector
        self._key = key
        self._patience = patience
        self._holding: Holding | None = None
        self._pull: asyncio.Task[None] | None = None

    def arrives(self, cached: int) -> bool:
        return True

    def begin(self, sequence: Sequence, tokens: int) -> None:
        self._pull = self._connector.pull(self, sequence, tokens)

    async def found(self) -> bool:
        if self.asked.is_lost:
            return False
        self._holding = await self._connector.fabric.find(self._key, self._patience)
        return self._holding is not None and await self._holding.ready()

    def take(self) -> bool:
        """After it was copied; False if it has gone meanwhile."""
        if self._holding is None or self._holding.is_gone:
            return False
        self._holding.fetched()
        return True

    def abandon(self) -> None:
        """The pod that has it is told, also before anything was copied."""
        if self._pull is not None and self._pull is not asyncio.current_task():
            self._pull.cancel()
        if (holding := self._connector.fabric.get(self._key)) is not None:
            holding.end()
