"""Responses in which the model has the client's name."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.core.attempt import Ending, Usage
from proxy.http import pipeline
from proxy.http.framing import chunk
from tests.helpers.examples import examples
from tests.helpers.http.messages import reads
from tests.helpers.http.support import SSE_HEAD
from tests.helpers.http.wire import play
from tests.unit.http.test_without_usage import TwoStreams, two_streams

MANY = settings(max_examples=examples(60), deadline=None, suppress_health_check=[HealthCheck.too_slow])
ALIAS = "org/gpt-4o"
END = b"0\r\n\r\n"
JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\nx-engine: yes\r\n\r\n%b"
WHOLE = {"id": "1", "model": "m", "choices": [{"text": '"model":"m"', "tool": {"model": "m"}}]}


def body_of(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def renamed(events: tuple[bytes, ...]) -> bytes:
    return b"".join(events).replace(b'"model":"m"', b'"model":"%b"' % ALIAS.encode())


def streamed(events: tuple[bytes, ...], last: bytes = END) -> bytes:
    return SSE_HEAD + b"".join(map(chunk, events)) + last


@pytest.mark.parametrize("size", [1, 7, 100_000])
def test_a_complete_response_has_the_requested_name_and_its_length(size: int) -> None:
    body = body_of({**WHOLE, "usage": {"prompt_tokens": 7, "completion_tokens": 3}})
    raw = JSON % (len(body), body)
    outcome = play([raw[at : at + size] for at in range(0, len(raw), size)], "open", alias=ALIAS)
    seen = outcome.seen()
    assert seen.body == body.replace(b'"id":"1","model":"m"', b'"id":"1","model":"org/gpt-4o"')
    assert b"x-engine: yes" in outcome.raw
    assert outcome.attempt.ending is Ending.COMPLETE
    assert outcome.attempt.usage == Usage(7, 3)
    assert outcome.reused


@pytest.mark.parametrize(
    "raw",
    [
        JSON % (2, b"[]"),
        JSON % (0, b""),
        JSON.replace(b"application/json", b"audio/wav") % (13, b'{"model":"m"}'),
        JSON.replace(b"200 OK", b"400 Bad Request") % (15, b'{"error":"no m"}'[:15]),
        JSON.replace(b"x-engine: yes", b"content-encoding: gzip")
        % (len(gzip.compress(b'{"model":"m"}', mtime=0)), gzip.compress(b'{"model":"m"}', mtime=0)),
    ],
)
def test_responses_without_a_model_pass_unchanged(raw: bytes) -> None:
    assert play([raw], "open", alias=ALIAS).raw == play([raw], "open").raw


def test_a_large_response_passes_with_the_pods_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LARGEST_WHOLE", 1000)
    body = body_of({**WHOLE, "data": "x" * 3000})
    raw = JSON % (len(body), body)
    pieces = [raw[at : at + 500] for at in range(0, len(raw), 500)]
    begun = play(pieces[:4], "open", alias=ALIAS)
    assert b'"model":"m"' in begun.raw
    assert play(pieces, "open", alias=ALIAS).seen().body == body


def test_a_response_that_breaks_off_before_its_end_goes_to_another_pod() -> None:
    body = body_of(WHOLE)
    outcome = play([(JSON % (len(body), body))[:-5]], "closed", alias=ALIAS)
    assert outcome.raw == b""
    assert outcome.error is not None


TEXTS = st.lists(st.sampled_from(["x", "", '"model":"m"', "data: [DONE]\n\n", "é"]), max_size=5)


@MANY
@given(st.builds(two_streams, TEXTS), st.data(), st.booleans(), st.booleans())
def test_every_event_has_the_requested_name(made: TwoStreams, data: st.DataObject, speaks_11: bool, asks: bool) -> None:
    raw = streamed(made.with_usage if asks else made.plain)
    outcome = play(data.draw(reads(raw)), "open", speaks_11, usage_added=asks, alias=ALIAS)
    assert outcome.seen().body == renamed(made.plain)
    assert outcome.attempt.ending is Ending.COMPLETE


@MANY
@given(st.builds(two_streams, TEXTS, st.none()), st.data(), st.booleans(), st.sampled_from(["closed", "reset"]))
def test_a_broken_stream_ends_with_an_error_after_whole_events(
    made: TwoStreams, data: st.DataObject, asks: bool, ending: str
) -> None:
    raw = streamed(made.with_usage if asks else made.plain, last=b"")
    at = data.draw(st.integers(len(SSE_HEAD) + 1, len(raw) - len(b"\n\r\n")))  # later the client has all events
    outcome = play(data.draw(reads(raw[:at])), ending, usage_added=asks, alias=ALIAS)
    if outcome.error is not None:
        assert outcome.raw == b""
        return
    events = [event for event in outcome.seen().body.split(b"\n\n") if event]
    assert "error" in json.loads(events[-1].removeprefix(b"data: "))
    assert renamed(made.plain).startswith(b"".join(event + b"\n\n" for event in events[:-1]))


def test_an_endless_event_is_passed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "LARGEST_EVENT", 100)
    events = (b"data: {}\n\n", b'data: {"model":"m","x":"%b' % (b"x" * 200), b'y"}\n\n', b"data: [DONE]\n\n")
    outcome = play([streamed(events[:2], last=b"")], "open", alias=ALIAS)
    assert b'"model":"org/gpt-4o"' in outcome.raw
    assert play([streamed(events)], "open", alias=ALIAS).seen().body == renamed(events)


def test_json_of_unknown_length_is_renamed_at_its_end() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    body = b'{"model": "m", "x": 1}'
    outcome = play([head, chunk(body[:5]), chunk(body[5:]) + END], "open", alias=ALIAS)
    assert outcome.seen().body == body.replace(b'"m"', b'"org/gpt-4o"')
