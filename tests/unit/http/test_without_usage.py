"""Streams whose usage the proxy asked for: their clients get what they would have got without the question."""

from __future__ import annotations

import json
from dataclasses import dataclass
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
class Answer:
    """Events as vLLM sends them asked, and not asked."""

    asked: tuple[bytes, ...]
    plain: tuple[bytes, ...]


def event(fields: dict[str, Any], end: bytes = b"\n\n") -> bytes:
    return b"data: " + json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode() + end


def answer(
    texts: list[str], fingerprint: str | None = "fp", noise: bytes = b"", finishes: bool = True, end: bytes = b"\n\n"
) -> Answer:
    """`noise` stands before the last chunk."""
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
        return Answer((*before, event(usage, end), done), (*before, done))
    return Answer(
        (*before, event(last, end), event(usage, end), done), (*before, event({**last, **stamped}, end), done)
    )


answers = st.builds(
    answer,
    st.lists(st.sampled_from(TEXTS), max_size=4),
    st.sampled_from([None, "fp-1", 'odd "one"']),
    st.sampled_from([b"", b": keep-alive\n\n", b"data: {not json\n\n"]),
    st.booleans(),
    st.sampled_from([b"\n\n", b"\r\n\r\n"]),
)


def chunked(events: tuple[bytes, ...]) -> bytes:
    return b"".join(map(chunk, events)) + END


@MANY
@given(st.data(), answers, st.booleans())
def test_with_any_reads_the_client_gets_the_bytes_of_a_stream_without_usage(
    data: st.DataObject, given: Answer, speaks_11: bool
) -> None:
    plain = play([SSE_HEAD + chunked(given.plain)], "open", speaks_11)
    asked = play(data.draw(reads(SSE_HEAD + chunked(given.asked))), "open", speaks_11, asks_usage=True)
    assert asked.raw == plain.raw
    assert (asked.attempt.ending, asked.attempt.usage) == (Ending.COMPLETE, Usage(7, 3))
    assert asked.reused


@MANY
@given(st.data(), answers, st.booleans(), st.booleans())
def test_events_across_chunks_and_without_chunks_are_equivalent(
    data: st.DataObject, given: Answer, speaks_11: bool, closes: bool
) -> None:
    body = b"".join(given.asked)
    if closes:
        raw = SSE_HEAD.replace(b"transfer-encoding: chunked\r\n", b"") + body
    else:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(body) - 1), max_size=8)))
        raw = SSE_HEAD + chunked(tuple(body[a:b] for a, b in zip([0, *cuts], [*cuts, len(body)], strict=True)))
    asked = play(data.draw(reads(raw)), "closed" if closes else "open", speaks_11, asks_usage=True)
    seen = asked.seen()
    assert (seen.body, seen.ending) == (b"".join(given.plain), "complete")
    assert asked.attempt.usage == Usage(7, 3)


@MANY
@given(st.data(), answers)
def test_a_broken_stream_has_whole_events_and_the_error(data: st.DataObject, given: Answer) -> None:
    raw = SSE_HEAD + chunked(given.asked)
    kept = data.draw(st.integers(0, len(raw) - 1))
    cut = play(data.draw(reads(raw[:kept])), "reset", asks_usage=True)
    assert cut.attempt.ending is Ending.UPSTREAM_FAILED
    if not cut.raw:
        return
    seen = cut.seen()
    sent, mark, error = seen.body.rpartition(b'data: {"error"')
    assert mark
    assert error.endswith(b"}\n\n")
    assert b'"usage":{"prompt_tokens":7' not in sent
    whole = [b"".join(events[:count]) for events in (given.plain, given.asked) for count in range(len(events) + 1)]
    assert sent in whole


def paced(given: Answer) -> tuple[RelayedResponse, list[bytes]]:
    """What is written after each event."""
    leg, written = RelayedResponse(asks_usage=True), []
    leg.read(SSE_HEAD)
    for each in given.asked:
        before = leg.client.written
        leg.read(chunk(each))
        written.append(leg.client.written[len(before) :])
    leg.read(END)
    return leg, written


async def test_events_pass_at_once_and_only_the_last_one_waits() -> None:
    given = answer(["a"] * 200)
    leg, written = paced(given)
    assert written[1:200] == [chunk(each) for each in given.plain[1:200]]
    assert written[200] == b""
    assert written[201] == chunk(given.plain[200])
    assert written[202] == chunk(b"data: [DONE]\n\n")
    assert leg.client.written.endswith(chunked(given.plain))


async def test_passing_events_use_the_fast_path() -> None:
    leg = RelayedResponse(asks_usage=True)
    leg.read(SSE_HEAD)
    for each in answer(["a"] * 100).asked[:100]:
        leg.read(chunk(each))
        assert leg.connection.receive == leg.response._pass_events


USAGE = answer([]).asked[1]


@pytest.mark.parametrize("cut", range(1, len(USAGE)))
async def test_events_in_two_chunks_are_recognised_with_any_reads(cut: int) -> None:
    for finishes in (True, False):
        said = answer(["a", "b", "c"], finishes=finishes)
        leg = RelayedResponse(asks_usage=True)
        leg.read(SSE_HEAD)
        for each in said.asked:
            leg.read(chunk(each[:cut]))
            if cut < len(each):
                leg.read(chunk(each[cut:]))
        leg.read(END)
        assert understand(leg.client.written).body == b"".join(said.plain)


async def test_a_held_last_chunk_of_a_broken_stream_precedes_the_error() -> None:
    given = answer(["a"])
    leg = RelayedResponse(asks_usage=True)
    leg.read(SSE_HEAD + chunk(given.asked[0]) + chunk(given.asked[1]) + chunk(given.asked[2])[:30])
    leg.end()
    body = understand(leg.client.written).body
    assert body.startswith(given.asked[0] + given.asked[1] + b'data: {"error"')
    assert body.count(b"\n\n") == 3


async def test_an_engine_that_always_sends_usage_is_passed_unchanged() -> None:
    tells = event({"choices": [{"finish_reason": None}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
    leg = RelayedResponse(asks_usage=True)
    leg.read(SSE_HEAD)
    for each in (tells, tells, *answer([]).asked):
        leg.read(chunk(each))
    leg.read(END)
    assert leg.client.written.partition(b"\r\n\r\n")[2] == chunked((tells, tells, *answer([]).asked))


@pytest.mark.parametrize("head", [b"content-encoding: gzip\r\n", b""])
async def test_an_unreadable_stream_passes_unchanged(head: bytes) -> None:
    kind = b"text/event-stream" if head else b"application/json"
    raw = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n%btransfer-encoding: chunked\r\n\r\n" % (kind, head)
    given = answer(["a"])
    outcome = Outcome(await _played([raw + chunked(given.asked)]))
    assert outcome.seen().body == b"".join(given.asked)


async def _played(pieces: list[bytes]) -> RelayedResponse:
    leg = RelayedResponse(asks_usage=True)
    for piece in pieces:
        leg.read(piece)
    return leg
