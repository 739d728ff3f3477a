"""Pods that decline, by status or with the first event under a head that says 200: nothing of that goes out, and
another pod is asked."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.attempt import Ending
from proxy.core.errors import Declined
from proxy.http.framing import HELD_LIMIT
from proxy.openai.errors import LONGEST
from tests.helpers.examples import examples
from tests.helpers.http.messages import Message, messages, reads
from tests.helpers.http.support import (
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
from tests.helpers.http.wire import RelayedResponse, play

MANY = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
END = b"0\r\n\r\n"
BUSY = event('{"error": {"message": "busy", "type": "Service Unavailable", "param": null, "code": 503}}')
DECLINED = SSE_HEAD + BUSY + event("[DONE]") + END
FAULT = SSE_HEAD + event('{"error": {"message": "too long", "type": "BadRequestError", "code": 400}}') + END
GOOD = SSE_HEAD + event("1") + event("[DONE]") + END


def declined_at(cut: int, data: bytes) -> tuple[RelayedResponse, Declined]:
    """The response arrives in two reads. The client gets nothing of it."""
    relayed = RelayedResponse(others=True)
    relayed.read(data[:cut])
    relayed.read(data[cut:])
    error = relayed.response.done.result()
    assert isinstance(error, Declined), cut
    assert relayed.client.written == b"", cut
    assert relayed.first_bytes == [], cut
    return relayed, error


async def test_nothing_of_a_refusal_reaches_the_client_with_any_cut() -> None:
    for cut in range(1, len(DECLINED)):
        relayed, error = declined_at(cut, DECLINED)
        assert (error.status, error.text) == (503, "busy"), cut
        assert relayed.attempt.ending is Ending.UPSTREAM_FAILED, cut
        assert relayed.attempt.status is None, cut


@MANY
@given(st.data(), st.booleans(), st.booleans(), st.sampled_from(["whole", "closed", "closes"]))
def test_a_refusal_is_recognised_with_any_reads_and_framing(
    data: st.DataObject, speaks_11: bool, usage_added: bool, kind: str
) -> None:
    raw = DECLINED
    if kind == "closed":
        raw = SSE_HEAD + BUSY
    elif kind == "closes":
        raw = SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + b'data: {"error":{"code":503}}'
    ending = "open" if kind == "whole" else "closed"
    outcome = play(data.draw(reads(raw)), ending, speaks_11, usage_added=usage_added, others=True)
    assert isinstance(outcome.error, Declined)
    assert outcome.raw == b""


@MANY
@given(st.data(), st.sampled_from([GOOD, FAULT]), st.booleans())
def test_any_other_response_passes_from_its_first_event_on(data: st.DataObject, raw: bytes, speaks_11: bool) -> None:
    whole = play([raw], "open", speaks_11)
    assert whole.attempt.ending is Ending.COMPLETE
    assert play(data.draw(reads(raw)), "open", speaks_11, others=True).raw == whole.raw


async def test_a_complete_refusal_keeps_the_connection() -> None:
    relayed = RelayedResponse(others=True)
    relayed.read(DECLINED)
    assert relayed.released == [relayed.connection]
    assert (relayed.connection.meter.pieces, relayed.connection.meter.marks, relayed.connection.meter.tail) == (
        [],
        [],
        b"",
    )
    other = RelayedResponse(others=True)
    other.read(SSE_HEAD + BUSY)
    assert other.pod.aborted


async def test_the_last_refusal_is_passed_on() -> None:
    relayed = RelayedResponse()
    relayed.read(DECLINED)
    assert relayed.client.written.partition(b"\r\n\r\n")[2] == DECLINED.removeprefix(SSE_HEAD)
    assert relayed.attempt.ending is Ending.COMPLETE


async def test_the_wait_for_a_first_event_is_limited() -> None:
    relayed = RelayedResponse()
    relayed.read(SSE_HEAD)
    piece = chunk(b"data: " + b"x" * 1000)
    for _ in range(LONGEST // 1006):
        relayed.read(piece)
        assert relayed.client.written == b""
    relayed.read(piece)
    assert relayed.client.written.endswith(piece * (LONGEST // 1006 + 1))
    assert len(relayed.first_bytes) == 1


REASON = b'{"error":{"message":"cannot schedule new futures after shutdown","code":503}}'
LEAVING = b"HTTP/1.1 503 Gone\r\nRetry-After: 7\r\ncontent-length: %d\r\n\r\n%b" % (len(REASON), REASON)


async def test_nothing_of_a_response_with_such_a_status_reaches_the_client_with_any_cut() -> None:
    for cut in range(1, len(LEAVING)):
        relayed, error = declined_at(cut, LEAVING)
        assert (error.status, error.retry_after, error.text) == (503, 7.0, REASON.decode()), cut
        assert relayed.released == [relayed.connection], cut
        assert relayed.connection.meter.pieces == [], cut


@MANY
@given(st.data(), messages(), st.booleans(), st.sampled_from([b"", b"HTTP/1.1 200 OK\r\n"]))
def test_a_refusal_depends_on_the_status_alone(
    data: st.DataObject, message: Message, speaks_11: bool, more: bytes
) -> None:
    raw = message.raw + (b"" if message.closes else more)
    ending = "closed" if message.closes else "open"
    alone = play([raw], ending, speaks_11)
    with_others = play(data.draw(reads(raw)), ending, speaks_11, others=True)
    if alone.attempt.status == 500:
        assert isinstance(with_others.error, Declined)
        assert with_others.raw == b""
        with_others = play(data.draw(reads(raw)), ending, speaks_11)
    assert with_others.error is None
    assert with_others.attempt.ending is Ending.COMPLETE
    assert (with_others.seen().status, with_others.seen().body) == (alone.seen().status, message.body)


async def test_a_long_response_with_such_a_status_is_not_kept() -> None:
    head = b"HTTP/1.1 500 Oops\r\ncontent-length: 1000000\r\n\r\n"
    relayed = RelayedResponse(others=True)
    relayed.read(head + b"x" * LONGEST)
    assert not relayed.response.done.done()
    relayed.read(b"x")
    assert isinstance(relayed.response.done.result(), Declined)
    assert relayed.pod.aborted
    alone = RelayedResponse()
    alone.read(head + b"x" * LONGEST)
    alone.read(b"x" * (1000000 - LONGEST))
    assert alone.client.written.endswith(b"\r\n\r\n" + b"x" * 1000000)


async def test_the_response_to_a_head_request_can_be_a_refusal() -> None:
    for others in (True, False):
        relayed = RelayedResponse(others=others)
        relayed.connection.head_only = True
        relayed.read(LEAVING.removesuffix(REASON))
        assert isinstance(relayed.response.done.result(), Declined) is others
        assert (b" 503 " in relayed.client.written) is not others


async def test_framing_without_a_body_is_limited() -> None:
    relayed = RelayedResponse(others=True)
    relayed.read(SSE_HEAD)
    piece = b"1;" + b"x" * 1000 + b"\r\na\r\n"
    for _ in range(HELD_LIMIT // len(piece) + 1):
        relayed.read(piece)
    assert relayed.client.written.endswith(piece)


async def test_the_response_of_the_last_pod_is_passed_on() -> None:
    async with Pod(answering(LEAVING)) as first, Pod(answering(LEAVING)) as last, rig(first, last) as port:
        seen = await port.ask(post())
        assert len(port.gateway.attempts) == 2
        assert port.attempt.status == 503
    assert (seen.status, seen.body, seen.all("retry-after")) == (503, REASON, ["7"])


async def test_a_pod_that_dies_before_its_first_event_is_followed_by_the_next() -> None:
    async def dying(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, event("half")[:9], pause=0.01)
        request.break_off()

    async with Pod(dying) as bad, Pod(answering(GOOD)) as good, rig(bad, good) as port:
        seen = await port.ask(post(body=STREAMED))
        assert [each.ending for each in port.gateway.attempts] == [Ending.UPSTREAM_FAILED, Ending.COMPLETE]
    assert (seen.status, seen.body) == (200, b"data: 1\n\ndata: [DONE]\n\n")


async def test_a_refusing_status_sends_the_request_to_another_pod() -> None:
    async with Pod(answering(LEAVING)) as bad, Pod(answering(plain())) as good, rig(bad, good) as port:
        seen = await port.ask(post())
        assert port.attempt.endpoint is good.endpoint
    assert (seen.status, seen.json()) == (200, {"ok": True})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_request_that_one_pod_refuses_is_served_by_another(path: str, version: str) -> None:
    raw = b'event: error\ndata: {"type":"error","error":{"type":"internal_error","message":"x"}}\n\n'
    refusal = SSE_HEAD + chunk(raw) + END if path == "/v1/messages" else DECLINED
    pieces = [refusal[at : at + 40] for at in range(0, len(refusal), 40)]
    async with Pod(answering(*pieces, pause=0.001)) as bad, Pod(answering(GOOD)) as good, rig(bad, good) as port:
        seen = await port.ask(post(path, STREAMED, version=version))
        assert len(port.first_bytes) == 1
        assert port.attempt.endpoint is good.endpoint
    assert (seen.status, seen.body, seen.ending) == (200, b"data: 1\n\ndata: [DONE]\n\n", "complete")


async def test_a_head_without_an_event_times_out_like_a_missing_response() -> None:
    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD, b"5\r\ndata:")
        await request.gone()

    async with Pod(script) as pod, rig(pod, timeouts=timeouts(first_byte=0.1)) as port:
        seen = await port.ask(post(body=STREAMED))
    assert seen.status == 504


async def test_a_client_that_leaves_before_the_first_event_ends_the_pods_request() -> None:
    gone = asyncio.Event()

    async def script(request: Received) -> None:
        await request.body()
        await request.send(SSE_HEAD)
        await request.gone()
        gone.set()

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(post(body=STREAMED))
        await asyncio.sleep(0.05)
        client.leave()
        async with asyncio.timeout(5):
            await gone.wait()
        assert (await port.until_ended()).outcome is Ending.CLIENT_GONE
