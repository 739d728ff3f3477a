"""The loop that scrapes one pod, and the CPU budget that all of these loops share."""

from __future__ import annotations

import asyncio
import logging
import math
import types
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from dataclasses import InitVar, dataclass, replace
from typing import Any, TypeVar
from zlib import crc32

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics
from proxy.core.errors import ConnectRefused, UpstreamFailed
from proxy.core.ports import Clock, Random
from proxy.fleet.dialects import Dialects
from proxy.fleet.models import ROUND_EVERY
from proxy.fleet.scrape import MOST_SAMPLES, Fetcher, parse_in_steps, parse_models
from proxy.fleet.settings import DcgmSettings, RefreshSettings
from proxy.fleet.store import Fleet
from proxy.telemetry.exposition import SampleReader, ScrapeError

log = logging.getLogger(__name__)

STALE_AFTER = 3
"""Number of missed scrapes: of failed ones, or of scrapes by another process that are not received."""

MODELS_INTERVAL = 5.0
MODELS_RETRY = 1.0
_MODELS_ROUNDS = 4
"""In a large fleet the models are read in one of this many rounds, because they use the same CPU budget."""

_JITTER = 0.1
_RESTART_SLACK = 1.0
"""Largest difference in seconds between start times of the same process: some engines compute it again."""


class _Refused(Exception):
    """The pod refuses connections."""


class _NoResponse(Exception):
    """The pod sent no complete, valid response."""


Scraped = Callable[[Endpoint, float, int], None]
"""Called after a scrape with the pod, the seconds within which another one follows, which are 0 after a failure, and
the checksum of its list of models."""


