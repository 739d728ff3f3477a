"""KV events of simulated pods, as vLLM publishes them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from proxy.lab.sim import SimConfig, SimPod
from proxy.lab.sim.sequence import token_ids
from tests.helpers.lab.sim.support import post
from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE

zmq = pytest.importorskip("zmq", reason="needs the extra: pip install 'kvlane[precise]'")
msgpack = pytest.importorskip("msgpack")

PROMPT = "".join(f"{number:04d}" for number in range(100))
RANKS = 2


class Subscriber:
    """The messages of one rank."""

    def __init__(self, context: Any, port: int) -> None:
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    async def message(self) -> tuple[int, list[Any], int]:
        """Return its number, its events and the rank."""
        async with asyncio.timeout(PATIENCE):
            _, number, payload = await self._socket.recv_multipart()
        _, events, rank = msgpack.unpackb(payload)
        return int.from_bytes(number, "big"), events, rank

    def close(self) -> None:
        self._socket.close(linger=0)


@asynccontextmanager
async def publishing(**config: Any) -> AsyncIterator[tuple[aiohttp.ClientSession, list[Subscriber]]]:
    """A pod of two ranks. Both subscriptions have arrived: a first event of each rank has come."""
    import zmq.asyncio

    port = free_port(RANKS)
    context = zmq.asyncio.Context()
    settings: dict[str, Any] = {"time_scale": 50, "data_parallel_size": RANKS, "kv_events_port": port, **config}
    async with SimPod(SimConfig(**settings)) as pod, aiohttp.ClientSession(pod.url) as client:
        subscribers = [Subscriber(context, port + rank) for rank in range(RANKS)]
        try:
            for rank, subscriber in enumerate(subscribers):
                await _subscribed(client, subscriber, rank)
            yield client, subscribers
        finally:
            for subscriber in subscribers:
                subscriber.close()
            context.destroy(linger=0)


async def _subscribed(client: aiohttp.ClientSession, subscriber: Subscriber, rank: int) -> None:
    """Wait until events arrive, and receive the events of all requests so far."""
    first = asyncio.ensure_future(subscriber.message())
    for number in range(1000):
        await ask(client, rank, f"{number:04d}" * 16)
        if (await asyncio.wait([first], timeout=0.01))[0]:
            break
    await first
    last = "last" * 16
    await ask(client, rank, last)
    tokens = token_ids(last.encode())
    while not any(event.get("token_ids") == tokens for event in (await subscriber.message())[1]):
        pass


async def ask(client: aiohttp.ClientSession, rank: int, prompt: str, **body: Any) -> None:
    body = {"prompt": prompt, "max_tokens": 1, **body}
    async with client.post("/v1/completions", json=body, headers={"X-data-parallel-rank": str(rank)}) as response:
        assert response.status == 200


async def test_the_blocks_of_a_prompt_are_published_with_their_tokens_by_its_rank() -> None:
    async with publishing() as (client, (_, second)):
        await ask(client, 1, PROMPT)
        _, events, rank = await second.message()
    assert rank == 1
    assert [event["type"] for event in events] == ["BlockStored"] * 6
    tokens = [token for event in events for token in event["token_ids"]]
    assert tokens == token_ids(PROMPT.encode())[:96]
    parents = [event["parent_block_hash"] for event in events]
    assert parents == [None, *(event["block_hashes"][0] for event in events[:-1])]


async def test_only_new_blocks_are_published_and_messages_are_numbered() -> None:
    async with publishing() as (client, (first, _)):
        await ask(client, 0, PROMPT)
        number, _, _ = await first.message()
        await ask(client, 0, PROMPT + "more" * 16)
        following, events, _ = await first.message()
    assert (following, len(events)) == (number + 1, 1)


async def test_evicted_blocks_are_published() -> None:
    async with publishing(num_gpu_blocks=8) as (client, (first, _)):
        await ask(client, 0, PROMPT)
        _, stored, _ = await first.message()
        await ask(client, 0, "other" + PROMPT[5:])
        _, events, _ = await first.message()
    names = {event["block_hashes"][0] for event in stored if event["type"] == "BlockStored"}
    gone = [event["block_hashes"][0] for event in events if event["type"] == "BlockRemoved"]
    assert names & set(gone)
    assert len(gone) >= 4


async def test_a_cleared_cache_is_published_with_the_next_step() -> None:
    async with publishing() as (client, (first, _)):
        await post(client, "/admin/reset")
        await ask(client, 0, PROMPT)
        _, events, _ = await first.message()
    assert events[0] == {"type": "AllBlocksCleared"}


async def test_a_port_in_use_is_an_error_that_names_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} for KV events"):
            await SimPod(SimConfig(kv_events_port=port)).start()
