"""The plugin with an external service, in the whole proxy: with its service well, hanging, and gone."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from proxy.pool import PRODUCE_DEADLINE
from tests.helpers.docs.greenest import Forecast, forecast, installed
from tests.helpers.docs.pages import ROOT, yaml_blocks
from tests.helpers.scenarios.stack import CHAT, Stack, stack
from tests.helpers.waiting import until

PATIENCE = 20.0
"""Seconds after which a request counts as stuck, however slow the machine."""


@pytest.fixture(autouse=True)
def package(tmp_path: Path) -> Iterator[None]:
    with installed(tmp_path):
        yield


def settings(service: Forecast) -> dict[str, Any]:
    """The configuration that the page shows, with the service's port."""
    (block,) = (block for block in yaml_blocks("configurations") if block.page == ROOT / "docs" / "writing-plugins.md")
    scheduling: dict[str, Any] = yaml.safe_load(block.text)["scheduling"]
    (producer,) = (plugin for plugin in scheduling["plugins"] if plugin["type"] == "green-forecast-producer")
    producer["parameters"]["port"] = service.port
    return {"scheduling": scheduling}


async def pod_of(s: Stack, text: str) -> str:
    async with asyncio.timeout(PATIENCE):
        response, _ = await s.chat(text, max_tokens=2)
    assert response.status == 200
    return response.headers["x-kvlane-endpoint"]


@pytest.mark.parametrize("best", ["pod-0", "pod-1"])
async def test_a_service_that_responds_decides(best: str) -> None:
    async with forecast({best: 0.9}) as service, stack(2, settings=settings(service)) as s:
        assert {await pod_of(s, f"question {number}") for number in range(4)} == {best}
        assert service.queries == 4


async def test_a_hanging_service_costs_the_deadline_and_not_the_request() -> None:
    async with forecast(None) as service, stack(2, settings=settings(service)) as s:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await pod_of(s, "Hello!")
        assert loop.time() - started >= PRODUCE_DEADLINE
        await until(lambda: service.given_up == 1)


async def test_requests_do_not_wait_for_each_others_deadlines() -> None:
    async with forecast(None) as service, stack(2, settings=settings(service)) as s:
        loop = asyncio.get_running_loop()
        started = loop.time()
        async with asyncio.timeout(PATIENCE):
            responses = await asyncio.gather(*(s.chat(f"question {number}", max_tokens=2) for number in range(40)))
        assert [response.status for response, _ in responses] == [200] * 40
        assert loop.time() - started < 40 * PRODUCE_DEADLINE / 2
        await until(lambda: service.given_up == service.queries == 40)


async def test_other_producers_still_decide_while_it_hangs() -> None:
    documents = [f"document {number} " * 400 for number in range(3)]
    async with forecast(None) as service, stack(2, settings=settings(service)) as s:
        homes = {document: await pod_of(s, document) for document in documents}
        assert len(set(homes.values())) == 2, "all on one pod would prove nothing"
        for document in documents:
            assert await pod_of(s, document) == homes[document]


async def test_a_stream_is_served_while_it_hangs() -> None:
    body = {"model": "sim", "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}
    async with forecast(None) as service, stack(2, settings=settings(service)) as s, asyncio.timeout(PATIENCE):
        async with s.http.post(s.url + CHAT, json=body) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        assert service.queries == 1


async def test_a_client_that_leaves_while_it_hangs_cancels_the_query() -> None:
    async with forecast(None) as service, stack(2, settings=settings(service)) as s:
        task = asyncio.get_running_loop().create_task(s.chat())
        await until(lambda: service.queries == 1)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await until(lambda: service.given_up == 1)
        await s.idle()
        assert not any(len(list(pod.requests)) for pod in s.pods)


async def test_an_unreachable_service_costs_nothing() -> None:
    async with forecast(None) as service:
        gone = settings(service)
    async with stack(2, settings=gone) as s:
        await pod_of(s, "Hello!")


async def test_a_malformed_response_of_the_service_costs_nothing() -> None:
    async with forecast({"pod-0": 7.0, "pod-1": float("nan")}) as service, stack(2, settings=settings(service)) as s:
        await pod_of(s, "Hello!")
