"""What holds for every actuator: when it acts, how far it goes at once, what comes before somebody is taken away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from proxy.autoscale.acting import ActuatorSettings
from proxy.autoscale.actuators.order import Hand, Order
from proxy.autoscale.decision import Decision
from proxy.autoscale.drains import Drains
from proxy.autoscale.loop import Outcome
from proxy.autoscale.orders import Orders
from proxy.core.ports import Clock, Random

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 300.0
"""Seconds after a failure, doubled with every further one, give or take a quarter."""

CIRCUIT = 5
"""Failures one after the other, upon which it pauses for the longest time at once."""


@dataclass(slots=True)
class _Role:
    went_up: float | None = None
    went_down: float | None = None
    failures: int = 0
    not_before: float = float("-inf")


@dataclass(slots=True)
class Guard:
    """An Actuator of the loop, in front of a Hand. What cannot be done now is BUSY: the loop asks again."""

    settings: ActuatorSettings
    hand: Hand
    drains: Drains
    orders: Orders
    clock: Clock
    random: Random
    leads: Callable[[], bool] = lambda: True
    """Whether this proxy is the one that scales."""
    exists: Callable[[Path], bool] = Path.exists
    roles: dict[str, _Role] = field(default_factory=dict)
    """What became of earlier orders."""

    async def apply(self, decision: Decision, role: str) -> Outcome:
        if not self.leads():
            return Outcome.BUSY
        known, current = self.roles.setdefault(role, _Role()), decision.situations[role].current
        if self.settings.kill_file is not None and self.exists(Path(self.settings.kill_file)):
            await self.cancel(role)
            return Outcome.REFUSED
        count = self._step(current, *decision.bounds[role], decision.desired[role])
        if count == 0 and not self.settings.allow_zero:
            return Outcome.REFUSED
        if count == current:
            return Outcome.OK
        if self._must_wait(known, count > current):
            return Outcome.BUSY
        order = Order(decision, role, current, count)
        return await (self._up(known, order) if count > current else self._down(known, order))

    async def cancel(self, role: str) -> None:
        """Nobody has to go."""
        if back := self.drains.cancel(role):
            log.info("autoscale: %s serve again, as they are needed", ", ".join(back))
            await self._mark(back, doomed=False)

    async def spare(self, pods: list[str]) -> None:
        """They are not to go, whatever was said before."""
        await self._mark(pods, doomed=False)

    async def _up(self, known: _Role, order: Order) -> Outcome:
        await self.cancel(order.role)
        return await self._act(known, order)

    async def _down(self, known: _Role, order: Order) -> Outcome:
        before = self.drains.names(order.role)
        victims = self.drains.begin(order.role, order.count)
        if victims != before:
            await self._mark([one for one in before if one not in victims], doomed=False)
            await self._mark([one for one in victims if one not in before], doomed=True)
        if not self.drains.empty(order.role):
            return Outcome.BUSY
        going = Order(order.decision, order.role, order.current, order.count, tuple(victims))
        self.drains.doom(order.role)
        outcome = await self._act(known, going)
        if outcome is not Outcome.OK:
            self.drains.spare(order.role)
        return outcome

    async def _act(self, known: _Role, order: Order) -> Outcome:
        try:
            outcome = await self.hand.scale(order)
        except Exception:
            self._failed(known)
            raise
        if outcome is Outcome.OK:
            self._done(known, order)
        elif outcome is Outcome.ERROR:
            self._failed(known)
        decision = order.decision
        found = decision.recommendation
        why = ", ".join(reason.value for reason in found.result.reasons) if found else ""
        log.info(
            "autoscale: pool %s, role %s: %d -> %d: %s (decision %d%s)",
            *(order.pool, order.role, order.current, order.count, outcome.value, decision.id, why and f": {why}"),
        )
        return outcome

    def _done(self, known: _Role, order: Order) -> None:
        known.failures, known.not_before = 0, float("-inf")
        if order.count > order.current:
            known.went_up = self.clock.now()
        else:
            known.went_down = self.clock.now()
        self.orders.put(order.role, order.count)

    def _failed(self, known: _Role) -> None:
        known.failures += 1
        pause = LONGEST_PAUSE if known.failures >= CIRCUIT else min(LONGEST_PAUSE, FIRST_PAUSE * 2**known.failures / 2)
        known.not_before = self.clock.now() + pause * (0.75 + self.random.random() / 2)

    def _must_wait(self, known: _Role, up: bool) -> bool:
        now = self.clock.now()
        since, interval = (
            (known.went_up, self.settings.up_interval) if up else (known.went_down, self.settings.down_interval)
        )
        return now < known.not_before or (since is not None and now - since < interval)

    def _step(self, current: int, low: int, high: int, desired: int) -> int:
        """Towards what is desired, within the bounds."""
        wanted, most = min(max(desired, low), high), self.settings.max_step or desired + current
        return min(max(wanted, current - most), current + most)

    async def _mark(self, pods: list[str], doomed: bool) -> None:
        """It only says who should go: without it another one goes, and is drained no less."""
        try:
            if pods:
                await self.hand.mark(pods, doomed)
        except Exception:
            log.warning("autoscale: %s cannot be marked", ", ".join(pods), exc_info=True)
