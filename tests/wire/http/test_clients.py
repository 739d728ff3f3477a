"""Clients that stay, hurry, leave or do not read."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Awaitable, Callable

import pytest
import uvloop

from proxy.core.attempt import Ending
from proxy.core.endpoint import Endpoint
from proxy.http.guards import CloseReason
from proxy.http.settings import SecuritySettings
from tests.helpers.http.support import (
    BUFFER,
    CHAT,
    SSE_HEAD,
    STREAMED,
    Pod,
    Received,
    answering,
    chunk,
    event,
    plain,
    post,
    rig,
    timeouts,
)
from tests.helpers.ports import full_address
from tests.helpers.waiting import PATIENCE, until

CANCEL_WITHIN = 10.0
"""Generous: the point is that no client waits for the pod's next byte."""


async def test_a_connection_serves_one_request_after_another() -> None:
    async with Pod(answering(plain(b"1"))) as pod, rig(pod) as port, port.client() as client:
        for _ in range(5):
            client.send(post(close=False))
            assert (await client.response()).endswith(b"\r\n\r\n1")
        assert pod.connections == 1


async def test_pipelined_requests_are_served_in_order() -> None:
    async def script(request: Received) -> None:
        body = await request.body()
        if body == STREAMED:
            await request.send(SSE_HEAD, event("a"), b"0\r\n\r\n", pause=0.005)
        else:
            await request.send(plain(body))

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post(CHAT, b'{"n":1}', close=False) + post(CHAT, STREAMED, close=False))
        client.send(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n" + post(CHAT, b'{"n":3}'))
        assert (await client.response()).endswith(b'{"n":1}')
        assert b"data: a" in await client.until(b"0\r\n\r\n")
        assert b" 200 " in await client.response()
        assert (await client.until_closed()).body == b'{"n":3}'


@pytest.mark.parametrize("after", ["at once", "cut", "later"])
async def test_bytes_after_a_request_for_an_unknown_upgrade_are_the_next_requests(after: str) -> None:
    async def script(request: Received) -> None:
        await request.send(plain(await request.body()))

    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\ntransfer-encoding: chunked\r\n\r\n"
    first = b"POST %b HTTP/1.1\r\nhost: a\r\n%b" % (CHAT.encode(), upgrade) + chunk(b'{"n":1}') + b"0\r\n\r\n"
    hidden = b'{"n":"GET /v1/models HTTP/1.1\\r\\nhost: smuggled\\r\\n\\r\\n"}'
    rest = post(CHAT, hidden, close=False) + post(CHAT, b'{"n":3}')
    cut = {"at once": len(rest), "cut": len(rest) - 60, "later": 0}[after]
    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(first + rest[:cut])
        assert (await client.response()).endswith(b'{"n":1}')
        client.send(rest[cut:])
        assert (await client.response()).endswith(hidden)
        assert (await client.until_closed()).body == b'{"n":3}'
    assert [ended.path for ended in port.ended] == [CHAT] * 3


async def test_a_request_for_a_head_may_have_a_body() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(plain(b"x" * 99)[:-99] if request.line.startswith(b"HEAD") else plain(b"next"))

    head = b"HEAD /custom HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
    security = SecuritySettings(relay_paths=("/custom",))
    async with Pod(script) as pod, rig(pod, security=security) as port, port.client() as client:
        client.send(head)
        assert b"content-length: 99" in await client.until(b"\r\n\r\n")
        client.send(post())
        assert (await client.until_closed()).body == b"next"


async def test_a_client_that_requests_it_is_closed_after_the_response() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        seen = await port.ask(post())
    assert seen.all("connection") == ["close"]


Phase = Callable[[Received, asyncio.Event], Awaitable[None]]


async def before_the_head(request: Received, reached: asyncio.Event) -> None:
    reached.set()


async def before_the_first_event(request: Received, reached: asyncio.Event) -> None:
    await request.send(SSE_HEAD)
    reached.set()


async def in_the_stream(request: Received, reached: asyncio.Event) -> None:
    await request.send(SSE_HEAD, event("1"))
    reached.set()


async def in_the_middle_of_a_body(request: Received, reached: asyncio.Event) -> None:
    await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")
    reached.set()


@pytest.mark.parametrize("body", [STREAMED, b"{}"])
@pytest.mark.parametrize("phase", [before_the_head, before_the_first_event, in_the_stream, in_the_middle_of_a_body])
@pytest.mark.parametrize("orderly", [True, False])
async def test_a_client_that_leaves_ends_the_pods_request(phase: Phase, body: bytes, orderly: bool) -> None:
    reached, gone = asyncio.Event(), asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await phase(request, reached)
        await request.gone()
        gone.set()

    async with Pod(script) as pod, rig(pod) as port:
        async with port.client() as client:
            client.send(post(body=body, close=False))
            await reached.wait()
            if orderly:
                client.writer.close()
            else:
                client.leave()
            await asyncio.wait_for(gone.wait(), CANCEL_WITHIN)
        ended = await port.until_ended()
        assert port.attempt.ending is Ending.CLIENT_GONE
        assert ended.outcome is Ending.CLIENT_GONE


async def test_a_client_that_leaves_while_connecting_to_the_pod_ends_the_request() -> None:
    with full_address() as (host, number):
        async with rig(Endpoint("full", f"http://{host}:{number}"), timeouts=timeouts(connect=30)) as port:
            async with port.client() as client:
                client.send(post())
                await until(lambda: bool(port.gateway.attempts))
                client.leave()
            ended = await port.until_ended()
            assert (ended.status, ended.outcome) == (499, Ending.CLIENT_GONE)
            assert port.attempt.ending is Ending.CLIENT_GONE


async def test_after_a_client_left_the_pod_serves_others() -> None:
    async with Pod(answering(SSE_HEAD, *[event("x")] * 20, b"0\r\n\r\n", pause=0.005)) as pod, rig(pod) as port:
        for _ in range(3):
            async with port.client() as client:
                client.send(post(body=STREAMED))
                await client.until(b"data: x")
                client.leave()
        assert (await port.ask(post(body=STREAMED))).ending == "complete"


@pytest.mark.parametrize("framing", ["chunked", "length", "close"])
async def test_a_client_that_does_not_read_pauses_the_pod(framing: str) -> None:
    """What is in flight stays within the sockets' buffers and a few reads, whatever the size of the response."""
    total, piece = 64 * 2**20, b"x" * 2**16
    sent = 0

    async def script(request: Received) -> None:
        nonlocal sent
        await request.body()
        if framing == "chunked":
            await request.send(SSE_HEAD)
        elif framing == "length":
            await request.send(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % total)
        else:
            await request.send(b"HTTP/1.1 200 OK\r\n\r\n")
        while sent < total:
            await request.send(chunk(piece) if framing == "chunked" else piece)
            sent += len(piece)
        if framing == "chunked":
            await request.send(b"0\r\n\r\n")
        elif framing == "close":
            request.break_off()

    async with Pod(script) as pod, rig(pod) as port, port.client(BUFFER) as client:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(body=STREAMED))
        await until(lambda: sent > 0)
        seen = -1
        while seen != sent:
            seen = sent
            await asyncio.sleep(0.2)
        assert sent < total
        (connection,) = port.server.connections
        assert connection.socket.get_write_buffer_size() < 2**20
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        left = 0
        async with asyncio.timeout(PATIENCE):
            while data := await client.reader.read(2**18):
                left += len(data)
        assert left >= total
        assert port.attempt.ending is Ending.COMPLETE
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown < 48 * 1024, "kilobytes"


