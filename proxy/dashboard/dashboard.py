"""The dashboard of a process with an admin port: the sources of its panels, and its routes."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AsyncExitStack, aclosing, suppress
from dataclasses import dataclass
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from aiohttp import web

from proxy import __version__
from proxy.core.endpoint import Endpoint
from proxy.core.errors import NotFound
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.dashboard.feed import (
    INTERVAL,
    Counts,
    Feed,
    Paces,
    Panel,
    PodRows,
    SummedCounts,
    queues,
    scaling,
    shadows,
)
from proxy.dashboard.heat import Heat
from proxy.dashboard.samples import Sampling, Series
from proxy.fleet.store import Fleet
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.prefix.index import PrefixIndex
from proxy.scheduling.build import Scheduling
from proxy.telemetry.metrics import Catalogue

if TYPE_CHECKING:
    from proxy.autoscale.scaled_pool import ScaledPool
    from proxy.flowcontrol.controller import FlowControl

HEAT_EVERY = 5
"""Number of snapshots between two reads of the heat map."""

Read = Callable[[], Awaitable[Series]]


def of_process(catalogue: Catalogue) -> Read:
    async def read() -> Series:
        return Series(catalogue.families)

    return read


PAGE = "page.html"

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    content_type: str
    tag: str


def load() -> dict[str, Asset]:
    found = {}
    for file in files("proxy.dashboard").joinpath("page").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            found[file.name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class Dashboard:
    """Routes of the admin port, which serve from `start` on. A supervisor of several workers has no queues and no
    common prefixes: only each worker knows them."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Clock,
        counts: Counts | None,
        breaker: Callable[[Endpoint], str],
        series: Read,
        scaled: Callable[[], Mapping[str, ScaledPool]],
        about: Callable[[], Mapping[str, Any]],
        schedulings: Callable[[], Mapping[str, Scheduling]] = dict,
        flow_controls: Callable[[], Mapping[str, FlowControl]] | None = None,
        interval: float = INTERVAL,
    ) -> None:
        """`counts` returns the attempts of a pod; if it is None, they are read from `series`. `about` describes the
        process itself, `interval` is the time between snapshots, in seconds."""
        self._sampling = sampling = Sampling(series, clock, lambda: fleet.endpoints)
        self._heat = Heat(lambda: _indexes(schedulings().values()), clock)
        self._schedulings = schedulings
        summed = SummedCounts(lambda: sampling.series)
        pods = PodRows(fleet, clock, breaker, counts or summed.of, self._paces)
        panels = (
            Panel(
                "about",
                lambda: {"version": __version__, "panics": fleet.panics, "pools": list(fleet.pools), **about()},
            ),
            Panel("queues", lambda: None if flow_controls is None else queues(flow_controls(), clock.now())),
            Panel("scaling", lambda: scaling(scaled())),
            Panel("shadows", lambda: [] if sampling.series is None else shadows(sampling.series)),
            Panel("heat", self._heat.read, HEAT_EVERY),
        )
        self._feed = Feed(pods, sampling.samples, sampling.update, panels, clock, interval)
        self._assets: dict[str, Asset] = {}

    async def start(self, stack: AsyncExitStack, samples_always: bool = True) -> None:
        """Start after the admin port is open, so that viewers are disconnected before it closes."""
        await stack.enter_async_context(self._feed)
        tasks = await stack.enter_async_context(Tasks())
        if samples_always:
            tasks.keep(self._sampling.run, "samples-for-the-dashboard")

    def add_to(self, router: web.UrlDispatcher) -> None:
        self._assets = load()
        router.add_get("/dashboard", self.page)
        router.add_get("/dashboard/assets/{name}", self.asset)
        router.add_get("/dashboard/events", self.events, allow_head=False)

    async def page(self, request: web.Request) -> web.Response:
        return _asset_response(self._assets[PAGE], request)

    async def asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._assets:
            raise NotFound(f"The dashboard has no {name}.")
        return _asset_response(self._assets[name], request)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: `all` once, then a `change` per second."""
        response = web.StreamResponse(headers={**HEADERS, "cache-control": "no-store"})
        response.content_type = "text/event-stream"
        with suppress(ConnectionResetError):
            async with aclosing(self._feed.events()) as events:
                async for event in events:
                    if not response.prepared:
                        await response.prepare(request)
                    await response.write(event)
        return response

    def _paces(self) -> Paces:
        by_pool = {
            name: scheduling.plugins(PredictedLatencyProducer) for name, scheduling in self._schedulings().items()
        }

        def pace(endpoint: Endpoint) -> tuple[float, float] | None:
            known = (one.pace(endpoint) for one in by_pool.get(endpoint.pool, ()))
            return next((one for one in known if one is not None), None)

        return pace


def _indexes(schedulings: Iterable[Scheduling]) -> list[PrefixIndex]:
    return [producer.index for one in schedulings for producer in one.plugins(ApproxPrefixCacheProducer)]


def _asset_response(asset: Asset, request: web.Request) -> web.Response:
    headers = {**HEADERS, "etag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=asset.body, content_type=asset.content_type, charset="utf-8", headers=headers)
