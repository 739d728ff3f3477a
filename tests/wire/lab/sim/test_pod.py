from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp
import pytest

from proxy.lab.sim import SimConfig, SimPod, StepTiming
from proxy.lab.sim.sequence import text_hash
from tests.helpers.lab.sim.support import CHAT, USER, is_idle, post
from tests.helpers.waiting import PATIENCE, until

COMPLETIONS = "/v1/completions"
SLOW = StepTiming(base=0.02, per_prefill_token=0.02)


@asynccontextmanager
async def serving(config: SimConfig) -> AsyncIterator[tuple[SimPod, aiohttp.ClientSession]]:
    async with SimPod(config) as pod, aiohttp.ClientSession(pod.url) as client:
        yield pod, client


def starts(client: aiohttp.ClientSession, **body: Any) -> asyncio.Task[None]:
    """A client that reads until it is cancelled."""

    async def talk() -> None:
        async with client.post(COMPLETIONS, json=body) as response:
            await response.read()

    return asyncio.get_running_loop().create_task(talk())


async def leaves(client: asyncio.Task[None]) -> None:
    client.cancel()
    await asyncio.wait([client])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_before_the_first_token_leaves_the_engine(stream: bool) -> None:
    async with serving(SimConfig(timing=SLOW)) as (pod, client):
        task = starts(client, prompt="x" * 8_000, stream=stream)
        await until(lambda: len(pod.engine.running) == 1)
        await leaves(task)
        await until(lambda: is_idle(pod))
        assert pod.requests[0].aborted
        assert pod.requests[0].first_token is None
        assert (pod.engine.stats.aborted, pod.requests.aborted) == (1, 1)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_in_the_middle_leaves_the_engine(stream: bool) -> None:
    async with serving(SimConfig(time_scale=5)) as (pod, client):
        task = starts(client, prompt="x", max_tokens=100_000, stream=stream)
        await until(lambda: pod.engine.stats.generation_tokens > 3)
        await leaves(task)
        await until(lambda: is_idle(pod))
        assert pod.requests[0].aborted
        assert pod.engine.kv_usage == 0
        assert pod.requests[0].generated_tokens < 100_000


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_the_queue_is_never_started(stream: bool) -> None:
    async with serving(SimConfig(max_num_seqs=1, time_scale=5)) as (pod, client):
        first = starts(client, prompt="x", max_tokens=100_000, stream=True)
        await until(lambda: len(pod.engine.running) == 1)
        queued = starts(client, prompt="y", stream=stream)
        await until(lambda: len(pod.engine.waiting) == 1)
        await leaves(queued)
        await until(lambda: not pod.engine.waiting)
        await leaves(first)
        await until(lambda: is_idle(pod))
        assert [record.aborted for record in pod.requests] == [True, True]
        assert pod.requests[1].started is None


async def test_leaving_ends_all_choices() -> None:
    async with serving(SimConfig(time_scale=5)) as (pod, client):
        task = starts(client, prompt=["x", "y"], n=3, max_tokens=100_000)
        await until(lambda: len(pod.engine.running) == 6)
        await leaves(task)
        await until(lambda: is_idle(pod))
        assert (pod.engine.stats.aborted, pod.requests.aborted) == (6, 1)


async def test_the_log_has_requests_and_their_results(pod: SimPod, client: aiohttp.ClientSession) -> None:
    raw = b'{"prompt":"' + b"x" * 400 + b'"}'
    headers = {"Content-Type": "application/json", "X-Request-Id": "r1", "X-Tenant": "t"}
    for _ in range(2):
        async with client.post(COMPLETIONS, data=raw, headers=headers) as response:
            await response.read()
    async with client.get("/admin/requests") as response:
        first, second = await response.json()
    assert (first["id"], first["path"], first["model"], first["status"]) == ("r1", COMPLETIONS, "sim", 200)
    assert first["body_sha256"] == hashlib.sha256(raw).hexdigest()
    assert first["headers"]["x-tenant"] == "t"
    assert [first["cached_tokens"], second["cached_tokens"]] == [0, 96]
    assert first["arrived"] <= first["started"] <= first["first_token"] <= first["ended"]
    assert not first["aborted"]


