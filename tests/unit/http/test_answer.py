"""Streams that pass chunk by chunk: what goes out, what is remembered, and when the sweep ends them."""

from __future__ import annotations

import asyncio
import weakref

import pytest

from proxy.core.attempt import Ending, Usage
from proxy.core.errors import Disconnected, InvalidResponse, UpstreamFailed
from proxy.http.framing import HELD_LIMIT
from proxy.http.upstream.connection import HEAD_LIMIT, MOST_INFORMATIONAL, MOST_PASSED
from proxy.reliability.settings import Timeouts
from tests.helpers.http.support import SSE_HEAD, chunk, event, plain, understand
from tests.helpers.http.wire import RelayedResponse

END = b"0\r\n\r\n"


def passes_chunks(leg: RelayedResponse) -> bool:
    """Whether whole chunks pass without the response object."""
    return leg.connection.receive is None


async def test_a_stream_of_events_is_written_at_once_and_hardly_buffered() -> None:
    leg = RelayedResponse()
    leg.read(SSE_HEAD)
    events = [event(f"{number:0200d}") for number in range(500)]
    for at, each in enumerate(events):
        leg.read(each)
        assert leg.client.written.endswith(each)
        assert sum(map(len, leg.connection.meter.pieces)) <= MOST_PASSED
        assert at < 1 or passes_chunks(leg)
    leg.read(event('{"usage":{"prompt_tokens":4,"completion_tokens":2}}'))
    leg.read(END)
    assert (
        leg.client.written.partition(b"\r\n\r\n")[2]
        == b"".join(events) + event('{"usage":{"prompt_tokens":4,"completion_tokens":2}}') + END
    )
    assert leg.attempt.chunks == 501
    assert leg.attempt.usage == Usage(4, 2)
    assert leg.attempt.ending is Ending.COMPLETE
    assert leg.released == [leg.connection]


@pytest.mark.parametrize("cut", range(1, len(event("second"))))
async def test_a_split_chunk_waits_and_the_next_ones_pass_at_once(cut: int) -> None:
    leg = RelayedResponse()
    leg.read(SSE_HEAD + event("first"))
    leg.read(event("more"))
    before = leg.client.written
    leg.read(event("second")[:cut])
    assert leg.client.written == before
    assert leg.connection.receive == leg.response.received
    leg.read(event("second")[cut:])
    leg.read(event("third"))
    assert leg.client.written == before + event("second") + event("third")
    assert passes_chunks(leg)
    leg.read(END)
    assert leg.attempt.chunks == 4


async def test_a_large_chunk_between_small_ones_is_split_and_the_next_ones_pass_at_once() -> None:
    leg, large = RelayedResponse(), chunk(b"x" * 3 * HELD_LIMIT)
    leg.read(SSE_HEAD + event("first"))
    leg.read(event("more"))
    for at in range(0, len(large), 50_000):
        leg.read(large[at : at + 50_000])
    leg.read(event("after"))
    leg.read(event("last"))
    assert leg.client.written.endswith(event("after") + event("last"))
    assert passes_chunks(leg)
    leg.read(END)
    assert leg.attempt.response_bytes == len(b"data: firstmoreafterlast" * 1) + 3 * 6 + 4 * 2 + 3 * HELD_LIMIT


async def test_the_first_byte_is_reported_once_and_not_for_the_head() -> None:
    leg = RelayedResponse()
    leg.clock.advance(5.0)
    leg.read(SSE_HEAD)
    leg.read(b"d\r\n")
    assert leg.first_bytes == []
    leg.read(b"data: first\n\n\r\n")
    leg.clock.advance(1.0)
    leg.read(event("second"))
    leg.read(END)
    assert leg.first_bytes == [leg.attempt]
    assert (leg.attempt.first_byte_at, leg.attempt.last_byte_at) == (5.0, 6.0)


async def test_passing_events_keep_a_stream_alive_and_silence_ends_it() -> None:
    leg, idle = RelayedResponse(), Timeouts().idle
    leg.read(SSE_HEAD + event("first"))
    for _ in range(5):
        leg.read(event("x"))
        leg.clock.advance(idle * 0.8)
        leg.response.check(leg.clock.now())
        assert leg.attempt.ending is None
    leg.clock.advance(idle * 1.1)
    leg.response.check(leg.clock.now())
    assert leg.attempt.ending is Ending.TIMED_OUT
    assert leg.attempt.chunks == 6
    assert b'"error"' in leg.client.written


