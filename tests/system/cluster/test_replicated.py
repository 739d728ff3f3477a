"""Proxies of one deployment over a real Redis: processes without workers, and hosts with several."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from proxy.auth.limits import HostGrants
from proxy.cli.serve import app_of
from proxy.cluster.settings import ReplicaSettings
from proxy.cluster.sharing import Replicated
from proxy.cluster.supervisor import Supervisor
from proxy.core.errors import ConfigError
from proxy.core.params import Invalid
from proxy.lab.sim import SimConfig, SimFleet
from proxy.settings import Settings, from_mapping
from tests.helpers.cluster.host import CHAT, configured, held, question
from tests.helpers.cluster.store import Store, needs_redis, store
from tests.helpers.waiting import PATIENCE, until
from tests.system.cluster.test_supervisor import BY_PREFIX
from tests.system.cluster.test_worker_flow_control import most_at_once

LONG = "An old treatise on the harbour and its winds, in many words. " * 160


class Site:
    """Pods, a store, and proxies before them."""

    def __init__(self, stack: AsyncExitStack, sim: SimFleet, redis: Store, http: aiohttp.ClientSession) -> None:
        self._stack = stack
        self.sim = sim
        self.redis = redis
        self.http = http

    def settings(self, **sections: Any) -> Settings:
        replicas = {"store": self.redis.url, "lease": "3s", **sections.pop("replicas", {})}
        return configured(self.sim, replicas=replicas, **sections)

    async def proxy(self, **sections: Any) -> Replicated:
        app = app_of(self.settings(**sections))
        await self._stack.enter_async_context(app)
        assert isinstance(app, Replicated)
        return app

    async def host(self, workers: int, **sections: Any) -> Supervisor:
        return await self._stack.enter_async_context(Supervisor(self.settings(**sections), workers))

    async def chat(self, proxy: Replicated | Supervisor, text: str, tokens: int = 2, key: str = "") -> tuple[int, str]:
        """The status, and the pod."""
        headers = {"authorization": f"Bearer {key}"} if key else {}
        url = f"http://127.0.0.1:{proxy.port}{CHAT}"
        async with self.http.post(url, json=question(text, tokens), headers=headers) as response:
            await response.read()
            return response.status, response.headers.get("x-kvlane-endpoint", "")

    async def admin(self, proxy: Replicated | Supervisor, method: str, path: str) -> Any:
        url = f"http://127.0.0.1:{proxy.admin_port}{path}"
        async with self.http.request(method, url) as response:
            return await response.json()

    async def others(self, proxy: Replicated | Supervisor) -> int:
        found = await self.admin(proxy, "GET", "/readyz")
        states = [
            other for other in found["replicas"]["others"] if other["name"]
        ]  # who they are comes after that they are
        return len(states) if found["replicas"]["store"] == "up" else 0


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with _site(tmp_path, 3) as found:
        yield found


@asynccontextmanager
async def _site(folder: Path, pods: int) -> AsyncIterator[Site]:
    connector = aiohttp.TCPConnector(force_close=True)
    async with (
        store(folder) as redis,
        SimFleet(pods, SimConfig(time_scale=20)) as sim,
        aiohttp.ClientSession(connector=connector) as http,
        AsyncExitStack() as stack,
    ):
        yield Site(stack, sim, redis, http)


async def met(site: Site, *proxies: Replicated | Supervisor) -> None:
    async with asyncio.timeout(PATIENCE):
        for proxy in proxies:
            while await site.others(proxy) < len(proxies) - 1:
                await asyncio.sleep(0.02)


def in_flight(proxy: Replicated | Supervisor) -> int:
    return sum(pod.load.requests for pod in proxy.fleet.endpoints)


async def all_known(proxy: Replicated, prompts: int) -> None:
    """It remembers so many, and its scrapes of the pods are younger than their responses."""
    indexes = proxy._replica.state.indexes
    await until(lambda: sum(len(index._journal.latest(1 << 30)) for index in indexes) == prompts)
    known_at = proxy._clock.now()
    await until(lambda: all(pod.metrics.scraped_at > known_at for pod in proxy.fleet.endpoints))


@needs_redis
async def test_a_proxy_finds_the_pod_to_which_another_proxy_sent_the_prompt(site: Site) -> None:
    one, two = await site.proxy(scheduling=BY_PREFIX), await site.proxy(scheduling=BY_PREFIX)
    await met(site, one, two)
    places = {}
    for number in range(6):
        places[number] = await site.chat(one, f"{number} {LONG}")
    await all_known(two, len(places))
    for number, place in places.items():
        assert await site.chat(two, f"{number} {LONG}") == place
    assert len(set(places.values())) > 1


@needs_redis
async def test_requests_in_flight_at_one_proxy_count_at_the_other_until_they_end(site: Site) -> None:
    one, two = await site.proxy(), await site.proxy()
    await met(site, one, two)
    async with held(site.sim.pods):
        requests = [asyncio.ensure_future(site.chat(one, f"{number}", tokens=400)) for number in range(4)]
        await until(lambda: in_flight(one) == in_flight(two) == 4)
    assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 4
    await until(lambda: in_flight(one) == in_flight(two) == 0)


@needs_redis
@pytest.mark.smoke
async def test_a_host_with_workers_and_a_single_proxy_share_state(site: Site) -> None:
    host, one = await site.host(2, scheduling=BY_PREFIX), await site.proxy(scheduling=BY_PREFIX)
    await met(site, host, one)
    places = {number: await site.chat(host, f"{number} {LONG}") for number in range(6)}
    await all_known(one, len(places))
    for number, place in places.items():
        assert await site.chat(one, f"{number} {LONG}") == place
    async with held(site.sim.pods):
        requests = [asyncio.ensure_future(site.chat(host, f"{number}", tokens=400)) for number in range(4)]
        await until(lambda: in_flight(host) == in_flight(one) == 4)
    await asyncio.gather(*requests)
    await until(lambda: in_flight(host) == in_flight(one) == 0)


@needs_redis
async def test_a_drain_applies_on_all_proxies_until_any_of_them_undrains(site: Site) -> None:
    host, one = await site.host(1), await site.proxy()
    await met(site, host, one)
    await site.admin(one, "POST", "/admin/pods/pod-1/drain")
    await until(lambda: [pod.name for pod in host.fleet.draining] == ["pod-1"])
    late = await site.proxy()
    await until(lambda: [pod.name for pod in late.fleet.draining] == ["pod-1"])
    await site.admin(host, "POST", "/admin/pods/pod-1/undrain")
    await until(lambda: not one.fleet.draining and not late.fleet.draining)


KEYS = {
    "apiKeys": [{"key": "secret", "name": "app", "limits": "few"}],
    "limits": {"few": {"requestsPerMinute": 6}},
}


def counts(proxy: Replicated, requests: float) -> bool:
    """It has received more than so many of the key."""
    assert proxy.serving.limits is not None
    return sum(used[0] for _, _, used in proxy.serving.limits.known()) > requests


@needs_redis
async def test_a_limit_applies_to_the_deployment_and_in_parts_without_the_store(site: Site) -> None:
    one, two = await site.proxy(security=KEYS), await site.proxy(security=KEYS)
    await met(site, one, two)
    for _ in range(3):
        assert (await site.chat(one, "x", key="secret"))[0] == 200
    await until(partial(counts, two, 2.5))
    assert [(await site.chat(two, "x", key="secret"))[0] for _ in range(4)] == [200, 200, 200, 429]


@needs_redis
async def test_differing_settings_are_reported(site: Site) -> None:
    one, two = await site.proxy(), await site.proxy(reliability={"retries": {"attempts": 7}})
    await met(site, one, two)
    replicas = (await site.admin(one, "GET", "/readyz"))["replicas"]
    assert [other["sameConfig"] for other in replicas["others"]] == [False]


@needs_redis
@pytest.mark.parametrize("to_each", [(20, 20), (40, 0), (30, 10)])
async def test_a_burst_over_all_proxies_gets_exactly_its_limit(site: Site, to_each: tuple[int, int]) -> None:
    """One more is let in where less is left than there are proxies. A machine may be too busy for news to be in time,
    but not each time; without parts it would be 12 whenever both are asked for enough."""
    names = [f"app{number}" for number in range(10)]
    security = {**KEYS, "apiKeys": [{"key": name, "name": name, "limits": "few"} for name in names]}
    one, two = await site.proxy(security=security), await site.proxy(security=security)
    await met(site, one, two)
    proxies = [one] * to_each[0] + [two] * to_each[1]
    for name in names:
        began = time.monotonic()
        responses = await asyncio.gather(*(site.chat(proxy, "x", key=name) for proxy in proxies))
        let_in = [status for status, *_ in responses].count(200)
        assert let_in >= 6
        if let_in <= 7 + (time.monotonic() - began) // 10:
            return
    pytest.fail(f"{let_in} of 6 were let in")


@needs_redis
async def test_limits_of_a_reload_apply_to_the_deployment(site: Site) -> None:
    one, two = await site.proxy(), await site.proxy()
    await met(site, one, two)
    await one.reload(site.settings(security=KEYS))
    assert one.serving.limits is not None
    assert isinstance(one.serving.limits.shares, HostGrants)


@needs_redis
async def test_without_the_store_each_proxy_allows_its_part(site: Site) -> None:
    one, two = await site.proxy(security=KEYS), await site.proxy(security=KEYS)
    await met(site, one, two)
    site.redis.kill()
    await until(lambda: not one._deployment.is_connected)
    for counted in (1.5, 3.5, 5.5):
        assert (await site.chat(one, "x", key="secret"))[0] == 200
        await until(partial(counts, one, counted))  # the other one is taken to spend as much
    assert (await site.chat(one, "x", key="secret"))[0] == 429
    await site.redis.start()


@needs_redis
async def test_no_request_fails_or_waits_when_the_store_dies_hangs_or_recovers(site: Site) -> None:
    one, two = await site.proxy(), await site.host(1)
    await met(site, one, two)
    stop = asyncio.Event()
    statuses: list[list[int]] = [[], []]

    async def ask(proxy: Replicated | Supervisor, received: list[int]) -> None:
        while not stop.is_set():
            received.append((await site.chat(proxy, "hello"))[0])

    async def responses_continue() -> None:
        """With the store as it is now; what was asked before may have needed another one."""
        enough = [len(received) + 10 for received in statuses]
        await until(lambda: all(len(received) > most for received, most in zip(statuses, enough, strict=True)))

    task = [asyncio.ensure_future(ask(one, statuses[0])), asyncio.ensure_future(ask(two, statuses[1]))]
    site.redis.stop()
    await responses_continue()
    await until(lambda: not one._deployment.is_connected)
    await responses_continue()
    assert (await site.admin(two, "GET", "/readyz"))["ready"]
    site.redis.kill()
    await responses_continue()
    await site.redis.start()
    await met(site, one, two)
    await responses_continue()
    stop.set()
    await asyncio.gather(*task)
    assert {status for received in statuses for status in received} == {200}
    await until(lambda: in_flight(one) == in_flight(two) == 0)


@needs_redis
async def test_probes_and_metrics_show_the_state_of_the_replicas(site: Site) -> None:
    one, two = await site.proxy(replicas={"name": "left"}), await site.host(1, replicas={"name": "right"})
    await met(site, one, two)
    replicas = (await site.admin(one, "GET", "/readyz"))["replicas"]
    assert replicas["store"] == "up"
    assert replicas["others"] == [{"name": "right", "sameConfig": True}], "a name of its own is no other configuration"
    async with site.http.get(f"http://127.0.0.1:{two.admin_port}/metrics") as response:
        lines = (await response.text()).splitlines()
    assert "kvlane_replicas_store_up 1.0" in lines
    assert "kvlane_replicas_known 1.0" in lines


@needs_redis
@pytest.mark.parametrize("limits", ["localShare", "open"])
async def test_readiness_stays_and_its_details_name_the_lost_store(site: Site, limits: str) -> None:
    one = await site.proxy(replicas={"limits": limits})
    host = await site.host(1, replicas={"limits": limits})
    await met(site, one, host)
    site.redis.kill()
    for proxy in (one, host):
        async with asyncio.timeout(PATIENCE):
            while (replicas := await site.admin(proxy, "GET", "/readyz"))["replicas"]["store"] != "away":
                await asyncio.sleep(0.02)
        assert replicas["ready"]
        assert replicas["replicas"]["limits"] == limits
        assert replicas["replicas"]["why"]
        async with site.http.get(f"http://127.0.0.1:{proxy.admin_port}/readyz") as response:
            assert response.status == 200
        async with site.http.get(f"http://127.0.0.1:{proxy.admin_port}/metrics") as response:
            assert "kvlane_replicas_store_up 0.0" in (await response.text()).splitlines()
    async with asyncio.timeout(PATIENCE):
        while (await site.admin(one, "GET", "/readyz"))["replicas"]["others"]:
            await asyncio.sleep(0.05)
    await site.redis.start()
    await met(site, one, host)
    replicas = (await site.admin(one, "GET", "/readyz"))["replicas"]
    assert replicas.keys() == {"store", "staleness", "others"}


# Settings.


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"store": "http://x"}, "store: must be 'none' or a URL"),
        ({"store": "redis://:secret@x"}, "password in it"),
        ({"store": "redis+sentinel://x:1"}, "names no service"),
        ({"store": "redis+sentinel://x:1,y:z/chat"}, "'y:z' is no HOST:PORT"),
        ({"store": "redis+cluster://x:1,:2"}, "names no host"),
        ({"store": "redis://x:66000"}, "is no HOST:PORT"),
        ({"store": "redis://x", "sentinel_password": "p"}, "are for redis\\+sentinel"),
        ({"store": "redis://x", "prefix": ""}, "prefix: is empty"),
    ],
)
def test_an_invalid_store_is_refused(given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        ReplicaSettings(**given)
    with pytest.raises((ConfigError, Invalid), match="replicas"):
        from_mapping({"replicas": given})


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    settings = from_mapping({"replicas": {"store": "redis://x"}})
    for make in (lambda: app_of(settings), lambda: Supervisor(settings, 2)):
        with pytest.raises(ConfigError, match="kvlane\\[redis\\]"):
            make()


def test_an_unknown_option_of_the_store_is_refused_at_start() -> None:
    pytest.importorskip("redis", reason="needs the extra: pip install 'kvlane[redis]'")
    for url in ("redis://x?bogus=1", "redis+sentinel://x/chat?bogus=1", "redis+cluster://x,y?bogus=1"):
        with pytest.raises(ConfigError, match="bogus"):
            app_of(from_mapping({"replicas": {"store": url}}))


def test_a_single_proxy_shares_nothing() -> None:
    assert not isinstance(app_of(from_mapping({})), Replicated)


def parts(proxy: Replicated, cap: str, most: int) -> int:
    shared_caps = proxy.serving.flow_controls["default"].shared_caps
    assert shared_caps is not None
    return shared_caps.part(cap, most)


@needs_redis
@pytest.mark.parametrize(
    ("cap", "all_pods", "per_pod"), [({"maxConcurrent": 5}, 5, 5), ({"maxConcurrentPerPod": 1}, 3, 1)]
)
async def test_all_proxies_together_reach_a_cap_and_do_not_exceed_it(
    site: Site, cap: dict[str, int], all_pods: int, per_pod: int
) -> None:
    one, host = await site.proxy(flowControl=cap), await site.host(2, flowControl=cap)
    await met(site, one, host)
    await until(lambda: parts(one, "x", 4) == 2)
    requests = [site.chat((one, host)[number % 2], f"{number}", tokens=60) for number in range(40)]
    assert {status for status, _ in await asyncio.gather(*requests)} == {200}
    pods = list(site.sim.pods)
    assert all_pods - 1 <= most_at_once(pods) <= all_pods
    assert max(most_at_once([pod]) for pod in pods) <= per_pod


@needs_redis
async def test_one_busy_proxy_gets_the_whole_cap_which_is_divided_again_without_the_store(site: Site) -> None:
    one, two = await site.proxy(flowControl={"maxConcurrent": 4}), await site.proxy(flowControl={"maxConcurrent": 4})
    await met(site, one, two)
    await until(lambda: parts(one, "requests ", 4) == parts(two, "requests ", 4) == 2)
    async with held(site.sim.pods):
        requests = [asyncio.ensure_future(site.chat(one, f"{number}", tokens=1500)) for number in range(6)]
        await until(lambda: parts(one, "requests ", 4) == 4 and in_flight(one) == in_flight(two) == 4)
        assert parts(two, "requests ", 4) == 0
        site.redis.kill()
        await until(lambda: parts(one, "requests ", 4) == parts(two, "requests ", 4) == 2)
    status, _ = await site.chat(two, "no peer lends capacity, and the store is gone")
    assert status == 200
    assert [status for status, _ in await asyncio.gather(*requests)] == [200] * 6


@needs_redis
async def test_flow_control_of_a_reload_serves_a_request_that_waits_at_a_proxy_that_reloaded_before(site: Site) -> None:
    """The request is larger than the share of its proxy: the other one must know that it waits."""
    one, two = await site.proxy(), await site.proxy()
    await met(site, one, two)
    reloaded = site.settings(flowControl={"maxTokens": 3000})
    await one.reload(reloaded)
    await until(lambda: parts(one, "tokens ", 3000) == 1500)
    waits = asyncio.ensure_future(site.chat(one, LONG))
    control = one.serving.flow_controls["default"]
    await until(lambda: control.shared_caps is not None and control.shared_caps.published is not None)
    await asyncio.sleep(0.2)
    await two.reload(reloaded)
    assert (await waits)[0] == 200
