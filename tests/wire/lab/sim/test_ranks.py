"""A pod with data-parallel ranks: one port, and a queue and a KV cache per rank."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.lab.sim import SimConfig, SimPod
from proxy.lab.sim.driver import COUNTS_INTERVAL, InternalBalancer
from tests.helpers.lab.sim.support import post, refusal

PROMPT = "w" * 400
HEADER = "X-data-parallel-rank"


@asynccontextmanager
async def ranked(**config: Any) -> AsyncIterator[tuple[SimPod, aiohttp.ClientSession]]:
    defaults: dict[str, Any] = {"data_parallel_size": 4, "time_scale": 50}
    async with SimPod(SimConfig(**{**defaults, **config})) as pod, aiohttp.ClientSession(pod.url) as client:
        yield pod, client


async def ask(client: aiohttp.ClientSession, rank: object = None, path: str = "/v1/completions", **body: Any) -> Any:
    headers = {} if rank is None else {HEADER: str(rank)}
    async with client.post(path, json={"prompt": PROMPT, "max_tokens": 1, **body}, headers=headers) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_the_header_selects_the_rank_and_each_rank_has_its_own_cache() -> None:
    async with ranked() as (pod, client):
        cached = [(await ask(client, rank))["usage"]["prompt_tokens_details"]["cached_tokens"] for rank in (2, 2, 3, 2)]
        assert cached == [0, 96, 0, 96]
        assert [record.rank for record in pod.requests] == [2, 2, 3, 2]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_chat_and_messages_read_the_header(path: str) -> None:
    async with ranked() as (pod, client):
        await ask(client, 3, path, messages=[{"role": "user", "content": PROMPT}])
        assert pod.requests[0].rank == 3


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/embeddings"])
async def test_vllm_ignores_the_header_on_other_paths(path: str) -> None:
    async with ranked() as (pod, client):
        await ask(client, 3, path, input=PROMPT)
        assert pod.requests[0].rank == 0


async def test_a_rank_that_does_not_exist_is_refused() -> None:
    async with ranked() as (_, client):
        client.headers[HEADER] = "4"
        status, error = await refusal(client, "/v1/completions", prompt=PROMPT)
        assert (status, error["error"]["message"]) == (400, "data_parallel_rank 4 is out of range [0, 4).")


async def test_a_header_that_is_not_a_number_leaves_the_choice_to_the_balancer() -> None:
    async with ranked() as (pod, client):
        await ask(client, "third")
        assert pod.requests[0].rank == 0


async def test_an_old_engine_ignores_the_header() -> None:
    async with ranked(ignore_rank=True) as (pod, client):
        await ask(client, 3)
        assert pod.requests[0].rank == 0


@pytest.mark.parametrize("field", ["routed_dp_rank", "data_parallel_rank"])
async def test_sglang_reads_the_rank_in_the_body_and_prefers_the_header(field: str) -> None:
    async with ranked(connector="sglang") as (pod, client):
        await ask(client, None, "/v1/completions", **{field: 2})
        await ask(client, 1, "/v1/completions", **{field: 2})
        assert [record.rank for record in pod.requests] == [2, 1]


async def test_metrics_have_a_series_per_rank() -> None:
    async with ranked() as (_, client):
        for rank in (0, 2, 2):
            await ask(client, rank)
        async with client.get("/metrics") as response:
            families = {each.name: each for each in text_string_to_metric_families(await response.text())}
    hits = {s.labels["engine"]: s.value for s in families["vllm:prefix_cache_hits"].samples}
    assert hits == {"0": 0, "1": 0, "2": 96, "3": 0}
    for name in ("vllm:kv_cache_usage_perc", "vllm:cache_config_info"):
        assert [sample.labels["engine"] for sample in families[name].samples] == ["0", "1", "2", "3"]
    counts = [s for s in families["vllm:time_to_first_token_seconds"].samples if s.name.endswith("_count")]
    assert [sample.value for sample in counts] == [1, 0, 2, 0]


async def test_the_state_lists_the_blocks_of_each_rank() -> None:
    async with ranked() as (_, client):
        await ask(client, 1)
        async with client.get("/admin/state") as response:
            state = await response.json()
    assert [rank["cached_blocks"] for rank in state["ranks"]] == [0, 6, 0, 0]
    assert state["cached_blocks"] == 6


async def test_all_ranks_lose_their_prefixes_when_the_pod_sleeps() -> None:
    async with ranked() as (pod, client):
        for rank in range(4):
            await ask(client, rank)
        await client.post("/sleep")
        assert {(engine.pool.idle, engine.sleep_level) for engine in pod.engines} == {(0, 1)}


async def test_the_balancer_spreads_simultaneous_requests() -> None:
    async with ranked(time_scale=1) as (pod, client):
        prompts = [PROMPT] * 4
        await post(client, "/v1/completions", prompt=prompts, max_tokens=1)
        assert [engine.stats.prompt_tokens for engine in pod.engines] == [100] * 4


def test_the_balancer_sees_queues_as_it_read_them_last() -> None:
    queues = [(0, 0), (0, 0)]
    balancer = InternalBalancer(lambda: queues)
    assert [balancer.choose(0.0) for _ in range(3)] == [0, 1, 0]
    queues[0] = (3, 0)
    assert balancer.choose(COUNTS_INTERVAL / 2) == 1
    assert balancer.choose(COUNTS_INTERVAL) == 1


async def test_in_lockstep_a_prefill_on_one_rank_delays_the_responses_on_all() -> None:
    """Two seconds of prefill on rank 0 while rank 1 decodes."""
    paces = {}
    for lockstep in (False, True):
        async with ranked(data_parallel_size=2, lockstep=lockstep, time_scale=1) as (pod, client):
            stream = client.post(
                "/v1/completions",
                json={"prompt": "a", "max_tokens": 10_000, "stream": True, "ignore_eos": True},
                headers={HEADER: "1"},
            )
            async with stream as response:
                await response.content.readany()
                begun = pod.engines[1].stats.generation_tokens
                await ask(client, 0, prompt="b" * 20_000)
                paces[lockstep] = pod.engines[1].stats.generation_tokens - begun
    assert paces[True] < paces[False] / 4


async def test_a_pod_that_returns_has_all_its_ranks_with_empty_caches() -> None:
    async with ranked() as (pod, client):
        await ask(client, 3)
        port = pod.port
        await pod.kill()
        await pod.start(port=port)
        assert (await ask(client, 3))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(pod.engines) == 4
