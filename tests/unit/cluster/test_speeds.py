"""A process that joins starts with what its peers have learned of the speeds of pods."""

from __future__ import annotations

import orjson
import pytest

from proxy.cluster.messages import InvalidMessage, RecordKind
from proxy.cluster.replica import ALL, MISSED
from proxy.cluster.shared import SharedSpeeds
from proxy.core.endpoint import Endpoint
from proxy.latency.rates import FLEET_NUMBERS, POD_NUMBERS, FleetModel, Rates

FAST, SLOW, UNSEEN = (Endpoint(name) for name in ("fast", "slow", "unseen"))
PODS = {pod.name: pod for pod in (FAST, SLOW, UNSEEN)}


class Process:
    def __init__(self, name: str = "default/latency") -> None:
        self.model = FleetModel()
        self.rates = {pod: self.model.rates_of(pod) for pod in (FAST, SLOW)}
        self.shared = SharedSpeeds(self.model, name, PODS.get)

    def serve(self, seconds: float = 0.1) -> None:
        """A pod that takes so long for a thousand tokens, and one that takes three times as long."""
        for _ in range(40):
            for pod, factor in ((FAST, 1.0), (SLOW, 3.0)):
                self.rates[pod].observe_prefill(factor * seconds, 0.0, 1000.0, 0.0)
                self.rates[pod].observe_decode(4.0, factor * seconds / 10)

    def join(self, peer: Process) -> None:
        for kind, body in peer.shared.lasting(ALL):
            self.shared.receive(1, kind, body)

    def shown(self, pod: Endpoint) -> tuple[float, float]:
        """The seconds of a thousand tokens of a prompt, and of one of a response."""
        rates = self.model.rates.get(pod) or self.model.rates_of(pod)
        return _seconds(rates), rates.step + 4.0 * rates.per_running


def _seconds(rates: Rates) -> float:
    return rates.fixed + 1000.0 * rates.per_token


def test_a_process_that_joins_knows_the_speeds_of_pods() -> None:
    old, new = Process(), Process()
    old.serve()
    before = new.shown(SLOW)
    new.join(old)
    assert before != pytest.approx(old.shown(SLOW), rel=0.2)
    for pod in (FAST, SLOW):
        assert new.shown(pod) == pytest.approx(old.shown(pod), rel=0.02)
    assert new.model.slowness == pytest.approx(old.model.slowness)


def test_speeds_of_pods_without_a_model_are_kept_until_they_have_one_and_passed_on() -> None:
    old, new, newest = Process(), Process(), Process()
    del new.rates, newest.rates
    old.serve()
    new.join(old)
    newest.join(new)
    for process in (new, newest):
        assert process.shown(SLOW) == pytest.approx(old.shown(SLOW), rel=0.02)


def test_a_pod_that_no_process_has_observed_follows_the_fleet() -> None:
    old, new = Process(), Process()
    old.shown(UNSEEN)
    old.serve()
    new.join(old)
    unseen = new.model.rates_of(UNSEEN)
    assert not unseen.prefill.has_own
    assert unseen.prefill.coefficients == new.model.prefill.coefficients


def test_own_observations_replace_what_was_received() -> None:
    old, new = Process(), Process()
    old.serve()
    new.join(old)
    new.serve(0.3)
    learned = new.shown(FAST)
    new.join(old)
    assert new.shown(FAST) == learned
    assert _seconds(new.rates[FAST]) == pytest.approx(0.3, rel=0.1)


def test_only_a_process_that_joins_receives_speeds_and_only_of_its_own_models() -> None:
    old, other = Process(), Process("other/latency")
    assert not list(old.shared.lasting(ALL))
    old.serve()
    assert not list(old.shared.lasting(MISSED))
    before = other.shown(SLOW)
    other.join(old)
    assert other.shown(SLOW) == before


@pytest.mark.parametrize(
    "entry",
    [
        ["slow", [1.0] * (POD_NUMBERS - 1)],
        ["", [1.0] * POD_NUMBERS],
        ["slow", [-1.0] * POD_NUMBERS],
        ["slow", [1e300] * POD_NUMBERS],
        ["slow", [None] * POD_NUMBERS],
    ],
)
def test_impossible_speeds_are_refused_and_none_is_applied(entry: list[object]) -> None:
    process = Process()
    before = process.model.learned()
    body = orjson.dumps([[process.shared._tag, "", [1.0] * FLEET_NUMBERS], [process.shared._tag, *entry]])
    with pytest.raises(InvalidMessage):
        process.shared.receive(1, RecordKind.SPEEDS, body)
    assert process.model.learned() == before
