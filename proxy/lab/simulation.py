"""The loop on the virtual clock: arrivals, engine steps and scrapes in order of time, for any routing policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Any, Protocol

from proxy.core.attempt import Stage
from proxy.core.clock import ManualClock
from proxy.lab.engine import Counted, CountingEngine
from proxy.lab.sim import SimConfig
from proxy.lab.workload import Job, blocks_with_answer, prompt_blocks


@dataclass(frozen=True, slots=True)
class Reading:
    """What a scrape of the pod says."""

    waiting: int
    running: int
    kv_usage: float
    block_size: int
    blocks: int
    queried_tokens: int
    hit_tokens: int
    started_at: float


class Submitted(Protocol):
    """A request in an engine: prompt tokens it found `cached`, and how often it was pre-empted."""

    @property
    def index(self) -> int: ...
    @property
    def cached(self) -> int: ...
    @property
    def preemptions(self) -> int: ...


class Event(Protocol):
    """A request has its first token, or its last, or both; or its prompt came from another pod."""

    @property
    def sequence(self) -> Submitted: ...
    @property
    def first(self) -> bool: ...
    @property
    def last(self) -> bool: ...
    @property
    def came(self) -> bool: ...


class Engine(Protocol):
    """`CountingEngine` says what its members mean."""

    @property
    def until(self) -> float: ...
    @property
    def busy(self) -> bool: ...
    def finish(self) -> Sequence[Event]: ...
    def kv_usage(self, now: float) -> float: ...


class Pod(Protocol):
    """What a simulation makes of one."""

    @property
    def index(self) -> int: ...
    @property
    def up(self) -> bool: ...
    @property
    def engine(self) -> Engine:
        """Another one after a restart."""

    @property
    def in_flight(self) -> int: ...
    def submit(self, index: int, job: Job, now: float, stage: Stage = Stage.WHOLE) -> Submitted: ...
    def let_go(self, index: int, now: float) -> None:
        """The prompt of this request, if it is kept for another pod: it was fetched, or nobody will."""

    def read(self, now: float) -> Reading: ...
    def go_down(self) -> None:
        """What ran is lost."""

    def come_up(self, now: float) -> None: ...


class Kept:
    """The prompts that a pod computes for others, by request. Lives as long as the pod's memory."""

    def __init__(self) -> None:
        self._sequences: dict[int, Counted] = {}

    def sequence(self, index: int, job: Job, block_size: int, stage: Stage) -> Counted:
        """What an engine is given to do."""
        named = prompt_blocks(job, block_size)
        if stage is Stage.PREFILL:
            kept = self._sequences[index] = Counted(index, job.prompt_tokens, 1, named, stays=True)
            return kept
        grown, comes = blocks_with_answer(job, block_size), stage is Stage.DECODE
        return Counted(index, job.prompt_tokens, job.output_tokens, named, grown, comes=comes)

    def taken(self, index: int) -> Counted | None:
        return self._sequences.pop(index, None)


class VirtualPod(Pod):
    """An engine that may die, and come back with nothing in its memory."""

    def __init__(self, index: int, config: SimConfig) -> None:
        self._index = index
        self._config = config
        self._engine = CountingEngine(config)
        self._kept = Kept()
        self._started_at = 0.0
        self._up = True

    @property
    def index(self) -> int:
        return self._index

    @property
    def up(self) -> bool:
        return self._up

    @property
    def engine(self) -> CountingEngine:
        return self._engine

    @property
    def in_flight(self) -> int:
        return len(self._engine.running) + len(self._engine.waiting) + self._engine.fetching

    def submit(self, index: int, job: Job, now: float, stage: Stage = Stage.WHOLE) -> Counted:
        sequence = self._kept.sequence(index, job, self._config.block_size, stage)
        self._engine.submit(sequence, now)
        return sequence

    def let_go(self, index: int, now: float) -> None:
        if sequence := self._kept.taken(index):
            self._engine.let_go(sequence, now)

    def read(self, now: float) -> Reading:
        engine = self._engine
        return Reading(
            len(engine.waiting) + engine.fetching,
            len(engine.running),
            engine.kv_usage(now),
            self._config.block_size,
            self._config.num_gpu_blocks,
            engine.queried_tokens,
            engine.hit_tokens,
            self._started_at,
        )

    def go_down(self) -> None:
        self._engine = CountingEngine(self._config)
        self._kept = Kept()
        self._up = False

    def come_up(self, now: float) -> None:
        self._up = True
        self._started_at = now


class Policy(Protocol):
    """Told everything a router sees, in the order in which it sees it. `index` numbers requests."""

    scrapes: float
    """Seconds between two scrapes of a pod; 0: it looks at no metrics."""

    def place(self, index: int, job: Job, now: float) -> int | None:
        """The pod that gets the request; None refuses it."""

    def stage(self, index: int) -> Stage:
        """What the pod on which the request was last placed is to do of it. One that computes the prompt keeps it until
        it is fetched, or until another than a pod that fetches it gets the request."""
        return Stage.WHOLE

    def prefilled(self, index: int, now: float, cached_tokens: int) -> int | None:
        """The prompt is computed, of which so many tokens were cached: where the request goes with it."""
        return None

    def first_byte(self, index: int, now: float) -> None: ...

    def ended(self, index: int, now: float, cached_tokens: int) -> None: ...

    def failed(self, index: int, now: float) -> int | None:
        """The pod broke off: where the request goes now, if its answer had not begun; None: nowhere."""

    def predicted(self, index: int) -> int | None:
        """Prompt tokens it expected in the cache of the pod it chose."""

    def scrape_sent(self, pod: int) -> Any:
        """What is to be remembered until the answer comes."""

    def scraped(self, pod: int, reading: Reading | None, sent: Any, sent_at: float) -> None:
        """None: the pod refused the connection."""


