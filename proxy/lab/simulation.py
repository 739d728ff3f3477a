"""The event loop on the virtual clock: arrivals, engine steps and scrapes in order of time, for any routing policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any

from proxy.core.attempt import Stage
from proxy.core.endpoint import Freshness, Metrics
from proxy.core.ports import ManualClock
from proxy.lab.engine import CountedRequest, CountingEngine, EngineEvent
from proxy.lab.sim import SimConfig
from proxy.lab.workload import Job, blocks_with_response, prompt_blocks

EPOCH = 1_700_000_000.0
"""The wall clock at the start of a simulation."""


class VirtualPod:
    """An engine that may crash and restart with an empty cache: a pod, or one of the data-parallel ranks of a pod.
    `index` numbers the engines of a fleet, `pod` its pods; `rank` is None for a pod without ranks."""

    def __init__(
        self,
        index: int,
        config: SimConfig,
        make: Callable[[SimConfig], CountingEngine] = CountingEngine,
        *,
        pod: int | None = None,
        rank: int | None = None,
    ) -> None:
        self.index = index
        self.config = config
        self.pod = index if pod is None else pod
        self.rank = rank
        self.engine = make(config)
        self.started_at = 0.0
        self.up = True
        self._make = make
        self._kept: dict[int, CountedRequest] = {}
        """Prompts that are kept for other pods, by request."""

    @property
    def stepper(self) -> CountingEngine:
        """The pacer of the engine's steps. A subclass may pace several ranks together."""
        return self.engine

    @property
    def in_flight(self) -> int:
        return len(self.engine.running) + self.waiting

    @property
    def waiting(self) -> int:
        return len(self.engine.waiting) + self.engine.fetching

    def submit(self, index: int, job: Job, now: float, stage: Stage = Stage.WHOLE) -> CountedRequest:
        size = self.config.block_size
        named, prompt = prompt_blocks(job, size), job.prompt_tokens
        if stage is Stage.PREFILL:
            sequence = self._kept[index] = CountedRequest(index, prompt, 1, named, stays=True)
        else:
            grown = blocks_with_response(job, size)
            sequence = CountedRequest(index, prompt, job.output_tokens, named, grown, comes=stage is Stage.DECODE)
        self.engine.submit(sequence, now)
        return sequence

    def let_go(self, index: int, now: float) -> None:
        if sequence := self._kept.pop(index, None):
            self.engine.let_go(sequence, now)

    def read(self, now: float) -> Metrics:
        """Return the metrics of a scrape at this time."""
        engine = self.engine
        return Metrics(
            waiting=self.waiting,
            running=len(engine.running),
            kv_usage=engine.kv_usage(now),
            block_size=self.config.block_size,
            blocks=self.config.num_gpu_blocks,
            prefix_queries=engine.queried_tokens,
            prefix_hits=engine.hit_tokens,
            generation_tokens=engine.generated_tokens(now),
            process_started=EPOCH + self.started_at,
            freshness=Freshness.FRESH,
        )

    def go_down(self) -> None:
        """Crash: lose all sequences and all cached blocks."""
        self.engine = self._make(self.config)
        self._kept = {}
        self.up = False


class Policy:
    """A router. The simulation calls it for every event that a router sees, in order. `index` numbers requests."""

    scrapes = 0.0
    """Seconds between two scrapes of a pod; 0 for a router that reads no metrics."""

    def place(self, index: int, job: Job, now: float) -> int | None:
        """Return the pod for the request; None to refuse the request."""
        raise NotImplementedError

    def stage(self, index: int) -> Stage:
        """Return the part of the request that its last pod computes. A prefill pod keeps the prompt until another pod
        fetches it, or until the request is sent to a pod that does not fetch it."""
        return Stage.WHOLE

    def prefilled(self, index: int, now: float, cached_tokens: int) -> int | None:
        """Return the pod that continues the request. The prompt is computed; `cached` of its tokens were cached."""
        return None

    def first_byte(self, index: int, now: float) -> None:
        pass

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        pass

    def failed(self, index: int, now: float) -> int | None:
        """Return the next pod for a request whose pod failed before the response started; None to end the request."""
        return None

    def predicted(self, index: int) -> int | None:
        """Return the prompt tokens that were expected in the cache of the chosen pod."""
        return None

    def scrape_sent(self, pod: int) -> Any:
        """Return a value to pass to `scraped` when the response comes."""

    def scraped(self, pod: int, reading: Metrics | None, sent: Any, sent_at: float) -> None:
        """Receive the metrics of a pod, or None if it refused the connection."""


