"""Requests that wait, are refused, or have to go, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import orjson
import pytest

from proxy.core.ports import Identity, Resolver
from proxy.core.request import InferenceRequest
from proxy.lab.sim import SimConfig
from tests.helpers.scenarios.stack import BLIND, CHAT, ResponseAndBody, Stack, stack
from tests.helpers.waiting import until

SLOW = SimConfig(time_scale=1)
"""About seven milliseconds per token."""

PRIORITIES = {"batch": -1, "chat": 10}


class ByHeaders(Resolver):
    """Believes what clients say of their tenants and objectives."""

    def resolve(self, request: InferenceRequest, identity: Identity | None) -> InferenceRequest:
        priority = PRIORITIES.get(request.headers.get("x-llm-d-inference-objective", ""), 0)
        return replace(request, priority=priority, tenant=request.headers.get("x-llm-d-inference-fairness-id", ""))


def waiting(s: Stack) -> int:
    return s.app.serving.flow_controls["default"].queue.length


def at_once(s: Stack) -> int:
    """Requests on the pod with the most."""
    return max(endpoint.load.requests for endpoint in s.app.fleet.endpoints)


async def ask(
    s: Stack, tokens: int = 10, tenant: str = "", objective: str = "", model: str = "sim", **headers: str
) -> ResponseAndBody:
    body = {"model": model, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": tokens, "ignore_eos": True}
    if tenant:
        headers["x-llm-d-inference-fairness-id"] = tenant
    if objective:
        headers["x-llm-d-inference-objective"] = objective
    return await s.post(CHAT, body, headers)


async def test_no_pod_exceeds_its_cap_and_all_requests_are_served() -> None:
    most = 0
    async with stack(2, SLOW, {"flowControl": {"maxConcurrentPerPod": 2}}) as s:
        tasks = [asyncio.ensure_future(ask(s)) for _ in range(20)]
        while not all(one.done() for one in tasks):
            most = max(most, at_once(s))
            await asyncio.sleep(0.001)
        responses = [await one for one in tasks]
        assert [response.status for response, _ in responses] == [200] * 20
        assert most == 2
        await s.idle()
        assert waiting(s) == 0
        assert await s.sample('kvlane_queue_wait_seconds_count{band="0",pool="default"}') == 20.0
        assert await s.sample('kvlane_queue_requests{band="0",pool="default"}') == 0.0


async def test_requests_beyond_the_queue_are_refused_within_milliseconds_with_retry_after() -> None:
    async with stack(1, SLOW, {"flowControl": {"maxConcurrent": 1, "maxQueued": 1}}) as s:
        first, second = (asyncio.ensure_future(ask(s, 50)) for _ in range(2))
        await until(lambda: waiting(s) == 1)
        response, body = await ask(s)
        assert not first.done()
        assert response.status == 429
        assert body["error"]["type"] == "rate_limit_error"
        assert body["error"]["code"] == "queue_full"
        assert response.headers["x-kvlane-reason"] == "rejected-saturated"
        assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert int(response.headers["retry-after"]) >= 1
        assert [(await one)[0].status for one in (first, second)] == [200, 200]
        assert await s.sample('kvlane_queue_refused_total{band="0",pool="default",reason="rejected-saturated"}') == 1.0


async def test_a_request_that_waits_too_long_is_refused() -> None:
    async with stack(1, SLOW, {"flowControl": {"maxConcurrent": 1, "queueTimeout": "50ms"}}) as s:
        first = asyncio.ensure_future(ask(s, 60))
        await until(lambda: at_once(s) == 1)
        response, _ = await ask(s)
        assert (response.status, response.headers["x-kvlane-reason"]) == (429, "rejected-ttl-expired")
        assert (await first)[0].status == 200


async def wait_and_leave(s: Stack) -> None:
    """A client whose request is queued leaves."""
    async with aiohttp.ClientSession() as http:
        request = asyncio.ensure_future(http.post(s.url + CHAT, json={"model": "sim", "messages": []}))
        await until(lambda: waiting(s) == 1)
        request.cancel()
        await until(lambda: waiting(s) == 0)


async def test_a_client_that_leaves_the_queue_reaches_no_pod() -> None:
    async with stack(1, SLOW, {"flowControl": {"maxConcurrent": 1}}) as s:
        first = asyncio.ensure_future(ask(s, 60))
        await until(lambda: at_once(s) == 1)
        await wait_and_leave(s)
        assert not first.done()
        assert (await first)[0].status == 200
        assert len(s.pods[0].requests) == 1


async def test_a_new_pod_serves_queued_requests() -> None:
    async with stack(2, SLOW, {**BLIND, "flowControl": {"maxConcurrentPerPod": 1}}) as s:
        s.app.fleet.drain("pod-1")
        first, second = (asyncio.ensure_future(ask(s, 100)) for _ in range(2))
        await until(lambda: waiting(s) == 1)
        s.app.fleet.undrain("pod-1")
        await until(lambda: waiting(s) == 0)
        assert {(await one)[0].headers["x-kvlane-endpoint"] for one in (first, second)} == {"pod-0", "pod-1"}


async def test_requests_of_an_endpoint_picker_config_wait_for_the_first_ready_pod() -> None:
    document = {"kind": "EndpointPickerConfig", "featureGates": ["flowControl"], "plugins": [{"type": "queue-scorer"}]}
    async with stack(1, SLOW, {**BLIND, "scheduling": document}) as s:
        s.app.fleet.drain("pod-0")
        task = asyncio.ensure_future(ask(s, 1))
        await until(lambda: waiting(s) == 1)
        s.app.fleet.undrain("pod-0")
        response, _ = await task
        assert response.status == 200
        assert int(response.headers["x-llm-d-flow-queue-duration-ms"]) >= 0


async def test_a_request_that_finds_no_ready_pod_in_time_is_refused_with_503() -> None:
    async with stack(1, SLOW, {**BLIND, "flowControl": {"noEndpointTimeout": "50ms"}}) as s:
        s.app.fleet.drain("pod-0")
        response, body = await ask(s)
        assert (response.status, body["error"]["code"]) == (503, "no_endpoints")
        assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        assert "within 0.05 s" in body["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1


async def test_prefilled_tokens_free_capacity() -> None:
    """Six thousand of them take a third of a second."""
    async with stack(1, SLOW, {**BLIND, "flowControl": {"maxTokens": 6000}}) as s:
        long = {"model": "sim", "prompt": "x" * 24_000, "max_tokens": 300, "ignore_eos": True, "stream": True}
        first = asyncio.ensure_future(s.http.post(s.url + "/v1/completions", json=long))
        await until(lambda: at_once(s) == 1)
        second = asyncio.ensure_future(s.post("/v1/completions", {"model": "sim", "prompt": "Hi", "max_tokens": 1}))
        await until(lambda: waiting(s) == 1)
        assert (await second)[0].status == 200
        assert at_once(s) == 1, "the first one still runs"
        (await first).close()


async def test_a_queued_request_whose_pods_all_leave_is_refused() -> None:
    async with stack(1, SLOW, {**BLIND, "flowControl": {"maxConcurrent": 1}}) as s:
        first = asyncio.ensure_future(ask(s, 100))
        await until(lambda: at_once(s) == 1)
        second = asyncio.ensure_future(ask(s))
        await until(lambda: waiting(s) == 1)
        s.app.fleet.drain("pod-0")
        response, _ = await second
        assert (response.status, response.headers["x-kvlane-reason"]) == (503, "rejected-no-endpoints")
        assert (await first)[0].status == 200


async def test_queued_requests_at_the_end_of_the_grace_period_are_refused_with_retry_after() -> None:
    async with stack(1, SLOW, {**BLIND, "flowControl": {"maxConcurrent": 1}}) as s:
        long = {"model": "sim", "prompt": "Hi", "max_tokens": 1000, "ignore_eos": True, "stream": True}
        async with s.http.post(s.url + "/v1/completions", json=long) as begun:
            await begun.content.readany()
            tasks = [asyncio.ensure_future(ask(s)) for _ in range(3)]
            await until(lambda: waiting(s) == 3)
            await s.app._server.stop(0.05)
            for response, body in [await one for one in tasks]:
                assert (response.status, body["error"]["code"]) == (503, "shutting_down")
                assert response.headers["x-kvlane-reason"] == "rejected-shutting-down"
                assert int(response.headers["retry-after"]) >= 1
            assert b'data: {"error"' in await begun.read()
        assert len(s.pods[0].requests) == 1
        assert waiting(s) == 0
        assert await s.sample('kvlane_refused_total{reason="rejected-shutting-down"}') == 3.0


async def test_the_access_log_has_the_model_of_requests_that_end_in_the_queue(
    capfd: pytest.CaptureFixture[str],
) -> None:
    settings = {**BLIND, "flowControl": {"maxConcurrent": 1}, "telemetry": {"accessLog": True}}
    async with stack(1, SLOW, settings) as s:
        served = asyncio.ensure_future(ask(s, 1000))
        await until(lambda: at_once(s) == 1)
        await wait_and_leave(s)
        refused = asyncio.ensure_future(ask(s))
        await until(lambda: waiting(s) == 1)
        await s.app._server.stop(0.05)
        await asyncio.gather(served, refused)
        await s.idle()
    lines = map(orjson.loads, capfd.readouterr().out.splitlines())
    assert {(line["outcome"], line["model"], line["attempts"]) for line in lines} == {
        ("client-gone", "sim", 0),
        ("rejected-shutting-down", "sim", 0),
        ("rejected-shutting-down", "sim", 1),
    }


async def test_pods_that_report_queues_make_requests_wait() -> None:
    pods = SimConfig(time_scale=1, max_num_seqs=1)
    section = {"saturation": {"detector": "utilization", "queueDepth": 2}}
    fast = {"refresh": {"interval": "20ms", "maxCore": 1}}
    async with stack(1, pods, {"flowControl": section, "pods": fast}) as s:
        tasks = [asyncio.ensure_future(ask(s, 20)) for _ in range(12)]
        await until(lambda: waiting(s) > 5)
        assert [(await one)[0].status for one in tasks] == [200] * 12
        assert at_once(s) == 0


async def test_an_endpoint_picker_config_sheds_while_the_pods_are_full() -> None:
    settings = {
        "scheduling": {"kind": "EndpointPickerConfig", "plugins": [{"type": "queue-scorer"}]},
        "models": {"objectives": {"batch": {"priority": -1}}},
        "pods": {"refresh": {"interval": "20ms", "maxCore": 1}},
    }
    async with stack(1, SimConfig(time_scale=1, max_num_seqs=1), settings) as s:
        assert (await ask(s, 1, objective="batch"))[0].status == 200
        tasks = [asyncio.ensure_future(ask(s, 20)) for _ in range(12)]
        await until(lambda: s.app.fleet.endpoints[0].metrics.waiting > 7)
        response, body = await ask(s, objective="batch")
        assert (response.status, body["error"]["code"]) == (429, "queue_full")
        assert response.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert [(await one)[0].status for one in tasks] == [200] * 12
        await until(lambda: s.app.fleet.endpoints[0].metrics.waiting == 0)
        assert (await ask(s, 1, objective="batch"))[0].status == 200


async def test_a_retry_goes_to_a_pod_with_capacity() -> None:
    async with stack(3, SLOW, {"flowControl": {"maxConcurrentPerPod": 1}}) as s:
        busy = asyncio.ensure_future(ask(s, 100))
        await until(lambda: at_once(s) == 1)
        (full,) = (endpoint.name for endpoint in s.app.fleet.endpoints if endpoint.load.requests)
        free = [f"pod-{number}" for number in range(3) if f"pod-{number}" != full]
        await s.pod(free[0]).stop()
        for _ in range(4):
            response, _ = await ask(s, 2)
            assert (response.status, response.headers["x-kvlane-endpoint"]) == (200, free[1])
        assert (await busy)[0].status == 200


class TestWithObjectives:
    """Who is more urgent."""

    @asynccontextmanager
    async def stack(self, **section: Any) -> AsyncIterator[Stack]:
        async with stack(1, SLOW, {"flowControl": section}) as s:
            s.app.serving.gateway.resolver = ByHeaders()
            yield s

    async def test_an_urgent_request_evicts_a_sheddable_one_without_a_response(self) -> None:
        async with self.stack(maxConcurrent=1, evictSheddable=True) as s:
            batch = asyncio.ensure_future(ask(s, 200, objective="batch"))
            await until(lambda: at_once(s) == 1)
            response, _ = await ask(s, 2, objective="chat")
            assert response.status == 200
            response, body = await batch
            assert (response.status, response.headers["x-kvlane-reason"]) == (429, "evicted-priority")
            assert body["error"]["code"] == "evicted"
            await s.idle()

    async def test_an_evicted_stream_ends_with_an_error_and_without_done(self) -> None:
        async with self.stack(maxConcurrent=1, evictSheddable=True) as s:
            body = {"model": "sim", "prompt": "Hi", "max_tokens": 500, "ignore_eos": True, "stream": True}
            headers = {"x-llm-d-inference-objective": "batch"}
            async with s.http.post(s.url + "/v1/completions", json=body, headers=headers) as response:
                assert response.status == 200
                await response.content.readany()
                urgent, _ = await ask(s, 2, objective="chat")
                assert urgent.status == 200
                rest = await response.read()
            *_, last = rest.decode().strip().split("\n\n")
            assert "error" in orjson.loads(last.removeprefix("data: "))
            assert "[DONE]" not in rest.decode()
            await s.idle()
            assert (
                await s.sample('kvlane_queue_refused_total{band="-1",pool="default",reason="evicted-priority"}') == 1.0
            )
            series = 'kvlane_requests_total{model="sim",outcome="evicted",path="completions",status="2xx"}'
            assert await s.sample(series) == 1.0

    async def test_tenants_alternate_under_the_load_of_one(self) -> None:
        async with self.stack(maxConcurrent=1) as s:
            first = asyncio.ensure_future(ask(s, 30))
            await until(lambda: at_once(s) == 1)
            many = [asyncio.ensure_future(ask(s, 5, tenant="many")) for _ in range(10)]
            await until(lambda: waiting(s) == 10)
            few = asyncio.ensure_future(ask(s, 5, tenant="few"))
            await few
            assert sum(one.done() for one in many) <= 2
            await asyncio.gather(first, *many)