async def test_the_state_lists_requests_in_flight() -> None:
    async with serving(SimConfig(max_num_seqs=1, time_scale=5)) as (pod, client):
        headers = {"X-Request-Id": "busy"}
        body = {"prompt": "x" * 64, "max_tokens": 100_000, "stream": True}
        async with client.post(COMPLETIONS, json=body, headers=headers):
            await until(lambda: len(pod.engine.running) == 1)
            async with client.get("/admin/state") as response:
                state = await response.json()
        assert (state["running"], state["waiting"], state["in_flight"]) == (1, 0, ["busy"])
        assert state["kv_usage"] > 0


async def test_a_reset_clears_prefixes_and_requests(pod: SimPod, client: aiohttp.ClientSession) -> None:
    await post(client, COMPLETIONS, prompt="x" * 400)
    await post(client, "/admin/reset")
    assert len(pod.requests) == 0
    reply = await post(client, COMPLETIONS, prompt="x" * 400)
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_killed_pod_resets_its_clients_and_refuses_new_ones() -> None:
    async with serving(SimConfig(time_scale=5)) as (pod, client):
        async with client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 100_000, "stream": True}) as response:
            await response.content.readline()
            await pod.kill()
            with pytest.raises(aiohttp.ClientPayloadError, match="reset by peer"):
                await response.read()
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get("/health")


async def test_a_stopped_pod_lets_running_requests_end() -> None:
    async with serving(SimConfig(time_scale=5)) as (pod, client):
        task = starts(client, prompt="x", max_tokens=20, stream=True)
        await until(lambda: pod.engine.stats.generation_tokens > 2)
        await pod.stop(grace=5)
        await task
        assert pod.requests[0].generated_tokens == 20


async def test_a_stopped_pod_ends_requests_after_its_grace_period() -> None:
    async with serving(SimConfig(time_scale=5)) as (pod, client):
        task = starts(client, prompt="x", max_tokens=100_000, stream=True)
        await until(lambda: pod.engine.stats.generation_tokens > 2)
        await pod.stop(grace=0.01)
        with pytest.raises(aiohttp.ClientPayloadError):
            await task


async def test_a_pod_returns_on_its_port_with_an_empty_cache() -> None:
    async with serving(SimConfig(time_scale=20)) as (pod, client):
        await post(client, COMPLETIONS, prompt="x" * 400)
        await pod.kill()
        await pod.start(port=pod.port)
        reply = await post(client, COMPLETIONS, prompt="x" * 400)
        assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_large_body_is_read(client: aiohttp.ClientSession) -> None:
    body = BytesIO(b'{"prompt":"' + b"x" * 4_000_000 + b'"}')
    async with client.post("/tokenize", data=body, headers={"Content-Type": "application/json"}) as response:
        assert (await response.json())["count"] == 1_000_000


async def test_waits_are_divided_by_the_time_scale() -> None:
    timing = StepTiming(base=1.0)
    async with serving(SimConfig(timing=timing, time_scale=1_000)) as (_, client):
        async with asyncio.timeout(PATIENCE):
            await post(client, CHAT, messages=USER, max_tokens=50)


async def test_a_prompt_that_continues_a_configured_response_finds_it_in_the_cache() -> None:
    prompt, reply = "p" * 400, "configured response" + "." * 109
    config = SimConfig(responses={text_hash(prompt.encode()): reply.encode()})
    async with serving(config) as (_, client):
        completion = await post(client, COMPLETIONS, prompt=prompt, max_tokens=100)
        assert completion["choices"][0]["text"] == reply
        assert completion["usage"]["completion_tokens"] == 32
        again = await post(client, COMPLETIONS, prompt=f"{prompt}{reply} And then?", max_tokens=1)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
