"""What of a pod depends on how many answers run there and on what was learnt, and what a choice costs them."""

from __future__ import annotations

from typing import NamedTuple

from proxy.latency.beside import Beside
from proxy.latency.fleet import FleetModel
from proxy.latency.published import Published, Terms
from proxy.latency.rates import Rates


class Prices(NamedTuple):
    """In seconds before a first token: of a second that a pod works on a prompt, for those who come later, and of a
    second by which an answer under way is delayed, this one and those that run beside it."""

    work: float
    decode: float


class PacedPod(Published):
    """Publishes `own`, `cost`, `step` and `tpot`."""

    __slots__ = (
        "_fleet",
        "_in_turn",
        "_is_paced",
        "_prices",
        "_running",
        "_running_at",
        "_running_sum",
        "_share",
        "beside",
        "rates",
    )
    _in_turn: Terms
    """`own`, if prompts are computed in turn."""

    def __init__(self, fleet: FleetModel, prices: Prices, now: float) -> None:
        self.rates = Rates(fleet)
        self.beside = Beside(fleet, self.rates)
        self._fleet = fleet
        self._prices = prices
        self._share = 1.0
        """As it was when the pace was published."""
        self._is_paced = False
        self._running = 0
        self._running_at = now
        self._running_sum = 0.0

    def price(self, prices: Prices) -> None:
        """By these from here on."""
        self._prices = prices
        self._has_learnt()

    def follow(self) -> None:
        """The fleet, which has learnt something."""
        self.rates.renew()
        self.beside.renew()
        self._has_learnt()

    def _has_learnt(self) -> None:
        self._is_paced, self.view = False, None

    def _count_running(self, now: float) -> None:
        if now > self._running_at:
            self._running_sum += self._running * (now - self._running_at)
            self._running_at = now

    def _publish_pace(self, running: int, now: float) -> None:
        """For so many that run."""
        self._count_running(now)
        self._running, self._is_paced = running, True
        rates = self.rates
        self.step = step = rates.step + rates.per_running * running
        self.tpot = step + rates.per_running
        self._in_turn = self.own = (rates.fixed + rates.speed * step, rates.per_token, rates.per_pair)
        self._share = share = self.beside.share
        if share < 1.0:  # otherwise it is asked for lessons only
            self.beside.see(running)
        self._publish_cost(1.0)

    def _publish_cost(self, share: float) -> None:
        """Where prompts are computed in turn, as `share` says, answers stand still meanwhile."""
        (work, decode), (fixed, per_token, per_pair), running = self._prices, self.own, self._running
        delayed = 1.0 + work + share * decode * running
        answer = decode * self._fleet.output
        base = delayed * fixed + answer * (self.step + self.rates.per_running * (1 + running))
        self.cost = (base, delayed * per_token, delayed * per_pair)
