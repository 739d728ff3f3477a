"""What a client and a pod see of each other through the relay."""

from __future__ import annotations

import asyncio

import pytest

from proxy.core.attempt import Ending, Usage
from tests.helpers.http.support import (
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
)
from tests.helpers.waiting import until


async def test_a_complete_response_passes_unchanged() -> None:
    async with Pod(answering(plain(b'{"a":1}'))) as pod, rig(pod) as port:
        seen = await port.ask(post())
    assert (seen.status, seen.body, seen.ending) == (200, b'{"a":1}', "complete")
    assert seen.all("content-type") == ["application/json"]
    assert seen.all("content-length") == ["7"]


async def test_a_stream_passes_with_its_own_chunks() -> None:
    pieces = (SSE_HEAD, event("1"), event("2"), event("[DONE]"), b"0\r\n\r\n")
    async with Pod(answering(*pieces, pause=0.002)) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
        attempt = port.attempt
    assert seen.raw.partition(b"\r\n\r\n")[2] == b"".join(pieces[1:])
    assert seen.ending == "complete"
    assert attempt.ending is Ending.COMPLETE
    assert attempt.chunks == 3
    assert attempt.response_bytes == len(seen.body)


@pytest.mark.parametrize("padding", [b" ", b"  ", b"\t", b" ;a=b"])
async def test_white_space_after_the_sizes_of_chunks_is_accepted_from_pods(padding: bytes) -> None:
    async def script(request: Received) -> None:
        await request.body()
        for text in ("1", "2", "[DONE]"):
            head = SSE_HEAD if text == "1" else b""
            await request.send(head + event(text).replace(b"\r\n", padding + b"\r\n", 1), pause=0.002)
        await request.send(b"0" + padding + b"\r\n\r\n")

    async with Pod(script) as pod, rig(pod) as port:
        for _ in range(2):
            seen = await port.ask(post(body=STREAMED))
            assert (seen.status, seen.ending) == (200, "complete")
            assert seen.body == b"data: 1\n\ndata: 2\n\ndata: [DONE]\n\n"
        assert [request.connection for request in pod.requests] == [1, 1]


async def test_events_arrive_as_they_are_sent_and_not_at_the_end() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, event("first"))
        await go_on.wait()
        await request.send(event("second"), b"0\r\n\r\n")

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post(body=STREAMED))
        await client.until(b"data: first\n\n")
        go_on.set()
        seen = await client.until(b"0\r\n\r\n")
    assert b"second" in seen


async def test_whole_chunks_do_not_wait_for_the_rest_of_a_read() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        second = event("second")
        await request.send(SSE_HEAD, event("first") + second[:7])
        await go_on.wait()
        await request.send(second[7:], b"0\r\n\r\n")

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post(body=STREAMED))
        await client.until(b"data: first\n\n\r\n")
        go_on.set()
        await client.until(b"data: second\n\n\r\n0\r\n\r\n")