async def test_a_client_that_leaves_is_counted_with_its_received_bytes() -> None:
    leg = RelayedResponse()
    leg.read(SSE_HEAD + event("first"))
    leg.read(event("second"))
    leg.response.gone()
    leg.read(event("third"))
    assert leg.attempt.ending is Ending.CLIENT_GONE
    assert leg.attempt.response_bytes == len(b"data: first\n\ndata: second\n\n")
    assert leg.pod.aborted


@pytest.mark.parametrize("how", ["gone", "lost", "complete"])
async def test_an_ended_connection_keeps_nothing_of_the_request(how: str) -> None:
    leg = RelayedResponse()
    leg.read(SSE_HEAD + event("first"))
    leg.read(event("second"))
    answer = weakref.ref(leg.response)
    if how == "gone":
        leg.response.gone()
    elif how == "lost":
        leg.end(ConnectionResetError())
    else:
        leg.read(END)
    del leg.response
    assert answer() is None


async def test_responses_on_one_connection_are_independent() -> None:
    leg = RelayedResponse()
    leg.read(SSE_HEAD + event("first") + event('"usage":{"prompt_tokens":4,"completion_tokens":2}') + END)
    leg.response = type(leg.response)(leg.response._client_request, leg.attempt, leg.context, leg.connection)
    leg.attempt.response_bytes = leg.attempt.chunks = 0
    leg.attempt.first_byte_at = leg.attempt.usage = leg.attempt.ending = None
    leg.connection.send(leg.response, b"POST", b"")
    leg.read(plain(b"{}"))
    assert (leg.attempt.response_bytes, leg.attempt.chunks, leg.attempt.usage) == (2, 1, None)
    assert leg.client.written.endswith(b"\r\n\r\n{}")
    assert len(leg.released) == 2


async def test_informational_heads_are_skipped() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n"
    for pieces in (
        [early * 3 + plain()],
        [early, early + plain()[:20], plain()[20:]],
        [early[:9], early[9:] + plain()],
    ):
        leg = RelayedResponse()
        for piece in pieces:
            leg.read(piece)
        assert leg.client.written.startswith(b"HTTP/1.1 200 OK\r\n")
        assert leg.released == [leg.connection]


