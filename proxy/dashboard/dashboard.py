"""The dashboard of a process with an admin port: the sources of its panels."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

from proxy import __version__
from proxy.core.endpoint import Endpoint
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
from proxy.dashboard.routes import DashboardRoutes
from proxy.dashboard.samples import Sampling, Series
from proxy.fleet.store import Fleet
from proxy.flowcontrol.controller import FlowControl
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from proxy.prefix.index import PrefixIndex
from proxy.scheduling.build import Scheduling
from proxy.telemetry.metrics import Catalogue

if TYPE_CHECKING:
    from proxy.autoscale.scaled_pool import ScaledPool

HEAT_EVERY = 5
"""Number of snapshots between two reads of the heat map."""

Read = Callable[[], Awaitable[Series]]


def of_process(catalogue: Catalogue) -> Read:
    async def read() -> Series:
        return Series(catalogue.families)

    return read


class Dashboard:
    """`routes` are for the admin port; they serve from `start` on. A supervisor of several workers has no queues and no
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
        self._heat = Heat(self._indexes, clock)
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
        self.routes = DashboardRoutes(self._feed)

    async def start(self, stack: AsyncExitStack, samples_always: bool = True) -> None:
        """Start after the admin port is open, so that viewers are disconnected before it closes."""
        await stack.enter_async_context(self._feed)
        tasks = await stack.enter_async_context(Tasks())
        if samples_always:
            tasks.keep(self._sampling.run, "samples-for-the-dashboard")

    def _indexes(self) -> Sequence[PrefixIndex]:
        schedulings = self._schedulings().values()
        return [
            producer.index for scheduling in schedulings for producer in scheduling.plugins(ApproxPrefixCacheProducer)
        ]

    def _paces(self) -> Paces:
        by_pool = {
            name: scheduling.plugins(PredictedLatencyProducer) for name, scheduling in self._schedulings().items()
        }

        def pace(endpoint: Endpoint) -> tuple[float, float] | None:
            known = (one.pace(endpoint) for one in by_pool.get(endpoint.pool, ()))
            return next((one for one in known if one is not None), None)

        return pace
