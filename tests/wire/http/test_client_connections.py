"""Connections of clients: how they begin, wait, are refused, linger and end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import socket
import weakref
from dataclasses import replace
from typing import Any

import pytest

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import Reason
from proxy.core.listener import Listener, Listeners
from proxy.core.params import Duration, Size
from proxy.core.ports import ClientRequest
from proxy.http import guards
from proxy.http.guards import CloseReason
from tests.helpers.http.support import (
    BUFFER,
    CHAT,
    Pod,
    Received,
    Rig,
    Script,
    answering,
    chunk,
    connection_of,
    plain,
    post,
    rig,
)
from tests.helpers.waiting import PATIENCE, until
from tests.wire.http.test_tunnel import SWITCHED, UPGRADE, echo

HEALTH = b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n"
CHUNKED = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n".encode()


def chunked(body: bytes) -> bytes:
    return CHUNKED + chunk(body) + b"0\r\n\r\n"


async def repeating(request: Received) -> None:
    """A pod that responds with the body it was sent."""
    await request.send(plain(await request.body()))


# time


async def test_a_head_that_does_not_arrive_is_408() -> None:
    async with rig(head_timeout=Duration(0.1)) as port:
        seen = await port.ask(b"POST /v1/chat/completions HTTP/1.1\r\nhost: a")
        assert [(ended.path, ended.status, ended.outcome) for ended in port.ended] == [("", 408, Reason.BODY_TIMEOUT)]
    assert seen.status == 408
    assert seen.all("connection") == ["close"]
    assert seen.json()["error"]["message"].startswith("The head of the request")


async def test_a_head_sent_byte_by_byte_has_the_same_time() -> None:
    async with rig(head_timeout=Duration(0.2)) as port, port.client() as client:
        for byte in HEALTH[:-1]:
            client.send(bytes([byte]))
            await asyncio.sleep(0.02)
        assert (await client.until_closed()).status == 408


@pytest.mark.parametrize("first", [HEALTH, chunked(b"{}")])
async def test_the_head_of_a_later_request_has_the_same_time(first: bytes) -> None:
    async with Pod(repeating) as pod, rig(pod, head_timeout=Duration(0.1)) as port, port.client() as client:
        client.send(first)
        assert b" 200 " in await client.response()
        await asyncio.sleep(0.3)
        client.send(first[:20])
        assert (await client.until_closed()).status == 408


async def test_a_request_may_last_longer_than_its_head() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await asyncio.sleep(0.4)
        await request.send(plain())

    async with Pod(script) as pod, rig(pod, head_timeout=Duration(0.1), keep_alive=Duration(0.1)) as port:
        assert (await port.ask(post())).status == 200
        async with port.client() as client:
            client.send(CHUNKED)
            await asyncio.sleep(0.3)
            client.send(chunk(b"{}") + b"0\r\n\r\n")
            assert b" 200 " in await client.response()


@pytest.mark.parametrize("before", [b"", HEALTH, HEALTH[:10]])
async def test_a_connection_without_a_request_is_closed_in_time(before: bytes) -> None:
    async with rig(keep_alive=Duration(0.1)) as port, port.client() as client:
        if before:
            client.send(before)
            await asyncio.sleep(0.01)
            client.send(HEALTH[len(before) :])
            assert b" 200 " in await client.response()
        assert (await client.until_closed()).raw == b""


async def test_a_connection_in_use_stays_open() -> None:
    async with rig(keep_alive=Duration(0.2)) as port, port.client() as client:
        for _ in range(8):
            client.send(HEALTH)
            assert b" 200 " in await client.response()
            await asyncio.sleep(0.06)


# framing


async def test_requests_of_every_framing_share_a_connection() -> None:
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        for body in (b'{"n":1}', b'{"n":"%b"}' % (b"x" * 300_000)):
            for request in (post(body=body, close=False), chunked(body), post(body=body, close=False)):
                client.send(request)
                assert (await client.response()).partition(b"\r\n\r\n")[2] == body
            head, _, rest = post(body=body, close=False).partition(b"\r\n\r\n")
            for piece in (head[:30], head[30:] + b"\r\n\r\n", rest[:4], rest[4:]):
                client.send(piece)
                await asyncio.sleep(0.01)
            assert (await client.response()).partition(b"\r\n\r\n")[2] == body
            client.send(HEALTH)
            assert b" 200 " in await client.response()


async def test_a_body_after_its_head_is_read() -> None:
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        for body in (b"{}", b'{"n":"%b"}' % (b"x" * 3_000_000)):
            head, _, rest = post(body=body, close=False).partition(b"\r\n\r\n")
            client.send(head + b"\r\n\r\n")
            await asyncio.sleep(0.02)
            client.send(rest + HEALTH)
            assert (await client.response()).partition(b"\r\n\r\n")[2] == body
            assert b" 200 " in await client.response()


@pytest.mark.parametrize("line", ["connection: keep-alive", "x: y"])
async def test_an_http_10_connection_is_kept_on_request(line: str) -> None:
    kept = "keep-alive" in line
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        request = post(CHAT, b"{}", line, close=False, version="1.0")
        client.send(request)
        response = await client.response()
        assert (b"connection: keep-alive\r\n" in response) is kept
        if kept:
            client.send(request)
            assert b" 200 " in await client.response()
        else:
            assert (await client.until_closed()).raw == b""


async def test_a_client_that_sent_its_body_gets_no_100_continue() -> None:
    async with Pod(repeating) as pod, rig(pod) as port:
        seen = await port.ask(post(CHAT, b"{}", "expect: 100-continue"))
    assert (seen.status, seen.body) == (200, b"{}")


async def test_a_chunked_body_gets_100_continue() -> None:
    async with Pod(repeating) as pod, rig(pod) as port, port.client() as client:
        client.send(CHUNKED.replace(b"host: a", b"host: a\r\nexpect: 100-continue"))
        assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.send(chunk(b"{}") + b"0\r\n\r\n")
        assert (await client.response()).endswith(b"{}")


@pytest.mark.parametrize("close", [True, False])
async def test_an_unwanted_body_for_health_is_harmless(close: bool) -> None:
    """`close`: the response comes before the body has."""
    request = HEALTH.replace(b"\r\n\r\n", b"\r\ncontent-length: 4\r\n\r\n")
    async with rig() as port, port.client() as client:
        if close:
            client.send(request)
            assert b"connection: close\r\n" in await client.response()
            client.send(b"body")
            assert (await client.until_closed()).raw == b""
        else:
            client.send((request + b"body") * 2)
            for _ in range(2):
                assert b"connection: close\r\n" not in await client.response()


@pytest.mark.parametrize("protocol", [b"h2c", b"what/ever"])
async def test_an_unknown_upgrade_is_ignored(protocol: bytes) -> None:
    upgrade = HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: upgrade\r\nupgrade: " + protocol + b"\r\n\r\n")
    async with rig() as port, port.client() as client:
        client.send(upgrade + HEALTH)
        for _ in range(2):
            assert b" 200 " in await client.response()


# what cannot be read


@pytest.mark.parametrize("good", [post(close=False), chunked(b"{}")])
async def test_malformed_bytes_after_a_request_are_refused_after_its_response(good: bytes) -> None:
    async with Pod(answering(plain(b"good"))) as pod, rig(pod) as port, port.client() as client:
        client.send(good + b"NONSENSE\r\n\r\n" + good)
        assert (await client.response()).endswith(b"good")
        seen = await client.until_closed()
        assert (seen.status, seen.all("connection")) == (400, ["close"])
        assert len(pod.requests) == 1


@pytest.mark.parametrize("pause", [0.0, 0.02])
async def test_a_broken_body_is_400_and_ends_the_connection(pause: float) -> None:
    async with rig() as port, port.client() as client:
        client.send(CHUNKED)
        await asyncio.sleep(pause)
        client.send(chunk(b"{}") + b"zz\r\n" + HEALTH)
        seen = await client.until_closed()
        assert (seen.status, seen.all("connection")) == (400, ["close"])


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\nhost: a\n\n",
        b"GET /health HTTP/1.1\r\nhost: a\nx: y\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: +0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\ncontent-length: 0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\ncontent-length: 99999999999999999999\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\ntransfer-encoding: gzip\r\ncontent-length: 0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: a\0b\r\n\r\n",
        b"GET  /health HTTP/1.1\r\nhost: a\r\n\r\n",
        b"\r\nGET  /health HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health  HTTP/1.1\r\nhost: a\r\n\r\n",
        b"POST  /health HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
async def test_ambiguous_requests_are_refused(request_bytes: bytes) -> None:
    async with rig() as port, port.client() as client:
        client.send(request_bytes + HEALTH)
        assert (await client.until_closed()).status == 400
        assert [(ended.path, ended.status, ended.outcome) for ended in port.ended] == [
            ("", 400, Reason.INVALID_REQUEST)
        ]
        assert port.gateway.calls == []


async def test_two_spaces_in_separate_reads_are_two() -> None:
    async with rig() as port, port.client() as client:
        for piece in (b"GET ", b" /health HT", b"TP/1.1\r\nhost: a\r\n\r\n"):
            client.send(piece)
            await asyncio.sleep(0.02)
        assert (await client.until_closed()).status == 400


async def test_spaces_elsewhere_are_kept() -> None:
    async with rig() as port, port.client() as client:
        for pieces in (
            (HEALTH.replace(b"\r\n\r\n", b"\r\nx:  a  b\r\n\r\n"),),
            (b"GET /health HTTP/1.1\r\nhost: a\r\nx: ", b"  a  b\r\n\r\n"),
        ):
            for piece in pieces:
                client.send(piece)
                await asyncio.sleep(0.02)
            assert b" 200 " in await client.response()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"x: y\r\n" * 200 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nauthorization: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 200_000,
    ],
)
async def test_a_too_large_head_is_431_and_not_repeated(request_bytes: bytes) -> None:
    async with rig() as port, port.client() as client:
        client.send(request_bytes)
        seen = await client.until_closed()
        assert (seen.status, seen.json()["error"]["code"]) == (431, "head_too_large")
        assert b"yyyy" not in seen.raw
        assert seen.all("connection") == ["close"]
        assert [(ended.path, ended.status, ended.outcome) for ended in port.ended] == [("", 431, Reason.HEAD_TOO_LARGE)]
        assert port.hung_up == {CloseReason.BAD_REQUEST: 1}


@pytest.mark.parametrize("size", [1, 700, 16 * 1024, 60_000])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\nhost: a\r\nauthorization: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET /" + b"y" * 70_000 + b" HTTP/1.1\r\nhost: a\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\n" + b"".join(b"x%d: yyyy\r\n" % n for n in range(200)) + b"\r\n",
        b"GET /health HTTP/1.1\r\nhost: a\r\n" + (b"x: " + b"y" * 1000 + b"\r\n") * 100 + b"\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nx: " + b"y" * 70_000,
    ],
    ids=["field", "target", "fields", "sum", "endless"],
)
async def test_a_head_that_becomes_too_large_piece_by_piece_is_431(head: bytes, size: int) -> None:
    size = max(size, len(head) // 500)
    async with rig() as port, port.client() as client:
        for start in range(0, len(head), size):
            if client.writer.is_closing() or port.ended:
                break
            client.send(head[start : start + size])
            await asyncio.sleep(0)
        seen = await client.until_closed()
        assert (seen.status, seen.json()["error"]["code"]) == (431, "head_too_large")
        assert b"yyyy" not in seen.raw
        assert [(ended.path, ended.status, ended.outcome) for ended in port.ended] == [("", 431, Reason.HEAD_TOO_LARGE)]
        assert port.hung_up == {CloseReason.BAD_REQUEST: 1}
        assert port.server.retained == 0


# responds before the request was read


async def test_an_early_refusal_reaches_a_client_that_sends_all_of_its_body_first() -> None:
    """As a client does that writes, then reads: a close while it writes would reset what it has not read."""
    async with rig(max_body=Size(1000)) as port:

        def send_then_read() -> bytes:
            with socket.create_connection(("127.0.0.1", port.server.port)) as sock:
                sock.sendall(post(body=b"x" * 20_000_000, close=False))
                raw = b""
                while data := sock.recv(65536):
                    raw += data
                return raw

        response = await asyncio.get_running_loop().run_in_executor(None, send_then_read)
    assert response.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close\r\n" in response


async def send_on(port: Rig, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
    """Sends a body that was refused for as long as it is taken."""
    for name, value in limits.items():
        monkeypatch.setattr(guards, name, value)
    async with port.client() as client:
        client.send(post(body=b"x" * 2_000_000, close=False)[:-1])
        assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 413 ")
        async with asyncio.timeout(PATIENCE):
            while port.server.connections:
                client.send(b"x" * 10_000)
                await asyncio.sleep(0.01)


async def test_a_refused_client_that_continues_is_disconnected_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(max_body=Size(1000), keep_alive=Duration(0.2)) as port:
        await send_on(port, monkeypatch, LINGER=0.2)


async def test_a_refused_client_that_continues_is_disconnected_after_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async with rig(max_body=Size(1000)) as port:
        await send_on(port, monkeypatch, LINGER_BYTES=3_000_000)


# pipelining


@pytest.mark.parametrize("gap", [0.0, 0.002])
async def test_local_responses_do_not_accumulate_for_a_client_that_does_not_read(gap: float) -> None:
    card = {"id": "m", "x": "y" * 50_000}
    async with rig() as port, port.client(BUFFER) as client:
        port.gateway.cards.append(card)
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        request = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n"
        for _ in range(200):
            client.send(request)
            await asyncio.sleep(gap)
        served = await port.standstill()
        (connection,) = port.server.connections
        assert served < 200
        assert connection.socket.get_write_buffer_size() < 2**19
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(200):
            assert len(await client.response()) > 50_000


async def test_a_client_that_pipelines_endlessly_is_paused() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await go_on.wait()
        await request.send(plain(b"first"))

    count = 200_000
    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post(close=False) + HEALTH * count)
        await until(lambda: bool(pod.requests))
        left = -1
        while left != client.writer.transport.get_write_buffer_size():
            left = client.writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.1)
        (connection,) = port.server.connections
        assert len(connection._tail) < 2**19
        go_on.set()
        assert (await client.response()).endswith(b"first")
        for _ in range(2000):
            assert b" 200 " in await client.response()


def until_gone(gone: asyncio.Event) -> Script:
    """Waits until the proxy ends the request, and sets the event."""

    async def script(request: Received) -> None:
        await request.body()
        await request.gone()
        gone.set()

    return script


async def test_a_client_that_pipelines_and_leaves_is_noticed() -> None:
    gone = asyncio.Event()
    async with Pod(until_gone(gone)) as pod, rig(pod) as port:
        async with port.client() as client:
            client.send(post(close=False) + HEALTH)
            await until(lambda: bool(pod.requests))
            client.leave()
        await asyncio.wait_for(gone.wait(), PATIENCE)
        assert (await port.until_ended()).outcome is Ending.CLIENT_GONE
        await asyncio.sleep(0.02)
        assert len(port.ended) == 1


async def test_a_client_that_leaves_while_its_next_requests_are_not_read_is_noticed() -> None:
    gone = asyncio.Event()
    async with Pod(until_gone(gone)) as pod, rig(pod) as port:
        async with port.client() as client:
            client.send(post(close=False) + HEALTH)
            await until(lambda: bool(pod.requests))
            client.send(b"x" * 100_000)
            await until(lambda: any(connection._paused for connection in port.server.connections))
            client.leave()
        await asyncio.wait_for(gone.wait(), PATIENCE)
        assert (await port.until_ended()).outcome is Ending.CLIENT_GONE


async def test_a_client_that_closes_its_sending_side_has_left() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.gone()

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post(close=False))
        await until(lambda: bool(pod.requests))
        client.writer.write_eof()
        assert (await client.until_closed()).raw == b""
        assert (await port.until_ended()).outcome is Ending.CLIENT_GONE


# upgrades


async def cut_in_the_head(client: Any) -> None:
    client.send(UPGRADE[:40])
    await asyncio.sleep(0.02)
    client.send(UPGRADE[40:] + b"early ")


async def behind_a_chunked_request(client: Any) -> None:
    client.send(chunked(b"{}") + UPGRADE + b"early ")
    assert b" 200 " in await client.response()


@pytest.mark.parametrize("start", [cut_in_the_head, behind_a_chunked_request])
async def test_a_tunnel_starts_with_any_split_of_its_request(start: Any) -> None:
    async def script(request: Received) -> None:
        if request.line.startswith(b"POST"):
            await repeating(request)
        else:
            await asyncio.sleep(0.05)
            await echo(request)

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        await start(client)
        await asyncio.sleep(0.02)
        client.send(b"more ")
        assert SWITCHED.split(b"\r\n")[0] in await client.until(b"\r\n\r\n")
        await client.until(b"hello early more ")
        client.send(b"later")
        await client.until(b"later")


@pytest.mark.parametrize("whole", [True, False])
async def test_after_a_refused_upgrade_requests_continue(whole: bool) -> None:
    async def script(request: Received) -> None:
        await request.send(plain(b"no").replace(b"200 OK", b"403 Forbidden"))

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        if not whole:
            client.send(UPGRADE[:40])
            await asyncio.sleep(0.02)
        client.send((UPGRADE if whole else UPGRADE[40:]) + HEALTH + UPGRADE + HEALTH)
        for _ in range(2):
            assert b" 403 " in await client.response()
            assert b" 200 " in await client.response()


# stopping


async def test_stopping_closes_connections_with_an_incomplete_request() -> None:
    async with rig() as port, port.client() as client:
        client.send(HEALTH[:10])
        await until(lambda: bool(port.server.connections))
        await asyncio.sleep(0.02)
        await port.server.stop(grace=5)
        assert (await client.until_closed()).raw == b""


async def test_stopping_does_not_wait_for_unsent_bodies() -> None:
    async with rig() as port, port.client() as client:
        client.send(CHUNKED)
        await until(lambda: port.server.busy)
        async with asyncio.timeout(PATIENCE):
            await port.server.stop(grace=0.05)
        assert (await client.until_closed()).all("x-kvlane-reason") == ["rejected-shutting-down"]
        assert [ended.outcome for ended in port.ended] == [Reason.SHUTTING_DOWN]


class Broken(Listener):
    def request_ended(
        self, client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        raise ZeroDivisionError


async def test_a_listener_that_fails_is_logged_once_and_the_others_are_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with rig() as port, port.client() as client:
        served = port.server.config
        port.server.use(replace(served, listeners=Listeners([Broken(), *served.listeners.all])))
        for _ in range(2):
            client.send(HEALTH)
            assert b" 200 " in await client.response()
        await port.until_ended(2)
    (failure,) = [record for record in caplog.records if record.exc_info]
    assert "Broken.request_ended failed for request" in failure.getMessage()


async def test_an_error_after_a_response_is_reported_and_the_connection_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing that a request's task raises is lost."""
    reported: list[dict[str, Any]] = []
    async with rig() as port, port.client() as client:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

        def broken(*_: object) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(port.server.service, "ended", broken)
        for _ in range(2):
            client.send(HEALTH)
            assert b" 200 " in await client.response()
        await until(lambda: len(reported) == 2)
    assert {type(context["exception"]) for context in reported} == {ZeroDivisionError}


