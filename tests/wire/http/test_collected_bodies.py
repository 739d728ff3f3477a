"""Bodies that come in several reads: collected before their request is served, or read while it is."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import pytest

from proxy.core.attempt import Ending
from proxy.core.errors import Reason
from proxy.core.params import Duration, Size
from proxy.core.ports import SystemClock
from proxy.http.body import COLLECTED
from tests.helpers.http.support import CHAT, Client, Pod, Received, answering, connection_of, plain, post, rig
from tests.helpers.waiting import PATIENCE, until
from tests.unit.http.test_any_request import Socket, receive
from tests.wire.http.test_client_connections import HEALTH, repeating


def head(length: int, *fields: str, path: str = CHAT) -> bytes:
    return "\r\n".join((f"POST {path} HTTP/1.1", "host: a", *fields, f"content-length: {length}", "", "")).encode()


def json_of(size: int) -> bytes:
    return b'{"n":"%b"}' % (b"x" * (size - 8))


async def send_slowly(client: Client, data: bytes, pieces: int) -> None:
    step = -(-len(data) // pieces)
    for start in range(0, len(data), step):
        client.send(data[start : start + step])
        await asyncio.sleep(0.01)


# what is collected


@pytest.mark.parametrize("size", [8, 100_000, COLLECTED])
async def test_a_request_starts_with_its_whole_body_and_its_time_counts_from_its_head(size: int) -> None:
    body = json_of(size)
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        for _ in range(2):
            client.send(head(size))
            await until(lambda: port.server.retained == size)
            await send_slowly(client, body[:-1], 4)
            assert connection_of(port).task is None
            assert port.server.retained == size
            client.send(body[-1:])
            assert (await client.response()).partition(b"\r\n\r\n")[2] == body
            await until(lambda: port.server.retained == 0)
        assert [client_request.body for client_request in port.gateway.calls] == [body, body]


async def test_the_time_of_receipt_is_that_of_the_head() -> None:
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        client.send(head(8))
        await until(lambda: port.server.retained == 8)
        whole_at = SystemClock().now()
        await asyncio.sleep(0.01)
        client.send(json_of(8))
        await client.response()
        assert port.gateway.calls[0].received_at <= whole_at


async def test_bytes_after_a_collected_body_are_further_requests() -> None:
    body = json_of(300_000)
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        await send_slowly(client, head(len(body)) + body + HEALTH + post(close=False) + head(len(body)) + body, 7)
        assert (await client.response()).partition(b"\r\n\r\n")[2] == body
        assert b" 200 " in await client.response()
        assert (await client.response()).endswith(b'{"model":"m"}')
        assert (await client.response()).partition(b"\r\n\r\n")[2] == body


# what is served from its head on


@pytest.mark.parametrize(
    ("length", "fields"),
    [
        (COLLECTED + 1, ()),
        (8, ("expect: 100-continue",)),
        (8, ("connection: upgrade", "upgrade: h2c")),
        (8, ("content-type: Multipart/form-data; boundary=XX",)),
    ],
)
async def test_a_body_that_may_wait_or_be_streamed_is_read_by_its_request(length: int, fields: tuple[str, ...]) -> None:
    body = json_of(length)
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        client.send(head(length, *fields, "connection: close"))
        await until(lambda: bool(port.server.connections))
        await until(lambda: connection_of(port).task is not None)
        await send_slowly(client, body, 3)
        seen = await client.until_closed()
        assert seen.raw.removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n").partition(b"\r\n\r\n")[2] == body


async def test_a_body_beyond_the_budget_waits_for_others() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        body = await request.body()
        await go_on.wait()
        await request.send(plain(body))

    body = json_of(1_000_000)
    async with (
        Pod(script) as pod,
        rig(pod, retained_bodies=Size(3_000_000)) as port,
        port.client() as served,
        port.client() as collected,
        port.client() as waiting,
    ):
        await send_slowly(served, head(len(body)) + body, 2)
        await until(lambda: len(pod.requests) == 1)
        collected.send(head(len(body)) + body[:-1])
        await until(lambda: port.server.retained == 2_000_000)
        await send_slowly(waiting, head(len(body)) + body, 2)
        await asyncio.sleep(0.05)
        assert (len(pod.requests), port.server.budget.used) == (1, 2_000_000)
        collected.leave()
        await until(lambda: len(pod.requests) == 2)
        go_on.set()
        for client in (served, waiting):
            assert (await client.response()).partition(b"\r\n\r\n")[2] == body
        await until(lambda: port.server.retained == 0)


@pytest.mark.parametrize(
    ("length", "path", "status"), [(1001, CHAT, 413), (8, "/v1/unknown", 404), (8, "/v1/models", 405)]
)
async def test_a_request_is_refused_by_its_head(length: int, path: str, status: int) -> None:
    async with Pod(repeating) as pod, rig(pod, max_body=Size(1000)) as port, port.client() as client:
        client.send(head(length, path=path))
        assert (await client.response()).startswith(b"HTTP/1.1 %d " % status)
        client.send(json_of(length))
        assert (await client.until_closed()).raw == b""
        assert [ended.status for ended in port.ended] == [status]
        assert port.gateway.calls == []


# what does not become whole


async def test_a_collected_body_that_stops_is_refused_and_returns_its_budget() -> None:
    async with rig(body_timeout=Duration(0.1)) as port, port.client() as client:
        client.send(head(100, "x-request-id: mine", path="/v1/messages") + b"abc")
        await until(lambda: port.server.retained == 100)
        seen = await client.until_closed()
        assert (seen.status, seen.all("connection"), seen.all("x-request-id")) == (408, ["close"], ["mine"])
        assert seen.json()["type"] == "error"
        ended = [(ended.path, ended.status, ended.outcome) for ended in port.ended]
        assert ended == [("/v1/messages", 408, Reason.BODY_TIMEOUT)]
        assert port.server.retained == 0


async def test_a_second_body_has_the_same_time() -> None:
    async with Pod(repeating) as pod, rig(pod, body_timeout=Duration(0.3)) as port, port.client() as client:
        for _ in range(2):
            await asyncio.sleep(0.4)
            client.send(head(8))
            await asyncio.sleep(0.15)
            client.send(json_of(8))
            assert b" 200 " in await client.response()


@pytest.mark.parametrize("orderly", [True, False])
async def test_a_client_that_leaves_while_its_body_is_collected_leaves_nothing(orderly: bool) -> None:
    async with Pod(repeating) as pod, rig(pod) as port:
        gc.collect()
        gc.disable()
        try:
            async with port.client() as client:
                client.send(head(100_000) + b"x" * 50_000)
                await until(lambda: port.server.retained == 100_000)
                connection = weakref.ref(connection_of(port))
                if orderly:
                    client.writer.write_eof()
                else:
                    client.leave()
                ended = await port.until_ended()
            assert (ended.status, ended.outcome, port.server.retained) == (499, Ending.CLIENT_GONE, 0)
            await until(lambda: connection() is None)
        finally:
            gc.enable()
        assert len(port.ended) == 1
        assert pod.requests == []


@pytest.mark.parametrize("reads", [(head(8) + json_of(8),), (head(8), json_of(8))])
async def test_a_client_that_leaves_with_its_last_byte_is_counted_and_returns_its_budget(
    reads: tuple[bytes, ...],
) -> None:
    """Its task is cancelled before the first step."""
    async with rig() as port:
        connection = port.server.connect()
        connection.connection_made(Socket())
        for read in reads:
            receive(connection, read)
        connection.connection_lost(None)
        await asyncio.sleep(0.01)
        assert [(ended.status, ended.outcome) for ended in port.ended] == [(499, Ending.CLIENT_GONE)]
        assert port.gateway.calls == []
        assert port.server.retained == 0


# stopping


async def test_stopping_waits_for_a_collected_body_and_serves_it() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        client.send(head(8) + b"{")
        await until(lambda: port.server.retained == 8)
        stopping = asyncio.ensure_future(port.server.stop(grace=5))
        await asyncio.sleep(0.05)
        client.send(json_of(8)[1:])
        seen = await client.until_closed()
        assert (seen.status, seen.all("connection")) == (200, ["close"])
        await stopping


async def test_a_body_that_does_not_arrive_within_the_grace_period_is_refused() -> None:
    async with rig() as port, port.client() as client:
        client.send(head(8) + b"{")
        await until(lambda: port.server.retained == 8)
        async with asyncio.timeout(PATIENCE):
            await port.server.stop(grace=0.05)
        assert (await client.until_closed()).all("x-kvlane-reason") == ["rejected-shutting-down"]
        assert [(ended.status, ended.outcome) for ended in port.ended] == [(503, Reason.SHUTTING_DOWN)]
        assert port.server.retained == 0


async def test_a_collected_body_that_stops_is_refused_after_body_timeout() -> None:
    async with rig(body_timeout=Duration(0.1), min_body_rate=Size(1)) as port, port.client() as client:
        client.send(head(1000) + b"x" * 900)
        assert (await client.until_closed()).status == 408
        assert port.server.retained == 0


async def test_an_error_after_a_refusal_is_reported_and_the_connection_ends(
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with rig(body_timeout=Duration(0.1)) as port, port.client() as client:

        def broken(*_: Any) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(port.server.service, "ended", broken)
        client.send(head(8) + b"{")
        assert (await client.until_closed()).status == 408
        assert port.server.retained == 0
    assert any(record.exc_info for record in caplog.records)
