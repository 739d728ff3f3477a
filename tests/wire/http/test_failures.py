"""Pods that refuse, die, talk nonsense or fall silent."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.ports import ClientRequest, Relay, SystemClock
from proxy.core.request import InferenceRequest
from tests.helpers.http.support import (
    CHAT,
    SSE_HEAD,
    STREAMED,
    Pod,
    Received,
    Script,
    answering,
    chunk,
    event,
    plain,
    post,
    rig,
    timeouts,
)
from tests.helpers.ports import free_port, full_address
from tests.helpers.waiting import until


def breaking_off(*pieces: bytes) -> Script:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(*pieces, pause=0.01)
        request.break_off()

    return script


async def silent(request: Received) -> None:
    await request.body()
    await request.gone()


def closed_port() -> Endpoint:
    return Endpoint("gone", f"http://127.0.0.1:{free_port()}")


async def test_a_request_to_a_refusing_pod_goes_to_the_next() -> None:
    async with Pod(answering(plain())) as pod, rig(closed_port(), pod) as port:
        seen = await port.ask(post())
        assert seen.status == 200
        assert [attempt.ending for attempt in port.gateway.attempts] == [Ending.UPSTREAM_FAILED, Ending.COMPLETE]


async def test_an_unresolvable_name_and_an_invalid_url_are_failures_to_connect() -> None:
    async with rig(Endpoint("a", "http://kvlane.invalid:1"), Endpoint("b", "unix:/x")) as port:
        seen = await port.ask(post())
    assert seen.status == 502
    assert seen.json()["error"]["code"] == "upstream_failed"


async def test_a_connection_that_takes_too_long_is_given_up() -> None:
    with full_address() as (host, number):
        async with rig(Endpoint("full", f"http://{host}:{number}"), timeouts=timeouts(connect=0.1)) as port:
            seen = await port.ask(post())
            assert seen.status == 502
            assert port.attempt.ending is Ending.UPSTREAM_FAILED


@pytest.mark.parametrize("hedged", [False, True])
async def test_a_request_whose_attempt_waits_for_its_connection_is_refused_when_the_proxy_stops(hedged: bool) -> None:
    with full_address() as (host, number):
        full = Endpoint("full", f"http://{host}:{number}")
        async with rig(full) as port, port.client() as client:

            async def serve(client_request: ClientRequest, relay: Relay) -> None:
                request = InferenceRequest(
                    client_request.id,
                    client_request.path,
                    "m",
                    body=client_request.body,
                    headers=client_request.headers,
                )
                attempt = Attempt(request, Decision(full), full, 0, SystemClock().now())
                port.gateway.attempts.append(attempt)
                race = relay.race(lambda attempt: None)
                if hedged:
                    assert race is not None
                    with race:
                        await race.relay(attempt)
                else:
                    await relay.relay(attempt)

            port.gateway.serve = serve  # type: ignore[method-assign]
            client.send(post())
            await until(lambda: port.gateway.attempts)
            await port.server.stop(grace=0.05)
            seen = await client.until_closed()
            assert (seen.status, seen.all("x-kvlane-reason")) == (503, ["rejected-shutting-down"])
            assert [attempt.ending for attempt in port.gateway.attempts] == [Ending.EVICTED]
            assert [ended.outcome for ended in port.ended] == [Reason.SHUTTING_DOWN]


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\ncontent-le",
        b"not http at all\r\n\r\n",
        b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nx",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\t\r\n\r\n1\r\nx\r\n0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000,
        SSE_HEAD + b"zz\r\n",
    ],
)
async def test_a_request_to_a_pod_with_a_malformed_response_goes_to_the_next(raw: bytes) -> None:
    async with Pod(breaking_off(raw)) as bad, Pod(answering(plain())) as good, rig(bad, good) as port:
        seen = await port.ask(post())
    assert (seen.status, seen.ending) == (200, "complete")


async def test_an_endless_head_is_given_up() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(b"HTTP/1.1 200 OK\r\nx: " + b"y" * 300_000)
        await request.gone()

    async with Pod(script) as pod, rig(pod) as port:
        assert (await port.ask(post())).status == 502


async def test_without_a_response_of_any_pod_the_error_has_the_shape_of_the_api() -> None:
    async with Pod(breaking_off()) as pod, rig(pod) as port:
        seen = await port.ask(post("/v1/messages"))
        ended = await port.until_ended()
    assert seen.status == 502
    assert seen.json()["type"] == "error"
    assert seen.all("x-kvlane-reason") == ["upstream-failed"]
    assert (ended.status, ended.outcome) == (502, Reason.UPSTREAM_FAILED)
    assert "closed by the pod" in port.attempt.error


async def test_a_truncated_response_with_a_length_ends_early() -> None:
    cut = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nonly this"
    async with Pod(breaking_off(cut)) as pod, rig(pod, pod) as port:
        seen = await port.ask(post(close=False))
        assert port.attempt.ending is Ending.UPSTREAM_FAILED
        assert "closed by the pod" in port.attempt.error
        assert len(port.gateway.attempts) == 1
    assert seen.ending in ("cut", "reset")


async def test_a_truncated_chunked_response_has_no_last_chunk() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    async with Pod(breaking_off(head, chunk(b"[1,"))) as pod, rig(pod) as port:
        seen = await port.ask(post(close=False))
    assert seen.ending in ("cut", "reset")
    assert not seen.raw.endswith(b"0\r\n\r\n")


async def test_a_truncated_response_to_an_http_10_client_ends_with_a_reset() -> None:
    """It reads up to the end of the connection, so an orderly close would look whole."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    async with Pod(breaking_off(head, chunk(b"[1,"))) as pod, rig(pod) as port:
        seen = await port.ask(post(version="1.0"))
    assert seen.ending == "reset"


async def test_a_broken_stream_ends_with_an_error_event() -> None:
    async with Pod(breaking_off(SSE_HEAD, event("1"))) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
        ended = await port.until_ended()
    first, error, rest = seen.body.split(b"\n\n")
    assert (first, rest) == (b"data: 1", b"")
    assert error.startswith(b'data: {"error":')
    assert b"[DONE]" not in seen.body
    assert seen.ending == "complete"
    assert (ended.status, ended.outcome) == (200, Ending.UPSTREAM_FAILED)


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, b'data: {"error":{"message":"The pod stopped responding; this response is incomplete.",'),
        ("/v1/completions", b'data: {"error":{"message":"The pod stopped responding; this response is incomplete.",'),
        ("/v1/messages", b'event: error\ndata: {"type":"error","error":{"type":"api_error","message":"The pod '),
        ("/v1/responses", b'event: error\ndata: {"type":"error","code":"server_error","message":"The pod '),
    ],
)
async def test_the_error_event_has_the_shape_of_the_api(path: str, error: bytes, version: str) -> None:
    async with Pod(breaking_off(SSE_HEAD, event("1"))) as pod, rig(pod) as port:
        seen = await port.ask(post(path, STREAMED, version=version))
        ended = await port.until_ended()
    assert seen.body.startswith(b"data: 1\n\n" + error)
    assert seen.body.endswith(b"}\n\n")
    assert seen.body.count(b"\n\n") == 2
    assert (seen.ending, ended.outcome) == ("complete", Ending.UPSTREAM_FAILED)