@dataclass(eq=False)
class Refresher:
    """Scrapes one pod until cancelled. After its own first successful scrape it pauses for as long as another process
    sends it scrapes of that pod. The pause ends at once when the other process cannot scrape the pod, and when anything
    but the metrics has changed, such as the engine's process or the list of models.

    A slow pod becomes stale; a pod that refuses connections is ejected until it responds.
    """

    _endpoint: Endpoint
    _fleet: Fleet
    _fetcher: Fetcher
    settings: RefreshSettings
    dialects: Dialects
    """May change; used from the next round on."""
    budget: InitVar[ScrapeBudget]
    _clock: Clock
    _rng: Random
    _scraped: Scraped = lambda *_: None

    def __post_init__(self, budget: ScrapeBudget) -> None:
        clock = self._clock
        self._budget = PodBudget(budget)
        self._reached = self._endpoint.state is EndpointState.READY
        self._refused = self._endpoint.state is EndpointState.EJECTED
        self._missed = 0
        self._last: Sequence[Metrics] = ()
        """The last metrics of each rank."""
        self._received_at = self._received_until = -math.inf
        """When the last scrape by another process was used, and until when it counts."""
        self._models_checksum = 0
        """Checksum of the last list of models."""
        self._models_due = clock.now()
        self._models_wanted: asyncio.Future[None] | None = None
        """Done after the next read of the models, for callers of `read_models`."""
        self._may_read_from = clock.now()
        self._wake = asyncio.Event()
        """Set when the next round should not wait."""
        self._bad_models = ""
        """Why the last list of models was ignored."""
        self._gpus = Gpus(self._endpoint, self._fetcher, clock)
        self.tried = asyncio.Event()
        """Set after the first round, whatever its result."""

    def read_models(self) -> asyncio.Future[None]:
        """Scrape the pod and read its models now, but at most every ROUND_EVERY seconds or, in a large fleet, as often
        as the CPU budget permits. The future is done after a read that starts after this call."""
        if self._models_wanted is None:
            self._models_wanted = asyncio.get_running_loop().create_future()
            self._wake.set()
        return self._models_wanted

    def receive(self, seconds: float, models_checksum: int, ranks: Sequence[tuple[Metrics, int]]) -> None:
        """Use a scrape by another process: see Scraped, and for each rank its metrics and the requests in flight."""
        if not self._last or self._missed:
            return
        now, metrics = self._clock.now(), [of_rank for of_rank, _ in ranks]
        has_other_models = models_checksum != self._models_checksum and now >= self._models_due
        if len(ranks) != len(self._endpoint.ranks) or has_other_models or any(map(_was_restarted, metrics, self._last)):
            self.scrape_itself()
            return
        self._received_until = now + seconds
        if metrics[0].scraped_at > self._last[0].scraped_at:
            self._received_at = now
            self._use(self._endpoint.ranks, metrics, [in_flight for _, in_flight in ranks])

    def scrape_itself(self) -> None:
        """Scrape the pod at once if another process does."""
        if self._received_until > self._clock.now():
            self._received_until = -math.inf
            self._wake.set()

    async def run(self, delay: float = 0.0) -> None:
        """Start after `delay` seconds."""
        try:
            await asyncio.sleep(delay)
            while True:
                began = self._clock.now()
                if began < self._received_until and self._models_wanted is None:
                    self._wake.clear()
                    await self._rest(self._received_until - began)
                    continue
                with self._budget:
                    await metered(self._round(), self._clock, self._budget.charge)
                    self.tried.set()
                    await self._rest(self._pause(self._clock.now() - began))
        finally:
            _finish(self._models_wanted)
            self._models_wanted = None

    @property
    def interval(self) -> float:
        """Seconds between two scrapes."""
        return self._budget.interval

    @property
    def _pod(self) -> str:
        return self._endpoint.pod_name

    @property
    def _has_metrics(self) -> bool:
        return self._endpoint.metrics.scraped_at > -math.inf

    def _pause(self, elapsed: float) -> float:
        """Return the rest of the interval; at least half an interval after a slow scrape."""
        interval = self._budget.interval
        return max(interval - elapsed, interval / 2) * (1 - _JITTER + 2 * _JITTER * self._rng.random())

    async def _rest(self, seconds: float) -> None:
        """Sleep until the next round; less if a read of the models is requested, or another process stops scraping the
        pod."""
        try:
            async with asyncio.timeout(seconds):
                await self._wake.wait()
                await asyncio.sleep(self._may_read_from - self._clock.now())
        except TimeoutError:
            pass

    def _start_wanted_read(self) -> asyncio.Future[None] | None:
        """Return the future of the requested read of the models, if they are to be read in this round."""
        now, wanted = self._clock.now(), self._models_wanted
        if wanted is not None and now < self._may_read_from:
            return None
        self._wake.clear()
        if wanted is None:
            return None
        self._models_wanted, self._may_read_from = None, now + max(ROUND_EVERY, self._budget.affordable)
        return wanted

    async def _round(self) -> None:
        wanted = self._start_wanted_read()
        try:
            responds = await self._scrape()
            is_due = (responds or not self._reached) and self._clock.now() >= self._models_due
            if is_due or wanted is not None:
                responds = await self._list_models() or responds
            if responds or (not self._reached and await self._responds_to_health()):
                self._on_response()
            if responds and self.settings.dcgm is not None:
                await self._gpus.ask(self.settings.dcgm)
        except _Refused:
            self._on_refusal()
        finally:
            _finish(wanted)

    async def _scrape(self) -> bool:
        """Scrape the metrics. Return whether the status is 200, even if the body is invalid."""
        endpoint, sent_at = self._endpoint, self._clock.now()
        in_flight = [each.load.requests for each in endpoint.ranks]
        try:
            status, body = await self._get(self.settings.metrics_url(endpoint.url))
            if status != 200:
                raise ScrapeError(f"status {status}")
            dialect = self.dialects.of(endpoint)
            scrape = await parse_in_steps(body, dialect, sent_at)
        except _NoResponse as silent:
            self._on_miss(str(silent))
            return False
        except ScrapeError as error:
            self._on_miss(str(error))
            return status == 200
        number = len(scrape.ranks) or 1
        if not dialect.lists_all_ranks:
            number = max(number, len(endpoint.ranks))
        endpoints = self._fleet.ranks_seen(endpoint, number)
        if endpoints[0] is endpoint and sent_at >= self._received_at:  # else its counters may be older
            self._on_metrics(endpoints, scrape.of(endpoints), in_flight)
        return True

    async def _list_models(self) -> bool:
        """Read the models. A pod without this path serves any model; after an error the pod is asked again soon."""
        self._models_due = self._clock.now() + MODELS_RETRY
        try:
            status, body = await self._get(self._endpoint.url + "/v1/models")
            if status not in (200, 404):
                return False
            cards = parse_models(body) if status == 200 else ()
            names = sorted((card["id"], str(card.get("root"))) for card in cards)
            self._models_checksum = crc32(repr(names).encode())
            self._fleet.listed(self._endpoint, cards)
        except _NoResponse:
            return False
        except ScrapeError as error:
            why = str(error)
            if why != self._bad_models:  # logged once: the pod keeps the models that it listed before
                self._bad_models = why
                log.warning("pod %s: ignored its response to /v1/models: %s", self._pod, why)
            return False
        self._bad_models = ""
        self._models_due = self._clock.now() + max(MODELS_INTERVAL, _MODELS_ROUNDS * self._budget.interval)
        return status == 200

    async def _responds_to_health(self) -> bool:
        """Return whether `/health` is 200, which makes a pod ready that has neither metrics nor a list of models. The
        path is fixed; `reliability.health.path` is the path of the health checks of ready pods."""
        try:
            status, _ = await self._get(self._endpoint.url + "/health")
        except _NoResponse:
            return False
        return status == 200

    async def _get(self, url: str) -> tuple[int, bytes]:
        """Return status and body. The URL may change between two calls. Raise _Refused and _NoResponse."""
        try:
            return await self._fetcher.get(url, self._endpoint.api_key)
        except ConnectRefused:
            raise _Refused from None
        except UpstreamFailed as failed:
            raise _NoResponse(str(failed) or "no response") from None

    def _on_metrics(self, endpoints: Sequence[Endpoint], metrics: Sequence[Metrics], in_flight: Sequence[int]) -> None:
        """`in_flight` are the requests on each rank when the scrape was sent; unknown for a new rank."""
        if any(map(_was_restarted, metrics, self._last)):
            log.warning("pod %s was restarted", self._pod)
            self._fleet.restarted(self._endpoint)
        if self.settings.dcgm is not None:
            metrics = [replace(each, attributes={**each.attributes, **self._gpus.attributes}) for each in metrics]
        self._use(endpoints, metrics, [*in_flight, *(each.load.requests for each in endpoints[len(in_flight) :])])
        took = self._clock.now() - metrics[0].scraped_at
        self._scraped(self._endpoint, STALE_AFTER * (self._budget.interval + took), self._models_checksum)

    def _use(self, endpoints: Sequence[Endpoint], metrics: Sequence[Metrics], in_flight: Sequence[int]) -> None:
        if self._missed >= STALE_AFTER and self._has_metrics:
            log.info("pod %s: the metrics are fresh again", self._pod)
        self._missed, self._last = 0, metrics
        for endpoint, of_rank, requests in zip(endpoints, metrics, in_flight, strict=False):
            endpoint.publish(of_rank, requests)
        for endpoint in endpoints:
            self._fleet.refreshed(endpoint)

    def _on_miss(self, why: str) -> None:
        self._missed += 1
        if self._missed == 1:
            self._scraped(self._endpoint, 0.0, 0)
        self._fleet.missed(self._endpoint, why)
        if self._missed == STALE_AFTER:
            url = self.settings.metrics_url(self._endpoint.url)
            what = (
                "the metrics are stale" if self._has_metrics else "no metrics yet" if self._reached else "not ready yet"
            )
            log.warning("pod %s: %s: %s: %s", self._pod, what, url, why)
            for endpoint in self._endpoint.ranks:
                stale = replace(endpoint.metrics, freshness=Freshness.STALE)
                endpoint.publish(stale, endpoint.load.requests)
                self._fleet.refreshed(endpoint)

    def _on_response(self) -> None:
        if self._reached:
            return
        self._reached = True
        if self._refused:
            self._fleet.restarted(self._endpoint)
        self._fleet.reached(self._endpoint)

    def _on_refusal(self) -> None:
        """Handle a refused connection: the process and everything in its memory are gone."""
        self._on_miss("connection refused")
        self._models_due = self._clock.now()
        if self._reached:
            self._reached, self._refused, self._last = False, True, ()
            log.warning("pod %s refuses connections", self._pod)
            self._fleet.refused(self._endpoint)


