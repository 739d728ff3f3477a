"""kvlane itself as a policy: its gateway, scheduler, ledger, fleet and hooks, on the virtual clock and without sockets.

The gateway's coroutine is driven by hand: it runs up to the moment at which it relays to a pod, and goes on when the
simulation says what came of that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.errors import RequestError, UpstreamFailed
from proxy.core.listener import Listeners
from proxy.core.ports import Clock, ManualClock
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Registry
from proxy.core.tasks import Tasks
from proxy.disagg.transfer import SplitRequests
from proxy.fleet.bindings import Bindings
from proxy.fleet.ledger import Ledger
from proxy.fleet.settings import DataParallelSettings, PodSettings
from proxy.fleet.store import Fleet
from proxy.gateway import Gateway
from proxy.lab.simulation import Policy, Reading, VirtualPod
from proxy.lab.workload import Job, request_body
from proxy.openai.parse import Parsed, parse
from proxy.parsing import BodyParser
from proxy.plugins.sessions import ID_HEADER
from proxy.pool import Pool
from proxy.reliability.breaker import Breakers
from proxy.reliability.failover import Failover, RetryBudget
from proxy.scheduling.build import build
from proxy.settings import Settings

MODEL = "sim"
PREFILLED = b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"virtual"}}'
"""What a pod answers that has computed a prompt for another."""

BYTES_PER_EVENT = 220
"""Of a streamed token, about."""


@dataclass(frozen=True, slots=True)
class VirtualCall:
    """What the transport would hand to the gateway; see `proxy.core.ports.Call`."""

    id: str
    body: bytes
    received_at: float
    identity: None = None
    upload: None = None
    method: str = "POST"
    path: str = "/v1/completions"
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


class VirtualRelay:
    async def relay(self, attempt: Attempt) -> None:
        await _Sent(attempt)

    def race(self, begins: Callable[[Attempt], None]) -> None:
        """One leg at a time."""

    async def collect(self, attempt: Attempt, seconds: float) -> bytes:
        """Pods are never too slow for it."""
        await _Sent(attempt)
        return PREFILLED

    def pass_on(self, attempt: Attempt, body: bytes) -> None:
        """Nobody reads it."""


@dataclass(frozen=True, slots=True)
class _Sent:
    """Suspends the gateway until the leg has ended."""

    attempt: Attempt

    def __await__(self) -> Generator[Attempt, None, None]:
        yield self.attempt


class _ParsedHere(BodyParser):
    """Large bodies too are read at once: nobody else waits meanwhile."""

    async def parse_apart(self, path: str, body: bytes, content_type: str) -> Parsed:
        return parse(path, body, content_type)


class _Unobserved:
    """Takes the place of telemetry: it is told everything and keeps nothing."""

    def __getattr__(self, name: str) -> Any:
        return _ignore


def _ignore(*args: Any, **kwargs: Any) -> None:
    pass


async def _alive(endpoint: Endpoint) -> bool:
    return True


async def _at_once(seconds: float) -> None:
    """Retries wait for milliseconds, which nobody sees in a simulation of seconds."""


class Kvlane(Policy):
    """`says_cached`: pods report `cached_tokens` with the usage of a request. Pods have the labels, roles and
    weights of the static ones of the settings, in their order and over again; they serve any model."""

    def __init__(
        self, settings: Settings, pods: Sequence[VirtualPod], clock: ManualClock, rng: Random, *, says_cached: bool
    ) -> None:
        self.scrapes = settings.pods.refresh.interval
        self._clock = clock
        self._says_cached = says_cached
        self._scheduling = build(settings.scheduling, Registry.discover(), {Clock: clock, RandomPort: rng})
        self._ledger = self._make_ledger()
        self._fleet = Fleet(clock, on_ready=self._ready, on_restarted=self._forget, on_removed=self._forget)
        self._endpoints = self._add_pods(pods, settings.pods.static)
        self._pod_of = {endpoint.name: index for index, endpoint in enumerate(self._endpoints)}
        self._last: list[Reading | None] = [None] * len(pods)
        self._refused = [False] * len(pods)
        for endpoint in self._fleet.pods:
            self._fleet.reached(endpoint)
        unobserved: Any = _Unobserved()
        budget = RetryBudget(settings.reliability.retries.budget_percent, clock, lambda: self._ledger.entered)
        failover = Failover(settings.reliability.retries, clock, rng, budget, _alive, sleep=_at_once)
        self._breakers = Breakers(settings.reliability.breaker, clock, self._fleet, lambda seconds, call: None)
        split_requests = SplitRequests(
            settings.disaggregation, failover, self._ledger, clock, rng, Tasks(), lambda what: unobserved
        )
        listeners = Listeners([self._ledger, self._breakers, failover.poison])
        self._gateway = Gateway(
            self._fleet,
            [Pool(self._fleet, self._scheduling, split_requests=split_requests, common=listeners)],
            Bindings(clock),
            clock,
            failover,
            parser=_ParsedHere(),
        )
        self._attempts: dict[int, tuple[Coroutine[Any, Any, None], Attempt, Job]] = {}

    def _add_pods(self, pods: Sequence[VirtualPod], like: Sequence[PodSettings]) -> list[Endpoint]:
        """Return the endpoint of each virtual pod, or of each of its ranks."""
        sizes = Counter(pod.pod for pod in pods)
        leads = {pod: self._fleet.add(_pod(pod, size, like)) for pod, size in sizes.items()}
        return [leads[pod.pod].ranks[pod.rank or 0] for pod in pods]

    def _make_ledger(self) -> Ledger:
        return Ledger(self._clock)

    @property
    def in_flight(self) -> int:
        """Legs that were begun and have not ended."""
        return self._ledger.in_flight

    def place(self, index: int, job: Job, now: float) -> int | None:
        content, headers = request_body(job, job.params.model or MODEL), _headers(job)
        call = VirtualCall(f"r{index}", content, now, headers=headers)
        serving = self._gateway.serve(call, VirtualRelay())
        return self._proceed(index, job, serving, None)

    def first_byte(self, index: int, now: float) -> None:
        _, attempt, job = self._attempts[index]
        if job.params.stream:
            self._start_response(attempt, now)

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        serving, attempt, job = self._attempts.pop(index)
        if not job.params.stream:
            self._start_response(attempt, now)
        attempt.last_byte_at = now
        attempt.chunks = job.output_tokens
        attempt.response_bytes = job.output_tokens * BYTES_PER_EVENT
        attempt.usage = Usage(job.prompt_tokens, job.output_tokens, cached_tokens if self._says_cached else None)
        attempt.ending = Ending.COMPLETE
        self._proceed(index, job, serving, None)

    def stage(self, index: int) -> Stage:
        return self._attempts[index][1].stage

    def prefilled(self, index: int, now: float, cached_tokens: int) -> int | None:
        """Its answer of one token is for nobody, and comes whole."""
        serving, attempt, job = self._attempts.pop(index)
        self._start_response(attempt, now)
        attempt.last_byte_at = now
        attempt.chunks, attempt.response_bytes = 1, BYTES_PER_EVENT
        attempt.usage = Usage(job.prompt_tokens, 1, cached_tokens if self._says_cached else None)
        attempt.ending = Ending.COMPLETE
        return self._proceed(index, job, serving, None)

    def failed(self, index: int, now: float) -> int | None:
        serving, attempt, job = self._attempts.pop(index)
        attempt.ending = Ending.UPSTREAM_FAILED
        broken = UpstreamFailed("the pod is gone") if attempt.first_byte_at is None else None
        return self._proceed(index, job, serving, broken)

    def predicted(self, index: int) -> int | None:
        return self._attempts[index][1].predicted_cached_tokens

    def scrape_sent(self, pod: int) -> int:
        return self._endpoints[pod].load.requests

    def scraped(self, pod: int, reading: Reading | None, sent: int, sent_at: float) -> None:
        """Do what the refresh loop of a pod does. The first rank of a pod speaks for its state."""
        endpoint, last = self._endpoints[pod], self._last[pod]
        is_lead = endpoint is endpoint.lead
        if reading is None:
            if not self._refused[pod]:
                self._refused[pod], self._last[pod] = True, None
                if is_lead:
                    self._fleet.refused(endpoint)
            return
        if is_lead and last and reading.started_at != last.started_at:
            self._fleet.restarted(endpoint)
        self._last[pod] = reading
        endpoint.publish(_metrics(reading, sent_at), sent)
        self._fleet.refreshed(endpoint)
        if self._refused[pod]:
            self._refused[pod] = False
            if is_lead:
                self._fleet.restarted(endpoint)
                self._fleet.reached(endpoint)

    def _start_response(self, attempt: Attempt, now: float) -> None:
        attempt.status = 200
        attempt.begin_response(now)

    def _proceed(
        self, index: int, job: Job, serving: Coroutine[Any, Any, None], error: UpstreamFailed | None
    ) -> int | None:
        """Up to the next leg, whose pod it returns, or to the end."""
        try:
            attempt = serving.throw(error) if error else serving.send(None)
        except (StopIteration, RequestError):
            return None
        self._attempts[index] = (serving, attempt, job)
        return self._pod_of[attempt.endpoint.name]

    def _ready(self, endpoint: Endpoint) -> None:
        self._ledger.level(endpoint, self._fleet.ready)

    def _forget(self, endpoint: Endpoint) -> None:
        self._breakers.forget(endpoint)
        self._scheduling.forget(endpoint)


def _headers(job: Job) -> dict[str, str]:
    session = {ID_HEADER: job.session} if job.session else {}
    return {"content-type": "application/json", **session, **job.params.headers}


def _pod(index: int, size: int, like: Sequence[PodSettings]) -> PodSettings:
    ranks = DataParallelSettings(size) if size > 1 else None
    pod = PodSettings(url=f"http://pod-{index}:8000", name=f"pod-{index}", data_parallel=ranks)
    if not like:
        return pod
    same = like[index % len(like)]
    return replace(pod, role=same.role, labels=same.labels, weight=same.weight)


def _metrics(reading: Reading, sent_at: float) -> Metrics:
    return Metrics(
        waiting=reading.waiting,
        running=reading.running,
        kv_usage=reading.kv_usage,
        block_size=reading.block_size,
        blocks=reading.blocks,
        prefix_queries=reading.queried_tokens,
        prefix_hits=reading.hit_tokens,
        generation_tokens=reading.generated_tokens,
        process_started=1_700_000_000.0 + reading.started_at,
        scraped_at=sent_at,
        freshness=Freshness.FRESH,
    )
