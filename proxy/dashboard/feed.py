"""The dashboard's feed: one snapshot per second; each viewer receives the changes."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import TYPE_CHECKING, Any

import orjson

from proxy.core.attempt import Ending
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.errors import Saturated
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.dashboard.samples import Samples, Series
from proxy.fleet.store import Fleet

if TYPE_CHECKING:
    from proxy.autoscale.scaled_pool import ScaledPool
    from proxy.flowcontrol.controller import FlowControl

log = logging.getLogger(__name__)

PODS_AT_ONCE = 50
"""Number of pods that are read without a pause: half a millisecond."""

FIELDS = (
    *("pool", "role", "state", "breaker", "doubts", "requests", "tokens", "waiting", "running", "kv"),
    *(
        "scrapedAt",
        "stale",
        "leaving",
        "weight",
        "prefill",
        "perToken",
        "sent",
        "failed",
        "rankOf",
        "scrapeFailure",
        "failingSince",
    ),
)
"""Fields of a row, in order. `scrapedAt` is in whole seconds since the Unix epoch, null before the first scrape.
`prefill` is the learned time for a typical prompt, `perToken` for an output token, in seconds; `sent` and `failed`
count attempts since the start. `rankOf` is the name of the pod if the row is one of its data-parallel ranks.
`scrapeFailure` says why the last scrape failed, `failingSince` the second since when all scrapes have failed; both are
null if the last scrape did not fail."""

FINE = (Ending.COMPLETE.value, Ending.CLIENT_GONE.value)

Counts = Callable[[Endpoint], Mapping[str, int]]
"""A function that returns the attempts of an endpoint, by ending."""

Paces = Callable[[Endpoint], tuple[float, float] | None]


@dataclass(slots=True)
class PodRows:
    """The rows of pods. `paces` returns the learned speeds of pods: their `prefill` and `perToken`."""

    fleet: Fleet
    clock: Clock
    breaker: Callable[[Endpoint], str]
    counts: Counts
    paces: Callable[[], Paces]
    rows: dict[str, bytes] = field(init=False, default_factory=dict)
    """The latest rows in JSON, by the name of the pod."""

    async def changes(self) -> dict[str, bytes | None]:
        """Return the changed rows; None for removed pods. Let the event loop run in between."""
        found: dict[str, bytes | None] = {}
        there, ahead, pace = self.fleet.endpoints, self.clock.wall() - self.clock.now(), self.paces()
        for position, endpoint in enumerate(there):
            if position % PODS_AT_ONCE == PODS_AT_ONCE - 1:
                await asyncio.sleep(0)
            row = orjson.dumps(self._row(endpoint, ahead, pace(endpoint)))
            if self.rows.get(endpoint.name) != row:
                found[endpoint.name] = self.rows[endpoint.name] = row
        for name in self.rows.keys() - {endpoint.name for endpoint in there}:
            del self.rows[name]
            found[name] = None
        return found

    def _row(self, endpoint: Endpoint, ahead: float, pace: tuple[float, float] | None) -> list[Any]:
        """Return the row of a pod. `ahead`: wall time minus monotonic time."""
        metrics, view, load = endpoint.metrics, endpoint.view, endpoint.load
        never, failing = math.isinf(metrics.scraped_at), self.fleet.failing_since(endpoint)
        prefill, per_token = pace or (None, None)
        attempts = self.counts(endpoint)
        sent = sum(attempts.values())
        return [
            *(endpoint.pool, endpoint.role, endpoint.state.value, self.breaker(endpoint)),
            *(self.fleet.ejection_reasons(endpoint), load.requests, load.tokens),
            *(view.waiting, view.running, round(view.kv_usage, 3)),
            None if never else round(metrics.scraped_at + ahead),
            metrics.freshness is Freshness.STALE,
            self.fleet.is_leaving(endpoint),
            endpoint.weight,
            None if prefill is None else round(prefill, 3),
            None if per_token is None else round(per_token, 5),
            sent,
            sent - sum(attempts.get(ending, 0) for ending in FINE),
            None if endpoint.replica_name == endpoint.name else endpoint.replica_name,
            self.fleet.scrape_failure(endpoint),
            None if failing is None else round(failing + ahead),
        ]


class SummedCounts:
    """Attempts of each endpoint, summed over workers. `series` returns the latest sums; None before the first read."""

    def __init__(self, series: Callable[[], Series | None]) -> None:
        self._series = series
        self._read: Series | None = None
        self._counts: dict[str, dict[str, int]] = {}

    def of(self, endpoint: Endpoint) -> Mapping[str, int]:
        series = self._series()
        if series is not None and series is not self._read:
            self._read, self._counts = series, {}
            for (name, ending), number in series.by("attempts", "endpoint", "ending").items():
                self._counts.setdefault(name, {})[ending] = round(number)
        return self._counts.get(endpoint.name, {})


MOST_TENANTS = 12
"""Largest number of tenants of a band: the ones with the most waiting requests."""


def queues(flow_controls: Mapping[str, FlowControl], now: float) -> list[dict[str, Any]]:
    """Return the queues by pool and band; `oldest` is in seconds."""
    return [
        {
            "pool": pool,
            "saturation": round(control.capacity.saturation(), 3),
            "bands": [
                {
                    "name": band.name,
                    "priority": band.priority,
                    "waiting": band.length,
                    "bytes": band.bytes,
                    "tenants": [
                        {"name": tenant, "waiting": waiting, "oldest": round(now - since, 1)}
                        for tenant, waiting, since in sorted(band.tenants(), key=lambda one: -one[1])[:MOST_TENANTS]
                    ],
                }
                for band in control.queue.bands
            ],
        }
        for pool, control in flow_controls.items()
    ]


def shadows(series: Series) -> list[dict[str, Any]]:
    """Return by profile how often it agreed, and the cost or gain of the pods that it chose, in seconds."""
    runs = series.by("shadow_decisions", "profile", "agrees")
    regrets = series.masses("shadow_regret_seconds", "profile", "sooner")
    nothing = (0.0, 0.0)
    return [
        {
            "profile": profile,
            "agreed": round(runs.get((profile, "true"), 0.0)),
            "differed": round(runs.get((profile, "false"), 0.0)),
            "sooner": [round(one, 3) for one in regrets.get((profile, "shadow"), nothing)],
            "later": [round(one, 3) for one in regrets.get((profile, "live"), nothing)],
        }
        for profile in sorted({profile for profile, _ in runs})
    ]


def scaling(pools: Mapping[str, ScaledPool]) -> list[dict[str, Any]]:
    """Return the latest recommendation for each pool with a policy; only its name before the first one."""
    found: list[dict[str, Any]] = []
    for name, pool in pools.items():
        about: dict[str, Any] = {"pool": name, "paused": pool.loop.paused}
        if (latest := pool.loop.latest) is not None:
            about |= {key: value for key, value in pool.described(latest).items() if key not in ("decision_id", "ts")}
        found.append(about)
    return found


INTERVAL = 1.0
MOST_VIEWERS = 32
MOST_BEHIND = 4
"""Largest number of changes that a slow viewer may lag behind; after that it receives a whole snapshot."""

LONGEST = 600
"""Largest number of snapshots for one connection. The client connects again, so that its key is checked again."""


@dataclass(slots=True)
class Panel:
    """A part of the picture, read every `every` pictures and sent when it has changed. `last` is in JSON."""

    name: str
    read: Callable[[], Any]
    every: int = 1
    last: bytes = field(init=False, default=b"null")


@dataclass(eq=False, slots=True)
class Viewer:
    """A connected viewer, and the changes that it has not received."""

    behind: list[bytes] = field(default_factory=list)
    needs_all: bool = True
    news: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False

    def tell(self, change: bytes) -> None:
        if not self.needs_all:
            self.behind.append(change)
            self.needs_all = len(self.behind) > MOST_BEHIND
        self.news.set()


@dataclass(slots=True)
class Feed:
    """The feed, an `async with` context: it builds snapshots while there are viewers. `sample` updates due samples."""

    pods: PodRows
    samples: Samples
    sample: Callable[[], Awaitable[None]]
    panels: Sequence[Panel]
    clock: Clock
    interval: float = INTERVAL
    pictures: int = field(init=False, default=0)
    """Number of snapshots that were built."""
    is_building: bool = field(init=False, default=False)
    _is_built: bool = field(init=False, default=False)
    """Set when a snapshot exists that is not older than the interval."""
    _point: dict[str, Any] | None = field(init=False, default=None)
    """The latest point sent to viewers."""
    _viewers: list[Viewer] = field(init=False, default_factory=list)
    _tasks: Tasks = field(init=False, default_factory=Tasks)

    async def __aenter__(self) -> Feed:
        return self

    async def __aexit__(self, *_: object) -> None:
        for viewer in self._viewers:
            viewer.over = True
            viewer.news.set()
        await self._tasks.stop()

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Yield events for one viewer, first the whole snapshot. Raise Saturated if there are too many viewers."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise Saturated(f"The dashboard has {MOST_VIEWERS} viewers already; close one of its pages.")
        viewer = Viewer()
        self._viewers.append(viewer)
        if not self.is_building:
            self.is_building = True
            self._tasks.start(self._build_while_seen(), "dashboard")
        elif self._is_built:
            viewer.news.set()
        try:
            for _ in range(LONGEST):
                await viewer.news.wait()
                if viewer.over:
                    return
                news = self._all() if viewer.needs_all else b"".join(viewer.behind)
                viewer.needs_all = False
                viewer.behind.clear()
                viewer.news.clear()
                yield news
        finally:
            self._viewers.remove(viewer)

    async def _build_while_seen(self) -> None:
        try:
            for number in itertools.count():
                if not self._viewers:
                    return
                try:
                    change = await self._build(number)
                except Exception:  # the next one may be better
                    log.exception("dashboard: failed to build a snapshot")
                else:
                    self._is_built = True
                    for viewer in self._viewers:
                        viewer.tell(change)
                await asyncio.sleep(self.interval)
        finally:
            self.is_building = self._is_built = False

    async def _build(self, number: int) -> bytes:
        """Return an event with all changes since the last snapshot."""
        parts = {}
        await self.sample()
        pods = await self.pods.changes()
        if pods:
            parts["pods"] = _object({name: row or b"null" for name, row in pods.items()})
        for panel in self.panels:
            if number % panel.every == 0 and await self._read(panel):
                parts[panel.name] = panel.last
        if (points := self.samples.points) and points[-1] is not self._point:
            self._point = points[-1]
            parts["point"] = orjson.dumps(self._point)
        self.pictures += 1
        return self._event(b"change", parts)

    async def _read(self, panel: Panel) -> bool:
        """Read a panel. Return whether it changed. A panel that fails is empty."""
        try:
            read = panel.read()
            value = orjson.dumps(await read if isawaitable(read) else read)
        except Exception:
            log.exception("dashboard: failed to read %s", panel.name)
            value = b"null"
        changed, panel.last = value != panel.last, value
        return changed

    def _all(self) -> bytes:
        parts = {"fields": orjson.dumps(FIELDS), "pods": _object(self.pods.rows)}
        parts |= {panel.name: panel.last for panel in self.panels}
        parts["points"] = orjson.dumps(list(self.samples.points))
        return self._event(b"all", parts)

    def _event(self, name: bytes, parts: dict[str, bytes]) -> bytes:
        body = _object({"at": orjson.dumps(round(self.clock.wall(), 1)), **parts})
        return b"event: %s\ndata: %s\n\n" % (name, body)


def _object(parts: dict[str, bytes]) -> bytes:
    return b"{%s}" % b",".join(b"%s:%s" % (orjson.dumps(name), value) for name, value in parts.items())
