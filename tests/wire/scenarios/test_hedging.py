"""Requests whose pod is late, and that a second one serves, over real sockets."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import aiohttp
import pytest

from proxy.core.params import Duration
from proxy.lab.sim import Fault, FaultKind, SimConfig
from proxy.reliability.hedging import FAILED, LOST, NO_BUDGET, NO_POD, WON
from proxy.reliability.settings import HedgingSettings
from tests.helpers.http.support import SSE_HEAD, Pod, Received, Script, chunk, plain
from tests.helpers.scenarios.stack import BLIND, BY_LOAD, CHAT, Stack, running, stack
from tests.helpers.waiting import PATIENCE, until

AFTER = {"after": "50ms", "budgetPercent": 100}
SLOW = SimConfig(time_scale=1)


def hedged(**more: Any) -> dict[str, Any]:
    return {"reliability": {"hedging": {**AFTER, **more}, "breaker": {"failures": 1000}}, **BY_LOAD}


async def counted(s: Stack, outcome: str) -> float:
    return await s.sample(f'kvlane_hedges_total{{outcome="{outcome}"}}') or 0.0


def late(s: Stack, *numbers: int, seconds: float = 30.0) -> None:
    """The engines of these stand still at their next request."""
    for number in numbers:
        s.pods[number].faults.set([Fault(FaultKind.FROZEN, seconds=seconds)])


async def until_met(s: Stack, number: int, **fields: Any) -> tuple[Any, Any]:
    """Asks until the request comes to this pod first."""
    for attempt in range(50):
        response, body = await s.chat(f"Question {attempt}", **fields)
        assert response.status == 200, body
        if sum(s.pods[number].faults.met):
            return response, body
    raise AssertionError("it never came there")


@pytest.mark.parametrize("stream", [True, False])
async def test_a_late_request_is_served_by_another_pod_and_aborted_at_the_first(stream: bool) -> None:
    async with stack(2, SLOW, {**hedged(), **BLIND}) as s:
        late(s, 0)
        for attempt in range(50):
            fields = {"model": "sim", "messages": [{"role": "user", "content": f"Question {attempt}"}], "max_tokens": 2}
            async with s.http.post(s.url + CHAT, json={**fields, "stream": stream}) as response:
                assert response.status == 200
                body = await response.read()
                assert response.headers["x-kvlane-endpoint"] == "pod-1" or not sum(s.pods[0].faults.met)
                assert body.endswith(b"data: [DONE]\n\n") if stream else json.loads(body)["choices"]
            if sum(s.pods[0].faults.met):
                break
        assert await counted(s, WON) == 1.0
        await s.idle()
        s.app.observer.flush()
        assert await s.sample('kvlane_attempts_total{ending="evicted",endpoint="pod-0"}') == 1.0
        series = 'kvlane_requests_total{model="sim",outcome="complete",path="chat",status="2xx"}'
        assert await s.sample(series) == attempt + 1.0
        assert not await s.sample("kvlane_retries_total")


async def test_a_hedged_attempt_of_a_resumable_stream_shows_no_internal_counts() -> None:
    settings = hedged()
    settings["reliability"]["continuation"] = {"models": ["sim"]}
    async with stack(2, SLOW, {**settings, **BLIND}) as s:
        late(s, 0)
        for attempt in range(50):
            fields = {"model": "sim", "messages": [{"role": "user", "content": f"Question {attempt}"}], "max_tokens": 2}
            async with s.http.post(s.url + CHAT, json={**fields, "stream": True}) as response:
                body = await response.read()
            assert body.endswith(b"data: [DONE]\n\n")
            assert b'"usage":{' not in body
            if sum(s.pods[0].faults.met):
                break
        assert await counted(s, WON) == 1.0


async def test_the_first_pod_to_start_responds() -> None:
    async with stack(2, SLOW, {**hedged(after="20ms"), **BLIND}) as s:
        s.pods[0].faults.set([])
        response, _ = await s.chat(max_tokens=100)
        assert response.status == 200
        await s.idle()
        assert await counted(s, LOST) + await counted(s, WON) == 1.0
        assert sum(len(pod.requests) for pod in s.pods) == 2


async def test_requests_that_are_not_late_or_not_urgent_are_not_hedged() -> None:
    async with stack(2, SLOW, hedged(priorityAtLeast=1)) as s:
        response, _ = await s.chat(max_tokens=30)
        assert response.status == 200
        assert sum(len(pod.requests) for pod in s.pods) == 1
    async with stack(2, SLOW, hedged(after="20s")) as s:
        await s.chat(max_tokens=30)
        assert sum(len(pod.requests) for pod in s.pods) == 1


async def test_beyond_the_budget_there_is_one_attempt() -> None:
    async with stack(2, SLOW, hedged(after="10ms", budgetPercent=0)) as s:
        for _ in range(14):
            await s.chat(max_tokens=10)
        assert await counted(s, NO_BUDGET) == 4.0
        assert sum(len(pod.requests) for pod in s.pods) == 24


async def test_looking_for_a_pod_for_a_hedged_attempt_reserves_no_capacity() -> None:
    settings = {**hedged(), "flowControl": {"maxConcurrentPerPod": 1}, **BLIND}
    async with stack(2, SLOW, settings) as s:
        other, first = (asyncio.ensure_future(s.chat(f"Question {n}", max_tokens=n)) for n in (60, 400))
        await other
        assert await counted(s, NO_POD) == 2.0
        response, _ = await s.chat(max_tokens=2)
        assert response.status == 200
        assert not first.done(), "it waited although a pod was idle"
        first.cancel()


async def test_no_request_is_hedged_while_others_are_queued() -> None:
    settings = {**hedged(after="20ms"), "flowControl": {"maxConcurrentPerPod": 1}, **BLIND}
    async with stack(2, SLOW, settings) as s:
        tasks = [asyncio.ensure_future(s.chat(f"Question {number}", max_tokens=40)) for number in range(4)]
        most = 0
        while not all(one.done() for one in tasks):
            most = max(most, *(endpoint.load.requests for endpoint in s.app.fleet.endpoints))
            await asyncio.sleep(0.001)
        assert [(await one)[0].status for one in tasks] == [200] * 4
        assert most == 1
        assert await counted(s, NO_POD) >= 2.0
        await s.idle()


async def test_a_client_that_leaves_ends_both_attempts() -> None:
    async with stack(2, SLOW, {**hedged(), **BLIND}) as s:
        late(s, 0, 1)
        async with aiohttp.ClientSession() as other:
            body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}]}
            task = asyncio.ensure_future(other.post(s.url + CHAT, json=body))
            await until(lambda: sum(endpoint.load.requests for endpoint in s.app.fleet.endpoints) == 2)
            task.cancel()
            await s.idle()
        s.app.observer.flush()
        for number in (0, 1):
            name = f'kvlane_attempts_total{{ending="client-gone",endpoint="pod-{number}"}}'
            assert await s.sample(name) == 1.0
        assert await counted(s, FAILED) == 0.0


async def test_limits_count_the_attempt_that_responded() -> None:
    limits = {"requestsPerMinute": 1000, "tokensPerMinute": 100_000}
    keys = {"security": {"apiKeys": [{"name": "a", "key": "k", "limits": limits}]}}
    async with stack(2, SLOW, {**hedged(), **keys, **BLIND}) as s:
        late(s, 0)
        s.http.headers["x-api-key"] = "k"
        response, _ = await until_met(s, 0, max_tokens=2)
        assert response.headers["x-kvlane-endpoint"] == "pod-1"
        assert response.headers["x-ratelimit-limit-requests"] == "1000"
        await s.idle()
        assert s.app.serving.limits is not None
        (meter,) = s.app.serving.limits._meters.values()
        await until(lambda: meter.running == 0)


async def test_the_grace_period_ends_both_attempts_with_an_error() -> None:
    async with stack(2, SLOW, {**hedged(), **BLIND}) as s:
        late(s, 0, 1)
        task = asyncio.ensure_future(s.chat())
        await until(lambda: sum(endpoint.load.requests for endpoint in s.app.fleet.endpoints) == 2)
        await s.app._server.stop(0.05)
        response, body = await task
        assert (response.status, body["error"]["code"]) == (503, "shutting_down")
        await s.idle()


async def test_a_reload_enables_and_disables_hedging() -> None:
    async with stack(2, SLOW, BLIND) as s:
        without = s.app._settings
        wanted = HedgingSettings(after=Duration(0.02), budget_percent=100)
        for settings, requests in (
            (replace(without, reliability=replace(without.reliability, hedging=wanted)), 2),
            (without, 3),
        ):
            await s.app.reload(settings)
            await s.chat(max_tokens=30)
            assert sum(len(pod.requests) for pod in s.pods) == requests


async def test_learnt_first_byte_times_define_lateness() -> None:
    learning = {"percentile": 95, "budgetPercent": 100}
    settings = {"reliability": {"hedging": learning, "breaker": {"failures": 1000}}, **BY_LOAD, **BLIND}
    async with stack(2, SimConfig(time_scale=5), settings) as s:
        for number in range(60):
            await s.chat(f"Question {number}", max_tokens=1)
        before, questions = await counted(s, WON), itertools.count(60)
        late(s, 0)
        async with asyncio.timeout(PATIENCE):
            while await counted(s, WON) == before:  # a second attempt may be the one that comes there, and lose
                await s.chat(f"Question {next(questions)}", max_tokens=1)


# pods that follow a script


def streamed(*texts: str) -> list[bytes]:
    return [chunk(b'data: {"choices":[{"index":0,"delta":{"content":"%b"}}]}\n\n' % text.encode()) for text in texts]


END = chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
GOOD = b"".join((SSE_HEAD, *streamed("good"), END))
NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"
FULL = b"HTTP/1.1 503 Full\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


async def between(
    first: Script, second: Script, settings: Mapping[str, Any], *later: Script
) -> tuple[int, bytes, list[str]]:
    """Let these scripts serve the attempts in their order, the later ones on pods of their own. Return the client's
    status and body and the endings."""
    turns = iter((first, second, *later))

    async def script(request: Received) -> None:
        if request.line.startswith(b"GET"):
            await request.send(plain(b"") if b"/health" in request.line else NOT_FOUND)
            return
        await request.body()
        await next(turns)(request)

    async with AsyncExitStack() as entered:
        pods = [await entered.enter_async_context(Pod(script)) for _ in range(2 + len(later))]
        app = await entered.enter_async_context(running([pod.endpoint.url for pod in pods], settings))
        http = await entered.enter_async_context(aiohttp.ClientSession())
        fields = {"model": "m", "stream": True, "messages": []}
        async with http.post(f"http://127.0.0.1:{app.port}{CHAT}", json=fields) as response:
            status, body = response.status, await response.read()
        await until(lambda: not app.ledger.in_flight)
        assert all(endpoint.load.requests == endpoint.load.tokens == 0 for endpoint in app.fleet.endpoints)
        app.observer.flush()
        counts = [app._observation.endpoints.of(endpoint).attempts for endpoint in app.fleet.endpoints]
        assert all(sum(of_pod.values()) == 1 for of_pod in counts), "each attempt is on another pod"
        return status, body, sorted(ending for one in counts for ending, number in one.items() for _ in range(number))


def saying(*pieces: bytes, after: float = 0.0, pause: float = 0.0) -> Script:
    async def script(request: Received) -> None:
        await asyncio.sleep(after)
        await request.send(*pieces, pause=pause)

    return script


async def hanging(request: Received) -> None:
    await request.gone()


async def breaking(request: Received) -> None:
    await asyncio.sleep(0.1)
    request.break_off()


async def test_a_head_alone_is_no_start_of_a_stream() -> None:
    """The client gets one head, and events of one pod."""
    first = saying(SSE_HEAD, *streamed("slow"), END, pause=0.3)
    status, body, endings = await between(first, saying(GOOD), hedged())
    assert (status, body) == (200, b'data: {"choices":[{"index":0,"delta":{"content":"good"}}]}\n\ndata: [DONE]\n\n')
    assert endings == ["complete", "evicted"]


async def test_the_remaining_attempt_responds_when_the_other_fails() -> None:
    for first, second in ((breaking, saying(GOOD, after=0.3)), (saying(GOOD, after=0.4), breaking)):
        status, body, endings = await between(first, second, hedged())
        assert (status, body.count(b"good")) == (200, 1)
        assert endings == ["complete", "upstream-failed"]


async def test_a_refusal_is_hidden_while_the_other_attempt_may_respond() -> None:
    for first, second in (
        (saying(FULL, after=0.1), saying(GOOD, after=0.3)),
        (saying(GOOD, after=0.4), saying(FULL)),
    ):
        status, body, _ = await between(first, second, hedged())
        assert (status, body.count(b"good")) == (200, 1)


async def test_when_both_fail_no_pod_is_tried_again() -> None:
    settings = hedged()
    settings["reliability"]["retries"] = {"attempts": 2}
    status, _, endings = await between(breaking, breaking, settings)
    assert status == 502
    assert endings == ["upstream-failed", "upstream-failed"]


async def test_when_both_pods_decline_the_client_gets_the_response_of_the_last_one() -> None:
    settings = hedged()
    settings["reliability"]["retries"] = {"attempts": 2}
    busy = b"HTTP/1.1 503 Busy\r\ncontent-length: 4\r\n\r\nbusy"
    status, body, _ = await between(saying(busy, after=0.2), saying(busy, after=0.3), settings)
    assert (status, body) == (503, b"busy")


async def test_a_timeout_on_two_pods_counts_for_both() -> None:
    settings = hedged()
    settings["reliability"]["timeouts"] = {"request": "2s"}
    status, _, endings = await between(hanging, hanging, settings)
    assert status == 504
    assert endings == ["timed-out", "timed-out"]


async def cut(request: Received) -> None:
    await request.send(SSE_HEAD, *streamed("one"), pause=0.05)
    request.break_off()


async def test_a_broken_stream_of_the_hedged_attempt_ends_with_an_error() -> None:
    status, body, endings = await between(hanging, cut, hedged())
    assert status == 200
    assert body.count(b'data: {"error"') == 1
    assert endings == ["evicted", "upstream-failed"]


@pytest.mark.parametrize("first", [hanging, saying(SSE_HEAD, after=0.1)])
async def test_a_broken_stream_of_the_hedged_attempt_continues_on_a_third_pod(first: Script) -> None:
    settings = hedged()
    settings["reliability"]["continuation"] = {"models": ["*"]}
    status, body, endings = await between(first, cut, settings, saying(GOOD))
    assert status == 200
    assert body == b"".join(
        each[each.index(b"\n") + 1 : -2] for each in (*streamed("one", "good"), chunk(b"data: [DONE]\n\n"))
    )
    assert endings == ["complete", "evicted", "upstream-failed"]


async def test_either_attempt_may_respond_under_another_model_name() -> None:
    settings = {**hedged(), "models": {"aliases": {"m": "n"}}}
    for first, second in ((hanging, saying(GOOD)), (saying(GOOD, after=0.2), hanging)):
        status, body, _ = await between(first, second, settings)
        assert (status, body.count(b"good")) == (200, 1)
