"""The client of the dashboard's feed for `kvlane top`: it reads the admin port's events and the pods' own metrics."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from proxy import outbound
from proxy.autoscale.measures import quantile_between
from proxy.core.errors import KvlaneError, cause
from proxy.core.ports import Clock
from proxy.core.tasks import run_together
from proxy.telemetry.exposition import Sample, SampleReader, ScrapeError

WINDOW = 10.0
"""Seconds over which attempts are counted."""

BETWEEN_POINTS = 7.0
"""Longest time, in seconds, between two points of the series."""

FRESH = 30.0
"""Seconds for which the latest rates and percentiles are shown."""

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one pod from two reads of its metrics; None if unknown."""

    hit_ratio: float | None = None
    ttft_50: float | None = None
    ttft_90: float | None = None
    tokens: float | None = None
    """Output tokens per second."""


UNKNOWN = Figures()
_CONDITIONS = ("ready", "starting", "stale", "doubted", "probing", "broken", "draining", "leaving", "ejected")
"""Conditions, the best first."""


@dataclass(frozen=True, slots=True)
class PodView:
    """A pod or a data-parallel rank as the feed shows it, or the sums of a pod's ranks. kvlane counts `requests`; the
    engine counts the next three fields."""

    name: str
    pool: str = ""
    role: str = ""
    state: str = ""
    breaker: str = "closed"
    ejection_reasons: Sequence[str] = ()
    requests: int = 0
    waiting: int = 0
    running: int = 0
    kv: float = 0.0
    stale: bool = False
    leaving: bool = False
    sent: int = 0
    failed: int = 0
    rate: float | None = None
    """Recent attempts per second; None after a single count."""
    failures: float | None = None
    figures: Figures = UNKNOWN
    rank_of: str | None = None
    """The name of the pod if this is one of its ranks."""
    ranks: tuple[PodView, ...] = ()

    @property
    def condition(self) -> str:
        """Return the state of the pod, or its problem in the state ready."""
        if self.leaving:
            return "leaving"
        if self.state != "ready":
            return self.state
        if self.breaker != "closed":
            return "probing" if "half" in self.breaker else "broken"
        return "doubted" if self.ejection_reasons else "stale" if self.stale else "ready"

    @property
    def badness(self) -> int:
        return _CONDITIONS.index(self.condition) if self.condition in _CONDITIONS else len(_CONDITIONS)


_FIELDS = {"rankOf": "rank_of", "doubts": "ejection_reasons"} | {each.name: each.name for each in fields(PodView)}
"""Fields by their name in the feed."""


def _sum(name: str, ranks: list[PodView], figures: Figures) -> PodView:
    """Return the pod of these ranks, which has their sums and the worst condition."""
    return replace(
        max(ranks, key=lambda rank: rank.badness),
        name=name,
        requests=sum(rank.requests for rank in ranks),
        waiting=sum(rank.waiting for rank in ranks),
        running=sum(rank.running for rank in ranks),
        kv=sum(rank.kv for rank in ranks) / len(ranks),
        sent=sum(rank.sent for rank in ranks),
        failed=sum(rank.failed for rank in ranks),
        rate=None if ranks[0].rate is None else sum(rank.rate or 0.0 for rank in ranks),
        failures=None if ranks[0].failures is None else sum(rank.failures or 0.0 for rank in ranks),
        figures=figures,
        rank_of=None,
        ranks=tuple(sorted(ranks, key=lambda rank: (len(rank.name), rank.name))),
    )


