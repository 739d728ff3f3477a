"""Which sleeping pods are woken, and which requests wait for them."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from proxy.core import params
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import ConnectRefused, NoEndpoints
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.models import resolver
from proxy.models.resolver import AGAIN, Resolver, Waker
from proxy.models.settings import ModelSettings


class Bedroom:
    """Pods `a` and `b` of the model `m`, and `c` of `other`, that can sleep and be woken."""

    def __init__(self, tasks: Tasks, names: str = "abc") -> None:
        self.clock = ManualClock(now=100.0)
        self.fleet = Fleet(self.clock)
        self.posts: list[str] = []
        self.status = 200
        self.is_deaf = False
        self.wakes = True
        self.waker = Waker(self.fleet, self, self.clock, tasks, timeout=5.0)
        for name in names:
            pod = self.fleet.add(PodSettings(f"http://{name}:1", name, models=("other",) if name == "c" else ("m",)))
            self.fleet.reached(pod)

    async def post(self, url: str, body: bytes, api_key: str | None, rank: int | None = None) -> tuple[int, bytes]:
        self.posts.append(url)
        await asyncio.sleep(0)
        if self.is_deaf:
            raise ConnectRefused("connection refused")
        if self.status == 200 and self.wakes:
            self.sleeps(url[7], level=0)
        return self.status, b""

    def sleeps(self, names: str, level: int = 1) -> None:
        for name in names:
            pod = self.pod(name)
            pod.publish(replace(pod.metrics, sleep_level=level), 0)
            self.fleet.refreshed(pod)

    def pod(self, name: str) -> Endpoint:
        pod = self.fleet.get(name)
        assert pod is not None
        return pod

    def resolver(self, **settings: object) -> Resolver:
        return Resolver(params.load(ModelSettings, settings), random.Random(1), waker=self.waker)

    async def send(self, request: InferenceRequest) -> None:
        if not self.fleet.endpoints_for(request.model):
            raise NoEndpoints("nobody")


@pytest.fixture
async def tasks(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Tasks]:
    monkeypatch.setattr(resolver, "CHECK_INTERVAL", 0.0)
    async with Tasks() as tasks:
        yield tasks


def request(model: str = "m") -> InferenceRequest:
    return InferenceRequest("r", "/v1/completions", model, body=b'{"model":"%b"}' % model.encode())


async def test_all_requests_wait_for_one_woken_pod(tasks: Tasks) -> None:
    bedroom = Bedroom(tasks)
    bedroom.sleeps("ab")
    it = bedroom.resolver()
    await asyncio.gather(*(it.try_each(it.resolve(request(), None), bedroom.send) for _ in range(5)))
    assert bedroom.posts == ["http://a:1/wake_up"]
    assert [pod.name for pod in bedroom.fleet.endpoints_for("m")] == ["a"]


async def test_only_a_pod_of_the_permitted_pool_is_woken(tasks: Tasks) -> None:
    bedroom = Bedroom(tasks)
    bedroom.fleet.form(("default", "large"))
    large = bedroom.fleet.add(PodSettings("http://d:1", "d", models=("m",)), pool="large")
    bedroom.fleet.reached(large)
    bedroom.sleeps("abd")
    assert bedroom.waker.wake("m", "large")
    assert await bedroom.waker.awake("m", math.inf, "large")
    assert bedroom.posts == ["http://d:1/wake_up"]
    assert not bedroom.waker.wake("m", "large")


async def test_no_pod_is_woken_while_another_serves_or_for_an_unknown_model(tasks: Tasks) -> None:
    bedroom = Bedroom(tasks)
    bedroom.sleeps("a")
    it = bedroom.resolver()
    await it.try_each(it.resolve(request(), None), bedroom.send)
    with pytest.raises(NoEndpoints):
        await it.try_each(it.resolve(request("unknown"), None), bedroom.send)
    assert bedroom.posts == []


async def test_a_fallback_responds_meanwhile(tasks: Tasks) -> None:
    bedroom = Bedroom(tasks)
    bedroom.sleeps("ab")
    bedroom.wakes = False
    it = bedroom.resolver(fallbacks={"m": ["other"]})
    await it.try_each(it.resolve(request(), None), bedroom.send)
    await asyncio.sleep(0)
    assert bedroom.posts == ["http://a:1/wake_up"]


async def test_a_pod_without_its_weights_is_not_woken(tasks: Tasks) -> None:
    bedroom = Bedroom(tasks)
    bedroom.sleeps("ab", level=2)
    assert not bedroom.waker.wake("m")


async def test_a_draining_pod_is_not_woken(tasks: Tasks) -> None:
    bedroom = Bedroom(tasks, "a")
    bedroom.sleeps("a")
    bedroom.fleet.drain("a")
    assert bedroom.pod("a").state is EndpointState.DRAINING
    assert not bedroom.waker.wake("m")


@pytest.mark.parametrize("fault", ["deaf", "refuses"])
async def test_a_pod_that_does_not_wake_is_avoided_and_another_is_woken(tasks: Tasks, fault: str) -> None:
    bedroom = Bedroom(tasks)
    bedroom.sleeps("ab")
    bedroom.is_deaf, bedroom.status = fault == "deaf", 404
    it = bedroom.resolver()
    with pytest.raises(NoEndpoints):
        await it.try_each(it.resolve(request(), None), bedroom.send)
    assert bedroom.posts == ["http://a:1/wake_up", "http://b:1/wake_up"]
    with pytest.raises(NoEndpoints):
        await it.try_each(it.resolve(request(), None), bedroom.send)
    assert len(bedroom.posts) == 2
    bedroom.clock.advance(AGAIN + 1)
    bedroom.is_deaf, bedroom.status = False, 200
    await it.try_each(it.resolve(request(), None), bedroom.send)


async def test_a_request_does_not_wait_beyond_its_deadline(tasks: Tasks) -> None:
    bedroom = Bedroom(tasks, "a")
    bedroom.sleeps("a")
    bedroom.wakes = False
    it = bedroom.resolver()
    waiting = asyncio.ensure_future(it.try_each(it.resolve(request(), None), bedroom.send))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not waiting.done()
    bedroom.clock.advance(6.0)
    with pytest.raises(NoEndpoints):
        await waiting
