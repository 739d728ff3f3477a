"""A server with the tokenizer is queried; a failing server costs the exactness of one prompt, and no more."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.ports import RemoteTokenizer
from proxy.core.request import InferenceRequest, Prompt
from tests.helpers.prefix.opening import opening

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Server:
    """A server that sends `response` and keeps the requests."""

    def __init__(self, response: Any, status: int = 200, delay: float = 0.0) -> None:
        self.response = response
        self.status = status
        self.delay = delay
        self.requests: list[tuple[str, dict[str, Any], str | None]] = []

    async def handle(self, request: web.Request) -> web.Response:
        self.requests.append((request.path, await request.json(), request.headers.get("authorization")))
        await asyncio.sleep(self.delay)
        text = self.response if isinstance(self.response, str) else json.dumps(self.response)
        return web.Response(status=self.status, text=text, content_type="application/json")


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    application = web.Application()
    application.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(application)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def request(path: str = CHAT, **fields: Any) -> InferenceRequest:
    body = json.dumps({"model": "m", **fields}).encode()
    return InferenceRequest("id", path, "m", Prompt((b"estimate",), "salt"), body=body)


def chat(**fields: Any) -> InferenceRequest:
    return request(messages=[{"role": "user", "content": "Hello"}], **fields)


def packed(*ids: int) -> Prompt:
    return Prompt((array("I", ids).tobytes(),), "salt")


def pod(url: str, requests: int = 0, key: str | None = None) -> Endpoint:
    endpoint = Endpoint(url, url, state=EndpointState.READY, api_key=key)
    endpoint.charge(requests, 0)
    return endpoint


async def test_the_least_busy_pod_tokenises() -> None:
    busy, idle = Server({"tokens": [1]}), Server({"count": 2, "tokens": [5, 6]})
    async with serving(busy) as one, serving(idle) as other, opening() as source:
        tokens = source.remote(RemoteTokenizer())
        question = chat(tools=[{"a": 1}])
        assert await tokens.of(question, [pod(one, 3), pod(other, 1, "key")]) == packed(5, 6)
    assert not busy.requests
    assert idle.requests == [("/tokenize", json.loads(question.body), "Bearer key")]


@pytest.mark.parametrize("response", [{"token_ids": [7]}, [{"token_ids": [7]}]], ids=str)
async def test_a_render_server_gets_the_path_of_the_request(response: Any) -> None:
    server = Server(response)
    async with serving(server) as url, opening() as source:
        tokens = source.remote(RemoteTokenizer(url, "name"))
        assert await tokens.of(request(COMPLETIONS, prompt="Hello"), ()) == packed(7)
    assert server.requests == [("/v1/completions/render", {"model": "name", "prompt": "Hello"}, None)]


@pytest.mark.parametrize(
    "server",
    [
        Server("no JSON"),
        Server({"tokens": "many"}),
        Server({"tokens": [1, -1]}),
        Server({"tokens": [1]}, status=500),
        Server({"tokens": [1]}, delay=1.0),
        Server([]),
    ],
    ids=["garbage", "text", "negative", "failing", "slow", "empty"],
)
async def test_a_failing_server_leaves_the_prompt_without_tokens(server: Server) -> None:
    async with serving(server) as url, opening() as source:
        assert await source.remote(RemoteTokenizer(timeout=0.1)).of(chat(), [pod(url)]) is None
    assert server.requests


async def test_without_a_server_nothing_is_requested() -> None:
    async with opening() as source:
        tokens = source.remote(RemoteTokenizer(timeout=0.1))
        assert await tokens.of(chat(), ()) is None
        assert await tokens.of(chat(), [pod("http://127.0.0.1:9")]) is None


@pytest.mark.parametrize(
    "question",
    [
        request("/v1/messages", messages=[]),
        request(messages=[{"role": "user", "content": [{"type": "image_url"}]}]),
        chat(reasoning_effort="low"),
        chat(truncate_prompt_tokens=3),
        request(COMPLETIONS, prompt=[1, 2]),
        chat(reasoning_effort="low", user="x" * 300_000),
        InferenceRequest("id", CHAT, "m", Prompt((b"x",)), body=b"{broken"),
    ],
    ids=["path", "media", "effort", "truncated", "ids", "large", "broken"],
)
async def test_unsupported_requests_are_not_sent(question: InferenceRequest) -> None:
    server = Server({"tokens": [1]})
    async with serving(server) as url, opening() as source:
        assert await source.remote(RemoteTokenizer()).of(question, [pod(url)]) is None
    assert not server.requests


async def test_a_large_body_is_sent_unchanged() -> None:
    server = Server({"tokens": [1]})
    async with serving(server) as url, opening() as source:
        assert await source.remote(RemoteTokenizer()).of(chat(user="x" * 300_000), [pod(url)]) == packed(1)
