"""Discovery and refresh together, on real sockets."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from proxy.core.endpoint import EndpointState
from proxy.core.params import Duration
from proxy.core.ports import SystemClock
from proxy.fleet.discovery import Source
from proxy.fleet.runner import FleetRunner
from proxy.fleet.settings import DnsSettings, PodSettings, PodSources, RefreshSettings
from proxy.fleet.store import Fleet
from proxy.http.upstream.pool import PooledFetcher
from tests.helpers.fleet.pods import FakePod
from tests.helpers.waiting import until

FAST = RefreshSettings(interval=Duration(0.01), timeout=Duration(0.1), max_core=1.0)


@asynccontextmanager
async def runner(fleet: Fleet, settings: PodSources) -> AsyncIterator[FleetRunner]:
    clock = SystemClock()
    async with (
        PooledFetcher(settings.refresh.timeout, clock) as fetcher,
        FleetRunner(fleet, settings, fetcher, clock, random.Random(1)) as running,
    ):
        yield running


async def test_after_the_first_contact_responding_pods_are_ready() -> None:
    fleet = Fleet(SystemClock())
    async with FakePod() as one, FakePod() as two:
        dead = FakePod()
        await dead.start()
        await dead.stop()
        pods = tuple(PodSettings(url=pod.url) for pod in (one, two, dead))
        async with runner(fleet, PodSources(static=pods, refresh=FAST)) as running:
            assert await running.first_contact(5)
            assert [endpoint.url for endpoint in fleet.ready] == [one.url, two.url]
            assert [endpoint.state for endpoint in fleet.endpoints][2] is EndpointState.STARTING


async def test_the_first_contact_times_out() -> None:
    fleet = Fleet(SystemClock())
    async with FakePod() as pod:
        pod.hang |= {"/metrics", "/v1/models", "/health"}
        slow = RefreshSettings(timeout=Duration(30.0))
        async with runner(fleet, PodSources(static=(PodSettings(url=pod.url),), refresh=slow)) as running:
            assert not await running.first_contact(0.05)


async def test_slow_pods_delay_no_others() -> None:
    fleet = Fleet(SystemClock())
    async with AsyncExitStack() as stack:
        hanging, quick = FakePod(), FakePod()
        hanging.hang |= {"/metrics", "/v1/models", "/health"}
        for pod in (hanging, quick):
            await stack.enter_async_context(pod)
        many = [PodSettings(url=f"{hanging.url}/{number}", name=f"slow-{number}") for number in range(150)]
        hanging.hang |= {f"/{number}/metrics" for number in range(150)}
        settings = PodSources(
            static=(*many, PodSettings(url=quick.url, name="quick")),
            refresh=RefreshSettings(interval=Duration(0.01), timeout=Duration(20.0), max_core=1.0),
        )
        await stack.enter_async_context(runner(fleet, settings))
        await until(lambda: [endpoint.name for endpoint in fleet.ready] == ["quick"])
        seen = len(quick.requested)
        await until(lambda: len(quick.requested) > seen + 3)


async def test_an_added_pod_is_scraped_and_a_removed_one_no_longer() -> None:
    fleet = Fleet(SystemClock())
    async with FakePod() as pod, runner(fleet, PodSources(refresh=FAST)):
        endpoint = fleet.add(PodSettings(url=pod.url, name="late"))
        await until(lambda: endpoint.state is EndpointState.READY)
        fleet.remove("late")
        await asyncio.sleep(0.02)
        seen = len(pod.requested)
        await asyncio.sleep(0.1)
        assert len(pod.requested) == seen


async def test_a_removed_pod_disappears_when_its_requests_have_ended() -> None:
    fleet = Fleet(SystemClock())
    async with (
        FakePod() as pod,
        runner(fleet, PodSources(static=(PodSettings(url=pod.url, name="a"),), refresh=FAST)),
    ):
        endpoint = fleet.endpoints[0]
        endpoint.charge(1, 0)
        fleet.remove("a")
        await asyncio.sleep(0.15)
        assert len(fleet.endpoints) == 1
        endpoint.charge(-1, 0)
        await until(lambda: len(fleet.endpoints) == 0)


async def test_pods_come_from_a_file_and_a_dns_name(tmp_path: Path) -> None:
    fleet = Fleet(SystemClock())
    async with FakePod() as one, FakePod() as two:
        path = tmp_path / "pods.yaml"
        path.write_text(f"- {{url: '{one.url}', name: filed}}\n")
        settings = PodSources(file=str(path), dns=DnsSettings("127.0.0.1", two.port), refresh=FAST)
        async with runner(fleet, settings) as running:
            assert await running.first_contact(5)
            assert {endpoint.name for endpoint in fleet.ready} == {"filed", f"127.0.0.1:{two.port}"}


async def test_nothing_is_scraped_after_the_end() -> None:
    async with FakePod() as pod:
        async with runner(
            Fleet(SystemClock()), PodSources(static=(PodSettings(url=pod.url),), refresh=FAST)
        ) as running:
            await running.first_contact(5)
        seen = len(pod.requested)
        await asyncio.sleep(0.05)
        assert len(pod.requested) == seen


async def test_configured_attributes_are_scraped() -> None:
    fleet = Fleet(SystemClock())
    async with FakePod() as pod:
        pod.bodies["/metrics"] += 'gpu_temp{gpu="0"} 55\n'
        refresh = RefreshSettings(max_core=1.0, attributes={"temp": "gpu_temp{gpu=0}"})
        async with runner(fleet, PodSources(static=(PodSettings(url=pod.url),), refresh=refresh)) as running:
            assert await running.first_contact(5)
            assert fleet.endpoints[0].metrics.attributes == {"temp": 55.0}


class Late(Source):
    """A source that finds no pod at its first query."""

    name = "late"
    interval = 3600.0

    def __init__(self, pod: PodSettings) -> None:
        self._found: list[list[PodSettings]] = [[pod], []]

    async def poll(self) -> list[PodSettings]:
        return self._found.pop()


async def test_without_pods_sources_are_queried_more_often() -> None:
    fleet = Fleet(SystemClock())
    async with FakePod() as pod, runner(fleet, PodSources(refresh=FAST)) as running:
        running._discover_by([Late(PodSettings(url=pod.url))])
        await until(lambda: bool(fleet.ready))
