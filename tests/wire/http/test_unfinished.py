"""Streams that a pod, or a proxy before it, ends in good order before the response has."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from proxy.core.attempt import Ending
from proxy.core.errors import StreamInterrupted, UpstreamFailed
from proxy.openai.events import is_truncated
from tests.helpers.http.support import CHAT, SSE_HEAD, STREAMED, Pod, Seen, answering, chunk, post, rig, understand
from tests.helpers.http.wire import RelayedResponse
from tests.unit.http.test_continued import Continued
from tests.unit.http.test_without_usage import two_streams

TOKEN = b'data: {"id":"c","choices":[{"index":0,"delta":{"content":"Hi"},"finish_reason":null}]}\n\n'
LAST = TOKEN.replace(b"null", b'"stop"')
DONE = b"data: [DONE]\n\n"
TRANSCRIBED = b'data: {"id":"t","object":"transcription.chunk","choices":[{"delta":{"content":"Hi"}}]}\n\n'
END = b"0\r\n\r\n"
GENERATED = b'data: {"text":"Hi","meta_info":{"id":"g","finish_reason":%b},"index":0}\n\n'
MESSAGES = "/v1/messages"
STOPPED = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"m","content":[],"stop_reason":null}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"Hi"},"index":0}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
ABORTED_MESSAGE = STOPPED.replace(b'"end_turn"', b"null")
UNSIZED = SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", b"")
EVENTS = two_streams(["One", " two", " three"]).with_usage


def played(new_relay: Any, *pieces: bytes, closes: bool = False) -> tuple[RelayedResponse, Seen]:
    async def play() -> RelayedResponse:
        relayed: RelayedResponse = new_relay()
        for piece in pieces:
            relayed.read(piece)
        if closes:
            relayed.end()
        return relayed

    relayed = asyncio.run(play())
    return relayed, understand(relayed.client.written)


@pytest.mark.parametrize("speaks_11", [True, False])
@pytest.mark.parametrize("usage_added", [False, True])
@pytest.mark.parametrize("alias", ["m", "alias"])
@pytest.mark.parametrize("together", [False, True])
def test_an_unfinished_stream_ends_with_an_error(
    speaks_11: bool, usage_added: bool, alias: str, together: bool
) -> None:
    pieces = [SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[1])]
    pieces = [*pieces[:-1], pieces[-1] + END] if together else [*pieces, END]
    relayed, seen = played(lambda: RelayedResponse(speaks_11, usage_added=usage_added, alias=alias), *pieces)
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
    assert seen.ending == "complete"
    *sent, error, nothing = seen.body.split(b"\n\n")
    assert len(sent) == 2
    assert error.startswith(b'data: {"error"')
    assert nothing == b""


def test_an_unfinished_stream_whose_text_looks_like_its_end_ends_with_an_error() -> None:
    text = TOKEN.replace(b"Hi", b"[DONE]")
    relayed, seen = played(lambda: RelayedResponse(True), SSE_HEAD + chunk(TOKEN), chunk(text) + END)
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
    assert b'data: {"error"' in seen.body


@pytest.mark.parametrize("usage_added", [False, True])
@pytest.mark.parametrize("alias", ["m", "alias"])
def test_the_error_is_an_event_of_its_own_after_an_unfinished_event(usage_added: bool, alias: str) -> None:
    pieces = SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[1]), chunk(b'data: {"id":') + END
    _, seen = played(lambda: RelayedResponse(True, usage_added=usage_added, alias=alias), *pieces)
    assert seen.body.split(b"\n\n")[-2].startswith(b'data: {"error"')


def test_an_unfinished_changed_stream_of_declared_length_ends_with_an_error() -> None:
    sized = SSE_HEAD.replace(b"transfer-encoding: chunked", b"content-length: %d" % (2 * len(TOKEN)))
    for changed in ({"usage_added": True}, {"alias": "alias"}):
        relayed, seen = played(lambda changed=changed: RelayedResponse(True, **changed), sized + TOKEN, TOKEN)
        assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
        assert seen.body.startswith(TOKEN + TOKEN + b'data: {"error"')


def test_an_unfinished_stream_without_framing_ends_with_an_error() -> None:
    relayed, seen = played(lambda: RelayedResponse(True), UNSIZED + TOKEN, TOKEN, closes=True)
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
    assert seen.body.startswith(TOKEN + TOKEN + b'data: {"error"')
    assert seen.ending == "complete"


def test_an_unfinished_response_before_its_first_byte_goes_to_another_pod() -> None:
    async def play() -> RelayedResponse:
        relayed = RelayedResponse(True)
        relayed.read(SSE_HEAD + chunk(TOKEN) + END)
        return relayed

    relayed = asyncio.run(play())
    assert isinstance(relayed.response.done.result(), UpstreamFailed)
    assert relayed.client.written == b""


def test_a_stream_without_an_event_goes_to_another_pod() -> None:
    for closing in (SSE_HEAD + END, SSE_HEAD + chunk(b'data: {"id":') + END):
        relayed, _ = played(lambda: RelayedResponse(True), closing)
        assert isinstance(relayed.response.done.result(), UpstreamFailed)
        assert relayed.client.written == b""


def test_an_unfinished_stream_is_continued_by_another_pod_if_permitted() -> None:
    relayed, _ = played(lambda: Continued(True), SSE_HEAD + chunk(EVENTS[0]), chunk(EVENTS[1]), END)
    assert isinstance(relayed.response.done.result(), StreamInterrupted)


@pytest.mark.parametrize("ending", [(LAST,), (TOKEN, DONE), (b'data: {"error":{"message":"no"}}\n\n',)])
def test_a_finished_stream_passes_unchanged(ending: tuple[bytes, ...]) -> None:
    relayed, seen = played(lambda: RelayedResponse(True), SSE_HEAD + chunk(TOKEN), *map(chunk, ending), END)
    assert relayed.attempt.ending is Ending.COMPLETE
    assert seen.body == TOKEN + b"".join(ending)


@pytest.mark.parametrize(
    ("path", "tail", "cut"),
    [
        ("/v1/completions", TOKEN, True),
        ("/v1/completions", b"data: 1\n\n", False),
        ("/v1/embeddings", TOKEN, False),
        ("/v1/messages", b'data: {"type":"content_block_delta"}\n\n', True),
        ("/v1/messages", b'data: {"type":"content_block_delta"}\n\ndata: {"type":"message_stop"}\n\n', False),
        ("/v1/responses", b'data: {"type":"response.output_text.delta"}\n\n', True),
        ("/v1/responses", b'data: {"type":"response.created"}\n\ndata: {"type":"response.failed"}\n\n', False),
        ("/v1/messages", b'event: content_block_delta\ndata: {"index":0}\n\nevent: message_stop\ndata: {}\n\n', False),
        ("/v1/messages", b"event: content_block_delta\r\ndata: 1\r\n\r\nevent:message_stop\r\n", False),
        ("/v1/messages", b'event: content_block_delta\ndata: {"index":0}\n\n', True),
        ("/v1/messages", b'event: message_start\ndata: {}\n\nevent: error\ndata: {"message":"no"}\n\n', False),
        ("/v1/responses", b"event: response.created\ndata: {}\n\nevent: response.incomplete \ndata: {}\n\n", False),
        ("/v1/responses", b"event: response.created\rdata: {}\r\revent: response.failed\rdata: {}\r\r", False),
        ("/v1/responses", b"event: response.created\ndata: {}\n\nevent: response.completed\ndata: {}\n\n", False),
        ("/v1/responses", b"event: response.created\ndata: {}\n\nevent: response.completed_item\n\n", True),
        ("/v1/responses", b'event: response.created\ndata: {"x":"event: response.completed"}\n\n', True),
        (CHAT, TOKEN + b"event: error\ndata: {}\n\n", False),
        (CHAT, TOKEN + b'data: {"object":"error","message":"no"}\n\n', False),
        (CHAT, TOKEN + b'data: {"error":"no"}\n\n', False),
        (CHAT, TOKEN + TOKEN.replace(b"Hi", b"data: [DONE]"), True),
        (CHAT, TOKEN.replace(b'"delta"', b'"logprobs":{"content":[{"token":"error","logprob":-1}]},"delta"'), True),
        ("/v1/completions", TOKEN.replace(b'"delta"', b'"logprobs":{"top_logprobs":[{"error":-1}]},"delta"'), True),
        ("/v1/responses", b'data: {"type":"response.output_text.delta","logprobs":[{"token":"error"}]}\n\n', True),
        ("/v1/responses", b'data: {"type":"response.created"}\n\ndata: {"error":{"message":"no"}}\n\n', False),
        (CHAT, b"", False),
        (CHAT, b'data: {"id":"c","cho', True),
        (CHAT, b"data: [DONE]", False),
        (CHAT, b"data: [DO", False),
        (CHAT, LAST.strip(), False),
        ("/v1/unknown", b'data: {"id"', False),
        ("/v1/responses/resp_1", b'data: {"type":"response.output_text.delta"}\n\n', True),
        ("/v1/responses/resp_1", b'data: {"type":"response.completed"}\n\n', False),
        ("/v1/responses/resp_1", b"", False),
        ("/v1/audio/transcriptions", TRANSCRIBED, True),
        ("/v1/audio/transcriptions", TRANSCRIBED + DONE, False),
        ("/v1/audio/translations", TRANSCRIBED.replace(b"cription.", b"lation."), True),
        ("/v1/audio/translations", TRANSCRIBED + b'data: {"error":{"message":"no"}}\n\n', False),
        ("/v1/audio/transcriptions", b'data: {"type":"transcript.text.delta"}\n\n', True),
        ("/v1/audio/transcriptions", b'data: {"type":"transcript.text.done"}\n\n', False),
        (CHAT, LAST + TOKEN.replace(b'"index":0', b'"index":1'), True),
        (CHAT, LAST + TOKEN.replace(b"Hi", b""), False),
        (CHAT, LAST + TOKEN.replace(b'"index":0', b'"index":1') + LAST.replace(b'"index":0', b'"index":1'), False),
        (MESSAGES, b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n', True),
        (MESSAGES, b'event: ping\ndata: {"type":"ping"}\n\n', True),
        (MESSAGES, STOPPED, False),
        (MESSAGES, ABORTED_MESSAGE, True),
        (MESSAGES, ABORTED_MESSAGE.replace(b"message_delta", b"content_block_delta", 2) + STOPPED, False),
        ("/generate", GENERATED % b"null", True),
        ("/generate", GENERATED % b"null" + DONE, False),
        ("/generate", GENERATED % b'{"type":"length","length":1}', False),
        ("/generate", b'data: {"text":"\\"finish_reason\\":null"}\n\n', False),
        ("/generate", GENERATED % b"null" + b'data: {"error":{"message":"no"}}\n\n', False),
        ("/inference/v1/generate", TOKEN, True),
        ("/inference/v1/generate", TOKEN + DONE, False),
        ("/v1/responses", b'data: {"type":"response.output_text.done"}\n\n', True),
        (
            "/v1/responses",
            b'data: {"type":"response.content_part.done"}\n\ndata: {"type":"response.completed"}\n\n',
            False,
        ),
    ],
)
def test_each_api_has_its_own_end(path: str, tail: bytes, cut: bool) -> None:
    assert is_truncated(path, tail) is cut


def test_a_message_that_its_engine_aborted_ends_with_an_error() -> None:
    events = [b"%b\n\n" % each for each in ABORTED_MESSAGE.split(b"\n\n")[:-1]]
    relayed, seen = played(lambda: RelayedResponse(True, path=MESSAGES), SSE_HEAD, *map(chunk, events), END)
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
    assert seen.body.startswith(ABORTED_MESSAGE + b'data: {"error"')
    assert seen.ending == "complete"


async def test_its_connection_can_be_reused() -> None:
    script = answering(SSE_HEAD + chunk(TOKEN), chunk(TOKEN) + END, pause=0.05)
    async with Pod(script) as pod, rig(pod) as port:
        for _ in range(2):
            seen = await port.ask(post(body=STREAMED))
            assert seen.body.startswith(TOKEN + TOKEN + b'data: {"error"')
            assert seen.ending == "complete"
        assert [attempt.chunks for attempt in port.gateway.attempts] == [2, 2]


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_last_event_known_by_its_name_ends_the_stream(line_end: bytes, size: int) -> None:
    events = [
        b'event: message_start\ndata: {"message":{"content":[]}}\n\n',
        b'event: content_block_delta\ndata: {"index":0,"delta":{"text":"Hi"}}\n\n',
        b"event: message_stop\ndata: {}\n\n",
    ]
    stream = b"".join(events).replace(b"\n", line_end)
    pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
    relayed, seen = played(lambda: RelayedResponse(True, path="/v1/messages"), SSE_HEAD, *map(chunk, pieces), END)
    assert relayed.attempt.ending is Ending.COMPLETE
    assert seen.body == stream