SCRAPE_SECONDS = 0.004
"""From the request for metrics to their arrival; the pod looks at itself in the middle."""

SCRAPE_JITTER = 0.1

GAUGE_SECONDS = 0.5
"""Between two looks at how full and how balanced the fleet is."""


@dataclass(slots=True)
class Outcome:
    """What came of one request. Times are seconds on the virtual clock, None for what never came. `prefill_pod` has
    computed the prompt, if that is another than the `pod` that answers."""

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
    """Sampled over the run: the fleet's KV use, the fullest pod's, and the busiest pod's requests over the mean."""

    samples: int = 0
    kv_mean: float = 0.0
    kv_max: float = 0.0
    imbalance: float = 0.0
    balanced_samples: int = 0

    def add(self, usage: Sequence[float], busy: Sequence[int]) -> None:
        """One look at the fleet: each pod's KV use, and the requests on it. Balance counts while there is something to
        balance: a request for each pod."""
        self.samples += 1
        self.kv_mean += (sum(usage) / len(usage) - self.kv_mean) / self.samples
        self.kv_max = max(self.kv_max, *usage)
        if sum(busy) >= len(busy):
            self.balanced_samples += 1
            self.imbalance += (max(busy) * len(busy) / sum(busy) - self.imbalance) / self.balanced_samples


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
        pods: Sequence[Pod],
        policy: Policy,
        clock: ManualClock,
        rng: Random,
        restarts: Sequence[Restart] = (),
    ) -> None:
        self.pods = pods
        self._policy = policy
        self._clock = clock
        self._rng = rng
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._order = 0
        self._open = len(jobs)
        self._live: dict[int, tuple[Submitted, Stage]] = {}
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
        """The prompt that a pod keeps for another, if one does."""
        keeper = self.outcomes[index].prefill_pod
        if keeper >= 0:
            with self._rescheduled(self.pods[keeper]):
                self.pods[keeper].let_go(index, self.now)

    @contextmanager
    def _rescheduled(self, pod: Pod) -> Iterator[None]:
        """Around what may change when the steps of the pod end."""
        due = pod.engine.until
        yield
        if pod.engine.until != due and pod.engine.until < math.inf:
            self._at(pod.engine.until, self._end_steps, (pod, pod.engine))

    def _end_steps(self, ended: tuple[Pod, Engine]) -> None:
        """Of an engine that is still there, and whose steps still end at this time."""
        pod, engine = ended
        if engine.until != self.now or pod.engine is not engine:
            return
        for event in engine.finish():
            self._take(event)
        if engine.until < math.inf:
            self._at(engine.until, self._end_steps, ended)

    def _take(self, event: Event) -> None:
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

    def _prefilled(self, sequence: Submitted) -> None:
        index, outcome = sequence.index, self.outcomes[sequence.index]
        del self._live[index]
        outcome.prefill_pod = outcome.pod
        outcome.cached_tokens = sequence.cached
        outcome.preemptions += sequence.preemptions
        self._submit(index, self._policy.prefilled(index, self.now, sequence.cached))

    def _first_token(self, sequence: Submitted) -> None:
        outcome = self.outcomes[sequence.index]
        if outcome.first_token is None:
            outcome.first_token = self.now
            if outcome.prefill_pod < 0:
                outcome.cached_tokens = sequence.cached
        self._policy.first_byte(sequence.index, self.now)

    def _finish(self, sequence: Submitted) -> None:
        outcome = self.outcomes[sequence.index]
        outcome.ended = self.now
        outcome.preemptions += sequence.preemptions
        del self._live[sequence.index]
        self._open -= 1
        self._policy.ended(sequence.index, self.now, sequence.cached)

    def _scrape(self, pod: Pod) -> None:
        sent = self._policy.scrape_sent(pod.index)
        self._at(self.now + SCRAPE_SECONDS / 2, self._read, (pod, sent, self.now))
        jitter = 1 - SCRAPE_JITTER + 2 * SCRAPE_JITTER * self._rng.random()
        self._at(self.now + self._policy.scrapes * jitter, self._scrape, pod)

    def _read(self, scrape: tuple[Pod, Any, float]) -> None:
        pod, sent, sent_at = scrape
        reading = pod.read(self.now) if pod.up else None
        self._at(self.now + SCRAPE_SECONDS / 2, self._hand_over, (pod.index, reading, sent, sent_at))

    def _hand_over(self, scraped: tuple[Any, ...]) -> None:
        self._policy.scraped(*scraped)

    def _go_down(self, restart: Restart) -> None:
        pod = self.pods[restart.pod]
        lost = [index for index in self._live if self.outcomes[index].pod == pod.index]
        pod.go_down()
        self._at(self.now + restart.down, self._come_up, pod)
        for index in lost:
            del self._live[index]
            outcome = self.outcomes[index]
            outcome.retries += 1
            self._submit(index, self._policy.failed(index, self.now))

    def _come_up(self, pod: Pod) -> None:
        pod.come_up(self.now)

    def _look(self, _: None) -> None:
        pods = self.pods
        self.gauges.add([pod.engine.kv_usage(self.now) for pod in pods], [pod.in_flight for pod in pods])
        self._at(self.now + GAUGE_SECONDS, self._look, None)
