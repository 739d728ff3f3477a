"""When an answer that has not begun is late."""

from __future__ import annotations

from proxy.core.params import Duration
from proxy.core.request import InferenceRequest
from proxy.reliability.hedging import ENOUGH, KINDS, Lateness
from proxy.reliability.settings import HedgingSettings


def request(model: str = "m", stream: bool = True) -> InferenceRequest:
    return InferenceRequest("1", "/v1/chat/completions", model, stream=stream)


def test_a_time_that_is_given_is_that_of_all() -> None:
    lateness = Lateness(HedgingSettings(after=Duration(2.0)))
    assert lateness.of(request()) == lateness.of(request("n", stream=False)) == 2.0


def test_nothing_is_late_while_little_is_known() -> None:
    lateness = Lateness(HedgingSettings())
    for _ in range(ENOUGH - 1):
        lateness.saw(request(), 1.0)
    assert lateness.of(request()) is None
    lateness.saw(request(), 1.0)
    assert lateness.of(request()) == 1.0
    assert lateness.of(request(stream=False)) is None
    assert lateness.of(request("n")) is None


def test_as_many_are_late_as_the_percentile_says_and_old_times_are_forgotten() -> None:
    lateness = Lateness(HedgingSettings(percentile=90))
    for number in range(1000):
        lateness.saw(request(), float(number % 100))
    assert lateness.of(request()) == 90.0
    for _ in range(500):
        lateness.saw(request(), 3.0)
    assert lateness.of(request()) == 3.0


def test_models_that_clients_make_up_do_not_pile_up() -> None:
    lateness = Lateness(HedgingSettings())
    for number in range(2 * KINDS):
        lateness.saw(request(f"m{number}"), 1.0)
    assert len(lateness._kinds) == KINDS