async def test_a_partial_event_is_closed_by_a_blank_line_before_the_error() -> None:
    async with Pod(breaking_off(SSE_HEAD, event("1"), chunk(b"data: ha"))) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
    assert seen.body.startswith(b'data: 1\n\ndata: ha\n\ndata: {"error"')


async def test_a_partial_chunk_of_a_stream_is_not_sent() -> None:
    async with Pod(breaking_off(SSE_HEAD, event("1"), event("never seen")[:10])) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
    assert b"nev" not in seen.body
    assert seen.body.startswith(b'data: 1\n\ndata: {"error"')


async def test_the_request_after_a_broken_stream_is_served_on_the_same_connection() -> None:
    async with Pod(breaking_off(SSE_HEAD, event("1"))) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED, close=False) + post(body=STREAMED))
    assert seen.raw.count(b"HTTP/1.1 200 ") == seen.raw.count(b'data: {"error":') == 2


async def test_a_broken_stream_to_an_http_10_client_ends_with_an_error_event() -> None:
    async with Pod(breaking_off(SSE_HEAD, event("1"))) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED, version="1.0"))
    assert seen.body.startswith(b'data: 1\n\ndata: {"error"')


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_broken_compressed_stream_is_aborted(version: str) -> None:
    head = SSE_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
    async with Pod(breaking_off(head, chunk(b"\x1f\x8b"))) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED, version=version))
        ended = await port.until_ended()
    assert seen.ending == "reset" if version == "1.0" else seen.ending in ("cut", "reset")
    assert not seen.raw.endswith(b"0\r\n\r\n")
    assert ended.outcome is Ending.UPSTREAM_FAILED


async def test_a_stream_that_never_starts_times_out_and_frees_the_pod() -> None:
    async with Pod(silent) as pod, rig(pod, timeouts=timeouts(first_byte=0.1)) as port:
        seen = await port.ask(post(body=STREAMED))
        ended = await port.until_ended()
    assert seen.status == 504
    assert port.attempt.ending is Ending.TIMED_OUT
    assert ended.outcome is Reason.UPSTREAM_TIMED_OUT


async def test_a_head_is_not_a_first_byte() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD)
        await request.gone()

    async with Pod(script) as pod, rig(pod, timeouts=timeouts(first_byte=0.1)) as port:
        seen = await port.ask(post(body=STREAMED))
        assert port.attempt.ending is Ending.TIMED_OUT
    assert seen.status == 504


async def test_a_stream_that_stalls_ends_with_an_error_event() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, event("1"))
        await request.gone()

    async with Pod(script) as pod, rig(pod, timeouts=timeouts(idle=0.1)) as port:
        seen = await port.ask(post(body=STREAMED))
        assert port.attempt.ending is Ending.TIMED_OUT
    assert b'"error"' in seen.body


