"""Streams whose sent output must be known with any reads of the pod's connection."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import KvlaneError, StreamInterrupted
from proxy.core.request import InferenceRequest, Naming, changed
from proxy.http import pipeline
from proxy.http.framing import chunk
from proxy.http.pipeline import Continuation, make_continuable
from proxy.http.response import Response
from tests.helpers.examples import examples
from tests.helpers.http.messages import reads
from tests.helpers.http.support import CHAT, SSE_HEAD, Seen, understand
from tests.helpers.http.wire import RelayedResponse
from tests.unit.http.test_without_usage import two_streams

MANY = settings(max_examples=examples(100), deadline=None, suppress_health_check=[HealthCheck.too_slow])
BODY = b'{"messages":[{"role":"user","content":"Hello"}],"stream":true}'
WANTED = BODY[:-1] + b',"stream_options":{"include_usage":true,"continuous_usage_stats":true}}'
"""A client that requests everything the engine can report."""

RESPONSE = two_streams(["One", " two", '"quoted"', "\n\n", " é", ""])
EVENTS, PLAIN = RESPONSE.with_usage, RESPONSE.plain
END = b"0\r\n\r\n"
ERROR = b'data: {"error":{}}\n\n'


class Continued(RelayedResponse):
    """The same with a response that may be continued."""

    def __init__(self, speaks_11: bool, usage_added: bool = False, alias: str = "m", body: bytes = BODY) -> None:
        super().__init__(speaks_11, usage_added=usage_added, alias=alias)
        client_request = cast(Any, self.response)._client_request
        self.attempt.request = changed(self.attempt.request, body=body)
        continuation = make_continuable(None, self.attempt, ["m"])
        assert continuation is not None
        self.response = Response(client_request, self.attempt, self.context, self.connection)
        self.response.continue_with(continuation)
        self.connection.send(self.response, b"POST", b"")
        self.continuation: Continuation = continuation

    @property
    def error(self) -> KvlaneError | None:
        return self.response.done.result()

    def end_stream(self) -> None:
        """No pod goes on with it."""
        self.client.write(self.continuation.end(ERROR))

    def seen(self) -> Seen:
        return understand(self.client.written)


def cut(pieces: list[bytes], speaks_11: bool = True, **kind: Any) -> Continued:
    async def played() -> Continued:
        relayed = Continued(speaks_11, **kind)
        for piece in pieces:
            relayed.read(piece)
        relayed.end(ConnectionResetError())
        return relayed

    return asyncio.run(played())


@MANY
@given(st.data(), st.booleans(), st.sampled_from(["aligned", "any", "none"]), st.sampled_from([BODY, WANTED]))
def test_the_remembered_output_equals_the_sent_one(
    data: st.DataObject, speaks_11: bool, chunks: str, wanted: bytes
) -> None:
    body = b"".join(EVENTS)
    head = SSE_HEAD
    if chunks == "aligned":
        raw = b"".join(map(chunk, EVENTS))
    elif chunks == "any":
        cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=8)))
        raw = b"".join(chunk(body[a:b]) for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True))
    else:
        head, raw = SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", b""), body
    kept = data.draw(st.integers(0, len(raw)))
    relayed = cut(data.draw(reads(head + raw[:kept])), speaks_11, body=wanted)
    if not relayed.client.written:
        assert not isinstance(relayed.error, StreamInterrupted)
        return
    assert isinstance(relayed.error, StreamInterrupted)
    assert relayed.attempt.ending is Ending.UPSTREAM_FAILED
    relayed.end_stream()
    sent, mark, _ = relayed.seen().body.rpartition(b'data: {"error"')
    assert mark
    whole = EVENTS if wanted is WANTED else PLAIN
    assert sent in [b"".join(events[:count]) for events in (EVENTS, whole) for count in range(len(events) + 1)]
    texts = ["One", " two", '"quoted"', "\n\n", " é", ""]
    text = "".join(texts[: sent.count(b'"content"')])
    assert relayed.continuation.partial.complete_text() == text


def test_paced_events_pass_at_once() -> None:
    async def played() -> None:
        relayed = Continued(True, body=WANTED)
        relayed.read(SSE_HEAD)
        for event in EVENTS:
            before = relayed.client.written
            relayed.read(chunk(event))
            assert relayed.client.written.removeprefix(before).endswith(chunk(event))
        relayed.read(END)
        assert relayed.attempt.ending is Ending.COMPLETE
        assert relayed.seen().body == b"".join(EVENTS)
        assert relayed.continuation.partial.complete_text() == 'One two"quoted"\n\n é'

    asyncio.run(played())


def counted(event: bytes, prompt: int, completion: int) -> bytes:
    """As vLLM says it where it is asked for."""
    usage = b',"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"completion_tokens_details":null}'
    return event.replace(b"]", b"]" + usage % (prompt, prompt + completion, completion))


@pytest.mark.parametrize("usage_added", [False, True])
def test_requested_counts_are_read_and_removed(usage_added: bool) -> None:
    event = b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"One two"}}]}\n\n'
    first, second = counted(event, 5, 3), counted(event, 5, 6)
    relayed = cut(
        [SSE_HEAD, chunk(first), chunk(second), chunk(first[:30]), chunk(first[30:50])], usage_added=usage_added
    )
    assert isinstance(relayed.error, StreamInterrupted)
    relayed.end_stream()
    assert relayed.seen().body.startswith(event + event + b'data: {"error"')
    assert (relayed.continuation.partial.prompt, relayed.continuation.partial.shown) == (5, 6)


def test_counts_that_the_client_requested_stay() -> None:
    event = counted(b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"One two"}}]}\n\n', 5, 3)
    relayed = cut([SSE_HEAD, chunk(event), b"nonsense"], body=WANTED)
    assert relayed.attempt.request.body == WANTED
    relayed.end_stream()
    assert relayed.seen().body.startswith(event + b'data: {"error"')
    assert relayed.continuation.partial.shown == 3


def test_a_pod_after_a_failed_one_gets_the_same_request() -> None:
    async def send_twice() -> None:
        relayed = Continued(True)
        before = relayed.attempt.request
        assert b"continuous_usage_stats" in before.body
        assert before.usage_added
        again = make_continuable(relayed.continuation, relayed.attempt, ["m"])
        assert again is not None
        assert relayed.attempt.request.body == before.body
        assert again is not relayed.continuation
        assert again.continuable.counts_added

    asyncio.run(send_twice())


def test_an_endless_event_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent in parts then, and the response cannot be continued."""
    monkeypatch.setattr(pipeline, "LARGEST_EVENT", 1000)
    relayed = cut([SSE_HEAD, chunk(EVENTS[0]), chunk(b"data: " + b"x" * 1000), chunk(b"y" * 500)], body=WANTED)
    assert relayed.error is None
    body = relayed.seen().body
    assert body.startswith(EVENTS[0] + b"data: " + b"x" * 1000)
    assert b'\n\ndata: {"error"' in body


@pytest.mark.parametrize(
    "changes",
    [
        {"stream": False},
        {"model": "n"},
        {"path": "/v1/messages"},
        {"path": "/v1/responses"},
        {"body": BODY[:-1] + b',"n":2}'},
    ],
    ids=str,
)
def test_most_responses_are_not_kept(changes: dict[str, Any]) -> None:
    request = InferenceRequest("1", CHAT, "m", body=BODY, stream=True, naming=Naming("m"))
    pod = Endpoint("pod")
    for incoming, is_kept in ((request, True), (changed(request, **changes), False)):
        attempt = Attempt(incoming, Decision(pod), pod, 0, 0.0)
        assert (make_continuable(None, attempt, ["m"]) is not None) is is_kept
        assert (attempt.request is not incoming) is is_kept
