"""The refresh loop of one pod, on real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from proxy.core.endpoint import Endpoint, EndpointState, Freshness
from proxy.core.ports import SystemClock
from proxy.fleet.dialects import Dialects
from proxy.fleet.refresh import Refresher, ScrapeBudget
from proxy.fleet.settings import DcgmSettings, PodSettings, RefreshSettings
from proxy.fleet.store import Fleet
from proxy.http.upstream.pool import PooledFetcher
from tests.helpers.fleet.pods import FakePod, exposition, models
from tests.helpers.waiting import PATIENCE, until


async def rounds(budget: ScrapeBudget, count: int) -> None:
    seen = budget.rounds
    await until(lambda: budget.rounds >= seen + count)


class Refreshed:
    """One endpoint of a fleet, with its refresh loop running."""

    def __init__(self, fleet: Fleet, endpoint: Endpoint, refresher: Refresher, budget: ScrapeBudget) -> None:
        self.fleet = fleet
        self.endpoint = endpoint
        self.refresher = refresher
        self.budget = budget
        self.restarts = 0
        self.misses = 0

    def is_in(self, state: EndpointState) -> Callable[[], bool]:
        return lambda: self.endpoint.state is state


@asynccontextmanager
async def refreshing(
    settings: PodSettings, timeout: float = 0.1, refresh: RefreshSettings | None = None
) -> AsyncIterator[Refreshed]:
    clock = SystemClock()

    def restarted(endpoint: Endpoint) -> None:
        it.restarts += 1

    def missed(endpoint: Endpoint) -> None:
        it.misses += 1

    fleet, budget = Fleet(clock, on_restarted=restarted, on_missed=missed), ScrapeBudget(0.01, 1.0)
    endpoint = fleet.add(settings)
    async with PooledFetcher(timeout, clock) as fetcher:
        refresher = Refresher(
            endpoint, fleet, fetcher, refresh or RefreshSettings(), Dialects(), budget, clock, random.Random(1)
        )
        it = Refreshed(fleet, endpoint, refresher, budget)
        task = asyncio.get_running_loop().create_task(refresher.run())
        try:
            yield it
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_a_pod_becomes_ready_with_its_metrics_and_its_models() -> None:
    async with FakePod() as pod:
        pod.bodies["/metrics"] = exposition(running=3, waiting=2)
        async with refreshing(PodSettings(url=pod.url)) as it:
            await until(it.is_in(EndpointState.READY))
            assert it.endpoint.models == frozenset({"m"})
            metrics = it.endpoint.metrics
            assert (metrics.running, metrics.waiting, metrics.freshness) == (3, 2, Freshness.FRESH)
            pod.bodies["/metrics"] = exposition(running=4)
            await until(lambda: it.endpoint.metrics.running == 4)
            assert it.restarts == 0


async def test_requests_dispatched_during_a_scrape_count_on_top_of_it() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url), timeout=PATIENCE) as it:
        await until(it.is_in(EndpointState.READY))

        def dispatch_once(path: str) -> None:
            it.endpoint.charge(1, 0)
            pod.bodies["/metrics"] = exposition(running=7)
            pod.hang.add("/metrics")

        pod.while_answering = dispatch_once
        await until(lambda: it.endpoint.metrics.running == 7)
        assert it.endpoint.view.running == 8


async def test_the_reason_of_a_failed_scrape_is_kept_until_one_succeeds() -> None:
    async with FakePod() as pod:
        exposed = pod.bodies.pop("/metrics")
        async with refreshing(PodSettings(url=pod.url)) as it:
            await until(lambda: it.fleet.scrape_failure(it.endpoint) == "status 404")
            pod.hang.add("/metrics")
            await until(lambda: "no response" in (it.fleet.scrape_failure(it.endpoint) or ""))
            pod.hang.clear()
            pod.bodies["/metrics"] = exposed
            await until(lambda: it.fleet.scrape_failure(it.endpoint) is None)


async def test_the_next_scrape_includes_earlier_dispatches() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url)) as it:
        await until(it.is_in(EndpointState.READY))
        it.endpoint.charge(1, 0)
        await rounds(it.budget, 3)
        assert it.endpoint.view.running == 0


async def test_a_pod_without_metrics_is_ready_and_stale() -> None:
    async with FakePod() as pod:
        del pod.bodies["/metrics"]
        async with refreshing(PodSettings(url=pod.url)) as it:
            await until(it.is_in(EndpointState.READY))
            await rounds(it.budget, 4)
            assert it.endpoint.metrics.freshness is Freshness.STALE
            assert it.misses >= 4


async def test_metrics_may_have_their_own_port_and_path() -> None:
    async with FakePod() as pod, FakePod() as exporter:
        exporter.bodies["/stats"] = exposition(running=9)
        refresh = RefreshSettings(path="/stats", port=int(exporter.url.rpartition(":")[2]), scheme="http")
        async with refreshing(PodSettings(url=pod.url), refresh=refresh) as it:
            await until(lambda: it.endpoint.metrics.running == 9)


async def test_a_pod_with_only_health_is_ready_and_serves_any_model() -> None:
    async with FakePod() as pod:
        del pod.bodies["/metrics"], pod.bodies["/v1/models"]
        async with refreshing(PodSettings(url=pod.url)) as it:
            await until(it.is_in(EndpointState.READY))
            assert it.endpoint.models is None
            assert list(it.fleet.endpoints_for("anything")) == [it.endpoint]


async def test_a_pod_whose_metrics_hang_is_ready() -> None:
    async with FakePod() as pod:
        pod.hang.add("/metrics")
        async with refreshing(PodSettings(url=pod.url), timeout=0.03) as it:
            await until(it.is_in(EndpointState.READY))
            assert it.endpoint.metrics.freshness is Freshness.STALE


async def test_a_pod_with_only_errors_stays_starting() -> None:
    async with FakePod() as pod:
        pod.bodies.clear()
        async with refreshing(PodSettings(url=pod.url)) as it:
            await rounds(it.budget, 5)
            assert it.endpoint.state is EndpointState.STARTING


async def test_a_pod_that_never_responds_stays_starting() -> None:
    pod = FakePod()
    await pod.start()
    await pod.stop()
    async with refreshing(PodSettings(url=pod.url)) as it:
        await rounds(it.budget, 5)
        assert it.endpoint.state is EndpointState.STARTING
        await pod.start()
        await until(it.is_in(EndpointState.READY))
        assert it.restarts == 0
        await pod.stop()


async def test_a_slow_pod_becomes_stale_and_stays_ready() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url), timeout=0.03) as it:
        pod.bodies["/metrics"] = exposition(running=3)
        await until(lambda: it.endpoint.metrics.running == 3)
        pod.hang.add("/metrics")
        await rounds(it.budget, 1)
        assert it.endpoint.metrics.freshness is Freshness.FRESH
        await until(lambda: it.endpoint.metrics.freshness is Freshness.STALE)
        assert it.endpoint.metrics.running == 3
        assert it.endpoint.state is EndpointState.READY
        pod.hang.clear()
        await until(lambda: it.endpoint.metrics.freshness is Freshness.FRESH)


async def test_a_pod_with_malformed_metrics_becomes_stale() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url)) as it:
        await until(it.is_in(EndpointState.READY))
        pod.bodies["/metrics"] = "<html>hello</html>"
        await until(lambda: it.endpoint.metrics.freshness is Freshness.STALE)
        assert it.endpoint.state is EndpointState.READY


async def test_a_refusing_pod_is_ejected_and_counts_as_restarted_when_it_returns() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url)) as it:
        await until(it.is_in(EndpointState.READY))
        await pod.stop()
        await until(it.is_in(EndpointState.EJECTED))
        pod.bodies["/v1/models"] = json.dumps(models("other"))
        pod.bodies["/metrics"] = exposition(started=2000.0)
        await pod.start()
        await until(it.is_in(EndpointState.READY))
        assert it.endpoint.models == frozenset({"other"})
        await rounds(it.budget, 2)
        assert it.restarts == 1


async def test_a_pod_with_another_start_time_was_restarted() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url)) as it:
        await until(it.is_in(EndpointState.READY))
        pod.bodies["/metrics"] = exposition(started=2000.0)
        await until(lambda: it.restarts == 1)
        pod.bodies["/metrics"] = exposition(started=2000.5)
        await rounds(it.budget, 3)
        assert it.restarts == 1


async def test_a_pod_whose_counters_decreased_was_restarted() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url)) as it:
        pod.bodies["/metrics"] = exposition(queries=100.0)
        await until(lambda: it.endpoint.metrics.prefix_queries == 100)
        pod.bodies["/metrics"] = exposition(queries=5.0)
        await until(lambda: it.restarts == 1)


async def test_a_changed_port_takes_effect_on_the_next_scrape() -> None:
    async with FakePod() as old, FakePod() as new, refreshing(PodSettings(url=old.url, name="a")) as it:
        await until(it.is_in(EndpointState.READY))
        new.bodies["/metrics"] = exposition(running=9)
        it.fleet.add(PodSettings(url=new.url, name="a"))
        await until(lambda: it.endpoint.metrics.running == 9)


async def test_the_key_of_a_pod_is_sent_as_its_bearer_token() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url, api_key="secret")) as it:
        await until(it.is_in(EndpointState.READY))
        assert pod.authorization == "Bearer secret"


async def test_failed_reads_of_models_are_retried_and_change_nothing() -> None:
    async with FakePod() as pod:
        pod.status["/v1/models"] = 500
        async with refreshing(PodSettings(url=pod.url)) as it:
            await until(it.is_in(EndpointState.READY))
            assert it.endpoint.models is None
            pod.status.clear()
            await until(lambda: it.endpoint.models == frozenset({"m"}))


async def test_models_are_not_read_with_every_scrape() -> None:
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url)) as it:
        await rounds(it.budget, 10)
        assert pod.requested.count("/metrics") >= 10
        assert pod.requested.count("/v1/models") == 1
        assert "/health" not in pod.requested


async def test_an_endless_response_is_given_up() -> None:
    async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(b"x" * 65536)
                await writer.drain()
        except ConnectionError:
            writer.close()

    server = await asyncio.start_server(endless, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server, refreshing(PodSettings(url=f"http://127.0.0.1:{port}"), timeout=0.05) as it:
        await asyncio.wait_for(it.refresher.tried.wait(), PATIENCE)
        assert it.endpoint.state is EndpointState.STARTING


async def test_gpu_utilisation_of_an_exporter_is_an_attribute_and_its_absence_is_harmless() -> None:
    async with FakePod() as pod, FakePod() as exporter:
        exporter.bodies["/metrics"] = 'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 40\n'
        refresh = RefreshSettings(dcgm=DcgmSettings(port=exporter.port), attributes={})
        async with refreshing(PodSettings(url=pod.url), refresh=refresh) as it:
            await until(lambda: it.endpoint.metrics.attributes == {"GPUUtilization": 0.4})
            await exporter.stop()
            await until(lambda: it.endpoint.metrics.attributes == {})
            assert it.endpoint.state is EndpointState.READY
            assert it.endpoint.metrics.freshness is Freshness.FRESH
            await exporter.start()


async def test_stale_metrics_and_their_return_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy.fleet.refresh")
    async with FakePod() as pod, refreshing(PodSettings(url=pod.url, name="a")) as it:
        await until(lambda: it.endpoint.metrics.freshness is Freshness.FRESH)
        pod.status["/metrics"] = 500
        await until(lambda: it.endpoint.metrics.freshness is Freshness.STALE)
        pod.status.clear()
        await until(lambda: it.endpoint.metrics.freshness is Freshness.FRESH)
    assert [message for name, _, message in caplog.record_tuples if name == "proxy.fleet.refresh"] == [
        f"pod a: the metrics are stale: {pod.url}/metrics: status 500",
        "pod a: the metrics are fresh again",
    ]


async def test_a_pod_that_was_never_reached_has_no_stale_metrics(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "proxy.fleet.refresh")
    pod = FakePod()
    async with refreshing(PodSettings(url=pod.url, name="a")) as it:
        await until(lambda: bool(caplog.messages))
        async with pod:
            await until(lambda: it.endpoint.metrics.freshness is Freshness.FRESH)
    assert [message for name, _, message in caplog.record_tuples if name == "proxy.fleet.refresh"] == [
        f"pod a: not ready yet: {pod.url}/metrics: connection refused"
    ]
