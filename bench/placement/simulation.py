"""The loop on the virtual clock: arrivals, engine steps and scrapes, in order of their time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

from bench.placement.engine import Counted, CountingEngine
from bench.placement.pods import VirtualPod
from bench.placement.policy import Policy
from bench.placement.workload import Job

SCRAPE_SECONDS = 0.004
"""From the request for metrics to their arrival; the pod looks at itself in the middle."""

SCRAPE_JITTER = 0.1

GAUGE_SECONDS = 0.5
"""Between two looks at how full and how balanced the fleet is."""


class Time(Protocol):
    """`proxy.core.clock.ManualClock` is one."""

    def now(self) -> float: ...
    def advance(self, seconds: float) -> None: ...


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are seconds on the virtual clock, None for what never came."""

    job: Job
    pod: int = -1
    first_token: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    predicted_tokens: int | None = None
    preemptions: int = 0
    retries: int = 0


@dataclass(slots=True)
class Gauges:
    """Sampled over the run: the fleet's KV use, the fullest pod's, and the busiest pod's requests over the mean."""

    samples: int = 0
    kv_mean: float = 0.0
    kv_max: float = 0.0
    imbalance: float = 0.0
    balanced_samples: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """The pod's process dies at `at` seconds, and is back, with nothing in its memory, `down` seconds later."""

    pod: int
    at: float
    down: float = 5.0


class Simulation:
    """Runs until the last request has ended. `clock` must stand at 0."""

    def __init__(
        self,
        jobs: Sequence[Job],
        pods: Sequence[VirtualPod],
        policy: Policy,
        clock: Time,
        rng: Random,
        restarts: Sequence[Restart] = (),
    ) -> None:
        self._pods = pods
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = 0
        self._open = len(jobs)
        self._live: dict[int, Counted] = {}
        self.now = 0.0
        self.outcomes = [Outcome(job) for job in jobs]
        self.gauges = Gauges()
        for index, job in enumerate(jobs):
            self._at(job.arrival, self._arrive, index)
        for pod in pods if policy.scrapes else ():
            self._at(0.0, self._scrape, pod)
        for restart in restarts:
            self._at(restart.at, self._go_down, restart)
        self._at(GAUGE_SECONDS, self._look, None)

    def run(self) -> list[Outcome]:
        events, advance = self._events, self._clock.advance
        while self._open:
            at, _, what, subject = heappop(events)
            if at > self.now:
                advance(at - self.now)
                self.now = at
            what(subject)
        return self.outcomes

    def _at(self, when: float, what: Callable[..., None], subject: Any) -> None:
        self._order += 1
        heappush(self._events, (when, self._order, what, subject))

    def _arrive(self, index: int) -> None:
        self._submit(index, self._policy.place(index, self.outcomes[index].job, self.now))

    def _submit(self, index: int, chosen: int | None) -> None:
        """A pod that is down refuses, and the router is told at once."""
        outcome = self.outcomes[index]
        while chosen is not None and not self._pods[chosen].up:
            outcome.retries += 1
            chosen = self._policy.failed(index, self.now)
        if chosen is None:
            self._open -= 1
            return
        outcome.pod = chosen
        outcome.predicted_tokens = self._policy.predicted(index)
        pod = self._pods[chosen]
        due = pod.engine.until
        self._live[index] = pod.submit(index, outcome.job, self.now)
        if pod.engine.until != due:
            self._at(pod.engine.until, self._end_steps, (pod, pod.engine))

    def _end_steps(self, ended: tuple[VirtualPod, CountingEngine]) -> None:
        """Of an engine that is still there, and whose steps still end at this time."""
        pod, engine = ended
        if engine.until != self.now or pod.engine is not engine:
            return
        for event in engine.finish():
            if event.first:
                self._first_token(event.sequence)
            if event.last:
                self._finish(event.sequence)
        if engine.busy:
            self._at(engine.until, self._end_steps, ended)

    def _first_token(self, sequence: Counted) -> None:
        outcome = self.outcomes[sequence.index]
        if outcome.first_token is None:
            outcome.first_token = self.now
            outcome.cached_tokens = sequence.cached
        self._policy.first_byte(sequence.index, self.now)

    def _finish(self, sequence: Counted) -> None:
        outcome = self.outcomes[sequence.index]
        outcome.ended = self.now
        outcome.preemptions = sequence.preemptions
        del self._live[sequence.index]
        self._open -= 1
        self._policy.ended(sequence.index, self.now, outcome.cached_tokens)

    def _scrape(self, pod: VirtualPod) -> None:
        sent = self._policy.scrape_sent(pod.index)
        self._at(self.now + SCRAPE_SECONDS / 2, self._read, (pod, sent, self.now))
        jitter = 1 - SCRAPE_JITTER + 2 * SCRAPE_JITTER * self._rng.random()
        self._at(self.now + self._policy.scrapes * jitter, self._scrape, pod)

    def _read(self, scrape: tuple[VirtualPod, Any, float]) -> None:
        pod, sent, sent_at = scrape
        reading = pod.read(self.now) if pod.up else None
        self._at(self.now + SCRAPE_SECONDS / 2, self._hand_over, (pod.index, reading, sent, sent_at))

    def _hand_over(self, scraped: tuple[Any, ...]) -> None:
        self._policy.scraped(*scraped)

    def _go_down(self, restart: Restart) -> None:
        pod = self._pods[restart.pod]
        lost = [index for index in self._live if self.outcomes[index].pod == pod.index]
        pod.go_down()
        self._at(self.now + restart.down, self._come_up, pod)
        for index in lost:
            del self._live[index]
            outcome = self.outcomes[index]
            outcome.retries += 1
            self._submit(index, self._policy.failed(index, self.now))

    def _come_up(self, pod: VirtualPod) -> None:
        pod.come_up(self.now)

    def _look(self, _: None) -> None:
        gauges, pods = self.gauges, self._pods
        usage = [pod.engine.kv_usage(self.now) for pod in pods]
        gauges.samples += 1
        gauges.kv_mean += (sum(usage) / len(usage) - gauges.kv_mean) / gauges.samples
        gauges.kv_max = max(gauges.kv_max, *usage)
        busy = [pod.in_flight for pod in pods]
        if sum(busy) >= len(busy):
            gauges.balanced_samples += 1
            ratio = max(busy) * len(busy) / sum(busy)
            gauges.imbalance += (ratio - gauges.imbalance) / gauges.balanced_samples
        self._at(self.now + GAUGE_SECONDS, self._look, None)
