"""Streams whose usage the proxy requested: clients get the same bytes as without that request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import product
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.attempt import Ending, Usage
from proxy.http.framing import chunk
from tests.helpers.examples import examples
from tests.helpers.http.messages import reads
from tests.helpers.http.support import SSE_HEAD, understand
from tests.helpers.http.wire import Outcome, RelayedResponse, play

MANY = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
TEXTS = (
    "x",
    "",
    '"usage": {"prompt_tokens":1}',
    '"finish_reason":"stop"',
    "data: [DONE]\n\n",
    "\r\n\r\n0\r\n\r\n",
    "é",
)
END = b"0\r\n\r\n"


@dataclass(frozen=True)
class TwoStreams:
    """The events of vLLM when usage is requested, and when it is not."""

    with_usage: tuple[bytes, ...]
    plain: tuple[bytes, ...]


def event(fields: dict[str, Any], end: bytes = b"\n\n") -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + end


def two_streams(
    texts: list[str], fingerprint: str | None = "fp", noise: bytes = b"", finishes: bool = True, end: bytes = b"\n\n"
) -> TwoStreams:
    """Return both streams. `noise` precedes the last chunk."""
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    events = [
        event({**head, "choices": [{"index": 0, "delta": {"content": t}, "finish_reason": None}]}, end) for t in texts
    ]
    stamped = {} if fingerprint is None else {"system_fingerprint": fingerprint}
    last = {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}
    usage = {**head, "choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3}, **stamped}
    before = [*events, *([noise] if noise else [])]
    done = b"data: [DONE]" + end
    if not finishes:
        return TwoStreams((*before, event(usage, end), done), (*before, done))
    return TwoStreams(
        (*before, event(last, end), event(usage, end), done), (*before, event({**last, **stamped}, end), done)
    )


responses = st.builds(
    two_streams,
    st.lists(st.sampled_from(TEXTS), max_size=4),
    st.sampled_from([None, "fp-1", 'odd "one"']),
    st.sampled_from([b"", b": keep-alive\n\n", b"data: {not json\n\n"]),
    st.booleans(),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)


def chunked(events: tuple[bytes, ...]) -> bytes:
    return b"".join(map(chunk, events)) + END


@MANY
@given(st.data(), responses, st.booleans())
def test_with_any_reads_the_client_gets_the_bytes_of_a_stream_without_usage(
    data: st.DataObject, given: TwoStreams, speaks_11: bool
) -> None:
    plain = play([SSE_HEAD + chunked(given.plain)], "open", speaks_11)
    relayed = play(data.draw(reads(SSE_HEAD + chunked(given.with_usage))), "open", speaks_11, usage_added=True)
    assert relayed.raw == plain.raw
    assert (relayed.attempt.ending, relayed.attempt.usage) == (Ending.COMPLETE, Usage(7, 3))
    assert relayed.reused


@MANY
@given(st.data(), responses, st.booleans(), st.sampled_from(["closed", "chunked", "sized"]))
def test_events_across_chunks_and_without_chunks_are_equivalent(
    data: st.DataObject, given: TwoStreams, speaks_11: bool, framing: str
) -> None:
    body = b"".join(given.with_usage)
    if framing != "chunked":
        length = b"content-length: %d\r\n" % len(body) if framing == "sized" else b""
        raw = SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", length) + body
    else:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=8)))
        raw = SSE_HEAD + chunked(tuple(body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)))
    relayed = play(data.draw(reads(raw)), "closed" if framing == "closed" else "open", speaks_11, usage_added=True)
    seen = relayed.seen()
    assert (seen.body, seen.ending) == (b"".join(given.plain), "complete")
    assert relayed.attempt.usage == Usage(7, 3)


@MANY
@given(st.data(), responses)
def test_a_broken_stream_has_whole_events_and_the_error_unless_it_has_all_events(
    data: st.DataObject, given: TwoStreams
) -> None:
    raw = SSE_HEAD + chunked(given.with_usage)
    kept = data.draw(st.integers(0, len(raw) - 1))
    cut = play(data.draw(reads(raw[:kept])), "reset", usage_added=True)
    if given.with_usage[-1] in raw[:kept]:
        seen = cut.seen()
        assert (seen.body, seen.ending) == (b"".join(given.plain), "complete")
        assert (cut.attempt.ending, cut.attempt.usage) == (Ending.COMPLETE, Usage(7, 3))
        return
    assert cut.attempt.ending is Ending.UPSTREAM_FAILED
    if not cut.raw:
        return
    seen = cut.seen()
    sent, mark, error = seen.body.rpartition(b'data: {"error"')
    assert mark
    assert error.endswith(b"}\n\n")
    assert b'"usage":{"prompt_tokens":7' not in sent
    whole = [b"".join(events[:count]) for events in (given.plain, given.with_usage) for count in range(len(events) + 1)]
    assert sent in whole


def paced(given: TwoStreams) -> tuple[RelayedResponse, list[bytes]]:
    """What is written after each event."""
    relayed, written = RelayedResponse(usage_added=True), []
    relayed.read(SSE_HEAD)
    for each in given.with_usage:
        before = relayed.client.written
        relayed.read(chunk(each))
        written.append(relayed.client.written[len(before) :])
    relayed.read(END)
    return relayed, written


async def test_events_pass_at_once_and_only_the_last_one_waits() -> None:
    given = two_streams(["a"] * 200)
    relayed, written = paced(given)
    assert written[1:200] == [chunk(each) for each in given.plain[1:200]]
    assert written[200] == b""
    assert written[201] == chunk(given.plain[200])
    assert written[202] == chunk(b"data: [DONE]\n\n")
    assert relayed.client.written.endswith(chunked(given.plain))


async def test_passing_events_use_the_fast_path() -> None:
    relayed = RelayedResponse(usage_added=True)
    relayed.read(SSE_HEAD)
    for each in two_streams(["a"] * 100).with_usage[:100]:
        relayed.read(chunk(each))
        assert relayed.connection.receive == relayed.response._pass_events


USAGE = two_streams([]).with_usage[1]


async def test_events_in_two_chunks_are_recognised_with_any_reads() -> None:
    for cut, finishes in product(range(1, len(USAGE)), (True, False)):
        streams = two_streams(["a", "b", "c"], finishes=finishes)
        relayed = RelayedResponse(usage_added=True)
        relayed.read(SSE_HEAD)
        for each in streams.with_usage:
            relayed.read(chunk(each[:cut]))
            if cut < len(each):
                relayed.read(chunk(each[cut:]))
        relayed.read(END)
        assert understand(relayed.client.written).body == b"".join(streams.plain), f"cut after {cut} bytes"


async def test_a_held_last_chunk_of_a_broken_stream_precedes_the_error() -> None:
    given = two_streams(["a"])
    relayed = RelayedResponse(usage_added=True)
    relayed.read(SSE_HEAD + chunk(given.with_usage[0]) + chunk(given.with_usage[1]) + chunk(given.with_usage[2])[:30])
    relayed.end()
    body = understand(relayed.client.written).body
    assert body.startswith(given.with_usage[0] + given.with_usage[1] + b'data: {"error"')
    assert body.count(b"\n\n") == 3


async def test_an_engine_that_always_sends_usage_is_passed_unchanged() -> None:
    tells = event({"choices": [{"finish_reason": None}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
    relayed = RelayedResponse(usage_added=True)
    relayed.read(SSE_HEAD)
    for each in (tells, tells, *two_streams([]).with_usage):
        relayed.read(chunk(each))
    relayed.read(END)
    assert relayed.client.written.partition(b"\r\n\r\n")[2] == chunked((tells, tells, *two_streams([]).with_usage))


@pytest.mark.parametrize("head", [b"content-encoding: gzip\r\n", b""])
async def test_an_unreadable_stream_passes_unchanged(head: bytes) -> None:
    kind = b"text/event-stream" if head else b"application/json"
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%btransfer-encoding: chunked\r\n\r\n" % (kind, head)
    given = two_streams(["a"])
    outcome = Outcome(await _played([raw + chunked(given.with_usage)]))
    assert outcome.seen().body == b"".join(given.with_usage)


async def _played(pieces: list[bytes]) -> RelayedResponse:
    relayed = RelayedResponse(usage_added=True)
    for piece in pieces:
        relayed.read(piece)
    return relayed
