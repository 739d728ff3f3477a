"""What clients see of failing pods: a complete response, or a visible failure."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from bench.disorder.clients import Saw, Seen, asks, is_all_there, probe
from proxy.app import App
from proxy.core.endpoint import EndpointState
from proxy.core.ports import SystemClock
from proxy.core.request import TIME_LIMIT
from proxy.lab.sim import Fault, FaultKind, SimConfig, SimFleet, StepTiming
from proxy.settings import from_mapping
from tests.helpers.scenarios.stack import BY_LOAD, CHAT, Stack, stack
from tests.helpers.waiting import until

SETTINGS = {
    "reliability": {"timeouts": {"firstByte": "150ms", "idle": "150ms"}, "breaker": {"failures": 1000}},
    **BY_LOAD,
}
TRIES = 60
LONG = 10_000
"""Bytes of a prompt that takes longer than the time-outs."""


@pytest.fixture
async def proxy() -> AsyncIterator[Stack]:
    async with stack(3, SimConfig(time_scale=20), SETTINGS) as running:
        yield running


async def meet(proxy: Stack, fault: Fault, *, stream: bool = True) -> Seen:
    """What the first request sees that meets the fault on one of the pods."""
    pod = proxy.pods[0]
    pod.faults.set([fault])
    async with aiohttp.ClientSession(proxy.url) as session:
        for ask in asks(TRIES, 1, leavers=0.0):
            if ask.stream is stream and ask.timeout is None and len(ask.body) < LONG:
                seen = await probe(session, ask)
                if any(record.id == ask.id and record.fault for record in pod.requests):
                    return seen
    raise AssertionError("no request met it")


BEFORE = [
    Fault(FaultKind.REJECT, status=429),
    Fault(FaultKind.REJECT, status=429, retry_after=1),
    Fault(FaultKind.REJECT, status=500),
    Fault(FaultKind.REJECT, status=502),
    Fault(FaultKind.REJECT, status=503),
    Fault(FaultKind.RESET),
    Fault(FaultKind.FIN),
    Fault(FaultKind.GARBAGE),
    Fault(FaultKind.ERROR_FIRST),
    Fault(FaultKind.CRASH, seconds=0.3),
    Fault(FaultKind.LOADING, seconds=0.3),
    Fault(FaultKind.SHUTTING_DOWN, seconds=0.3),
]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fault", BEFORE, ids=lambda fault: f"{fault.kind.value} {fault.status} {fault.retry_after}")
async def test_a_failure_before_the_response_is_served_by_another_pod(proxy: Stack, fault: Fault, stream: bool) -> None:
    seen = await meet(proxy, fault, stream=stream)
    assert (seen.status, seen.saw) == (200, Saw.WHOLE)
    assert is_all_there(seen)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.FROZEN, FaultKind.KILLED])
async def test_a_stream_that_does_not_start_is_started_elsewhere(proxy: Stack, kind: FaultKind) -> None:
    seen = await meet(proxy, Fault(kind, seconds=0.5))
    assert (seen.status, seen.saw) == (200, Saw.WHOLE)


@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.FIN, FaultKind.MISFRAME])
async def test_a_broken_stream_ends_with_an_error(kind: FaultKind) -> None:
    """A failure before the proxy has read anything is no response: so these events come slowly."""
    async with stack(3, SimConfig(timing=StepTiming(base=0.05)), SETTINGS) as slow:
        seen = await meet(slow, Fault(kind, events=2))
    assert (seen.status, seen.saw) == (200, Saw.ERROR_EVENT)
    assert seen.events == 3
    assert b"[DONE]" not in seen.body


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.FIN, FaultKind.MISFRAME])
@pytest.mark.parametrize(("stream", "cut"), [(True, Saw.ERROR_EVENT), (False, Saw.BROKEN)])
async def test_a_truncated_response_is_truncated_or_complete_from_another_pod(
    proxy: Stack, kind: FaultKind, stream: bool, cut: Saw
) -> None:
    """A reset may discard unread bytes, and malformed bytes may come with the head."""
    seen = await meet(proxy, Fault(kind, events=1), stream=stream)
    assert seen.saw in (cut, Saw.WHOLE)
    assert is_all_there(seen) is (seen.saw is Saw.WHOLE)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", [FaultKind.DRIP, FaultKind.UNHEALTHY, FaultKind.SLOW_START, FaultKind.REFUSE])
async def test_a_slow_complete_response_is_passed_on(proxy: Stack, kind: FaultKind, stream: bool) -> None:
    seen = await meet(proxy, Fault(kind, seconds=0.3), stream=stream)
    assert (seen.status, seen.saw) == (200, Saw.WHOLE)
    assert is_all_there(seen)


async def test_malformed_content_in_valid_http_is_passed_on(proxy: Stack) -> None:
    seen = await meet(proxy, Fault(FaultKind.CORRUPT, events=2))
    assert (seen.status, seen.saw) == (200, Saw.WHOLE)


async def test_the_request_after_a_broken_stream_is_served_on_its_connection(proxy: Stack) -> None:
    """Clients reuse a connection as soon as a response has ended in order."""
    for pod in proxy.pods:
        pod.faults.set([Fault(FaultKind.HANG, events=2)])
    connector = aiohttp.TCPConnector(limit=1)
    async with aiohttp.ClientSession(proxy.url, connector=connector) as session:
        streams = [ask for ask in asks(10, 2, leavers=0.0) if ask.stream and len(ask.body) < LONG]
        seen = [await probe(session, ask) for ask in streams]
    assert {one.saw for one in seen} == {Saw.ERROR_EVENT}


async def test_a_starting_pod_is_tried_before_an_error() -> None:
    settings = {"reliability": {"breaker": {"slowStart": "1h", "failures": 1000}}}
    async with stack(2, SimConfig(time_scale=20), settings) as proxy, aiohttp.ClientSession(proxy.url) as session:
        failing, back = proxy.pods
        endpoint = proxy.app.fleet.get("pod-1")
        assert endpoint is not None
        await back.kill()
        await until(lambda: endpoint.state is EndpointState.EJECTED)
        await back.start(port=back.port)
        await until(lambda: endpoint.state is EndpointState.READY)
        failing.faults.set([Fault(FaultKind.REJECT, status=503)])
        seen = [await probe(session, ask) for ask in asks(20, 3, leavers=0.0)]
        assert {one.saw for one in seen} == {Saw.WHOLE}
        assert failing.faults.met[0] > 5


class SlowClock(SystemClock):
    """A clock that is 1.8 ms behind after 0.2 s, so that timers are early, as uvloop's are."""

    def __init__(self) -> None:
        self._exact = SystemClock()
        self._began = self._exact.now()

    def now(self) -> float:
        return self._began + 0.991 * (self._exact.now() - self._began)


async def test_time_limits_of_clients_open_no_breaker_though_timers_are_early() -> None:
    async with SimFleet(2, SimConfig(time_scale=20)) as sim:
        static = [{"url": url} for url in sim.urls]
        free = {"host": "127.0.0.1", "port": 0}
        settings = {"listen": free, "admin": free, "pods": {"static": static}, "telemetry": {"accessLog": False}}
        async with App(from_mapping(settings), clock=SlowClock()) as app, aiohttp.ClientSession() as http:
            for pod in sim.pods:
                pod.faults.set([Fault(FaultKind.FROZEN, seconds=30.0)])
            proxy = Stack(app, sim, http)
            body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}]}
            requests = [proxy.post(CHAT, body, {TIME_LIMIT: "200"}) for _ in range(12)]
            responses = await asyncio.gather(*requests)
            assert {response.status for response, _ in responses} == {504}
            assert {error["error"]["message"] for _, error in responses} == {"The pod did not respond in time."}
            assert {app.breakers.state(endpoint) for endpoint in app.fleet.endpoints} == {"closed"}