@pytest.mark.parametrize("reads", [1, 2 * MOST_INFORMATIONAL])
async def test_a_pod_that_sends_endless_informational_heads_is_given_up(reads: int) -> None:
    early = b"HTTP/1.1 100 Continue\r\n\r\n"
    leg = RelayedResponse()
    for _ in range(reads):
        leg.read(early * (2 * MOST_INFORMATIONAL // reads))
    assert isinstance(leg.response.done.result(), InvalidResponse)
    assert leg.pod.aborted
    assert leg.client.written == b""


async def test_informational_heads_of_earlier_responses_do_not_count() -> None:
    early = b"HTTP/1.1 103 Early Hints\r\n\r\n" * (MOST_INFORMATIONAL - 1)
    leg = RelayedResponse()
    leg.read(early + plain())
    leg.response = type(leg.response)(leg.response._client_request, leg.attempt, leg.context, leg.connection)
    leg.connection.send(leg.response, b"POST", b"")
    leg.read(early + plain(b"{}"))
    assert leg.client.written.endswith(b"\r\n\r\n{}")


@pytest.mark.parametrize(("said", "silent"), [(b"", True), (b"H", False), (b"HTTP/1.1 103 Early\r\n\r\n", False)])
async def test_a_pod_that_sent_any_byte_has_started(said: bytes, silent: bool) -> None:
    leg = RelayedResponse()
    if said:
        leg.read(said)
    leg.end()
    error = leg.response.done.result()
    assert isinstance(error, Disconnected)
    assert error.silent is silent


async def test_a_head_that_never_ends_is_given_up() -> None:
    leg = RelayedResponse()
    leg.read(b"HTTP/1.1 200 OK\r\n")
    for number in range(HEAD_LIMIT // 1000):
        leg.read(b"x-%05d: %b\r\n" % (number, b"y" * 1000))
    assert leg.attempt.ending is Ending.UPSTREAM_FAILED
    assert leg.pod.aborted
    assert leg.client.written == b""


@pytest.mark.parametrize("more", [b"HTTP/1.1 2", plain(), b"rubbish"])
async def test_a_connection_with_extra_bytes_is_not_reused(more: bytes) -> None:
    leg = RelayedResponse()
    leg.read(plain(b"{}") + more)
    assert leg.client.written.endswith(b"\r\n\r\n{}")
    assert leg.released == []
    assert leg.pod.aborted
    idle = RelayedResponse()
    idle.read(plain(b"{}"))
    idle.read(more)
    assert idle.client.written.endswith(b"\r\n\r\n{}")
    assert idle.pod.aborted


async def test_the_response_to_a_head_request_ends_with_its_head() -> None:
    for body in (b"", b"{}"):
        leg = RelayedResponse()
        leg.connection.head_only = True
        leg.read(plain(b"{}").removesuffix(b"{}") + body)
        assert leg.attempt.ending is Ending.COMPLETE
        assert leg.client.written.endswith(b"content-length: 2\r\nx-request-id: id-1\r\n\r\n")
        assert leg.pod.aborted
    await asyncio.sleep(0)


async def test_a_response_given_up_before_its_first_byte_goes_to_another_pod() -> None:
    leg = RelayedResponse()
    leg.clock.advance(7.0)
    leg.response.check(leg.clock.now())
    assert not leg.response.done.done()
    leg.given_up = "the pod is gone"
    leg.response.check(leg.clock.now())
    error = leg.response.done.result()
    assert isinstance(error, UpstreamFailed)
    assert (leg.client.written, leg.pod.aborted) == (b"", True)
    assert leg.attempt.ending is Ending.UPSTREAM_FAILED


async def test_a_stream_that_is_given_up_ends_with_an_error_event() -> None:
    leg = RelayedResponse()
    leg.read(SSE_HEAD + event("first"))
    leg.response.check(1.0)
    leg.given_up = "the pod is gone"
    leg.clock.advance(9.0)
    leg.response.check(9.0)
    assert leg.checks == [1.0]
    assert b"error" in leg.client.written
    assert b"[DONE]" not in leg.client.written
    assert leg.attempt.ending is Ending.UPSTREAM_FAILED


async def test_while_bytes_flow_no_timeout_is_checked() -> None:
    leg = RelayedResponse()
    leg.given_up = "the pod is gone"
    leg.read(SSE_HEAD)
    for second in range(20):
        leg.read(event(str(second)))
        leg.response.check(float(second))
    assert leg.checks == []
    leg.read(END)
    assert leg.attempt.ending is Ending.COMPLETE


async def test_a_slow_client_and_an_unfinished_upload_are_not_silence_of_the_pod() -> None:
    for hold in ("reading", "upload"):
        leg = RelayedResponse()
        leg.given_up = "the pod is gone"
        if hold == "reading":
            leg.response.paused = True
        else:
            leg.connection.request_sent = False
        for second in range(20):
            leg.response.check(float(second))
        assert leg.checks == []


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
    leg = RelayedResponse()
    leg.read(SSE_HEAD)
    reads = [event(str(number)) for number in range(50)]
    for place in (45, 20, 3):
        reads.insert(place, odd)
    for each in reads:
        leg.read(each)
    leg.response.gone()
    body = understand(SSE_HEAD + b"".join(reads) + END).body
    assert understand(leg.client.written + END).body == body
    assert leg.attempt.response_bytes == len(body)
    assert leg.attempt.chunks == body.count(b"data:")
    assert leg.connection.meter.tail == body


@pytest.mark.parametrize(
    "garbled", [b"zz\r\n", b"5\r\nabcdeXX", b"5\r\nabcd\r\n", b"\r\n", b"1_0\r\n" + b"x" * 16 + b"\r\n"]
)
async def test_a_malformed_chunk_ends_the_stream_with_an_error_at_any_position(garbled: bytes) -> None:
    leg = RelayedResponse()
    leg.read(SSE_HEAD)
    for number in range(5):
        leg.read(event(str(number)))
    leg.read(garbled)
    leg.end(ConnectionResetError())
    assert leg.attempt.ending is Ending.UPSTREAM_FAILED
    body, mark, _ = understand(leg.client.written).body.partition(b'data: {"error"')
    assert body.strip() == b"data: 0\n\ndata: 1\n\ndata: 2\n\ndata: 3\n\ndata: 4"
    assert mark
