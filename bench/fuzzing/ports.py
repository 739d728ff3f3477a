"""Bytes at the data port and at the admin port, and bytes of a pod in response to a request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import orjson

from bench.fuzzing.inputs import LATE, Check, cut
from bench.fuzzing.talk import CHAT, GOOD, STREAMED, exchange, proxy_before, read_request, respond_well
from proxy.app import App

QUIET = 0.02


@asynccontextmanager
async def requests() -> AsyncIterator[Check]:
    async with await asyncio.start_server(respond_well, "127.0.0.1", 0) as pod, proxy_before(pod) as app:

        async def check(data: bytes, rng: random.Random) -> str:
            response = await exchange(app.port, cut(data, rng), QUIET)
            if response is None:
                return f"{LATE}the connection was not closed"
            if response and not response.startswith(b"HTTP/1.1 "):
                return f"got {response[:80]!r}"
            healthy = await exchange(app.port, [CHAT % (len(STREAMED), STREAMED)])
            if healthy is None or not healthy.startswith(b"HTTP/1.1 200 "):
                return f"the next request got {healthy!r}"
            return "requests are in flight that have ended" if app.ledger.in_flight else ""

        yield check


APIS: Sequence[tuple[str, dict[str, object]]] = (
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/messages", {"max_tokens": 3, "messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/embeddings", {"input": ["hi"]}),
    ("/v1/rerank", {"query": "a", "documents": ["b"]}),
    ("/generate", {"text": "hi"}),
)
REWRITTEN = {
    "models": {"aliases": {"other": "m"}},
    "telemetry": {"askForUsage": True},
    "reliability": {"continuation": {"models": ["*"]}},
}
"""The response is changed, and observed for what another pod would need in order to go on with it."""


@asynccontextmanager
async def responses() -> AsyncIterator[Check]:
    """The input is everything that a pod sends after a request, whatever the request is."""
    response, choices = b"", random.Random(0)

    async def respond_badly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            line, _, _ = await read_request(reader)
            if line.startswith(b"POST"):
                for piece in cut(response, choices):
                    writer.write(piece)
                    await asyncio.sleep(0)
            else:
                writer.write(GOOD)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async with AsyncExitStack() as stack:
        pod = await stack.enter_async_context(await asyncio.start_server(respond_badly, "127.0.0.1", 0))
        apps = [await stack.enter_async_context(proxy_before(pod, **more)) for more in ({}, REWRITTEN)]

        async def check(data: bytes, rng: random.Random) -> str:
            nonlocal response, choices
            response, choices = data, rng
            app = rng.choice(apps)
            passed = await exchange(app.port, [_request(app is apps[1], rng)])
            if passed is None:
                return f"{LATE}the client was left waiting"
            if passed and not passed.startswith(b"HTTP/1.1 "):
                return f"passed on {passed[:80]!r}"
            return "requests are in flight that have ended" if app.ledger.in_flight else ""

        yield check


def _request(has_aliases: bool, rng: random.Random) -> bytes:
    path, fields = rng.choice(APIS)
    fields = {"model": rng.choice(("m", "other")) if has_aliases else "m", **fields, "stream": rng.random() < 0.6}
    if rng.random() < 0.2:
        fields["stream_options"] = {"include_usage": True}
    body = orjson.dumps(fields)
    version = rng.choice((b"1.1", b"1.1", b"1.0"))
    head = b"POST %b HTTP/%b\r\nhost: a\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
    return head % (path.encode(), version, len(body)) + body


ADMIN = (
    b"%b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
)
OPERATIONS = (
    b"POST /admin/pods",
    b"POST /admin/config?dry_run=1",
    b"POST /admin/pods/x/drain",
    b"DELETE /admin/pods/x",
    b"GET /admin/pods",
)


@asynccontextmanager
async def admin() -> AsyncIterator[Check]:
    async with await asyncio.start_server(respond_well, "127.0.0.1", 0) as pod, proxy_before(pod) as app:

        async def check(data: bytes, rng: random.Random) -> str:
            operation = rng.choice(OPERATIONS)
            response = await exchange(app.admin_port, [ADMIN % (operation, len(data), data)])
            _remove_pods(app)
            if response is None:
                return f"{LATE}{operation!r} got no response"
            return "" if b" 500 " not in response[:20] else f"{operation!r} was got {response!r}"

        yield check


def _remove_pods(app: App) -> None:
    for endpoint in app.fleet.endpoints:
        app.fleet.remove(endpoint.name)
