"""Pods that serve other models than when they were last asked: clients notice nothing."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.sim import SimConfig
from tests.scenarios.stack import CHAT, Stack, stack

RARELY: dict[str, Any] = {"pods": {"refresh": {"interval": "60s"}}}
"""Pods say by themselves what they serve before the first request only."""


def base(**fields: Any) -> SimConfig:
    return SimConfig(model="base", time_scale=20, **fields)


def questions(s: Stack, number: int, model: str | None = None) -> list[int]:
    """The statuses of the requests that the pod got."""
    return [r.status or 0 for r in s.pods[number].requests if r.path == CHAT and model in (None, r.model)]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_404_of_a_pod_that_changed_its_model_is_asked_elsewhere(stream: bool) -> None:
    async with stack(2, [base(), base()], RARELY) as s:
        s.pods[0].serve_models("other")
        for number in range(8):
            body = {"model": "base", "stream": stream, "messages": [{"role": "user", "content": f"question {number}"}]}
            async with s.http.post(s.url + CHAT, json=body) as response:
                assert response.status == 200
                assert response.headers["x-kvlane-endpoint"] == "pod-1"
                await response.read()
        assert questions(s, 0).count(404) >= 1
        assert s.app.reliability.breakers.state(s.app.fleet.endpoints[0]) == "closed"


async def test_a_404_without_another_pod_that_lists_the_model_passes() -> None:
    async with stack(2, [base(), SimConfig(model="other")], RARELY) as s:
        s.pods[0].serve_models("third")
        response, error = await s.chat(model="base")
        assert response.status == 404
        assert response.headers["x-kvlane-endpoint"] == "pod-0"
        assert "`base` does not exist" in error["error"]["message"]
        assert questions(s, 1) == []


async def test_a_404_of_every_pod_passes_after_each_was_asked_once() -> None:
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