class FleetPicture:
    """The current picture of the fleet, from the feed; it stays while the connection is lost."""

    def __init__(self) -> None:
        self.about: Json = {}
        self.point: Json = {}
        """The latest point of the proxy's time series."""
        self.pods: dict[str, PodView] = {}
        self.figures: dict[str, Figures] = {}
        """Figures by the name of a pod or rank."""
        self.waits = 0
        """Requests in flow-control queues."""
        self._fields: list[str] = []
        self._seen: deque[tuple[float, dict[str, tuple[int, int]]]] = deque()
        self._point_at = 0.0

    def apply(self, event: str, body: Json, now: float) -> None:
        """Apply an event `all` or `change`, received at this monotonic time."""
        if event == "all":
            self._fields, self.pods = body["fields"], {}
            self._seen.clear()
        for name, row in body.get("pods", {}).items():
            if row is None:
                self.pods.pop(name, None)
            else:
                given = zip(self._fields, row, strict=True)
                self.pods[name] = PodView(name, **{_FIELDS[key]: value for key, value in given if key in _FIELDS})
        self.about = body.get("about") or self.about
        if "queues" in body:
            self.waits = sum(band["waiting"] for pool in body["queues"] or () for band in pool["bands"])
        if points := _points(body):
            age = max(0.0, body.get("at", 0.0) - points[-1].get("t", 0.0))
            self.point, self._point_at = points[-1], now - age
        if (at := self._counted_at(body)) is not None:
            self._seen.append((at, {name: (pod.sent, pod.failed) for name, pod in self.pods.items()}))
            while len(self._seen) > 2 and at - self._seen[1][0] >= WINDOW:
                self._seen.popleft()

    def rows(self) -> list[PodView]:
        """Return a row per pod; the rows of its ranks are inside."""
        then, before = self._seen[0] if self._seen else (0.0, {})
        seconds = self._seen[-1][0] - then if self._seen else 0.0
        are_counted = seconds > 0 and any(pod.sent for pod in self.pods.values())
        found: dict[str, list[PodView]] = {}
        for pod in self.pods.values():
            known = replace(pod, figures=self.figures.get(pod.name, UNKNOWN))
            if are_counted and pod.name in before:
                sent, failed = before[pod.name]
                rate, failures = max(0, pod.sent - sent) / seconds, max(0, pod.failed - failed) / seconds
                known = replace(known, rate=rate, failures=failures)
            found.setdefault(pod.rank_of or pod.name, []).append(known)
        return [
            _sum(name, ranks, self.figures.get(name, UNKNOWN)) if ranks[0].rank_of else ranks[0]
            for name, ranks in found.items()
        ]

    def totals(self, now: float) -> Json:
        """Return the latest point, unless it is old."""
        return self.point if now - self._point_at < FRESH else {}

    def _counted_at(self, body: Json) -> float | None:
        """Return the time of the counts, by the proxy's clock. Counts of several workers change only with points."""
        if self.about.get("workers", 1) > 1:
            points = _points(body)
            if points and body["at"] - points[-1]["t"] < BETWEEN_POINTS:
                return float(points[-1]["t"])
            if "points" not in body:
                return None
        return float(body["at"])


def _points(body: Json) -> Sequence[Json]:
    return body.get("points") or ([body["point"]] if "point" in body else [])


FAMILIES = {
    "hits": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
    "queries": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "tokens": ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    "ttft": ("vllm:time_to_first_token_seconds_bucket", "sglang:time_to_first_token_seconds_bucket"),
}
"""Names of each metric; the first one that a pod exposes is used."""

_READER = SampleReader([name for names in FAMILIES.values() for name in names])


@dataclass(frozen=True, slots=True)
class EngineTotals:
    """Totals of all models since the start of the engine, read at a monotonic time: the hits, queries and tokens that
    the engine counts, and the times to the first token by the upper bounds of buckets."""

    at: float
    counts: Mapping[str, float]
    ttft: Mapping[float, float]


def totals_in(exposition: bytes, at: float) -> list[EngineTotals]:
    """Read the totals of the pod, then of its data-parallel ranks in their order. Raise ScrapeError."""
    samples = _READER.read(exposition)
    labels = {_rank_of(sample) for of_family in samples.values() for sample in of_family} - {""}
    found = []
    for rank in (None, *sorted(labels, key=lambda label: (len(label), label))):
        families = {
            key: [sample for sample in samples[name] if rank is None or _rank_of(sample) == rank]
            for key, names in FAMILIES.items()
            if (name := next(filter(samples.__contains__, names), None))
        }
        ttft: defaultdict[float, float] = defaultdict(float)
        for sample in families.pop("ttft", ()):
            if bound := sample.labels.get("le"):
                ttft[float(bound)] += sample.value
        counts = {key: sum(sample.value for sample in family) for key, family in families.items()}
        found.append(EngineTotals(at, counts, ttft))
    return found


def _rank_of(sample: Sample) -> str:
    return sample.labels.get("engine") or sample.labels.get("dp_rank") or ""


def sum_of(parts: Sequence[EngineTotals]) -> EngineTotals:
    counts: defaultdict[str, float] = defaultdict(float)
    ttft: defaultdict[float, float] = defaultdict(float)
    for part in parts:
        for name, count in part.counts.items():
            counts[name] += count
        for bound, count in part.ttft.items():
            ttft[bound] += count
    return EngineTotals(max(part.at for part in parts), counts, ttft)


def between(before: EngineTotals, now: EngineTotals) -> Figures:
    """Return the figures between two reads; None for counters of a restarted engine."""
    grown = {
        name: count - was for name, count in now.counts.items() if (was := before.counts.get(name, math.inf)) <= count
    }
    hits, queries, tokens = map(grown.get, ("hits", "queries", "tokens"))
    seconds = now.at - before.at
    return Figures(
        hits / queries if hits is not None and queries else None,
        _percentile(50, before, now),
        _percentile(90, before, now),
        tokens / seconds if tokens is not None and seconds > 0 else None,
    )


def _percentile(percentile: float, before: EngineTotals, now: EngineTotals) -> float | None:
    try:
        return quantile_between(percentile, sorted(now.ttft.items()), sorted(before.ttft.items()))
    except ValueError:
        return None


