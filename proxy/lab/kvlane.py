"""The proxy as a policy: the graph that serves requests, on the virtual clock and without sockets.

The gateway's coroutine is driven by hand: it runs until it relays an attempt to a pod, and continues when the
simulation reports the result of the attempt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import replace
from random import Random
from types import coroutine
from typing import Any

from proxy.app import App
from proxy.core.attempt import Attempt, Ending, Stage, Usage
from proxy.core.endpoint import Endpoint, Metrics
from proxy.core.errors import ConfigError, Problem, RequestError, UpstreamFailed
from proxy.core.params import Duration
from proxy.core.ports import Clock, ManualClock, Unconnected
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Ports, Registry
from proxy.core.state import Draft
from proxy.core.tasks import Tasks
from proxy.dry_run import UnsentRequest
from proxy.fleet.settings import DataParallelSettings, PodSettings
from proxy.http.upstream.pool import UpstreamPool
from proxy.lab.simulation import Policy, VirtualPod
from proxy.lab.workload import Job, request_body
from proxy.openai.parse import Parsed, parse
from proxy.parsing import BodyParser
from proxy.plugins.sessions import ID_HEADER
from proxy.reliability.settings import ReliabilitySettings
from proxy.serving import Process
from proxy.settings import Settings
from proxy.telemetry.settings import Telemetry

MODEL = "sim"
PREFILLED = b'{"kv_transfer_params":{"do_remote_prefill":true,"remote_engine_id":"virtual"}}'
"""The response of a pod that computed a prompt for another pod."""

BYTES_PER_EVENT = 220
"""Approximate size of the event of one streamed token."""

WAITS = "may wait for its data, which a replay on a virtual clock cannot do; leave out it and the plugins that read it"

COUNTED_EVERY = 256
"""Number of requests after which recorded events are counted, so that they do not accumulate."""


class VirtualRelay:
    async def relay(self, attempt: Attempt) -> None:
        await _sent(attempt)

    def race(self, on_start: Callable[[Attempt], None]) -> None:
        """Allow one attempt at a time."""

    async def collect(self, attempt: Attempt, seconds: float) -> bytes:
        """Never time out."""
        await _sent(attempt)
        return PREFILLED

    def pass_on(self, attempt: Attempt, body: bytes) -> None:
        """Drop the response: no client reads it."""


@coroutine
def _sent(attempt: Attempt) -> Generator[Attempt, None, None]:
    """Suspend the gateway until the attempt has ended."""
    yield attempt


class _InlineParser(BodyParser):
    """Parses large bodies in this process: no other request waits meanwhile."""

    async def parse_apart(self, path: str, body: bytes, content_type: str) -> Parsed:
        return parse(path, body, content_type)


class _NoConnections(UpstreamPool):
    async def takes_connections(self, endpoint: Endpoint) -> bool:
        return True


class _NoTasks(Tasks):
    """Drops background work: a virtual run has no event loop, and its pods accept all connections."""

    def start(self, work: Coroutine[Any, Any, Any], name: str) -> Any:
        work.close()


class Kvlane(App, Policy):
    """The proxy with these settings. It is never entered, so it opens no port and polls no pod. `says_cached`: pods
    report `cached_tokens` with the usage of a request. Pods repeat the labels, roles and weights of the static pods of
    the settings, in their order; they serve any model."""

    _timer = Unconnected()  # retries wait for milliseconds, too short to matter

    def __init__(
        self, settings: Settings, pods: Sequence[VirtualPod], clock: ManualClock, rng: Random, *, says_cached: bool
    ) -> None:
        """Raise ConfigError for plugins that a replay cannot run."""
        super().__init__(_simulated(settings), clock=clock, rng=rng)
        if waiting := [
            Problem(f"scheduling.plugins.{scheduling.name_of(producer)}", WAITS)
            for scheduling in self.schedulings.values()
            for producer in scheduling.producers
            if producer.waits
        ]:
            raise ConfigError(waiting)
        self.scrapes = settings.pods.refresh.interval
        self._says_cached = says_cached
        sizes = Counter(pod.pod for pod in pods)
        first_ranks = {pod: self.fleet.add(_pod(pod, size, settings.pods.static)) for pod, size in sizes.items()}
        self._endpoints = [first_ranks[pod.pod].ranks[pod.rank or 0] for pod in pods]
        self._pod_of = {endpoint.name: index for index, endpoint in enumerate(self._endpoints)}
        self._last: list[Metrics | None] = [None] * len(pods)
        self._refused: set[int] = set()
        for endpoint in self.fleet.pods:
            self.fleet.reached(endpoint)
        self._attempts: dict[int, tuple[Coroutine[Any, Any, None], Attempt, Job]] = {}

    def _make_process(self, settings: Settings, registry: Registry | None) -> Process:
        process = super()._make_process(settings, registry)
        process.parser = _InlineParser()
        process.tasks = _NoTasks()
        process.upstream = _NoConnections(0.0, self._clock, pod_tls=process.pod_tls)
        return process

    def _ports(self, pool: str, draft: Draft) -> Ports:
        return {Clock: self._clock, RandomPort: self._random}

    def place(self, index: int, job: Job, now: float) -> int | None:
        if not index % COUNTED_EVERY:
            self.observer.flush()
        body = request_body(job, job.params.model or MODEL)
        client_request = UnsentRequest("/v1/completions", _headers(job), body, now, id=f"r{index}")
        serving = self.serving.gateway.serve(client_request, VirtualRelay())
        return self._proceed(index, job, serving, None)

    def first_byte(self, index: int, now: float) -> None:
        _, attempt, job = self._attempts[index]
        if job.params.stream:
            self._start_response(attempt, now)

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        _, attempt, job = self._attempts[index]
        if not job.params.stream:
            self._start_response(attempt, now)
        self._complete(index, now, job.output_tokens, cached_tokens)

    def stage(self, index: int) -> Stage:
        return self._attempts[index][1].stage

    def prefilled(self, index: int, now: float, cached_tokens: int) -> int | None:
        self._start_response(self._attempts[index][1], now)
        return self._complete(index, now, 1, cached_tokens)

    def _complete(self, index: int, now: float, tokens: int, cached_tokens: int) -> int | None:
        serving, attempt, job = self._attempts.pop(index)
        attempt.last_byte_at = now
        attempt.chunks, attempt.response_bytes = tokens, tokens * BYTES_PER_EVENT
        attempt.usage = Usage(job.prompt_tokens, tokens, cached_tokens if self._says_cached else None)
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

    def scraped(self, pod: int, reading: Metrics | None, sent: int, sent_at: float) -> None:
        """Update the state of a pod as its refresh loop does. The first rank of a pod determines its state."""
        endpoint, last, was_refused = self._endpoints[pod], self._last[pod], pod in self._refused
        is_first_rank = endpoint is endpoint.first_rank
        self._last[pod] = reading
        if reading is None:
            self._refused.add(pod)
            if is_first_rank and not was_refused:
                self.fleet.refused(endpoint)
            return
        if is_first_rank and last and reading.process_started != last.process_started:
            self.fleet.restarted(endpoint)
        endpoint.publish(replace(reading, scraped_at=sent_at), sent)
        self.fleet.refreshed(endpoint)
        self._refused.discard(pod)
        if is_first_rank and was_refused:
            self.fleet.restarted(endpoint)
            self.fleet.reached(endpoint)

    def _start_response(self, attempt: Attempt, now: float) -> None:
        attempt.status = 200
        attempt.note_first_byte(now)

    def _proceed(
        self, index: int, job: Job, serving: Coroutine[Any, Any, None], error: UpstreamFailed | None
    ) -> int | None:
        """Run up to the next attempt and return its pod; None at the end."""
        try:
            attempt = serving.throw(error) if error else serving.send(None)
        except (StopIteration, RequestError):
            return None
        self._attempts[index] = (serving, attempt, job)
        return self._pod_of[attempt.endpoint.name]


def _simulated(settings: Settings) -> Settings:
    """Return the sections that apply in a simulation: clients have no keys, requests queue in the pods, and a pod that
    recovers gets its full share at once."""
    reliability = settings.reliability
    breaker = replace(reliability.breaker, slow_start=Duration(0.0))
    return Settings(
        scheduling=settings.scheduling,
        disaggregation=settings.disaggregation,
        reliability=ReliabilitySettings(retries=reliability.retries, breaker=breaker),
        telemetry=Telemetry(access_log=False, decisions=None),
    )


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
