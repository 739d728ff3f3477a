"""The exact prefix index in front of a simulated pod whose data-parallel ranks publish KV events."""

from __future__ import annotations

import asyncio
import itertools

import aiohttp
import pytest

from proxy.app import App
from proxy.lab.sim import SimConfig, SimPod
from proxy.plugins.producers.precise_prefix_cache import PrecisePrefixCacheProducer
from proxy.prefix.exact import ExactIndex
from proxy.settings import from_mapping
from tests.helpers.ports import free_port
from tests.helpers.waiting import until

pytest.importorskip("zmq", reason="needs the extra: pip install 'kvlane[precise]'")
pytest.importorskip("msgpack")

RANKS = 4


async def subscribed(index: ExactIndex, client: aiohttp.ClientSession, pod: str, rank: int) -> None:
    """Wait for an event of the rank; earlier events are lost."""
    known = index.pairs
    for number in itertools.count():
        body = {"prompt": f"{rank} {number} " + "words" * 40, "max_tokens": 1}
        async with client.post(f"{pod}/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}):
            await asyncio.sleep(0.02)
        if index.pairs > known:
            return


async def test_a_prompt_returns_to_the_rank_that_published_its_blocks() -> None:
    port = free_port(RANKS)
    async with SimPod(SimConfig(time_scale=50, data_parallel_size=RANKS, kv_events_port=port)) as pod:
        settings = {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"host": "127.0.0.1", "port": 0},
            "telemetry": {"accessLog": False},
            "pods": {"static": [{"url": pod.url, "labels": {"kvlane/kv-events-port": str(port)}}]},
            "scheduling": {
                "plugins": [
                    {"type": "token-producer", "parameters": {"pod": {}}},
                    {"type": "precise-prefix-cache-producer"},
                    {"type": "prefix-cache-scorer"},
                ]
            },
        }
        async with App(from_mapping(settings)) as app, aiohttp.ClientSession() as client:
            (index,) = (one.index for one in app.schedulings["default"].plugins(PrecisePrefixCacheProducer))
            await until(lambda: len(app.fleet.endpoints) == RANKS)

            for rank in range(RANKS):
                await subscribed(index, client, pod.url, rank)

            async def rank_of(text: str) -> int | None:
                body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 1}
                async with client.post(f"http://127.0.0.1:{app.port}/v1/chat/completions", json=body) as response:
                    assert response.status == 200, await response.text()
                return pod.requests[-1].rank

            texts = [f"Text number {number}: " + "some words of it, and more. " * 20 for number in range(8)]
            first = []
            for text in texts:
                known = index.pairs
                first.append(await rank_of(text))
                await until(lambda known=known: index.pairs > known)  # type: ignore[misc]
            assert len(set(first)) > 1
            assert [await rank_of(text) for text in texts] == first