AGAIN = 1.0
SILENCE = 15.0
"""Seconds without an event after which the connection is considered lost; there is one event per second."""

READ_INTERVAL = 5.0
MOST_PODS = 40
"""Largest number of visible pods whose metrics are read: the metrics of a real engine are 69 KB."""

AT_ONCE = 4


class Refused(KvlaneError):
    """The admin port refused the request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class FeedClient:
    """A reader of the feed of a proxy. `changed` is called after each change of the picture or of the connection."""

    session: aiohttp.ClientSession
    url: str
    picture: FleetPicture
    clock: Clock
    changed: Callable[[], None]
    wrong: str = field(init=False, default="")
    """The reason for the lost connection; empty while connected."""
    wrong_since: float = field(init=False, default=0.0)
    refused: Refused | None = field(init=False, default=None)
    _totals: dict[str, EngineTotals] = field(init=False, default_factory=dict)
    _reads: asyncio.Semaphore = field(init=False, default_factory=lambda: asyncio.Semaphore(AT_ONCE))

    async def run(self) -> None:
        """Receive events until cancelled or `refused`; connect again after errors."""
        while self.refused is None:
            try:
                async with aclosing(self.events()) as events:
                    async for event, body in events:
                        self.wrong = ""
                        self.picture.apply(event, body, self.clock.now())
                        self.changed()
            except Refused as error:
                self.refused = error
                self.changed()
            except (*outbound.FAILURES, ValueError) as error:
                if not self.wrong:
                    self.wrong_since = self.clock.now()
                self.wrong = cause(error)
                self.changed()
                await asyncio.sleep(AGAIN)

    async def first(self) -> None:
        """Receive the first event. Raise an error of the connection."""
        async with aclosing(self.events()) as events:
            async for event, body in events:
                self.picture.apply(event, body, self.clock.now())
                return

    async def events(self) -> AsyncGenerator[tuple[str, Any], None]:
        """Yield the events of one connection; the proxy ends it after some minutes. Raise Refused, and ConnectionError
        for a status of 500 or more, which is worth a retry."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE)
        async with self.session.get(f"{self.url.rstrip('/')}/dashboard/events", timeout=timeout) as response:
            if response.status >= 500:
                raise ConnectionError(f"the admin port responded {response.status}")
            if response.status != 200:
                raise Refused(response.status, _refusal(response.status, await response.read()))
            rest = b""
            async for chunk in response.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    name, _, body = event.partition(b"\ndata: ")
                    yield name.removeprefix(b"event: ").decode(), orjson.loads(body)

    async def read_engines(self, shown: Callable[[], Iterable[PodView]]) -> None:
        """Read the metrics of the pods that are `shown`, until cancelled."""
        while True:
            await self.read(shown())
            await asyncio.sleep(READ_INTERVAL)

    async def read(self, pods: Iterable[PodView]) -> None:
        """Read the metrics of the pods, and of the ranks inside."""
        await run_together(*(self._read_pod(pod) for pod in list(pods)[:MOST_PODS]))

    async def _read_pod(self, pod: PodView) -> None:
        """Read the metrics of a pod. Ranks behind one port share an exposition; ranks with own ports have one each."""
        if not pod.ranks or pod.ranks[0].name.startswith(f"{pod.name}/"):
            total, *of_ranks = await self._read(pod.name)
            self._keep(pod.name, total)
            if len(of_ranks) != len(pod.ranks):
                of_ranks = [None] * len(pod.ranks)
        else:
            of_ranks = [found[0] for found in await asyncio.gather(*(self._read(rank.name) for rank in pod.ranks))]
            known = [one for one in of_ranks if one is not None]
            self._keep(pod.name, sum_of(known) if len(known) == len(of_ranks) else None)
        for rank, found in zip(pod.ranks, of_ranks, strict=True):
            self._keep(rank.name, found)

    async def _read(self, name: str) -> Sequence[EngineTotals | None]:
        """Return what `totals_in` reads, or None for a pod that does not respond."""
        url = f"{self.url.rstrip('/')}/admin/pods/{quote(name, safe='')}/proxy/metrics"
        with suppress(*outbound.FAILURES, ValueError, ScrapeError):
            async with self._reads:
                response = await outbound.send(self.session, "GET", url, timeout=_SHORT)
            if response.status == 200:
                return totals_in(response.body, self.clock.now())
        return [None]

    def _keep(self, name: str, found: EngineTotals | None) -> None:
        """Store the figures of a pod or rank; without totals it has no figures."""
        before = self._totals.pop(name, None)
        self.picture.figures.pop(name, None)
        if found is not None:
            self._totals[name] = found
            if before is not None and found.at - before.at < 3 * READ_INTERVAL:
                self.picture.figures[name] = between(before, found)


_SHORT = aiohttp.ClientTimeout(total=3.0)


def _refusal(status: int, body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"it responded {status}; is this kvlane's admin port, 9190 unless configured?"
