"""Hosts of a deployment divide the scrapes of their pods."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import orjson
import pytest

from proxy.cluster.messages import InvalidMessage, Packet, PacketKind, RecordKind, record
from proxy.cluster.replica import Replica, new_id
from proxy.cluster.sharing import SharedScrapes
from proxy.cluster.transport import Transport
from proxy.core.endpoint import DEFAULT_POOL, EndpointState, Freshness, PodTls
from proxy.core.errors import ConnectRefused, UpstreamFailed
from proxy.core.params import Duration
from proxy.core.ports import SystemClock
from proxy.fleet.refresh import STALE_AFTER
from proxy.fleet.runner import FleetRunner
from proxy.fleet.scrape import Fetcher
from proxy.fleet.settings import PodSettings, PodSources, RefreshSettings
from proxy.fleet.store import Fleet
from proxy.http.settings import PodTlsContexts
from proxy.polling import Polling
from proxy.telemetry import metrics
from tests.helpers.fleet.pods import exposition, models
from tests.helpers.waiting import until

INTERVAL = 0.25
BOUND = (STALE_AFTER + 1) * 1.1 * INTERVAL
"""Seconds within which each process has new metrics of each pod: a pause has a jitter of 10 %."""


class Pod:
    def __init__(self, name: str) -> None:
        self.name = name
        self.url = f"http://{name}"
        self.bodies = {"/metrics": exposition(), "/v1/models": json.dumps(models("m")), "/health": ""}
        self.refuses = False


class Host(Transport, Fetcher):
    """A process of the deployment, the connections between it and pods, and its connection to the other processes."""

    def __init__(self, others: list[Host], pods: Sequence[Pod], config: str = "a") -> None:
        self.others = others
        self.pods = {pod.url: pod for pod in pods}
        self.is_connected = True
        self.blocked: set[str] = set()
        """Pods whose responses do not arrive here."""
        self.scrapes: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.packets: list[Packet] = []
        self.restarts: list[str] = []
        clock = SystemClock()
        self.clock = clock
        self.replica = Replica(
            new_id(),
            clock,
            endpoints=tuple,
            apply=lambda *_: None,
            receive=lambda *_: None,
            catalogue=metrics.Catalogue("test"),
        )
        self.replica.use(self)
        self.replica.divide(2, 0, True)
        self.fleet = Fleet(clock, on_restarted=lambda endpoint: self.restarts.append(endpoint.name))
        pod_tls = PodTlsContexts(PodTls(), lambda: (), {})
        self.polling = Polling(self.fleet, pod_tls, clock, random.Random(1), lambda *_: None)
        self.runner = FleetRunner(
            self.fleet,
            PodSources(
                static=tuple(PodSettings(url=pod.url, name=pod.name) for pod in pods),
                refresh=RefreshSettings(interval=Duration(INTERVAL), max_core=1.0),
            ),
            self,
            clock,
            random.Random(1),
            scraped=lambda *of: self.polling.scraped(*of),
        )
        self.polling.runners = {DEFAULT_POOL: self.runner}
        self.shared = SharedScrapes(self.replica, self.fleet, self.polling, clock, lambda: config)
        self.replica.state.put(scrapes=[self.shared])

    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        base, path = url[: url.index("/", 8)], url[url.index("/", 8) :]
        pod = self.pods[base]
        {"/metrics": self.scrapes}.get(path, self.reads)[pod.name] += 1
        if pod.refuses:
            raise ConnectRefused("refused")
        if pod.name in self.blocked:
            raise UpstreamFailed("no response")
        return 200, pod.bodies[path].encode()

    def publish(self, packet: Packet) -> None:
        self.packets.append(packet)
        for other in self.others:
            if other is not self and other.is_connected and self.is_connected:
                other.replica.received(packet)

    async def end(self) -> None:
        return

    def age(self, name: str) -> float:
        endpoint = self.fleet.get(name)
        assert endpoint is not None
        return self.clock.now() - endpoint.metrics.scraped_at

    def running(self, name: str) -> int:
        endpoint = self.fleet.get(name)
        assert endpoint is not None
        return endpoint.metrics.running

    def state(self, name: str) -> EndpointState:
        endpoint = self.fleet.get(name)
        assert endpoint is not None
        return endpoint.state


class Deployment:
    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self.hosts: list[Host] = []
        self._exits: dict[Host, AsyncExitStack] = {}

    async def join(self, pods: Sequence[Pod], config: str = "a") -> Host:
        host = Host(self.hosts, pods, config)
        self.hosts.append(host)
        self._exits[host] = await self._stack.enter_async_context(AsyncExitStack())
        await self._exits[host].enter_async_context(host.runner)
        await until(lambda: all(endpoint.state is EndpointState.READY for endpoint in host.fleet.endpoints))
        return host

    async def vanish(self, host: Host) -> None:
        self.hosts.remove(host)
        await self._exits[host].aclose()

    async def scrapes(self, rounds: int = 20, after: int = 5) -> dict[str, dict[Host, int]]:
        """Return how often each host scrapes each pod in so many intervals, after it has settled."""
        await self.sleep(after)
        before = {host: Counter(host.scrapes) for host in self.hosts}
        await self.sleep(rounds)
        names = {name for host in self.hosts for name in host.scrapes}
        counted = {name: {host: host.scrapes[name] - before[host][name] for host in self.hosts} for name in names}
        return {name: {host: count for host, count in by.items() if count} for name, by in counted.items()}

    async def sleep(self, intervals: float) -> None:
        until_then = self.hosts[0].clock.now() + intervals * INTERVAL
        await until(lambda: self.hosts[0].clock.now() >= until_then)


@asynccontextmanager
async def deployment() -> AsyncIterator[Deployment]:
    async with AsyncExitStack() as stack:
        yield Deployment(stack)


def _pods(number: int) -> list[Pod]:
    return [Pod(f"pod-{index}") for index in range(number)]


async def test_each_pod_is_scraped_by_one_host_and_each_host_scrapes_some() -> None:
    pods = _pods(24)
    async with deployment() as it:
        for _ in range(3):
            await it.join(pods)
        scrapes = await it.scrapes(20)
        assert all(len(by) == 1 for by in scrapes.values())
        assert sum(sum(by.values()) for by in scrapes.values()) <= len(pods) * 20 * 1.15
        assert {host for by in scrapes.values() for host in by} == set(it.hosts)
        for host in it.hosts:
            assert all(host.age(pod.name) < BOUND for pod in pods)
            assert host.runner.budget.pods == sum(host in by for by in scrapes.values())


async def test_all_hosts_have_the_metrics_of_the_last_scrape() -> None:
    pods = _pods(4)
    async with deployment() as it:
        one, two = await it.join(pods), await it.join(pods)
        await it.scrapes(1)
        for index, pod in enumerate(pods):
            pod.bodies["/metrics"] = exposition(running=index + 1, waiting=2)
        for pod in pods:
            await until(lambda pod=pod: one.running(pod.name) == two.running(pod.name) > 0)  # type: ignore[misc]
        for host in (one, two):
            assert [host.running(pod.name) for pod in pods] == [1, 2, 3, 4]


@pytest.mark.parametrize("what", ["dies", "loses the store"])
async def test_the_others_scrape_what_a_host_scraped_that_is_gone(what: str) -> None:
    pods = _pods(8)
    async with deployment() as it:
        one, two = await it.join(pods), await it.join(pods)
        await it.scrapes(1)
        if what == "dies":
            await it.vanish(one)
        else:
            one.is_connected = False
        oldest = 0.0

        def all_scraped() -> bool:
            nonlocal oldest
            oldest = max(oldest, *(host.age(pod.name) for host in it.hosts for pod in pods))
            return two.runner.budget.pods == len(pods)

        await until(all_scraped)
        assert oldest < BOUND
        scrapes = await it.scrapes(20)
        assert all(set(by) == set(it.hosts) for by in scrapes.values())
        if what == "loses the store":
            one.is_connected = True
            assert all(len(by) == 1 for by in (await it.scrapes(20)).values())


async def test_a_pod_that_the_first_host_cannot_reach_is_scraped_by_the_second_and_stale_at_the_first() -> None:
    pods = _pods(1)
    async with deployment() as it:
        hosts = [await it.join(pods) for _ in range(3)]
        ((first, _),) = (await it.scrapes(20))["pod-0"].items()
        first.blocked.add("pod-0")
        endpoint = first.fleet.get("pod-0")
        assert endpoint is not None
        await until(lambda: endpoint.metrics.freshness is Freshness.STALE)
        pods[0].bodies["/metrics"] = exposition(running=7)
        scrapes = (await it.scrapes(20))["pod-0"]
        assert len(scrapes) == 2
        assert first in scrapes
        assert endpoint.metrics.freshness is Freshness.STALE
        assert [host.running("pod-0") for host in hosts if host is not first] == [7, 7]
        first.blocked.clear()
        assert set((await it.scrapes(20))["pod-0"]) == {first}
        assert first.running("pod-0") == 7


async def test_a_dead_pod_is_ejected_everywhere_within_the_interval() -> None:
    pods = _pods(1)
    async with deployment() as it:
        one, two = await it.join(pods), await it.join(pods)
        await it.scrapes(1)
        pods[0].refuses = True
        await until(lambda: EndpointState.EJECTED in (one.state("pod-0"), two.state("pod-0")))
        noticed = one.clock.now()
        await until(lambda: one.state("pod-0") is two.state("pod-0") is EndpointState.EJECTED)
        assert one.clock.now() - noticed < INTERVAL / 2
        pods[0].refuses = False
        pods[0].bodies["/metrics"] = exposition(started=2000.0)
        await until(lambda: one.state("pod-0") is two.state("pod-0") is EndpointState.READY)
        assert one.restarts == two.restarts == ["pod-0"]


async def test_a_restart_between_two_scrapes_is_noticed_everywhere() -> None:
    pods = _pods(2)
    async with deployment() as it:
        one, two = await it.join(pods), await it.join(pods)
        await it.scrapes(1)
        for pod in pods:
            pod.bodies["/metrics"] = exposition(started=2000.0)
        await until(lambda: sorted(one.restarts) == sorted(two.restarts) == ["pod-0", "pod-1"])
        assert all(len(by) == 1 for by in (await it.scrapes(20)).values())
        assert len(one.restarts) == len(two.restarts) == 2


async def test_an_old_scrape_that_arrives_late_is_no_restart() -> None:
    pods = _pods(1)
    pods[0].bodies["/metrics"] = exposition(queries=100.0)
    async with deployment() as it:
        hosts = [await it.join(pods), await it.join(pods)]
        ((first, _),) = (await it.scrapes(20))["pod-0"].items()
        (second,) = set(hosts) - {first}
        late = _last_scrape(first)
        pods[0].bodies["/metrics"] = exposition(queries=200.0)
        await until(lambda: all(_queries(host) == 200 for host in hosts))
        before = second.scrapes["pod-0"]
        second.shared.receive(1, RecordKind.SCRAPE, late)
        await until(lambda: second.scrapes["pod-0"] > before)
        await it.scrapes(5)
        assert not second.restarts
        assert _queries(second) == 200


async def test_a_new_model_is_read_by_all_hosts_and_read_regularly_by_one() -> None:
    pods = _pods(1)
    async with deployment() as it:
        hosts = [await it.join(pods), await it.join(pods)]
        ((first, _),) = (await it.scrapes(20))["pod-0"].items()
        (second,) = set(hosts) - {first}
        before = Counter(second.reads)
        regular = first.reads["pod-0"]
        await until(lambda: first.reads["pod-0"] >= regular + 3)
        assert second.reads == before
        pods[0].bodies["/v1/models"] = json.dumps(models("m", "adapter"))
        await until(lambda: all(list(host.fleet.endpoints_for("adapter")) for host in hosts))
        assert second.reads["pod-0"] == before["pod-0"] + 1


async def test_models_that_a_request_needs_are_read_by_the_host_that_received_it() -> None:
    pods = _pods(4)
    async with deployment() as it:
        hosts = [await it.join(pods), await it.join(pods)]
        await it.scrapes(1)
        for pod in pods:
            pod.bodies["/v1/models"] = json.dumps(models("m", "new"))
        for host in hosts:
            await host.polling.next_round()
            assert len(host.fleet.endpoints_for("new")) == 4


async def test_a_pod_that_refuses_health_checks_is_scraped_at_once() -> None:
    pods = _pods(1)
    async with deployment() as it:
        hosts = [await it.join(pods), await it.join(pods)]
        ((first, _),) = (await it.scrapes(20))["pod-0"].items()
        (second,) = set(hosts) - {first}
        endpoint = second.fleet.endpoints[0]
        before = second.scrapes["pod-0"]
        second.polling._refused(endpoint)
        await until(lambda: second.scrapes["pod-0"] == before + 1)
        assert set((await it.scrapes(20))["pod-0"]) == {first}


async def test_a_pod_that_not_all_hosts_know_is_scraped_by_one_that_does() -> None:
    pods = _pods(8)
    async with deployment() as it:
        one, two = await it.join(pods[:6]), await it.join(pods[2:])
        scrapes = await it.scrapes(20)
        assert all(set(scrapes[pod.name]) == {one} for pod in pods[:2])
        assert all(set(scrapes[pod.name]) == {two} for pod in pods[6:])
        assert all(len(scrapes[pod.name]) == 1 for pod in pods[2:6])


async def test_a_host_with_another_configuration_scrapes_all_pods_itself() -> None:
    pods = _pods(4)
    async with deployment() as it:
        one, two = await it.join(pods), await it.join(pods, config="b")
        scrapes = await it.scrapes(20)
        assert all(set(by) == {one, two} for by in scrapes.values())


async def test_a_host_that_is_alone_publishes_no_scrapes() -> None:
    async with deployment() as it:
        one = await it.join(_pods(1))
        one.replica.divide(1, 0, True)
        one.packets.clear()
        await it.scrapes(5)
        assert not one.packets


def _last_scrape(host: Host) -> bytes:
    (found,) = [
        each.body for each in host.packets[-1:] if each.kind is PacketKind.NEWS
    ]  # the body of the packet is one record
    return found[len(record(RecordKind.SCRAPE, b"")) :]


def _queries(host: Host) -> float:
    return host.fleet.endpoints[0].metrics.prefix_queries


_UNREADABLE: Sequence[Callable[[list[object]], list[object]]] = [
    lambda scrape: scrape[:-1],
    lambda scrape: [5, *scrape[1:]],
    lambda scrape: [*scrape[:-1], [{}]],
    lambda scrape: [*scrape[:-1], [5]],
    lambda scrape: [*scrape[:-1], [{"age": 0.0, "in_flight": 0, "waiting": "many"}]],
    lambda scrape: [*scrape[:-1], [{"age": 0.0, "in_flight": 0, "attributes": 5}]],
    lambda scrape: [*scrape[:-1], [{"age": "old", "in_flight": 0}]],
]


@pytest.mark.parametrize("garble", _UNREADABLE)
async def test_a_garbled_scrape_changes_nothing(garble: Callable[[list[object]], list[object]]) -> None:
    pods = _pods(1)
    async with deployment() as it:
        await it.join(pods), await it.join(pods)
        ((first, _),) = (await it.scrapes(20))["pod-0"].items()
        (second,) = {*it.hosts} - {first}
        body = orjson.dumps(garble(orjson.loads(_last_scrape(first))))
        before = second.fleet.endpoints[0].metrics
        with pytest.raises((InvalidMessage, ValueError, TypeError, KeyError, AttributeError)):
            second.shared.receive(1, RecordKind.SCRAPE, body)
        assert second.fleet.endpoints[0].metrics is before
