"""Clients that close their connection at the last event have got the whole response."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.helpers.http.support import Pod, Received, plain
from tests.helpers.scenarios.stack import CHAT, running
from tests.helpers.waiting import PATIENCE, until

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
WORD = b'data: {"choices": [{"delta": {"content": "Hello"}}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 1}}\n\n'
BODY = {"model": "m", "stream": True, "messages": [{"role": "user", "content": "Hello!"}]}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def left_at(last: bytes) -> AsyncIterator[tuple[str, aiohttp.ClientSession]]:
    """The admin port of a proxy whose client left when it had read `last`, after which the pod sent nothing."""

    async def script(request: Received) -> None:
        await request.body()
        if b"/v1/chat" in request.line:
            await request.send(HEAD, chunk(WORD), chunk(USAGE), chunk(last))
            await request.gone()
        else:
            await request.send(plain(b""))

    async with Pod(script) as pod, running([pod.endpoint.url]) as app, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{app.port}{CHAT}"
        async with session.post(url, json=BODY) as response, asyncio.timeout(PATIENCE):
            read = b""
            while not read.endswith(last):
                read += await response.content.readany()
            response.close()
        await until(lambda: not app.ledger.in_flight)
        yield f"http://127.0.0.1:{app.admin_port}", session


@pytest.mark.parametrize(
    ("last", "outcome"),
    [
        (b"data: [DONE]\n\n", "complete"),
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', "complete"),
        (b'event: response.completed\ndata: {"type":"response.completed"}\n\n', "complete"),
        (b"event: message_stop\r\ndata: {}\r\n\r\n", "complete"),
        (b"event:response.incomplete\ndata: {}\n\n", "complete"),
        (b'data: {"type": "response.failed"}\n\n', "complete"),
        (WORD, "client-gone"),
        (b'data: {"choices": [{"delta": {"content": "data: [DONE]"}}]}\n\n', "client-gone"),
    ],
)
async def test_a_client_that_leaves_after_the_last_event_has_the_whole_stream(last: bytes, outcome: str) -> None:
    async with left_at(last) as (admin, session), session.get(admin + "/metrics") as response:
        lines = (await response.text()).splitlines()
    counted = [line for line in lines if line.startswith("kvlane_requests_total{") and 'path="chat"' in line]
    assert len(counted) == 1
    assert f'outcome="{outcome}"' in counted[0]
    series = [line for line in lines if line.startswith("kvlane_attempts_total{")]
    assert len(series) == 1
    assert f'ending="{outcome}"' in series[0]
    tokens = [line for line in lines if line.startswith("kvlane_prompt_tokens_total{")]
    assert [line.rpartition(" ")[2] for line in tokens] == ["7.0" if outcome == "complete" else "0.0"]