async def test_a_stream_that_waits_for_its_client_is_not_stalled() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD)
        for _ in range(400):
            await request.send(chunk(b"x" * 2**16))
        await request.send(b"0\r\n\r\n")
        go_on.set()

    async with Pod(script) as pod, rig(pod, timeouts=timeouts(idle=0.1)) as port, port.client(BUFFER) as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(body=STREAMED))
        await asyncio.sleep(0.5)
        assert port.attempt.ending is None
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        seen = await client.until_closed()
        assert seen.ending == "complete"


async def test_pipelined_responses_do_not_accumulate_for_a_client_that_does_not_read() -> None:
    async with Pod(answering(plain(b"x" * 100_000))) as pod, rig(pod) as port, port.client(BUFFER) as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(close=False) * 150)
        served = await port.standstill()
        (connection,) = port.server.connections
        assert served < 150
        assert connection.socket.get_write_buffer_size() < 2**19
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(150):
            assert len(await client.response()) > 100_000


async def test_a_malformed_request_is_refused_and_the_connection_closed() -> None:
    async with rig() as port:
        for request in (
            b"NONSENSE\r\n\r\n",
            b"GET / HTTP/1.1\r\n bad\r\n\r\n",
            b"GET  / HTTP/1.1\r\nhost: a\r\n\r\n",
        ):
            async with port.client() as client:
                client.send(request)
                seen = await client.until_closed()
            assert seen.status == 400
            assert seen.json()["error"]["type"] == "invalid_request_error"
            assert seen.all("connection") == ["close"]
        assert port.hung_up == {CloseReason.BAD_REQUEST: 3}


async def test_a_refusal_that_keeps_its_connection_open_does_not_reset_it() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        for path in ("/nowhere", CHAT):
            client.send(post(path, close=False))
            await client.response()
        assert port.hung_up == {}


async def test_malformed_chunks_close_the_connection() -> None:
    async with rig() as port, port.client() as client:
        client.send(f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n".encode())
        assert (await client.until_closed()).status == 400
        assert port.hung_up == {CloseReason.BAD_REQUEST: 1}


async def test_a_request_of_two_lengths_is_not_served() -> None:
    both = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        client.send(both.encode())
        assert (await client.until_closed()).status == 400
        assert pod.requests == []


async def leave_during_the_response(rounds: int) -> None:
    async with Pod(answering(plain(b"x" * 4096))) as pod, rig(pod) as port:
        for _ in range(rounds):
            clients = [await asyncio.open_connection("127.0.0.1", port.server.port) for _ in range(16)]
            for _, writer in clients:
                writer.write(post(close=False))
            await clients[0][0].read(1)
            for _, writer in clients:
                writer.transport.abort()
            await asyncio.sleep(0)
        await until(lambda: len(port.ended) == 16 * rounds)


def test_a_response_that_crosses_its_leaving_client_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    """On the loop of production: asyncio's own swallows writes to sockets that are no more."""
    uvloop.run(leave_during_the_response(20))
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
