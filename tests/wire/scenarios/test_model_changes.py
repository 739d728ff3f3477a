"""Pods whose models changed since they were last read: clients notice nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.endpoint import DEFAULT_POOL
from proxy.fleet.models import ROUND_EVERY
from proxy.lab.sim import SimConfig
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

RARELY: dict[str, Any] = {"pods": {"refresh": {"interval": "60s"}}}
"""Without a reason, models are read from pods before the first request only."""


def base(**fields: Any) -> SimConfig:
    return SimConfig(model="base", time_scale=20, **fields)


def questions(s: Stack, number: int, model: str | None = None) -> list[int]:
    """The statuses of the requests that the pod got."""
    return [r.status or 0 for r in s.pods[number].requests if r.path == CHAT and model in (None, r.model)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_404_of_a_pod_that_changed_its_model_is_retried_elsewhere(stream: bool) -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        s.pods[0].serve_models("other")
        for number in range(8):
            body = {"model": "base", "stream": stream, "messages": [{"role": "user", "content": f"question {number}"}]}
            async with s.http.post(s.url + CHAT, json=body) as response:
                assert response.status == 200
                assert response.headers["x-kvlane-endpoint"] == "pod-1"
                await response.read()
        assert questions(s, 0).count(404) >= 1
        assert s.app.breakers.state(s.app.fleet.endpoints[0]) == "closed"


async def test_a_404_without_another_pod_that_lists_the_model_passes() -> None:
    async with stack(2, [base(), SimConfig(model="other")], RARELY) as s:
        s.pods[0].serve_models("third")
        response, error = await s.chat(model="base")
        assert response.status == 404
        assert response.headers["x-kvlane-endpoint"] == "pod-0"
        assert "`base` does not exist" in error["error"]["message"]
        assert questions(s, 1) == []


async def test_a_404_of_every_pod_passes_after_one_attempt_each() -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        for pod in s.pods:
            pod.serve_models("other")
        response, error = await s.chat(model="base")
        assert response.status == 404
        assert "`base` does not exist" in error["error"]["message"]
        assert [questions(s, 0), questions(s, 1)] == [[404], [404]]


async def test_a_404_of_an_unknown_path_passes_without_another_attempt() -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        async with s.http.post(s.url + "/v1/nothing-of-this-kind", json={"model": "base"}) as response:
            assert response.status == 404
        assert sum(len([r for r in pod.requests if "nothing" in r.path]) for pod in s.pods) <= 1


async def test_a_404_about_something_else_passes_without_another_attempt() -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        async with s.http.get(s.url + "/v1/responses/resp_none") as response:
            assert response.status == 404
        assert sum(len([r for r in pod.requests if "resp_none" in r.path]) for pod in s.pods) <= 1


def reads(s: Stack) -> int:
    """Rounds of questions to pods: with RARELY each of them reads the models, and one for each pod is at the start."""
    assert s.app._process.polling is not None
    return s.app._process.polling.runners[DEFAULT_POOL].budget.rounds


async def test_an_adapter_loaded_at_run_time_is_found_on_request() -> None:
    async with stack(3, [base(), base(), base()], RARELY) as s:
        s.pods[1].serve_models(lora_adapters=["poems"])
        response, body = await s.chat(model="poems")
        assert (response.status, response.headers["x-kvlane-endpoint"]) == (200, "pod-1")
        assert body["model"] == "poems"


async def test_concurrent_requests_for_a_new_adapter_are_all_served() -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        s.pods[1].serve_models(lora_adapters=["poems"])
        responses = await asyncio.gather(*(s.chat(f"question {number}", model="poems") for number in range(20)))
        assert {response.status for response, _ in responses} == {200}
        await until(lambda: reads(s) >= 4)
        assert reads(s) == 4


async def test_an_adapter_unloaded_and_loaded_elsewhere_is_found_again() -> None:
    async with stack(2, [base(lora_adapters=("poems",)), base()], {"pods": {"refresh": {"interval": "1s"}}}) as s:
        s.pods[0].serve_models()
        assert (await s.chat(model="poems"))[0].status == 404
        await until(lambda: not s.app.fleet.endpoints_for("poems"))
        s.pods[1].serve_models(lora_adapters=["poems"])
        response, _ = await s.chat(model="poems")
        assert (response.status, response.headers["x-kvlane-endpoint"]) == (200, "pod-1")


async def test_an_alias_of_a_new_adapter_is_found_and_a_fallback_does_not_wait() -> None:
    models = {"aliases": {"verses": "poems"}, "fallbacks": {"laws": ["base"]}}
    async with stack(2, [base(), base()], {**RARELY, "models": models}) as s:
        s.pods[1].serve_models(lora_adapters=["poems", "laws"])
        response, _ = await s.chat(model="laws")
        assert (response.status, response.headers["x-kvlane-model"]) == (200, "base")
        assert reads(s) == 2
        response, body = await s.chat(model="verses")
        assert (response.status, response.headers["x-kvlane-endpoint"], body["model"]) == (200, "pod-1", "verses")


async def test_the_models_of_a_pod_are_read_at_once_after_its_404() -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        s.pods[0].serve_models("other")
        while not questions(s, 0):
            assert (await s.chat("a question", model="base"))[0].status == 200
        await until(lambda: s.app.fleet.endpoints_for("base") == (s.app.fleet.get("pod-1"),))
        assert s.app.fleet.endpoints_for("other") == (s.app.fleet.get("pod-0"),)
        assert reads(s) == 3


async def test_the_only_pod_that_changes_its_model_serves_the_new_one_at_once() -> None:
    async with stack(1, [base()], RARELY) as s:
        s.pods[0].serve_models("other")
        assert (await s.chat(model="other"))[0].status == 200
        assert (await s.chat(model="base"))[0].status == 503


async def test_invented_models_cause_one_read_per_pod_and_second() -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        clock = asyncio.get_running_loop()
        began = clock.time()
        for batch in range(3):
            responses = await asyncio.gather(*(s.chat(model=f"invented-{batch}-{number}") for number in range(40)))
            assert {response.status for response, _ in responses} == {404}
        most = int((clock.time() - began) / ROUND_EVERY) + 1
        assert 4 <= reads(s) <= 2 + 2 * most
        assert questions(s, 0) == questions(s, 1) == []


async def test_a_model_of_an_unreachable_pod_is_unavailable_without_a_read() -> None:
    async with stack(2, [base(), SimConfig(model="other")], RARELY) as s:
        await s.pods[1].kill()
        statuses = [(await s.chat(model="other"))[0].status for _ in range(3)]
        assert set(statuses) <= {502, 503}
        assert reads(s) == 2


async def test_a_hanging_pod_does_not_hide_a_new_adapter() -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        s.pods[1].serve_models(lora_adapters=["poems"])
        port = s.pods[0].port
        await s.pods[0].stop()
        hanging: list[asyncio.StreamWriter] = []
        async with await asyncio.start_server(lambda _, writer: hanging.append(writer), "127.0.0.1", port):
            response, _ = await s.chat(model="poems")
            assert (response.status, response.headers["x-kvlane-endpoint"]) == (200, "pod-1")
            for writer in hanging:
                writer.close()


async def test_a_key_without_permission_for_a_model_causes_no_read() -> None:
    keys = [{"name": "a", "key": "secret-a", "models": ["base"]}]
    async with stack(2, [base(), base()], {**RARELY, "security": {"apiKeys": keys}}) as s:
        s.pods[1].serve_models(lora_adapters=["poems"])
        headers = {"authorization": "Bearer secret-a"}
        response, _ = await s.post(CHAT, {"model": "poems", "messages": []}, headers)
        assert (response.status, reads(s)) == (404, 2)
