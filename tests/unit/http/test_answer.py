"""Streams that pass chunk by chunk: what goes out, what is remembered, and when the sweep ends them."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from proxy.core.attempt import Ending, Usage
from proxy.core.errors import Disconnected, InvalidResponse, UpstreamFailed
from proxy.core.request import changed
from proxy.http.framing import HELD_LIMIT
from proxy.http.upstream.connection import FLUSH_BYTES, HEAD_LIMIT, MOST_INFORMATIONAL
from proxy.reliability.settings import Timeouts
from tests.helpers.http.support import SSE_HEAD, chunk, event, plain, understand
from tests.helpers.http.wire import RelayedResponse

END = b"0\r\n\r\n"


def passes_chunks(relayed: RelayedResponse) -> bool:
    """Whether whole chunks pass without the response object."""
    return relayed.connection.receive is None


async def test_a_stream_of_events_is_written_at_once_and_hardly_buffered() -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD)
    events = [event(f"{number:0200d}") for number in range(500)]
    for at, each in enumerate(events):
        relayed.read(each)
        assert relayed.client.written.endswith(each)
        assert sum(map(len, relayed.connection.meter.pieces)) <= FLUSH_BYTES
        assert at < 1 or passes_chunks(relayed)
    relayed.read(event('{"usage":{"prompt_tokens":4,"completion_tokens":2}}'))
    relayed.read(END)
    assert (
        relayed.client.written.partition(b"\r\n\r\n")[2]
        == b"".join(events) + event('{"usage":{"prompt_tokens":4,"completion_tokens":2}}') + END
    )
    assert relayed.attempt.chunks == 501
    assert relayed.attempt.usage == Usage(4, 2)
    assert relayed.attempt.ending is Ending.COMPLETE
    assert relayed.released == [relayed.connection]


@pytest.mark.parametrize("cut", range(1, len(event("second"))))
async def test_a_split_chunk_waits_and_the_next_ones_pass_at_once(cut: int) -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD + event("first"))
    relayed.read(event("more"))
    before = relayed.client.written
    relayed.read(event("second")[:cut])
    assert relayed.client.written == before
    assert relayed.connection.receive == relayed.response.received
    relayed.read(event("second")[cut:])
    relayed.read(event("third"))
    assert relayed.client.written == before + event("second") + event("third")
    assert passes_chunks(relayed)
    relayed.read(END)
    assert relayed.attempt.chunks == 4


async def test_a_large_chunk_between_small_ones_is_split_and_the_next_ones_pass_at_once() -> None:
    relayed, large = RelayedResponse(), chunk(b"x" * 3 * HELD_LIMIT)
    relayed.read(SSE_HEAD + event("first"))
    relayed.read(event("more"))
    for at in range(0, len(large), 50_000):
        relayed.read(large[at : at + 50_000])
    relayed.read(event("after"))
    relayed.read(event("last"))
    assert relayed.client.written.endswith(event("after") + event("last"))
    assert passes_chunks(relayed)
    relayed.read(END)
    assert relayed.attempt.response_bytes == len(b"data: firstmoreafterlast" * 1) + 3 * 6 + 4 * 2 + 3 * HELD_LIMIT


async def test_the_first_byte_is_reported_once_and_not_for_the_head() -> None:
    relayed = RelayedResponse()
    relayed.clock.advance(5.0)
    relayed.read(SSE_HEAD)
    relayed.read(b"d\r\n")
    assert relayed.first_bytes == []
    relayed.read(b"data: first\n\n\r\n")
    relayed.clock.advance(1.0)
    relayed.read(event("second"))
    relayed.read(END)
    assert relayed.first_bytes == [relayed.attempt]
    assert (relayed.attempt.first_byte_at, relayed.attempt.last_byte_at) == (5.0, 6.0)


async def test_passing_events_keep_a_stream_alive_and_silence_ends_it() -> None:
    relayed, idle = RelayedResponse(), Timeouts().idle
    relayed.read(SSE_HEAD + event("first"))
    for _ in range(5):
        relayed.read(event("x"))
        relayed.clock.advance(idle * 0.8)
        relayed.response.check(relayed.clock.now())
        assert relayed.attempt.ending is None
    relayed.clock.advance(idle * 1.1)
    relayed.response.check(relayed.clock.now())
    assert relayed.attempt.ending is Ending.TIMED_OUT
    assert relayed.attempt.chunks == 6
    assert b'"error"' in relayed.client.written


async def test_a_client_that_leaves_is_counted_with_its_received_bytes() -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD + event("first"))
    relayed.read(event("second"))
    relayed.response.gone()
    relayed.read(event("third"))
    assert relayed.attempt.ending is Ending.CLIENT_GONE
    assert relayed.attempt.response_bytes == len(b"data: first\n\ndata: second\n\n")
    assert relayed.pod.aborted


@pytest.mark.parametrize("how", ["gone", "lost", "complete"])
async def test_an_ended_connection_keeps_nothing_of_the_request(how: str) -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD + event("first"))
    relayed.read(event("second"))
    response = weakref.ref(relayed.response)
    if how == "gone":
        relayed.response.gone()
    elif how == "lost":
        relayed.end(ConnectionResetError())
    else:
        relayed.read(END)
    del relayed.response
    assert response() is None


async def test_responses_on_one_connection_are_independent() -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD + event("first") + event('"usage":{"prompt_tokens":4,"completion_tokens":2}') + END)
    first = relayed.response
    relayed.response = type(first)(first._client_request, relayed.attempt, relayed.context, relayed.connection)
    relayed.attempt.response_bytes = relayed.attempt.chunks = 0
    relayed.attempt.first_byte_at = relayed.attempt.usage = relayed.attempt.ending = None
    relayed.connection.send(relayed.response, b"POST", b"")
    relayed.read(plain(b"{}"))
    assert (relayed.attempt.response_bytes, relayed.attempt.chunks, relayed.attempt.usage) == (2, 1, None)
    assert relayed.client.written.endswith(b"\r\n\r\n{}")
    assert len(relayed.released) == 2


async def test_informational_heads_are_skipped() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
    for pieces in (
        [early * 3 + plain()],
        [early, early + plain()[:20], plain()[20:]],
        [early[:9], early[9:] + plain()],
    ):
        relayed = RelayedResponse()
        for piece in pieces:
            relayed.read(piece)
        assert relayed.client.written.startswith(b"HTTP/1.1 200 OK\r\n")
        assert relayed.released == [relayed.connection]


@pytest.mark.parametrize("reads", [1, 2 * MOST_INFORMATIONAL])
async def test_a_pod_that_sends_endless_informational_heads_is_given_up(reads: int) -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    relayed = RelayedResponse()
    for _ in range(reads):
        relayed.read(early * (2 * MOST_INFORMATIONAL // reads))
    assert isinstance(relayed.response.done.result(), InvalidResponse)
    assert relayed.pod.aborted
    assert relayed.client.written == b""


async def test_informational_heads_of_earlier_responses_do_not_count() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\n\r\n" * (MOST_INFORMATIONAL - 1)
    relayed = RelayedResponse()
    relayed.read(early + plain())
    first = relayed.response
    relayed.response = type(first)(first._client_request, relayed.attempt, relayed.context, relayed.connection)
    relayed.connection.send(relayed.response, b"POST", b"")
    relayed.read(early + plain(b"{}"))
    assert relayed.client.written.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize(("raw", "silent"), [(b"", True), (b"H", False), (b"HTTP/1.1 103 Early\r\n\r\n", False)])
async def test_a_pod_that_sent_any_byte_has_started(raw: bytes, silent: bool) -> None:
    relayed = RelayedResponse()
    if raw:
        relayed.read(raw)
    relayed.end()
    error = relayed.response.done.result()
    assert isinstance(error, Disconnected)
    assert error.silent is silent


async def test_a_head_that_never_ends_is_given_up() -> None:
    relayed = RelayedResponse()
    relayed.read(b"HTTP/1.1 200 OK\r\n")
    for number in range(HEAD_LIMIT // 1000):
        relayed.read(b"x-%05d: %b\r\n" % (number, b"y" * 1000))
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
    assert relayed.pod.aborted
    assert relayed.client.written == b""


@pytest.mark.parametrize("more", [b"HTTP/1.1 2", plain(), b"rubbish"])
async def test_a_connection_with_extra_bytes_is_not_reused(more: bytes) -> None:
    relayed = RelayedResponse()
    relayed.read(plain(b"{}") + more)
    assert relayed.client.written.endswith(b"\r\n\r\n{}")
    assert relayed.released == []
    assert relayed.pod.aborted
    idle = RelayedResponse()
    idle.read(plain(b"{}"))
    idle.read(more)
    assert idle.client.written.endswith(b"\r\n\r\n{}")
    assert idle.pod.aborted


async def test_the_response_to_a_head_request_ends_with_its_head() -> None:
    for body in (b"", b"{}"):
        relayed = RelayedResponse()
        relayed.connection.head_only = True
        relayed.read(plain(b"{}").removesuffix(b"{}") + body)
        assert relayed.attempt.ending is Ending.COMPLETE
        assert relayed.client.written.endswith(b"content-length: 2\r\nx-request-id: id-1\r\n\r\n")
        assert relayed.pod.aborted
    await asyncio.sleep(0)


async def test_a_response_given_up_before_its_first_byte_goes_to_another_pod() -> None:
    relayed = RelayedResponse()
    relayed.clock.advance(7.0)
    relayed.response.check(relayed.clock.now())
    assert not relayed.response.done.done()
    relayed.given_up = "the pod is gone"
    relayed.response.check(relayed.clock.now())
    error = relayed.response.done.result()
    assert isinstance(error, UpstreamFailed)
    assert (relayed.client.written, relayed.pod.aborted) == (b"", True)
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED


async def test_a_stream_that_is_given_up_ends_with_an_error_event() -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD + event("first"))
    relayed.response.check(1.0)
    relayed.given_up = "the pod is gone"
    relayed.clock.advance(9.0)
    relayed.response.check(9.0)
    assert relayed.checks == [1.0]
    assert b"error" in relayed.client.written
    assert b"[DONE]" not in relayed.client.written
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED


async def test_while_bytes_flow_no_timeout_is_checked() -> None:
    relayed = RelayedResponse()
    relayed.given_up = "the pod is gone"
    relayed.read(SSE_HEAD)
    for second in range(20):
        relayed.read(event(str(second)))
        relayed.response.check(float(second))
    assert relayed.checks == []
    relayed.read(END)
    assert relayed.attempt.ending is Ending.COMPLETE


async def test_a_slow_client_and_an_unfinished_upload_are_not_silence_of_the_pod() -> None:
    for hold in ("reading", "upload"):
        relayed = RelayedResponse()
        relayed.given_up = "the pod is gone"
        if hold == "reading":
            relayed.response.paused = True
        else:
            relayed.connection.request_sent = False
        for second in range(20):
            relayed.response.check(float(second))
        assert relayed.checks == []


@pytest.mark.parametrize(
    "odd",
    [
        b"0d\r\ndata: other\n\n\r\n",
        b"D\r\ndata: other\n\n\r\n",
        b"d;x=1\r\ndata: other\n\n\r\n",
        event("x") * 2,
        event("y" * 600),
    ],
)
async def test_chunks_that_pass_at_once_are_counted_in_order_with_others(odd: bytes) -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD)
    reads = [event(str(number)) for number in range(50)]
    for place in (45, 20, 3):
        reads.insert(place, odd)
    for each in reads:
        relayed.read(each)
    relayed.response.gone()
    body = understand(SSE_HEAD + b"".join(reads) + END).body
    assert understand(relayed.client.written + END).body == body
    assert relayed.attempt.response_bytes == len(body)
    assert relayed.attempt.chunks == body.count(b"data:")
    assert relayed.connection.meter.tail == body


@pytest.mark.parametrize(
    "garbled", [b"zz\r\n", b"5\r\nabcdeXX", b"5\r\nabcd\r\n", b"\r\n", b"1_0\r\n" + b"x" * 16 + b"\r\n"]
)
async def test_a_malformed_chunk_ends_the_stream_with_an_error_at_any_position(garbled: bytes) -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD)
    for number in range(5):
        relayed.read(event(str(number)))
    relayed.read(garbled)
    relayed.end(ConnectionResetError())
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
    body, mark, _ = understand(relayed.client.written).body.partition(b'data: {"error"')
    assert body.strip() == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4"
    assert mark


async def test_a_head_without_a_body_does_not_start_a_response_that_another_pod_can_send() -> None:
    head, body = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n", b"good"
    cut = RelayedResponse()
    cut.read(head)
    assert cut.client.written == b""
    cut.end()
    assert isinstance(cut.response.done.result(), UpstreamFailed)
    whole = RelayedResponse()
    whole.read(head)
    whole.read(body)
    assert whole.client.written.endswith(b"\r\n\r\ngood")
    assert whole.attempt.ending is Ending.COMPLETE


@pytest.mark.parametrize("size", [100, 9_000, 40_000])
async def test_the_usage_of_a_whole_response_is_found_before_other_fields(size: int) -> None:
    usage = b'"usage":{"prompt_tokens":4000,"total_tokens":4100,"completion_tokens":100}'
    body = b'{"choices":[],%b,"prompt_token_ids":[%b]}' % (usage, b"1," * (size // 2) + b"1")
    relayed = RelayedResponse()
    relayed.attempt.request = changed(relayed.attempt.request, stream=False)
    relayed.read(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body))
    for at in range(0, len(body), 10_000):
        relayed.read(body[at : at + 10_000])
    assert relayed.attempt.usage == Usage(4000, 100)
