"""Pods that come, go, die and return while clients are being served."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.lab.sim import SimConfig, SimPod
from tests.helpers.ports import free_port
from tests.helpers.scenarios.stack import BY_LOAD, Stack, stack
from tests.helpers.waiting import until

QUICK = SimConfig(time_scale=20)


@asynccontextmanager
async def load(s: Stack, clients: int = 8) -> AsyncIterator[list[int]]:
    """Clients that ask one question after the other until the end; what is yielded are the statuses so far."""
    statuses: list[int] = []
    numbers = itertools.count()
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            response, _ = await s.chat(f"question {next(numbers)}", max_tokens=4)
            statuses.append(response.status)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(ask())
        yield statuses
        over.set()


def endpoint(s: Stack, name: str) -> Endpoint:
    found = s.app.fleet.get(name)
    assert found is not None
    return found


async def test_pods_are_added_and_removed_under_load_without_a_failed_request() -> None:
    async with stack(3, settings=BY_LOAD) as s, SimPod(QUICK) as fresh:
        async with load(s) as statuses:
            added, pod = await s.operate("POST", "/admin/pods", {"url": fresh.url, "name": "fresh"})
            assert (added.status, pod["state"]) == (201, "starting")
            await until(lambda: len(fresh.requests) > 5)

            drained, pod = await s.operate("POST", "/admin/pods/pod-0/drain")
            assert (drained.status, pod["state"]) == (200, "draining")
            await until(lambda: not endpoint(s, "pod-0").load.requests)
            before, count = len(s.pods[0].requests), len(statuses)
            await until(lambda: len(statuses) > count + 40)
            assert len(s.pods[0].requests) == before

            await s.operate("POST", "/admin/pods/pod-0/undrain")
            await until(lambda: len(s.pods[0].requests) > before + 5)

            removed, _ = await s.operate("DELETE", "/admin/pods/pod-1")
            assert removed.status == 202
            await until(lambda: s.app.fleet.get("pod-1") is None)
            before, count = len(s.pods[1].requests), len(statuses)
            await until(lambda: len(statuses) > count + 40)
            assert len(s.pods[1].requests) == before
        assert set(statuses) == {200}
        await s.idle()


async def test_a_pod_drains_until_its_streams_end() -> None:
    async with stack(2) as s:
        body = {"model": "sim", "messages": [{"role": "user", "content": "a"}], "max_tokens": 600, "stream": True}
        async with s.http.post(s.url + "/v1/chat/completions", json=body) as response:
            await response.content.readuntil(b"\n\n")
            name = response.headers["x-kvlane-endpoint"]
            await s.operate("DELETE", f"/admin/pods/{name}")
            _, listed = await s.operate("GET", "/admin/pods")
            assert {pod["name"]: pod["state"] for pod in listed["pods"]}[name] == "draining"
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await until(lambda: s.app.fleet.get(name) is None)


async def test_a_removed_pod_is_dropped_from_metrics_index_and_bindings() -> None:
    async with stack(2) as s:
        response, body = await s.post("/v1/responses", {"model": "sim", "input": "a long prompt " * 300})
        name = response.headers["x-kvlane-endpoint"]
        decisions = f'kvlane_scheduling_decisions_total{{endpoint="{name}"}}'
        assert await s.sample(decisions) == 1
        assert await s.sample("kvlane_prefix_index_blocks")
        await s.operate("DELETE", f"/admin/pods/{name}")
        await until(lambda: s.app.fleet.get(name) is None)
        assert await s.sample(decisions) is None
        assert await s.sample("kvlane_prefix_index_blocks") == 0
        await s.operate("POST", "/admin/pods", {"url": s.pod(other(name)).url + "/", "name": "again"})
        async with s.http.get(f"{s.url}/v1/responses/{body['id']}") as response:
            assert response.status == 404


def other(name: str) -> str:
    return {"pod-0": "pod-1", "pod-1": "pod-0"}[name]


async def test_operator_errors_are_reported() -> None:
    async with stack(1) as s:
        wrong: list[tuple[str, str, Any, int]] = [
            ("POST", "/admin/pods", {"url": "no url"}, 400),
            ("POST", "/admin/pods", {"name": "x"}, 400),
            ("POST", "/admin/pods", {"url": s.pods[0].url, "name": "twice"}, 400),
            ("DELETE", "/admin/pods/nobody", None, 404),
            ("POST", "/admin/pods/nobody/drain", None, 404),
            ("GET", "/admin/pods/pod-0/drain", None, 405),
        ]
        for method, path, body, status in wrong:
            response, payload = await s.operate(method, path, body)
            assert response.status == status, path
            assert payload["error"]["message"]


async def test_changes_of_a_watched_file_apply(tmp_path: Path) -> None:
    file = tmp_path / "pods.yaml"
    file.write_text("[]")
    settings = {"pods": {"file": str(file)}, **BY_LOAD}
    async with SimPod(QUICK) as one, SimPod(QUICK) as two, stack(0, settings=settings) as s:
        assert (await s.chat())[0].status == 503
        async with s.http.get(s.url + "/health") as response:
            assert response.status == 503
        file.write_text(json.dumps([entry(one, "one"), entry(two, "two")]))
        await until(lambda: names(s) == {"one", "two"})
        file.write_text("- {url: broken")
        async with load(s) as statuses:
            await until(lambda: bool(len(one.requests) and len(two.requests)))
            file.write_text(json.dumps([entry(two, "two")]))
            await until(lambda: names(s) == {"two"})
            before = len(one.requests)
            count = len(statuses)
            await until(lambda: len(statuses) > count + 20)
            assert len(one.requests) <= before + 8
        assert set(statuses) == {200}


def entry(pod: SimPod, name: str) -> dict[str, str]:
    return {"url": pod.url, "name": name}


def names(s: Stack) -> set[str]:
    return {endpoint.name for endpoint in s.app.fleet.ready}


async def test_a_crashed_pod_returns_with_an_empty_cache_and_is_used_again() -> None:
    prompt = "warm words " * 800
    async with stack(2, settings={"reliability": {"breaker": {"slowStart": 0}}}) as s:
        first, _ = await s.chat(prompt)
        name = first.headers["x-kvlane-endpoint"]
        pod, endpoint = s.pod(name), s.app.fleet.get(name)
        assert endpoint is not None
        its_blocks = await s.sample("kvlane_prefix_index_blocks")
        assert its_blocks

        await pod.kill()
        await until(lambda: endpoint.state is EndpointState.EJECTED)
        assert await s.sample(f'kvlane_endpoint_state{{endpoint="{name}",state="ejected"}}') == 1
        assert (await s.chat("while it is unreachable"))[0].headers["x-kvlane-endpoint"] != name

        all_blocks = await s.sample("kvlane_prefix_index_blocks")
        assert all_blocks

        await pod.start(port=pod.port)
        await until(lambda: endpoint.state is EndpointState.READY)
        assert await s.sample("kvlane_prefix_index_blocks") == all_blocks - its_blocks
        responses = await asyncio.gather(*(s.chat(f"question {number}") for number in range(8)))
        assert {result.headers["x-kvlane-endpoint"] for result, _ in responses} == {"pod-0", "pod-1"}
        response, result = await s.chat(prompt)
        assert (response.status, result["usage"]["prompt_tokens_details"]["cached_tokens"]) == (200, 0)


async def test_an_unnoticed_restart_is_detected_from_the_metrics() -> None:
    async with stack(1, settings={"pods": {"refresh": {"interval": "300ms"}}}) as s:
        await s.chat("warm words " * 800)
        assert await s.sample("kvlane_prefix_index_blocks")
        pod, seen = s.pods[0], s.app.fleet.ready[0].metrics.scraped_at
        await until(lambda: s.app.fleet.ready[0].metrics.prefix_queries > 0)
        await pod.kill()
        await pod.start(port=pod.port)
        await until(lambda: s.app.fleet.ready[0].metrics.scraped_at > seen)
        await until(lambda: s.app.fleet.ready[0].metrics.prefix_queries == 0)
        assert await s.sample("kvlane_prefix_index_blocks") == 0


async def test_a_pod_that_starts_late_is_found() -> None:
    port = free_port()
    late = SimPod(QUICK)
    async with stack(1, settings=BY_LOAD) as s:
        added, _ = await s.operate("POST", "/admin/pods", {"url": f"http://127.0.0.1:{port}", "name": "late"})
        assert added.status == 201
        assert [(await s.chat(f"early {number}"))[0].status for number in range(4)] == [200] * 4
        await late.start(port=port)
        try:
            await until(lambda: names(s) == {"pod-0", "late"})
            responses = await asyncio.gather(*(s.chat(f"question {number}") for number in range(8)))
            assert {response.headers["x-kvlane-endpoint"] for response, _ in responses} == {"pod-0", "late"}
        finally:
            await late.stop()


async def test_readiness_tracks_the_pods() -> None:
    async with stack(1) as s:
        ready, detail = await s.operate("GET", "/readyz")
        assert (ready.status, detail["pods"]) == (200, {"ready": 1, "total": 1})
        await s.operate("POST", "/admin/pods/pod-0/drain")
        assert (await s.operate("GET", "/readyz"))[0].status == 503
        assert (await s.operate("GET", "/healthz"))[0].status == 200
        async with s.http.get(s.url + "/health") as response:
            assert response.status == 503
        refused, body = await s.chat()
        assert (refused.status, body["error"]["code"]) == (503, "no_endpoints")
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-no-endpoints"
        await s.operate("POST", "/admin/pods/pod-0/undrain")
        assert (await s.chat())[0].status == 200