def _finish(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _was_restarted(metrics: Metrics, last: Metrics) -> bool:
    """Return whether another process responds: it says so, or its counters have started again."""
    both_say = metrics.process_started and last.process_started
    if both_say and abs(metrics.process_started - last.process_started) > _RESTART_SLACK:
        return True
    return metrics.prefix_queries < last.prefix_queries or metrics.prefix_hits < last.prefix_hits


T = TypeVar("T")

UNMEASURED_FACTOR = 1.2
"""CPU of a refresh per second measured in the steps of its coroutine: reading the socket, parsing HTTP and turning the
loop happen outside of them. Measured with `bench/refresh.py`."""

_AVERAGED_ROUNDS = 20
"""Number of rounds over which the mean cost of a pod is computed."""

_SPIKE = 4.0
"""A round counts at most this many times the round before it. A pause of the whole process during one round must not
stretch a pod's interval to minutes."""

_INITIAL_COST = 0.002
"""Assumed CPU seconds of a round before the first one of the process."""


class ScrapeBudget:
    """The share of one core that all scrapes of a pool may take, divided equally among its pods."""

    def __init__(self, interval: float, max_core: float) -> None:
        self.shortest = interval
        self.max_core = max_core
        self.pods = 0
        self.rounds = 0
        """Number of rounds of all pods since the start."""
        self.charged = 0.0
        """CPU seconds of these rounds."""
        self.last = 0.0
        """CPU seconds of the latest round of any pod."""


class PodBudget:
    """One pod's part of the budget: with n pods, c CPU seconds per round of this pod and a share m of a core, the pod
    is scraped every n·c/m seconds, so it takes m/n of a core. Entered while the pod is scraped."""

    def __init__(self, budget: ScrapeBudget) -> None:
        self._budget = budget
        self._last = 0.0
        self._rounds = 0
        self.cost = 0.0
        """Mean CPU seconds of a round."""

    def __enter__(self) -> None:
        self._budget.pods += 1

    def __exit__(self, *_: object) -> None:
        self._budget.pods -= 1

    @property
    def interval(self) -> float:
        """Seconds between two rounds."""
        return max(self._budget.shortest, self.affordable)

    @property
    def affordable(self) -> float:
        """Seconds between two rounds that the pod's share of the CPU permits; independent of the configured
        interval."""
        return self._budget.pods * self.cost / self._budget.max_core

    def charge(self, seconds: float) -> None:
        """Add a round that took `seconds` in the steps of its coroutine."""
        seconds *= UNMEASURED_FACTOR
        counted = min(seconds, _SPIKE * (self._last or self._budget.last or _INITIAL_COST))
        self._rounds += 1
        self.cost += (counted - self.cost) / min(self._rounds, _AVERAGED_ROUNDS)
        self._last = self._budget.last = seconds
        self._budget.rounds += 1
        self._budget.charged += seconds


@types.coroutine
def metered(work: Coroutine[Any, Any, T], clock: Clock, charge: Callable[[float], None]) -> Generator[Any, None, T]:
    """Await `work` and charge the seconds in which it ran, not those in which it waited."""
    running, thrown = 0.0, None
    try:
        while True:
            began = clock.now()
            try:
                awaited = work.throw(thrown) if thrown else work.send(None)
            except StopIteration as done:
                return done.value  # type: ignore[no-any-return]
            finally:
                running += clock.now() - began
            thrown = None
            try:
                yield awaited
            except BaseException as error:  # noqa: BLE001 - cancellation too is for the work to see
                thrown = error
    finally:
        charge(running)


GPU_UTILIZATION = "GPUUtilization"
"""Attribute with the utilization of the pod's busiest GPU, from 0 to 1."""

SERIES = "DCGM_FI_DEV_GPU_UTIL"

RETRY = 5.0
"""Seconds after which an exporter without a response is scraped again, because the scrape of the pod waits for it."""

_READER = SampleReader((SERIES,), limit=MOST_SAMPLES)


class Gpus:
    """The GPUs of one pod. `attributes` are from the last scrape; empty after a failure."""

    def __init__(self, endpoint: Endpoint, fetcher: Fetcher, clock: Clock) -> None:
        self._endpoint = endpoint
        self._fetcher = fetcher
        self._clock = clock
        self._due = clock.now()
        self._has_warned = False
        self.attributes: Mapping[str, float] = {}

    async def ask(self, settings: DcgmSettings) -> None:
        """Scrape the exporter if its interval has passed."""
        if self._clock.now() < self._due:
            return
        url = settings.url_of(self._endpoint)
        try:
            status, body = await self._fetcher.get(url, None)
            if status != 200:
                raise ScrapeError(f"status {status}")
            self.attributes = {GPU_UTILIZATION: await utilization(body, self._endpoint.name)}
            self._due, self._has_warned = self._clock.now() + (settings.interval or 0.0), False
        except (UpstreamFailed, ScrapeError) as error:
            self.attributes = {}
            self._due = self._clock.now() + max(RETRY, settings.interval or 0.0)
            if not self._has_warned:
                self._has_warned = True
                log.warning("pod %s: failed to read its GPU metrics: %s: %s", self._endpoint.name, url, error)


async def utilization(text: bytes, pod: str) -> float:
    """Return the utilization from 0 to 1. If the exporter has labels of pods, only the GPUs of this pod count. Raise
    ScrapeError."""
    samples = (await _READER.read_in_steps(text)).get(SERIES, ())
    values = [sample.value for sample in samples if _is_of(sample.labels.get("pod", ""), pod)]
    if not values:
        raise ScrapeError(f"it has no {SERIES} of the pod" if samples else f"it has no {SERIES}")
    return min(1.0, max(0.0, max(values) / 100))


def _is_of(named: str, pod: str) -> bool:
    """Return whether the names match. Discovery puts the namespace before a pod's name, and the server's number after
    it."""
    own = pod.rpartition("/")[2]
    return named in ("", own) or own.startswith(f"{named}-rank-")