async def test_a_connection_leaves_no_garbage() -> None:
    async with Pod(repeating) as pod, rig(pod) as port:
        gc.collect()
        gc.disable()
        try:
            connections = []
            for last in (post(close=False), chunked(b"{}")):
                async with port.client() as client:
                    client.send(post(close=False))
                    await client.response()
                    connections.append(weakref.ref(connection_of(port)))
                    client.send(last)
                    await client.response()
            port.gateway.calls.clear()
            await until(lambda: not any(connection() for connection in connections))
        finally:
            gc.enable()


# the end


async def test_connections_accepted_when_the_port_closes_are_served() -> None:
    async with asyncio.timeout(PATIENCE), Pod(repeating) as pod, rig(pod) as port:
        with socket.create_connection(("127.0.0.1", port.server.port)) as sock:
            sock.sendall(post())
            for _ in range(2):  # accepted, and not yet told to anybody
                await asyncio.sleep(0)
            assert not port.server.connections
            stopping = asyncio.create_task(port.server.stop(10.0))
            reader, writer = await asyncio.open_connection(sock=sock.dup())
            assert b" 200 " in await reader.readline()
            writer.close()
            await stopping


async def test_a_connection_made_after_the_end_is_closed() -> None:
    ours, theirs = socket.socketpair()
    async with asyncio.timeout(PATIENCE), rig() as port:
        clients = port.server
        await clients.shutdown(0.0)
        await asyncio.get_running_loop().connect_accepted_socket(clients.connect, ours)
        reader, writer = await asyncio.open_connection(sock=theirs)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        assert not clients.connections
        writer.close()