async def test_the_head_of_a_stream_comes_with_its_first_event_and_other_heads_at_once() -> None:
    go_on = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        if request.line.startswith(b"POST /v1/embeddings"):
            await request.send(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        else:
            await request.send(SSE_HEAD + event("1")[:-3])
        await go_on.wait()
        await request.send(event("1")[-3:] if b"chat" in request.line else b"", b"0\r\n\r\n")

    async with Pod(script) as pod, rig(pod) as port:
        async with port.client() as client:
            client.send(post("/v1/embeddings"))
            assert b" 200 OK" in await client.until(b"\r\n\r\n")
            assert port.first_bytes == []
        async with port.client() as client:
            client.send(post(body=STREAMED))
            await until(lambda: len(pod.requests) == 2)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.reader.read(1)
            assert port.first_bytes == []
            go_on.set()
            assert b" 200 OK" in await client.until(event("1") + b"0\r\n\r\n")
            assert len(port.first_bytes) == 1


async def test_the_attempt_has_the_results_of_a_response() -> None:
    usage = b'{"usage":{"prompt_tokens":7,"completion_tokens":3,"total_tokens":10}}'
    async with Pod(answering(plain(usage))) as pod, rig(pod) as port:
        await port.ask(post())
        attempt = port.attempt
        ended = await port.until_ended()
        assert port.first_bytes == [attempt]
    assert attempt.status == 200
    assert attempt.usage == Usage(7, 3)
    assert attempt.response_bytes == len(usage)
    assert attempt.first_byte_at is not None
    assert attempt.last_byte_at is not None
    assert attempt.first_byte_at <= attempt.last_byte_at
    assert (ended.status, ended.outcome, ended.attempt) == (200, Ending.COMPLETE, attempt)


@pytest.mark.parametrize("size", [10, 100_000])
@pytest.mark.parametrize("leaves", [False, True])
async def test_the_prompt_of_a_streamed_message_is_counted_from_its_start(size: int, leaves: bool) -> None:
    """As llama.cpp reports it; clients may leave at the last event."""
    usage = b'"usage":{"input_tokens":25,"cache_read_input_tokens":16,"output_tokens":0}'
    pieces = [
        b'event: message_start\ndata: {"type":"message_start","message":{"id":"m",%b}}\n\n' % usage,
        b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"%b"}}\n\n' % (b"x" * size),
        b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},"usage":'
        b'{"output_tokens":15}}\n\nevent: message_stop\ndata: {"type":"message_stop"}\n\n',
    ]

    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, *map(chunk, pieces), pause=0.01)
        if leaves:
            await request.gone()
        else:
            await request.send(b"0\r\n\r\n")

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post("/v1/messages", body=STREAMED))
        if leaves:
            await client.reader.readuntil(b'"message_stop"}\n\n')
            client.writer.close()
        ended = await port.until_ended()
        assert ended.outcome is Ending.COMPLETE
        assert port.attempt.usage == Usage(25, 15, 16)


async def test_usage_is_found_across_reads() -> None:
    last = b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":2}}\n\n'
    pieces = (SSE_HEAD, event("x"), chunk(last[:30]), chunk(last[30:]), event("[DONE]"), b"0\r\n\r\n")
    async with Pod(answering(*pieces, pause=0.002)) as pod, rig(pod) as port:
        await port.ask(post(body=STREAMED))
        assert port.attempt.usage == Usage(5, 2)


async def test_the_id_of_a_stored_response_is_found_at_its_start() -> None:
    body = b'{"id":"resp_123","object":"response"}' + b" " * 100_000
    async with Pod(answering(plain(body))) as pod, rig(pod) as port:
        await port.ask(post("/v1/responses"))
        assert port.attempt.response_id == "resp_123"
        await port.ask(post(CHAT))
        assert port.attempt.response_id is None


async def test_errors_of_the_pod_are_relayed_unchanged() -> None:
    error = b'{"error":{"message":"too long","code":400}}'
    raw = b"HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
    async with Pod(answering(raw % (len(error), error))) as pod, rig(pod) as port:
        seen = await port.ask(post())
        assert (seen.status, seen.body) == (400, error)
        assert port.attempt.status == 400
        assert not port.attempt.succeeded


async def test_a_body_that_ends_with_the_connection_is_chunked_for_the_client() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(b"HTTP/1.0 200 OK\r\nserver: old\r\n\r\nhello ", b"world", pause=0.01)
        request.break_off()

    async with Pod(script) as pod, rig(pod) as port:
        seen = await port.ask(post())
        assert port.attempt.ending is Ending.COMPLETE
    assert (seen.status, seen.body, seen.ending) == (200, b"hello world", "complete")
    assert seen.all("transfer-encoding") == ["chunked"]


async def test_trailers_are_dropped() -> None:
    pieces = (SSE_HEAD, event("1"), b"0\r\nx-checksum: 1\r\n\r\n")
    async with Pod(answering(*pieces, pause=0.002)) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
    assert seen.raw.endswith(event("1") + b"0\r\n\r\n")


async def test_informational_responses_are_not_passed_on() -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\n"
    async with Pod(answering(early + plain())) as pod, rig(pod) as port:
        seen = await port.ask(post())
    assert seen.raw.startswith(b"HTTP/1.1 200 OK\r\n")
    assert seen.all("link") == []


