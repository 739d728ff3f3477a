"""How long who comes to a pod that computes prompts side by side waits, where there is no room for him.

Whoever comes when all places or all blocks of the KV cache are taken waits until as many have ended as he needs: in the
time that a request takes in all, all that is taken has become free.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import inf

from proxy.core.endpoint import Freshness, LoadView, Metrics
from proxy.latency.fleet import FleetModel
from proxy.latency.work import Leg


class Places:
    """Of one pod. Lives as long as the pod's memory."""

    __slots__ = ("_blocks", "_blocks_stay", "_fleet", "_held", "_most", "_places", "_running", "_stay")

    def __init__(self, fleet: FleetModel) -> None:
        self._fleet = fleet
        self._places: float = inf
        """Those that can run, as far as it was seen."""
        self._most = 0
        """That were ever seen to run. Where fewer run and others wait, these wait for blocks: of a long prompt, which
        may be more than seem to be left."""
        self._blocks = self._held = 0.0
        """Tokens that the KV cache has room for, and those in it."""
        self._running = 0
        self._stay = self._blocks_stay = 0.0
        """Seconds that a request takes in all, once it has a place; and the one that a block is held by: most are by
        the long ones."""

    def look(self, scrape: Metrics) -> None:
        """Those that wait do so for places, or for blocks; where nobody runs, for what comes from another pod."""
        if scrape.freshness is Freshness.STALE:
            self._places, self._most, self._blocks = inf, 0, 0.0
            return
        self._blocks = scrape.blocks * scrape.block_size
        self._held = scrape.kv_usage * self._blocks
        self._running = running = scrape.running
        is_full = self._blocks and self._held + self._fleet.prompt > self._blocks
        if running > self._places or (scrape.waiting and running and running >= self._most and not is_full):
            self._places = running
        self._most = max(self._most, running)

    def running(self, running: int) -> float:
        """Of so many that run or wait."""
        return min(running, self._places)

    def take(self, fixed: float, per_token: float, answer: float) -> None:
        """A request takes so many seconds, for each token of its prompt, and for its answer."""
        fleet = self._fleet
        self._stay = fixed + per_token * fleet.prompt + answer
        self._blocks_stay = fixed + per_token * fleet.prompt_of_token + answer

    def wait(self, view: LoadView, legs: Sequence[Leg]) -> tuple[float, float]:
        """(seconds that the next request waits, and for each token more that it needs). The `legs` are those without a
        first token, the youngest last."""
        there = view.waiting + view.running
        place = there + 1 - self._places
        seconds = place * self._stay / self._places if place > 0 else 0.0
        if not self._blocks:
            return seconds, 0.0
        unseen = max(0, there - self._running)
        to_come = sum(leg.tokens for leg in islice(reversed(legs), unseen)) + self._fleet.prompt
        beyond = self._held + to_come - self._blocks
        if beyond <= 0.0:
            return seconds, 0.0
        per_token = self._blocks_stay / self._blocks
        return max(seconds, beyond * per_token), per_token
