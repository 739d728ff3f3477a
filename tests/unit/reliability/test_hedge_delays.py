"""The time after which a response that has not started is late."""

from __future__ import annotations

from proxy.core.params import Duration
from proxy.core.request import InferenceRequest
from proxy.reliability.hedging import ENOUGH, KINDS, HedgeDelays
from proxy.reliability.settings import HedgingSettings


def request(model: str = "m", stream: bool = True) -> InferenceRequest:
    return InferenceRequest("1", "/v1/chat/completions", model, stream=stream)


def test_a_time_that_is_given_is_that_of_all() -> None:
    delays = HedgeDelays(HedgingSettings(after=Duration(2.0)))
    assert delays.of(request()) == delays.of(request("n", stream=False)) == 2.0


def test_nothing_is_late_while_little_is_known() -> None:
    delays = HedgeDelays(HedgingSettings())
    for _ in range(ENOUGH - 1):
        delays.record(request(), 1.0)
    assert delays.of(request()) is None
    delays.record(request(), 1.0)
    assert delays.of(request()) == 1.0
    assert delays.of(request(stream=False)) is None
    assert delays.of(request("n")) is None


def test_as_many_are_late_as_the_percentile_says_and_old_times_are_forgotten() -> None:
    delays = HedgeDelays(HedgingSettings(percentile=90))
    for number in range(1000):
        delays.record(request(), float(number % 100))
    assert delays.of(request()) == 90.0
    for _ in range(500):
        delays.record(request(), 3.0)
    assert delays.of(request()) == 3.0


def test_models_that_clients_make_up_do_not_pile_up() -> None:
    delays = HedgeDelays(HedgingSettings())
    for number in range(2 * KINDS):
        delays.record(request(f"m{number}"), 1.0)
    assert len(delays._kinds) == KINDS
