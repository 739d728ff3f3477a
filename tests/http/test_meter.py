"""What is remembered of an answer, however long it is."""

from __future__ import annotations

import pytest

from proxy.core.clock import ManualClock
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange, Usage
from proxy.core.request import InferenceRequest
from proxy.http.meter import TAIL, Meter

USAGE = b'"usage":{"prompt_tokens":4,"completion_tokens":2}}'


def exchange_of(path: str = "/v1/chat/completions") -> Exchange:
    endpoint = Endpoint("p")
    return Exchange(InferenceRequest("1", path, "m"), Decision(endpoint), endpoint, 0, 0.0)


@pytest.mark.parametrize("size", [1, 100, 5_000, 200_000])
def test_the_tail_is_bounded_and_holds_the_end(size: int) -> None:
    exchange = exchange_of()
    meter = Meter(exchange, ManualClock(), lambda first: None)
    piece = b"x" * size
    for _ in range(max(5, 50_000 // size)):
        meter.add([piece], [])
        assert len(meter.tail()) <= 2 * TAIL
    meter.add([piece, USAGE[:10]], [])
    meter.add([USAGE[10:]], [])
    assert meter.tail().endswith(USAGE)
    meter.finish(complete=True)
    assert exchange.usage == Usage(4, 2)


def test_the_first_byte_is_told_once() -> None:
    told: list[Exchange] = []
    clock = ManualClock(5.0)
    exchange = exchange_of()
    meter = Meter(exchange, clock, told.append)
    meter.add([], [])
    assert told == []
    meter.add([b"a"], [])
    clock.advance(1.0)
    meter.add([b"b"], [])
    meter.finish(complete=True)
    assert told == [exchange]
    assert (exchange.first_byte_at, exchange.last_byte_at) == (5.0, 6.0)


def test_the_id_of_a_stored_response_is_looked_for_in_its_beginning_only() -> None:
    exchange = exchange_of("/v1/responses")
    meter = Meter(exchange, ManualClock(), lambda first: None)
    meter.add([b'{"id":"res'], [])
    meter.add([b'p_7","x":1'], [])
    assert exchange.response_id == "resp_7"
    late = exchange_of("/v1/responses")
    meter = Meter(late, ManualClock(), lambda first: None)
    meter.add([b"x" * 20_000], [])
    meter.add([b'{"id":"resp_8"}'], [])
    assert late.response_id is None