async def test_a_stream_that_the_request_does_not_announce_has_the_same_limits() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, *([event("1")] if b"begun" in request.line else []))
        await request.gone()

    async with Pod(script) as pod, rig(pod, timeouts=timeouts(idle=0.1, first_byte=0.2)) as port:
        get = b"GET /v1/responses/resp_1?stream=true%b HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        assert b'"error"' in (await port.ask(get % b"&begun")).body
        assert port.attempt.ending is Ending.TIMED_OUT
        assert (await port.ask(get % b"")).status == 504


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("breaks_off", [True, False])
@pytest.mark.parametrize("kind", ["whole", "in parts"])
async def test_a_stream_that_has_its_last_event_is_complete(version: str, breaks_off: bool, kind: str) -> None:
    last = [chunk(b"data: [DO"), chunk(b"NE]\n\n")] if kind == "in parts" else [event("[DONE]")]

    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, event("1"), *last, pause=0.01)
        if breaks_off:
            request.break_off()
        else:
            await request.gone()

    async with Pod(script) as pod, rig(pod, timeouts=timeouts(idle=0.1)) as port:
        seen = await port.ask(post(body=STREAMED, version=version))
        ended = await port.until_ended()
    assert seen.body == b"data: 1\n\ndata: [DONE]\n\n"
    assert (seen.ending, ended.outcome) == ("complete", Ending.COMPLETE)


async def test_a_last_event_that_was_not_sent_does_not_complete_a_stream() -> None:
    async with Pod(breaking_off(SSE_HEAD, event("1"), event("[DONE]")[:-2])) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
    assert seen.body.startswith(b'data: 1\n\ndata: {"error"')


async def test_a_slow_stream_that_moves_continues() -> None:
    events = [event(str(n)) for n in range(8)]
    async with (
        Pod(answering(SSE_HEAD, *events, b"0\r\n\r\n", pause=0.05)) as pod,
        rig(pod, timeouts=timeouts(idle=0.2)) as port,
    ):
        seen = await port.ask(post(body=STREAMED))
        assert port.attempt.ending is Ending.COMPLETE
    assert seen.ending == "complete"


async def test_a_complete_response_is_limited_by_the_whole_request_only() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await asyncio.sleep(0.3)
        await request.send(plain())

    patience = timeouts(first_byte=0.05, idle=0.05)
    async with Pod(script) as pod, rig(pod, timeouts=patience) as port:
        assert (await port.ask(post())).status == 200
    async with Pod(silent) as pod, rig(pod, timeouts=timeouts(request=0.1)) as port:
        assert (await port.ask(post())).status == 504


async def test_a_gateway_that_raises_is_a_500_and_the_next_request_is_served() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        port.gateway.crash = RuntimeError("boom")
        client.send(post(close=False))
        assert b" 500 " in await client.response()
        port.gateway.crash = None
        client.send(post(CHAT, close=False))
        assert b" 200 " in await client.response()


ABORTED = b'{"choices":[{"index":0,"text":"","finish_reason":"abort"}],"usage":{"completion_tokens":0}}'


@pytest.mark.parametrize(
    "raw",
    [
        plain(ABORTED),
        b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        + chunk(ABORTED)
        + b"0\r\n\r\n",
        SSE_HEAD + chunk(b"data: " + ABORTED + b"\n\n") + event("[DONE]") + b"0\r\n\r\n",
    ],
)
async def test_a_response_aborted_by_a_stopping_engine_is_retried_on_another_pod(raw: bytes) -> None:
    async with Pod(answering(raw)) as stopping, Pod(answering(plain())) as pod, rig(stopping, pod) as port:
        seen = await port.ask(post())
        assert seen.body == b'{"ok":true}'
        assert [each.ending for each in port.gateway.attempts] == [Ending.UPSTREAM_FAILED, Ending.COMPLETE]
        await port.ask(post())
        assert stopping.connections == (1 if raw == plain(ABORTED) else stopping.connections)


MESSAGE = b'{"id":"c","type":"message","role":"assistant","content":[{"type":"text","text":"%b"}],%b"model":"m"}'
ABORTED_MESSAGES = (MESSAGE % (b"", b""), MESSAGE % (b'\\"stop_reason\\":\\"x\\"', b'"stop_reason":null,'))


@pytest.mark.parametrize("body", ABORTED_MESSAGES)
@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_message_aborted_by_a_stopping_engine_is_retried_on_another_pod(body: bytes, is_chunked: bool) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    raw = head + chunk(body) + b"0\r\n\r\n" if is_chunked else plain(body)
    whole = MESSAGE % (b"Hi", b'"stop_reason":"end_turn",')
    async with Pod(answering(raw)) as stopping, Pod(answering(plain(whole))) as pod, rig(stopping, pod) as port:
        seen = await port.ask(post("/v1/messages"))
        assert seen.body == whole
        assert [each.ending for each in port.gateway.attempts] == [Ending.UPSTREAM_FAILED, Ending.COMPLETE]