SCRAPE_SECONDS = 0.004
"""Seconds from the request for metrics to their arrival; the pod measures halfway."""

SCRAPE_JITTER = 0.1

GAUGE_SECONDS = 0.5
"""Seconds between two samples of the gauges."""


@dataclass(slots=True)
class SimulationOutcome:
    """Result of one request. Times are seconds on the virtual clock, None for an event that did not happen.
    `prefill_pod` computed the prompt, if it is not the `pod` that sent the response."""

    job: Job
    pod: int = -1
    first_token: float | None = None
    ended: float | None = None
    cached_tokens: int = 0
    predicted_tokens: int | None = None
    preemptions: int = 0
    retries: int = 0
    prefill_pod: int = -1


@dataclass(slots=True)
class Gauges:
    """Samples over the run: the KV use of the fleet, the KV use of the fullest pod, and the requests on the busiest pod
    relative to the mean."""

    samples: int = 0
    kv_mean: float = 0.0
    kv_max: float = 0.0
    imbalance: float = 0.0
    balanced_samples: int = 0

    def sample(self, pods: Sequence[VirtualPod], now: float) -> None:
        self.add([pod.engine.kv_usage(now) for pod in pods], [pod.in_flight for pod in pods])

    def add(self, usage: Sequence[float], busy: Sequence[int]) -> None:
        """Add a sample of each pod's KV use and requests. Balance is sampled only while there are at least as many
        requests as pods."""
        self.samples += 1
        self.kv_mean += (sum(usage) / len(usage) - self.kv_mean) / self.samples
        self.kv_max = max(self.kv_max, *usage)
        if sum(busy) >= len(busy):
            self.balanced_samples += 1
            self.imbalance += (max(busy) * len(busy) / sum(busy) - self.imbalance) / self.balanced_samples


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart of a pod: its process dies at `at` seconds and is back, with an empty cache, `down` seconds later."""

    pod: int
    at: float
    down: float = 5.0


class Simulation:
    """One run until the last request has ended. `clock` must be at 0."""

    def __init__(
        self,
        jobs: Sequence[Job],
        pods: Sequence[VirtualPod],
        policy: Policy,
        clock: ManualClock,
        rng: Random,
        restarts: Sequence[Restart] = (),
        gauges: Gauges | None = None,
    ) -> None:
        self.pods = pods
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = 0
        self._open = len(jobs)
        self._live: dict[int, tuple[CountedRequest, Stage]] = {}
        self.now = 0.0
        self.outcomes = [SimulationOutcome(job) for job in jobs]
        self.gauges = gauges or Gauges()
        for index, job in enumerate(jobs):
            self._at(job.arrival, self._arrive, index)
        self._by_pod: dict[int, list[VirtualPod]] = {}
        for pod in pods:
            self._by_pod.setdefault(pod.pod, []).append(pod)
        for ranks in self._by_pod.values() if policy.scrapes else ():
            self._at(0.0, self._scrape, ranks)
        for restart in restarts:
            self._at(restart.at, self._go_down, restart)
        self._at(GAUGE_SECONDS, self._sample_gauges, None)

    def run(self) -> list[SimulationOutcome]:
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
        """Submit the request to a pod. A pod that is down refuses it, and the router is notified at once."""
        outcome = self.outcomes[index]
        while chosen is not None and not self.pods[chosen].up:
            outcome.retries += 1
            chosen = self._policy.failed(index, self.now)
        stage = Stage.WHOLE if chosen is None else self._policy.stage(index)
        if stage is not Stage.DECODE:
            self._let_go(index)
            outcome.prefill_pod = -1
        if chosen is None:
            self._open -= 1
            return
        outcome.pod = chosen
        if stage is not Stage.DECODE:
            outcome.predicted_tokens = self._policy.predicted(index)
        pod = self.pods[chosen]
        with self._rescheduled(pod):
            self._live[index] = (pod.submit(index, outcome.job, self.now, stage), stage)

    def _let_go(self, index: int) -> None:
        """Free the prompt that a pod keeps for another pod, if any."""
        keeper = self.outcomes[index].prefill_pod
        if keeper >= 0:
            with self._rescheduled(self.pods[keeper]):
                self.pods[keeper].let_go(index, self.now)

    @contextmanager
    def _rescheduled(self, pod: VirtualPod) -> Iterator[None]:
        """Schedule the end of the pod's steps again if the body of the `with` block changes it."""
        due = pod.stepper.until
        yield
        if pod.stepper.until != due and pod.stepper.until < math.inf:
            self._at(pod.stepper.until, self._end_steps, (pod, pod.stepper))

    def _end_steps(self, ended: tuple[VirtualPod, CountingEngine]) -> None:
        """End the steps of an engine if it still exists and the steps still end at this time."""
        pod, stepper = ended
        if stepper.until != self.now or pod.stepper is not stepper:
            return
        for event in stepper.finish():
            self._handle(event)
        if stepper.until < math.inf:
            self._at(stepper.until, self._end_steps, ended)

    def _handle(self, event: EngineEvent) -> None:
        sequence = event.sequence
        if event.came:
            self._let_go(sequence.index)
        elif self._live[sequence.index][1] is Stage.PREFILL:
            self._prefilled(sequence)
        else:
            if event.first:
                self._first_token(sequence)
            if event.last:
                self._finish(sequence)

    def _prefilled(self, sequence: CountedRequest) -> None:
        index, outcome = sequence.index, self.outcomes[sequence.index]
        del self._live[index]
        outcome.prefill_pod = outcome.pod
        outcome.cached_tokens = sequence.cached
        outcome.preemptions += sequence.preemptions
        self._submit(index, self._policy.prefilled(index, self.now, sequence.cached))

    def _first_token(self, sequence: CountedRequest) -> None:
        outcome = self.outcomes[sequence.index]
        if outcome.first_token is None:
            outcome.first_token = self.now
            if outcome.prefill_pod < 0:
                outcome.cached_tokens = sequence.cached
        self._policy.first_byte(sequence.index, self.now)

    def _finish(self, sequence: CountedRequest) -> None:
        outcome = self.outcomes[sequence.index]
        outcome.ended = self.now
        outcome.preemptions += sequence.preemptions
        del self._live[sequence.index]
        self._open -= 1
        self._policy.ended(sequence.index, self.now, sequence.cached)

    def _scrape(self, ranks: Sequence[VirtualPod]) -> None:
        sent = [self._policy.scrape_sent(rank.index) for rank in ranks]
        self._at(self.now + SCRAPE_SECONDS / 2, self._read, (ranks, sent, self.now))
        jitter = 1 - SCRAPE_JITTER + 2 * SCRAPE_JITTER * self._rng.random()
        self._at(self.now + self._policy.scrapes * jitter, self._scrape, ranks)

    def _read(self, scrape: tuple[Sequence[VirtualPod], Sequence[Any], float]) -> None:
        ranks, sent, sent_at = scrape
        readings = [
            (rank.index, rank.read(self.now) if rank.up else None, each, sent_at)
            for rank, each in zip(ranks, sent, strict=True)
        ]
        self._at(self.now + SCRAPE_SECONDS / 2, self._publish, readings)

    def _publish(self, readings: Sequence[tuple[int, Metrics | None, Any, float]]) -> None:
        for reading in readings:
            self._policy.scraped(*reading)

    def _go_down(self, restart: Restart) -> None:
        ranks = self._by_pod[restart.pod]
        dead = {rank.index for rank in ranks}
        lost = [index for index in self._live if self.outcomes[index].pod in dead]
        for rank in ranks:
            rank.go_down()
        self._at(self.now + restart.down, self._come_up, ranks)
        for index in lost:
            del self._live[index]
            outcome = self.outcomes[index]
            outcome.retries += 1
            self._submit(index, self._policy.failed(index, self.now))

    def _come_up(self, ranks: Sequence[VirtualPod]) -> None:
        for rank in ranks:
            rank.up, rank.started_at = True, self.now

    def _sample_gauges(self, _: None) -> None:
        self.gauges.sample(self.pods, self.now)
        self._at(self.now + GAUGE_SECONDS, self._sample_gauges, None)
