"""Requests leave no cycles behind, and if a plugin makes them, memory stays bounded."""

from __future__ import annotations

import asyncio
import gc
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakSet

import orjson
import pytest

from proxy.app import App
from proxy.cluster.gc_tuning import Collector
from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import PreRequest, plugin
from proxy.core.registry import Registry
from proxy.scheduling.document import read
from proxy.settings import from_mapping
from tests.helpers.scenarios.stack import CHAT
from tests.helpers.waiting import PATIENCE

MIB = 1 << 20
TIMES = 60

MODELS = b'{"object":"list","data":[{"id":"m","object":"model"}]}'
COMPLETION = b'{"id":"1","object":"chat.completion","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2}}'
STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n%b0\r\n\r\n" % (
    b"%x\r\ndata: {}\n\n\r\n" % len(b"data: {}\n\n") * 3
)


class Engine(asyncio.Protocol):
    """As little of a pod as will do, so that what is left behind is the proxy's."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        del self._transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        if not end or len(body) < int(length.partition(b":")[2]):
            return
        self._received = b""
        if b"/v1/models" in head:
            self._transport.write(_whole(MODELS))
        elif head.startswith(b"GET"):
            self._transport.write(_whole(b""))
        else:
            self._transport.write(STREAM if b'"stream": true' in body else _whole(COMPLETION))


class Client(asyncio.Protocol):
    """Send one request after the other, and end when all have responses."""

    def __init__(self, request: bytes, times: int) -> None:
        self._request, self._left = request, times
        self._received = b""
        self.responded = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not _is_whole(self._received):
            return
        self._received = b""
        self._left -= 1
        if self._left:
            self._transport.write(self._request)
        else:
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        del self._transport
        self.responded.set_result(self._left)


@asynccontextmanager
async def proxy(
    registry: Registry | None = None, scheduling: Any = None, refresh: str = "50ms", access_log: bool = True
) -> AsyncIterator[App]:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    given: dict[str, Any] = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "pods": {"static": [{"url": f"http://127.0.0.1:{port}"}], "refresh": {"interval": refresh, "maxCore": 1}},
        "telemetry": {"accessLog": access_log},
    }
    settings = replace(from_mapping(given), scheduling=read(scheduling))
    async with server, App(settings, registry) as app:
        yield app


async def ask(app: App, request: bytes, times: int = TIMES) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(PATIENCE):
        _, client = await loop.create_connection(lambda: Client(request, times), "127.0.0.1", app.port)
        assert await client.responded == 0
        while app.ledger.in_flight:
            await asyncio.sleep(0.001)


def request(body: bytes, path: str = CHAT) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: kvlane\r\ncontent-type: application/json\r\n"
    return head.encode() + b"content-length: %d\r\n\r\n%b" % (len(body), body)


def chat(**fields: Any) -> bytes:
    return orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hello " * 200}], **fields})


REQUESTS = {
    "json": request(chat()),
    "stream": request(chat(stream=True)),
    "several prompts": request(b'{"model":"m","prompt":["one","two"]}', "/v1/completions"),
    "no JSON": request(b"{"),
    "unknown model": request(chat(model="other")),
    "unknown path": request(b"{}", "/v1/nothing"),
}


@pytest.mark.parametrize("name", REQUESTS)
async def test_requests_leave_no_cycles(name: str) -> None:
    """Scrapes go on meanwhile. A request for an unknown model waits for up to a second, which the loop skips where the
    access log has no thread."""
    waits = name == "unknown model"
    async with proxy(refresh="500ms" if waits else "50ms", access_log=not waits) as app:
        await ask(app, REQUESTS[name])
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await ask(app, REQUESTS[name])
            gc.collect()
        finally:
            gc.set_debug(0)
            left = gc.garbage[:]
            gc.garbage.clear()
    kinds = Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in left)
    assert len(left) < TIMES, kinds


async def test_growth_of_the_index_triggers_no_collection() -> None:
    async with proxy() as app:
        empty = app.index_bytes
        await ask(app, REQUESTS["json"], 1)
        assert app.index_bytes > empty


@dataclass(eq=False)
class Knot:
    """A megabyte that keeps itself."""

    ballast: bytes = field(default_factory=lambda: bytes(MIB))

    def __post_init__(self) -> None:
        self.itself = self


@plugin("knotty")
@dataclass
class Knotty(PreRequest):
    """Leaves a cycle per request; each grows old before it dies."""

    alive: WeakSet[Knot] = field(default_factory=WeakSet, init=False)
    young: Knot | None = field(default=None, init=False)

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        self.young = Knot()
        self.alive.add(self.young)
        for generation in (0, 1):
            gc.collect(generation)


async def test_a_plugin_that_makes_cycles_does_not_fill_the_memory() -> None:
    registry = Registry([*Registry.discover(), Knotty])
    async with proxy(registry, {"plugins": [{"type": "knotty"}]}) as app:
        knotty = app.schedulings["default"].instances["knotty"]
        assert isinstance(knotty, Knotty)
        async with Collector(lambda: False, lambda: (200 + len(knotty.alive)) * MIB) as collector:
            alive = []
            for _ in range(30):
                await ask(app, REQUESTS["json"], 10)
                alive.append(len(knotty.alive))
                collector.check()
    assert 100 < max(alive) <= 120


def _whole(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def _is_whole(raw: bytes) -> bool:
    head, end, body = raw.partition(b"\r\n\r\n")
    if not end:
        return False
    length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
    return len(body) == int(length[1]) if length else body.endswith(b"0\r\n\r\n")
