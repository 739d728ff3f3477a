"""What one client, or very many, may take: connections, time and memory."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.core.params import Duration, Size
from proxy.core.ports import SystemClock
from proxy.http.body import FREE_BUFFER, BodyReader
from proxy.http.guards import CloseReason, Sweep
from proxy.http.request import HEAD_LIMIT
from proxy.http.server import READ_SIZE
from proxy.http.settings import ListenSettings
from tests.helpers.http.support import CHAT, Pod, Received, answering, connection_of, plain, post, rig
from tests.helpers.waiting import until
from tests.unit.http.test_any_request import served

QUICK = Duration(0.1)
"""A timeout that makes the sweep look often."""


def beginning(length: int, *fields: str) -> bytes:
    lines = "".join(f"{field}\r\n" for field in fields)
    return f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n{lines}content-length: {length}\r\n\r\n".encode()


# connections


async def test_a_connection_beyond_the_limit_is_closed_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await go_on.wait()
        await request.send(plain(b"good"))

    async with (
        Pod(script) as pod,
        rig(pod, max_connections=2, head_timeout=QUICK) as port,
        port.client() as one,
        port.client() as two,
    ):
        for client in (one, two):
            client.send(post(close=False))
        await until(lambda: len(pod.requests) == 2)
        for _ in range(3):
            assert (await port.ask(post())).raw == b""
        await until(lambda: sum("maxConnections (2)" in text for text in caplog.messages) > 0)
        assert all(record.levelno == logging.WARNING for record in caplog.records)
        assert port.hung_up == {CloseReason.MAX_CONNECTIONS: 3}
        go_on.set()
        for client in (one, two):
            assert (await client.response()).endswith(b"good")
        two.leave()
        await until(lambda: len(port.server.connections) == 1)
        assert (await port.ask(post())).status == 200


async def test_idle_clients_are_closed_for_others(caplog: pytest.LogCaptureFixture) -> None:
    async with (
        Pod(answering(plain(b"good"))) as pod,
        rig(pod, max_connections=2, head_timeout=QUICK) as port,
        port.client() as oldest,
        port.client() as newer,
    ):
        oldest.send(post(close=False))
        assert (await oldest.response()).endswith(b"good")
        await asyncio.sleep(0.1)
        newer.send(post(close=False))
        assert (await newer.response()).endswith(b"good")
        await asyncio.sleep(0.1)
        assert (await port.ask(post())).status == 200
        assert (await oldest.until_closed()).raw == b""
        newer.send(post(close=False))
        assert (await newer.response()).endswith(b"good")
        assert port.hung_up == {}
    assert caplog.messages == []


async def test_many_idle_clients_are_closed_for_as_many_others() -> None:
    """Before any sweep has seen that they are."""
    async with (
        Pod(answering(plain(b"good"))) as pod,
        rig(pod, max_connections=4) as port,
        contextlib.AsyncExitStack() as clients,
    ):
        for _ in range(4):
            client = await clients.enter_async_context(port.client())
            client.send(post(close=False))
            assert (await client.response()).endswith(b"good")
        for each in port.server.connections:
            each.idle_since = None
        responses = await asyncio.gather(*[port.ask(post()) for _ in range(4)])
        assert [response.status for response in responses] == [200] * 4
        assert port.hung_up == {}


@pytest.mark.parametrize("is_seen_idle", [False, True])
async def test_a_client_with_a_running_request_is_not_closed_for_others(is_seen_idle: bool) -> None:
    async with Pod(answering(plain(b"good"))) as pod, rig(pod, max_connections=1) as port, port.client() as client:
        client.send(post(close=False))
        assert (await client.response()).endswith(b"good")
        request = post(close=False)
        (connection,) = port.server.connections
        await until(lambda: connection.idle)
        connection.idle_since = port.server.now() if is_seen_idle else None
        client.send(request[:20])
        await until(lambda: connection.reader.may_hold_bytes)
        assert (await port.ask(post())).raw == b""
        client.send(request[20:])
        assert (await client.response()).endswith(b"good")


# time


@pytest.mark.parametrize("kind", ["collected", "streamed", "chunked"])
async def test_a_body_sent_byte_by_byte_times_out(kind: str) -> None:
    head = {
        "collected": beginning(1000),
        "streamed": beginning(2_000_000),
        "chunked": f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode(),
    }[kind]
    piece = b"1\r\n \r\n" if kind == "chunked" else b" "
    async with rig(body_timeout=Duration(0.2), min_body_rate=Size(1000)) as port, port.client() as client:
        client.send(head)
        for _ in range(30):
            client.send(piece)
            await asyncio.sleep(0.02)
        assert (await client.until_closed()).status == 408
        await port.until_ended()
        assert port.server.retained == 0
        assert port.hung_up == {CloseReason.BODY_TIMEOUT: 1}


async def test_a_head_sent_byte_by_byte_has_its_own_reason() -> None:
    async with rig(head_timeout=QUICK) as port, port.client() as client:
        for byte in b"GET /health HTTP":
            client.send(bytes((byte,)))
            await asyncio.sleep(0.02)
        assert (await client.until_closed()).status == 408
        assert port.hung_up == {CloseReason.HEAD_TIMEOUT: 1}


async def test_waiting_for_the_budget_does_not_count_against_a_body() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        body = await request.body()
        if len(body) < 600:
            await go_on.wait()
        await request.send(plain(b"%d" % len(body)))

    limits: dict[str, Any] = {"retained_bodies": Size(600), "body_timeout": Duration(0.4), "min_body_rate": Size(1000)}
    async with Pod(script) as pod, rig(pod, **limits) as port, port.client() as one, port.client() as two:
        one.send(post(body=b"x" * 500, close=False))
        await until(lambda: len(pod.requests) == 1)
        two.send(beginning(600) + b"x" * 10)
        await asyncio.sleep(0.2)
        go_on.set()
        await one.response()
        await asyncio.sleep(0.3)
        two.send(b"x" * 590)
        assert (await two.response()).endswith(b"600")


# memory


def two_at_a_time(size: int) -> Iterator[bytes]:
    return (bytes((32, at % 251)) for at in range(size // 2))


async def test_a_body_in_many_small_reads_uses_little_more_than_its_bytes() -> None:
    size = 60_000
    tracemalloc.start()
    try:
        sent = (piece for part in ([beginning(size)], two_at_a_time(size)) for piece in part)
        seen = await served(sent, 0, size)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(seen.requests[0][2]) == size
    assert peak - READ_SIZE < 6 * size


async def test_a_large_body_in_many_small_reads_uses_little_more_than_its_bytes() -> None:
    size = 100_000
    pieces = two_at_a_time(size)

    async def readany() -> bytes:
        return next(pieces, b"")

    payload = SimpleNamespace(readany=readany, is_eof=lambda: True)
    client_request = SimpleNamespace(
        body=b"", payload=payload, retained=0, content_length=size, headers={}, speaks_11=True
    )
    bodies = BodyReader(ListenSettings(), Sweep(SystemClock(), 1.0))
    tracemalloc.start()
    try:
        await bodies.read(cast(Any, client_request))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(client_request.body) == size
    assert peak < 6 * size


async def test_a_compressed_body_is_not_decompressed() -> None:
    bomb = gzip.compress(b'{"model":"m","prompt":"' + b" " * 10_000_000 + b'"}')
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await port.ask(post(CHAT, bomb, "content-encoding: gzip"))
        assert port.gateway.calls[0].body == bomb


UNFINISHED = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nx: ".encode()


async def test_incomplete_heads_count_against_the_budget_until_their_clients_leave() -> None:
    async with rig(retained_bodies=Size(8_000_000)) as port, contextlib.AsyncExitStack() as clients:
        senders = [await clients.enter_async_context(port.client()) for _ in range(5)]
        for client in senders:
            client.send(UNFINISHED + b"a" * 50_000)
        await until(lambda: port.server.retained >= 5 * (2 * 50_000 - FREE_BUFFER))
        for client in senders:
            client.leave()
        await until(lambda: port.server.retained == 0)


async def test_a_head_beyond_the_budget_is_refused_with_retry_after_and_smaller_ones_are_served() -> None:
    async with (
        Pod(answering(plain(b"good"))) as pod,
        rig(pod, retained_bodies=Size(800_000)) as port,
        port.client() as first,
        port.client() as second,
    ):
        first.send(UNFINISHED + b"a" * 45_000)
        await until(lambda: port.server.retained > 80_000)
        second.send(UNFINISHED + b"a" * 45_000)
        seen = await second.until_closed()
        assert (seen.status, seen.all("retry-after")) == (429, ["1"])
        assert (await port.ask(post())).status == 200
        assert port.server.retained <= 100_000
        first.send(b"\r\ncontent-length: 2\r\n\r\n{}")
        assert (await first.response()).endswith(b"good")
        await until(lambda: port.server.retained == 0)


@pytest.mark.parametrize("pieces", [1, 30])
async def test_a_head_may_have_64_kib_in_all_its_fields(pieces: int) -> None:
    def with_fields(size: int) -> bytes:
        fields = "".join(f"x-{number}: {'y' * (size // 20)}\r\n" for number in range(20))
        return f"GET /health HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{fields}\r\n".encode()

    async with rig() as port:
        for size, status in ((HEAD_LIMIT - 1000, 200), (HEAD_LIMIT + 1000, 431)):
            request = with_fields(size)
            step = -(-len(request) // pieces)
            async with port.client() as client:
                for start in range(0, len(request), step):
                    client.send(request[start : start + step])
                    await asyncio.sleep(0)
                assert (await client.until_closed()).status == status
        await until(lambda: port.server.retained == 0)


@pytest.mark.parametrize("framing", ["counted", "chunked"])
async def test_pipelined_requests_do_not_accumulate(framing: str) -> None:
    """Each response lets the client send more."""
    chunked = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n\r\n".encode()
    request = chunked if framing == "chunked" else post(body=b"{}", close=False)
    count = 20_000
    most = 0

    async def script(received: Received) -> None:
        nonlocal most
        most = max(most, port.server.retained)
        await received.body()
        await received.send(plain(b"good"))

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(request * count)
        for _ in range(300):
            assert (await client.response()).endswith(b"good")
        assert 0 < most < 500_000
        client.leave()
        await until(lambda: port.server.retained == 0)


async def test_pipelined_requests_beyond_the_budget_are_dropped() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await go_on.wait()
        await request.send(plain(b"good"))

    async with Pod(script) as pod, rig(pod, retained_bodies=Size(80_000)) as port, port.client() as client:
        client.send(post(close=False))
        await until(lambda: len(pod.requests) == 1)
        client.send(post(close=False) * 500)
        await until(lambda: connection_of(port)._has_dropped)
        assert port.server.retained < 10_000
        go_on.set()
        seen = await client.until_closed()
        assert (seen.status, seen.body, seen.all("connection")) == (200, b"good", ["close"])
        assert len(pod.requests) == 1
        assert port.server.retained == 0
