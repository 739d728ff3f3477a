"""The state that the models of a pod's data-parallel ranks share: their speeds, and whether the ranks step together.

The ranks run on equal GPUs, so the speed of one rank applies to all, and a rank without observations needs no prior.
Where ranks step together, the duration of a step does not depend on the rank that it was observed on.

The ranks of a mixture-of-experts model exchange data in every layer, so an engine step takes as long as that of the
slowest rank: a prompt on one rank delays the responses on all ranks. The ranks of a dense model are independent. Two
scrapes show which is the case: a running request gets one token per step, so each rank reports its number of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.latency.rates import FleetModel, Rates

if TYPE_CHECKING:
    from proxy.latency.pod import PodModel

MEMORY = 0.98
"""Factor of the weight of earlier comparisons at each comparison."""

PRIOR_COMPARISONS = 10.0
"""Number of assumed earlier comparisons that showed independent ranks."""

RATE_MEMORY = 0.9
"""Weight of the previous usual step rate of a rank at each scrape."""

LEAST_RUNNING = 2
"""Fewest running requests with which the tokens of a rank show its step rate."""

LEAST_SHARE = 0.3
"""A smaller share counts as 0, because independent ranks appear to step together a little by chance."""

WORK_SECONDS = 10.0
"""Time constant of the decay of the work of a rank on prompts."""

WORK_PRICE = 2.0
"""Cost in seconds of each second by which the recent work of a rank on prompts exceeds the mean of the pod's ranks."""


class Lockstep:
    """The shared part of the models of one pod's ranks. `share` is 0 for independent ranks, 1 for ranks that step
    together; `busy` is the share of the time in which some rank computes a prompt."""

    def __init__(self, fleet: FleetModel) -> None:
        self.models: list[PodModel] = []
        self.rates = Rates(fleet)
        self.share = 0.0
        self.busy = 0.0
        self._read_at = 0.0
        self._scrapes: dict[Endpoint, Metrics] = {}
        self._step_rates: dict[Endpoint, float] = {}
        self._observations = 0.0
        self._together = self._apart = 0.0

    @property
    def running(self) -> int:
        """Running requests of all ranks."""
        return sum(model.running for model in self.models)

    def elsewhere(self, model: PodModel) -> float:
        """Return the running requests on other ranks that a prompt on the rank of `model` delays. Prompts that several
        ranks compute at the same time delay them only once."""
        others = sum(other.running for other in self.models if other is not model)
        return self.share * (1.0 - self.busy) * others

    def scraped(self, scrape: Metrics) -> None:
        """Compare the step rates of the ranks between two scrapes. Each rank may pass its scrape; one suffices."""
        if scrape.scraped_at <= self._read_at or scrape.freshness is not Freshness.FRESH:
            return
        self._read_at = scrape.scraped_at
        self.busy += (1.0 - RATE_MEMORY) * (any(model.queue for model in self.models) - self.busy)
        scrapes = {model.endpoint: model.endpoint.metrics for model in self.models}
        self.rates.set_cached(sum(each.cached_tokens for each in scrapes.values()) / len(scrapes))
        ratios = []
        for endpoint, after in scrapes.items():
            before = self._scrapes.get(endpoint)
            if before is not None and (rate := _step_rate(before, after)) is not None:
                usual = self._step_rates.get(endpoint, rate)
                self._step_rates[endpoint] = RATE_MEMORY * usual + (1.0 - RATE_MEMORY) * rate
                ratios.append(rate / usual)
        self._scrapes = scrapes
        if len(ratios) > 1:
            self._learn(ratios)

    def leave(self, model: PodModel) -> None:
        """Remove a rank that no longer exists."""
        self.models.remove(model)
        self._step_rates.pop(model.endpoint, None)

    def _learn(self, ratios: Sequence[float]) -> None:
        """Learn the share of the variance of these ratios that all ranks have in common: the intraclass correlation."""
        mean = sum(ratios) / len(ratios)
        apart = sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1)
        self._observations = MEMORY * self._observations + 1.0
        self._apart = MEMORY * self._apart + apart
        self._together = MEMORY * self._together + max(0.0, (mean - 1.0) ** 2 - apart / len(ratios))
        common = self._together / (self._together + self._apart) if self._together else 0.0
        share = common * self._observations / (self._observations + PRIOR_COMPARISONS)
        self.share = share if share >= LEAST_SHARE else 0.0


def _step_rate(before: Metrics, after: Metrics) -> float | None:
    """Return the steps per second of a rank between two scrapes; None if they do not show it."""
    seconds, tokens = after.scraped_at - before.scraped_at, after.generation_tokens - before.generation_tokens
    if before.generation_tokens < 0 or tokens <= 0 or seconds <= 0:
        return None
    if min(before.running, after.running) < LEAST_RUNNING:
        return None
    return tokens / seconds / ((before.running + after.running) / 2)
