"""Requests whose clients say how long they wait."""

from __future__ import annotations

import asyncio
import math

import pytest

from proxy.core.attempt import Ending
from proxy.core.endpoint import update
from proxy.core.ports import SystemClock
from tests.helpers.http.support import SSE_HEAD, STREAMED, Pod, Received, answering, event, plain, post, rig, timeouts

LIMIT = 0.3
HEADER = f"x-request-timeout-ms: {LIMIT * 1000:g}"


@pytest.mark.parametrize("pieces", [(), (SSE_HEAD + event("1"),)], ids=["before the first byte", "in a stream"])
async def test_a_request_ends_within_50_ms_of_its_deadline(pieces: tuple[bytes, ...]) -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(*pieces)
        await request.gone()

    async with Pod(script) as pod, rig(pod) as port:
        port.gateway.patience = LIMIT
        begun = SystemClock().now()
        seen = await port.ask(post("/v1/chat/completions", STREAMED, HEADER))
        took = SystemClock().now() - begun
        assert LIMIT <= took < LIMIT + 0.05
        assert port.attempt.ending is Ending.TIMED_OUT
        assert port.attempt.error == f"not complete within {LIMIT:g} s"
        if pieces:
            assert b'data: {"error":{"message":"The time limit of the request passed;' in seen.body
            assert seen.body.endswith(b"}}\n\n")
        else:
            assert seen.status == 504


async def test_connecting_ends_with_the_deadline() -> None:
    async def never(host: str, port: int) -> list[object]:
        await asyncio.sleep(math.inf)
        return []

    async with Pod(lambda request: request.gone()) as pod, rig(pod, timeouts=timeouts(connect=60.0)) as port:
        port.gateway.patience = LIMIT
        update(pod.endpoint, url=pod.endpoint.url.replace("127.0.0.1", "pod.invalid"))
        port.server.upstream._resolve = never  # type: ignore[assignment]
        begun = SystemClock().now()
        assert (await port.ask(post("/v1/chat/completions", b"{}", HEADER))).status == 504
        assert LIMIT <= SystemClock().now() - begun < LIMIT + 0.05
        assert port.attempt.ending is Ending.TIMED_OUT


async def test_a_deadline_after_a_complete_response_keeps_its_connection() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        port.gateway.patience = LIMIT
        for _ in range(2):
            assert (await port.ask(post("/v1/chat/completions", b"{}", HEADER))).status == 200
            await asyncio.sleep(2 * LIMIT)
        assert pod.connections == 1
