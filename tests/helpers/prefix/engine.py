"""An engine that publishes KV events as vLLM does, on real sockets, and can be made to misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.ports import KvEvent
from tests.helpers.waiting import PATIENCE

zmq = pytest.importorskip("zmq", reason="needs the extra: pip install 'kvlane[precise]'")
msgpack = pytest.importorskip("msgpack")

END = (-1).to_bytes(8, "big", signed=True)


def stored(names: Sequence[int | bytes], tokens: Sequence[int], parent: int | bytes | None = None, **more: Any) -> Any:
    size = len(tokens) // len(names)
    event = {"type": "BlockStored", "block_hashes": list(names), "parent_block_hash": parent}
    return event | {"token_ids": list(tokens), "block_size": size, "lora_id": None, "medium": "GPU"} | more


def removed(*names: int | bytes, medium: str = "GPU") -> Any:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": medium}


CLEARED = {"type": "AllBlocksCleared"}


class Engine:
    """Counts its messages from 0 on. `clock` is its wall clock, a second later at each message. `buffer` holds the last
    `keeps` batches for replay, in responses of `frames` frames."""

    def __init__(self, context: Any, keeps: int = 100, frames: int = 4, start: float = 1000.0) -> None:
        self._publisher = context.socket(zmq.XPUB)  # as PUB, and it receives the subscriptions
        self._router = context.socket(zmq.ROUTER)
        self._keeps = keeps
        self._frames = frames
        self.clock = start
        self.number = 0
        self.buffer: list[tuple[int, bytes]] = []
        self.replays: list[int] = []

    def open(self, port: int = 0, replay: int = 0) -> tuple[int, int]:
        return _bind(self._publisher, port), _bind(self._router, replay)

    async def has_a_listener(self) -> None:
        """Events published before a subscription are lost."""
        async with asyncio.timeout(PATIENCE):
            await self._publisher.recv()

    def close(self) -> None:
        self._publisher.close(linger=0)
        self._router.close(linger=0)

    async def publish(self, *events: Any, topic: str = "kv@pod@model", rank: int = 0, lose: bool = False) -> None:
        """Publish the events. With `lose` they only enter the buffer, as if the network had dropped them."""
        self.clock += 1
        payload = msgpack.packb([self.clock, list(events), rank])
        number, self.number = self.number, self.number + 1
        self.buffer = [*self.buffer, (number, payload)][-self._keeps :]
        if not lose:
            await self.send(number, payload, topic)

    async def send(self, number: int, payload: bytes, topic: str = "kv@pod@model") -> None:
        await self._publisher.send_multipart([topic.encode(), number.to_bytes(8, "big"), payload])

    async def send_frames(self, *frames: bytes) -> None:
        await self._publisher.send_multipart(list(frames))

    async def serve_replays(self) -> None:
        while True:
            client, empty, start = await self._router.recv_multipart()
            first = int.from_bytes(start, "big")
            self.replays.append(first)
            topic = [b"kv"] if self._frames == 4 else []
            for number, payload in self.buffer:
                if number >= first:
                    await self._router.send_multipart([client, empty, *topic, number.to_bytes(8, "big"), payload])
            await self._router.send_multipart([client, empty, *([b""] if topic else []), END, b""])


ENGINES: dict[int, Engine] = {}
"""The running publishers, by port."""


@asynccontextmanager
async def engine(
    keeps: int = 100, frames: int = 4, ports: tuple[int, int] = (0, 0), start: float = 1000.0, replay: bool = True
) -> AsyncIterator[tuple[Engine, tuple[int, int]]]:
    """Run a publisher; with `replay` it serves requests for missed events."""
    import zmq.asyncio

    context = zmq.asyncio.Context()
    made = Engine(context, keeps, frames, start)
    where = made.open(*ports)
    ENGINES[where[0]] = made
    task = asyncio.get_running_loop().create_task(made.serve_replays()) if replay else None
    try:
        yield made, where
    finally:
        ENGINES.pop(where[0], None)
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        made.close()
        context.destroy(linger=0)


class Ear:
    """A listener that keeps the events it received."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, KvEvent]] = []
        self.forgotten: list[tuple[str, int]] = []
        self.known: dict[tuple[str, int], bool] = {}
        self.left: list[str] = []

    def published(self, endpoint: Endpoint, rank: int, events: Sequence[KvEvent]) -> None:
        self.events.extend((endpoint.name, rank, event) for event in events)

    def lost(self, endpoint: Endpoint, rank: int) -> None:
        self.forgotten.append((endpoint.name, rank))
        self.events = [event for event in self.events if event[:2] != (endpoint.name, rank)]

    def complete(self, endpoint: Endpoint, rank: int, known: bool) -> None:
        self.known[endpoint.name, rank] = known

    def gone(self, endpoint: Endpoint) -> None:
        self.left.append(endpoint.name)

    def blocks(self, rank: int = 0) -> list[int | bytes]:
        return [name for _, of, event in self.events if of == rank for name in getattr(event, "hashes", ())]


class Pods:
    """A fleet that only reports added and removed pods."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self.endpoints = list(endpoints)
        self._watchers: list[tuple[Callable[[Endpoint], None], Callable[[Endpoint], None]]] = []

    def watch(self, added: Callable[[Endpoint], None], removed: Callable[[Endpoint], None]) -> Callable[[], None]:
        watcher = (added, removed)
        self._watchers.append(watcher)
        for endpoint in self.endpoints:
            added(endpoint)
        return lambda: self._watchers.remove(watcher)

    def add(self, endpoint: Endpoint) -> None:
        self.endpoints.append(endpoint)
        for added, _ in self._watchers:
            added(endpoint)

    def remove(self, endpoint: Endpoint) -> None:
        self.endpoints.remove(endpoint)
        for _, gone in self._watchers:
            gone(endpoint)


def pod(name: str = "pod", labels: Mapping[str, str] | None = None) -> Endpoint:
    return Endpoint(name, "http://127.0.0.1:8000", labels=labels or {}, state=EndpointState.READY)


def _bind(socket: Any, port: int) -> int:
    if port:
        socket.bind(f"tcp://127.0.0.1:{port}")
        return port
    return int(socket.bind_to_random_port("tcp://127.0.0.1"))
