"""Usage that kvlane requests for itself: clients do not see it, metrics and limits count it."""

from __future__ import annotations

import json
import re
from typing import Any

import aiohttp
import pytest

from tests.helpers.http.support import SSE_HEAD, chunk, event
from tests.helpers.scenarios.stack import CHAT, Stack, running, stack
from tests.wire.scenarios.test_transparency import engine

BODY = {"model": "sim", "max_tokens": 8, "stream": True}
ASK_FOR_USAGE = {"telemetry": {"askForUsage": True}}


async def stream(s: Stack, url: str, path: str, body: dict[str, Any]) -> bytes:
    async with s.http.post(url + path, json=body, headers={"x-request-id": "same"}) as response:
        assert response.status == 200
        return re.sub(rb'"created":\d+', b'"created":0', await response.read())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "Hello!"}]}),
        (CHAT, {"messages": [{"role": "user", "content": "Hello!"}], "stream_options": {}}),
        ("/v1/completions", {"prompt": "Hello!"}),
        ("/v1/completions", {"prompt": "Hello!", "max_tokens": 1}),
    ],
)
async def test_a_stream_has_the_bytes_of_a_stream_without_usage(path: str, body: dict[str, Any]) -> None:
    async with stack(1, settings=ASK_FOR_USAGE) as s:
        fields = {**BODY, **body}
        assert await stream(s, s.url, path, fields) == await stream(s, s.pods[0].url, path, fields)
        await s.idle()
        s.app.observer.flush()
        assert await s.sample('kvlane_completion_tokens_total{model="sim"}') == fields["max_tokens"]


async def test_usage_is_requested_only_if_configured_and_clients_that_request_it_get_it() -> None:
    body = {**BODY, "messages": [{"role": "user", "content": "Hello!"}]}
    async with stack(1) as s:
        assert b'"usage"' not in await stream(s, s.url, CHAT, body)
        s.app.observer.flush()
        assert not await s.sample('kvlane_completion_tokens_total{model="sim"}')
    async with stack(1, settings=ASK_FOR_USAGE) as s:
        own = await stream(s, s.url, CHAT, {**body, "stream_options": {"include_usage": True}})
        assert own.count(b'"usage":{') == 1


async def test_the_pod_gets_the_option_and_all_other_bytes_unchanged() -> None:
    bodies: list[bytes] = []
    sent = b'{ "model":"any", "stream" : true,\n"messages":[{"role":"user","content":"caf\xc3\xa9"}] }\n'
    pod = engine(SSE_HEAD + event("x") + event("[DONE]") + b"0\r\n\r\n", bodies=bodies)
    async with pod, running([pod.endpoint.url], ASK_FOR_USAGE) as app:
        await post(app.port, sent)
    assert bodies == [sent.replace(b" }\n", b' ,"stream_options":{"include_usage":true}}\n')]


async def test_a_pod_that_refuses_with_its_first_event_is_followed_by_another() -> None:
    refusal = chunk(b"data: " + json.dumps({"error": {"message": "busy", "code": 503}}).encode() + b"\n\n")
    busy = engine(SSE_HEAD + refusal + event("[DONE]") + b"0\r\n\r\n")
    good = engine(SSE_HEAD + event("x") + event("[DONE]") + b"0\r\n\r\n")
    async with busy, good, running([busy.endpoint.url, good.endpoint.url]) as app:
        for _ in range(6):
            status, body = await post(app.port, b'{"model":"any","stream":true,"messages":[]}')
            assert (status, body) == (200, b"data: x\n\ndata: [DONE]\n\n")
    async with busy, running([busy.endpoint.url]) as app:
        status, body = await post(app.port, b'{"model":"any","stream":true,"messages":[]}')
        assert (status, b"busy" in body) == (200, True)


async def post(port: int, body: bytes) -> tuple[int, bytes]:
    async with aiohttp.ClientSession() as http, http.post(f"http://127.0.0.1:{port}{CHAT}", data=body) as response:
        return response.status, await response.read()
