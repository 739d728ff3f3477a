"""Errors of the proxy while a callback of a transport runs: they end the request that they happen to."""

from __future__ import annotations

import asyncio
import logging

import pytest

from proxy.core.attempt import Ending
from proxy.core.listener import NO_LISTENERS
from proxy.http.client_connection import Tunnel
from proxy.http.reader import ContentLengthReader
from proxy.http.response import Response
from proxy.http.upstream.connection import ResponseMeter
from tests.helpers.http.support import (
    SSE_HEAD,
    STREAMED,
    Pod,
    Received,
    Rig,
    answering,
    connection_of,
    event,
    plain,
    post,
    rig,
)
from tests.helpers.waiting import PATIENCE, until
from tests.wire.http.test_tunnel import SWITCHED, UPGRADE

END = b"0\r\n\r\n"
UNTIL_CLOSE = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\nall"


class Broken(Exception):
    pass


def breaks(*_: object) -> None:
    raise Broken


def logged(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    return [record for record in caplog.records if record.levelno >= logging.ERROR]


async def has_ended(port: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """The request, its attempt and its connections, with one error in the log that names it."""
    await port.until_ended()
    assert port.attempt.ending is not None
    await until(lambda: not port.server.connections)
    assert not [pod for pod in port.server.upstream.values() if pod.idle]
    await until(lambda: logged(caplog))
    (record,) = logged(caplog)
    assert port.attempt.request.id in record.getMessage()
    assert record.exc_info is not None


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    "pieces",
    [
        (plain(b"{}"),),
        (plain(b"{}")[:-1], b"}"),
        (SSE_HEAD + event("1"), event("2"), END),
        (SSE_HEAD + event("1") + END,),
        (UNTIL_CLOSE,),
    ],
    ids=["whole", "in two reads", "stream", "stream in one read", "until close"],
)
@pytest.mark.parametrize("broken", ["flush", "finish", "finish_at_once"])
async def test_an_error_while_a_response_is_read_ends_its_request(
    pieces: tuple[bytes, ...],
    version: str,
    broken: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reached = []

    def meter(*arguments: object) -> None:
        reached.append(arguments)
        raise Broken

    monkeypatch.setattr(ResponseMeter, broken, meter)

    async def script(request: Received) -> None:
        await request.body()
        await request.send(*pieces, pause=0.02)
        if pieces == (UNTIL_CLOSE,):
            request.break_off()

    async with Pod(script) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED, version=version))
        if not reached:
            assert seen.ending == "complete"
            return
        assert seen.status == 500 or seen.ending == "reset" or seen.body == b"{}"
        await has_ended(port, caplog)


async def test_a_listener_that_fails_at_the_first_byte_changes_no_response(caplog: pytest.LogCaptureFixture) -> None:
    async with Pod(answering(SSE_HEAD, event("1"), b"0\r\n\r\n")) as pod, rig(pod) as port:
        port.gateway.listeners = NO_LISTENERS.at_first_byte(lambda _: breaks())
        seen = await port.ask(post(body=STREAMED))
        assert (seen.status, seen.ending, seen.body) == (200, "complete", b"data: 1\n\n")
        assert "its further failures are not logged" in caplog.text


async def test_an_error_before_anything_is_sent_is_a_500(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Response, "head_received", breaks)
    async with Pod(answering(SSE_HEAD, event("1"))) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
        assert seen.status == 500
        assert seen.json()["error"]["message"].startswith("Internal error")
        await has_ended(port, caplog)
        assert port.attempt.ending is Ending.EVICTED  # not by its pod


@pytest.mark.parametrize("callback", ["pause", "resume"])
async def test_an_error_while_a_client_reads_slowly_ends_its_request(
    callback: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    left = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        try:
            await request.send(SSE_HEAD, *[event("x" * 100_000)] * 1000)
        except ConnectionError:
            left.set()
            raise

    monkeypatch.setattr(Response, callback, breaks)
    async with Pod(script) as pod, rig(pod) as port, port.client(65536) as client:
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(body=STREAMED))
        if callback == "resume":
            await until(lambda: bool(port.server.connections) and connection_of(port).writing_paused)
        else:
            await until(lambda: logged(caplog))
        client.reader._transport.resume_reading()  # type: ignore[attr-defined]
        await client.until_closed()
        await asyncio.wait_for(left.wait(), PATIENCE)
        await has_ended(port, caplog)


async def test_an_error_of_the_timeout_sweep_ends_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.gone()

    monkeypatch.setattr(Response, "check", breaks)
    async with Pod(script) as pod, rig(pod) as port:
        await port.ask(post(body=STREAMED))
        await has_ended(port, caplog)


async def test_an_error_while_a_request_is_read_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ContentLengthReader, "feed", breaks)
    async with rig() as port:
        assert (await port.ask(post())).raw == b""
        await until(lambda: not port.server.connections)
        assert len(logged(caplog)) == 1


@pytest.mark.parametrize("callback", ["_from_pod", "feed_data"])
async def test_an_error_in_a_tunnel_ends_it(
    callback: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def script(request: Received) -> None:
        await request.send(SWITCHED)
        await request.reader.readexactly(1)
        await request.send(b"hello")
        await request.gone()

    if callback == "feed_data":
        monkeypatch.setattr(Tunnel, "feed_data", breaks)
    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(UPGRADE)
        await client.until(b"\r\n\r\n")
        if callback == "_from_pod":
            writer = connection_of(port).writer
            assert isinstance(writer, Tunnel)
            writer._client = None  # type: ignore[assignment]
        client.send(b"x")
        await client.until_closed()
        await has_ended(port, caplog)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            b'{"usage":{"prompt_tokens":%b,"total_tokens":1,"completion_tokens":1}}' % (b"9" * 5000),
        ),
        ("/v1/responses", b'{"id":"resp_\xff","object":"response","usage":null}'),
    ],
)
async def test_a_response_with_an_invalid_count_or_id_passes_unchanged(path: str, body: bytes) -> None:
    async with Pod(answering(plain(body))) as pod, rig(pod) as port:
        assert (await port.ask(post(path))).body == body
        await port.until_ended()
        assert port.attempt.usage is None
        assert port.attempt.response_id is None