async def test_responses_without_a_body_end_with_their_head() -> None:
    for status in (204, 304):
        raw = b"HTTP/1.1 %d X\r\netag: 1\r\n\r\n" % status
        async with Pod(answering(raw)) as pod, rig(pod) as port, port.client() as client:
            client.send(post(close=False))
            await client.until(b"\r\n\r\n")
            client.send(post(close=False))
            assert b"%d X" % status in await client.until(b"\r\n\r\n")
            assert pod.connections == 1


async def test_a_response_without_a_body_passes_no_length() -> None:
    """A client that believes the length reads the next response as the body."""
    raw = b"HTTP/1.1 204 X\r\ncontent-length: 38\r\netag: 1\r\n\r\n"
    for body in (b"", b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"):
        async with Pod(answering(raw + body)) as pod, rig(pod) as port:
            seen = await port.ask(post())
        assert (seen.status, seen.all("etag"), seen.all("content-length"), seen.body) == (204, ["1"], [], b"")


async def test_an_empty_response_counts_as_a_first_byte() -> None:
    async with Pod(answering(plain(b""))) as pod, rig(pod) as port:
        seen = await port.ask(post())
        assert port.first_bytes == [port.attempt]
    assert (seen.body, seen.ending) == (b"", "complete")


async def test_an_encoded_body_stays_encoded() -> None:
    async with Pod(answering(plain(b"\x1f\x8bnot really", b"content-encoding: gzip\r\n"))) as pod, rig(pod) as port:
        seen = await port.ask(post(CHAT, b"{}", "accept-encoding: gzip"))
        assert pod.requests[0].all(b"accept-encoding") == [b"gzip"]
    assert seen.all("content-encoding") == ["gzip"]
    assert seen.body == b"\x1f\x8bnot really"


async def test_the_body_is_sent_unchanged() -> None:
    bodies: list[bytes] = []

    async def script(request: Received) -> None:
        bodies.append(await request.body())
        await request.send(plain())

    sent = [b'{"model": "m",  "x":"\xc3\xa9"}', b'{"model":"m","pad":"' + b"x" * 3_000_000 + b'"}']
    async with Pod(script) as pod, rig(pod) as port:
        for body in sent:
            await port.ask(post(CHAT, body))
    assert bodies == sent


async def test_a_chunked_request_is_sent_with_its_length() -> None:
    bodies: list[bytes] = []

    async def script(request: Received) -> None:
        assert request.all(b"content-length") == [b"13"]
        assert request.all(b"transfer-encoding") == []
        bodies.append(await request.body())
        await request.send(plain())

    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode()
    async with Pod(script) as pod, rig(pod) as port:
        seen = await port.ask(head + chunk(b'{"model":') + chunk(b'"m"}') + b"0\r\n\r\n")
    assert seen.status == 200
    assert bodies == [b'{"model":"m"}']


async def test_an_http_10_client_gets_the_bare_body_and_a_close() -> None:
    pieces = (SSE_HEAD, event("1"), event("2"), b"0\r\n\r\n")
    async with Pod(answering(*pieces, pause=0.002)) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED, version="1.0"))
    assert seen.body == b"data: 1\n\ndata: 2\n\n"
    assert seen.all("transfer-encoding") == []
    assert seen.all("connection") == ["close"]


async def test_an_http_10_client_that_keeps_its_connection_gets_keep_alive() -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        for _ in range(2):
            client.send(post(CHAT, b"{}", "connection: keep-alive", close=False, version="1.0"))
            assert b"connection: keep-alive\r\n" in await client.response()


async def test_a_chunk_larger_than_the_buffer_is_split_and_complete_at_the_end() -> None:
    large = b"data: " + b"x" * 300_000 + b"\n\n"
    raw = SSE_HEAD + chunk(large) + event("after") + b"0\r\n\r\n"
    pieces = [raw[i : i + 50_000] for i in range(0, len(raw), 50_000)]
    async with Pod(answering(*pieces, pause=0.002)) as pod, rig(pod) as port:
        seen = await port.ask(post(body=STREAMED))
    assert seen.body == large + b"data: after\n\n"
    assert seen.ending == "complete"
