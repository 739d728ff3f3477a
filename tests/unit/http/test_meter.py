"""The bounded part of a response that is remembered."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.core.attempt import Attempt, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.request import InferenceRequest
from proxy.http.framing import CLOSED, OPENED
from proxy.http.upstream.connection import TAIL, ResponseMeter

USAGE = b'"usage":{"prompt_tokens":4,"completion_tokens":2}}'


def attempt_of(path: str = "/v1/chat/completions") -> Attempt:
    endpoint = Endpoint("p")
    return Attempt(InferenceRequest("1", path, "m"), Decision(endpoint), endpoint, 0, 0.0)


@pytest.mark.parametrize("size", [1, 100, 5_000, 200_000])
def test_the_tail_is_bounded_and_holds_the_end(size: int) -> None:
    attempt, meter = attempt_of(), ResponseMeter()
    piece = b"x" * size
    count = max(5, 50_000 // size)
    for _ in range(count):
        meter.pieces.append(piece)
        meter.flush(attempt)
        assert len(meter.tail) <= TAIL
        assert meter.pieces == []
    meter.pieces += [piece, USAGE[:10]]
    meter.flush(attempt)
    meter.pieces.append(USAGE[10:])
    meter.flush(attempt)
    assert meter.tail.endswith(USAGE)
    assert len(meter.tail) == min(TAIL, (count + 1) * size + len(USAGE))
    meter.finish(attempt)
    assert attempt.usage == Usage(4, 2)
    assert attempt.response_bytes == (count + 1) * size + len(USAGE)


def test_bytes_are_counted_once_with_repeated_settlement() -> None:
    attempt, meter = attempt_of(), ResponseMeter()
    meter.pieces += [b"ab", b"cd"]
    meter.marks += [OPENED, CLOSED, OPENED]
    meter.flush(attempt)
    meter.flush(attempt)
    assert (attempt.response_bytes, attempt.chunks) == (4, 1)
    meter.marks += [CLOSED, OPENED, CLOSED]
    meter.finish(attempt)
    assert (attempt.response_bytes, attempt.chunks) == (4, 2)


def test_reads_are_counted_without_chunks() -> None:
    attempt, meter = attempt_of(), ResponseMeter()
    meter.pieces.append(b"ab")
    meter.flush(attempt)
    meter.pieces.append(b"cd")
    meter.finish(attempt)
    assert (attempt.response_bytes, attempt.chunks) == (4, 2)


def test_nothing_of_a_response_is_left_for_the_next_one() -> None:
    meter = ResponseMeter()
    meter.pieces.append(USAGE)
    meter.marks += [OPENED, CLOSED, OPENED, CLOSED]
    meter.finish(attempt_of())
    assert (meter.pieces, meter.marks, meter.tail) == ([], [], b"")
    attempt = attempt_of()
    meter.finish(attempt)
    assert (attempt.usage, attempt.response_bytes, attempt.chunks) == (None, 0, 0)


def test_the_id_of_a_stored_response_is_searched_in_its_start_only() -> None:
    attempt, meter = attempt_of("/v1/responses"), ResponseMeter()
    meter.pieces.append(b'{"id":"res')
    meter.flush(attempt)
    meter.pieces.append(b'p_7","x":1' + b" " * 20_000)
    meter.flush(attempt)
    assert attempt.response_id == "resp_7"
    late, meter = attempt_of("/v1/responses"), ResponseMeter()
    meter.pieces.append(b"x" * 20_000)
    meter.flush(late)
    meter.pieces.append(b'{"id":"resp_8"}')
    meter.finish(late)
    assert late.response_id is None


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_in_the_last_events_of_a_stream_and_before_long_values_in_json(stream: bool) -> None:
    attempt, meter = attempt_of(), ResponseMeter()
    attempt.request = replace(attempt.request, stream=stream)
    meter.pieces += [b"data: {" + USAGE, b"\n\n" if stream else b',"prompt_logprobs":' + b"0" * 5_000]
    meter.finish(attempt)
    assert attempt.usage == Usage(4, 2)
