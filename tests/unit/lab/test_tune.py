from __future__ import annotations

from random import Random
from typing import Any

import pytest
import yaml

from proxy.lab.replay import RequestResult
from proxy.lab.tune import OBJECTIVES, TooFew, Tunable, Tuned, gain, missed, ttft_mean, tune
from proxy.lab.workload import Workload
from proxy.settings import Settings, from_mapping
from tests.helpers.lab.traffic import conversations, fleet

BAD: dict[str, Any] = {
    "plugins": [
        {"type": "approx-prefix-cache-producer"},
        {"type": "prefix-cache-scorer"},
        {"type": "kv-cache-utilization-scorer", "name": "room"},
        {"type": "max-score-picker"},
    ],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "prefix-cache-scorer", "weight": 0.01},
                {"pluginRef": "room", "weight": 10},
                {"pluginRef": "max-score-picker"},
            ],
        }
    ],
}


def tuned(settings: Settings, workload: Workload, trials: int = 8) -> Tuned:
    return tune(Tunable(settings), workload, fleet(), ttft_mean, trials, 1, lambda line: None)


def test_a_harmful_weight_is_found_and_changed() -> None:
    tunable = Tunable(from_mapping({"scheduling": BAD}))
    found = tuned(from_mapping({"scheduling": BAD}), conversations(300, 8.0), trials=5)
    prefix, usage = found.values
    assert prefix / max(usage, 1e-9) > 0.01
    assert found.gain.is_significant
    assert 0.0 < found.gain.low <= found.gain.share <= found.gain.high
    assert tunable.values == (0.01, 10.0)


def test_the_patch_is_a_valid_section_with_the_values() -> None:
    tunable = Tunable(from_mapping({"scheduling": BAD}))
    section = yaml.safe_load(yaml.safe_dump(tunable.section((3.0, 0.5))))
    again = Tunable(from_mapping({"scheduling": section}))
    assert again.values == (3.0, 0.5)
    assert {"type": "kv-cache-utilization-scorer", "name": "room"} in section["plugins"]


def test_the_defaults_can_be_tuned_too() -> None:
    tunable = Tunable(Settings())
    assert len(tunable.knobs) >= 2 or any(not knob.owner for knob in tunable.knobs)
    assert Tunable(from_mapping({"scheduling": tunable.section(tunable.values)})).values == tunable.values


def test_shadows_are_kept_unchanged() -> None:
    shadow = {**BAD["schedulingProfiles"][0], "name": "candidate", "shadow": True}
    settings = from_mapping({"scheduling": {**BAD, "schedulingProfiles": [*BAD["schedulingProfiles"], shadow]}})
    tunable = Tunable(settings)
    assert {knob.owner for knob in tunable.knobs} == {"default"}
    assert tunable.section((1.0, 1.0))["schedulingProfiles"][1] == shadow


def test_parameters_of_the_latency_scorer_are_tuned() -> None:
    plugins = [
        {"type": "approx-prefix-cache-producer"},
        {"type": "predicted-latency-producer", "parameters": {"workCost": 0.3}},
        {"type": "latency-scorer"},
    ]
    tunable = Tunable(from_mapping({"scheduling": {"plugins": plugins}}))
    values = {str(knob): knob.value for knob in tunable.knobs}
    assert values["predicted-latency-producer: workCost"] == 0.3
    assert "latency-scorer: scaleSeconds" in values
    changed = tunable.section(tuple(value * 2 for value in tunable.values))
    parameters = {plugin["type"]: plugin.get("parameters") for plugin in changed["plugins"]}
    assert parameters["predicted-latency-producer"]["workCost"] == 0.6


def test_without_a_possible_gain_nothing_is_significant() -> None:
    """One pod: every configuration places alike."""
    one = fleet(1)
    found = tune(Tunable(Settings()), conversations(200, 1.0), one, ttft_mean, 1, 1, lambda line: None)
    assert not found.gain.is_significant


def test_the_same_seed_gives_the_same_patch() -> None:
    settings, workload = from_mapping({"scheduling": BAD}), conversations(200, 6.0)
    assert tuned(settings, workload, 1) == tuned(settings, workload, 1)


def test_a_few_requests_are_too_few_to_tune_on() -> None:
    with pytest.raises(TooFew, match="100 requests are too few"):
        tuned(Settings(), conversations(100, 4.0))


def test_a_configuration_without_weights_has_nothing_to_tune() -> None:
    settings = from_mapping({"scheduling": {"plugins": [{"type": "queue-scorer"}]}})
    with pytest.raises(TooFew, match="nothing to tune"):
        tuned(settings, conversations(250, 4.0))


def fared(seconds: float) -> RequestResult:
    return RequestResult(seconds, 0.01, seconds + 1, seconds < 0.5, 10, 0)


class TestAGain:
    def test_the_gain_is_the_saved_share(self) -> None:
        rng = Random(1)
        before = [fared(rng.uniform(0.5, 1.5)) for _ in range(500)]
        after = [fared(one.ttft * 0.8) for one in before]
        found = gain([before], [after], ttft_mean, Random(2))
        assert found.share == pytest.approx(0.2)
        assert found.low == pytest.approx(0.2)
        assert found.is_significant

    def test_a_random_gain_is_not_significant(self) -> None:
        rng = Random(1)
        before, after = ([fared(rng.uniform(0.5, 1.5)) for _ in range(200)] for _ in range(2))
        found = gain([before], [after], ttft_mean, Random(2))
        assert found.low < 0.0 < found.high
        assert not found.is_significant

    def test_missing_responses_count_as_two_minutes(self) -> None:
        never = RequestResult(float("inf"), float("nan"), float("inf"), False, 10, 0)
        assert ttft_mean([never]) == 120.0
        assert missed([never, fared(0.1)]) == 0.5

    @pytest.mark.parametrize("name", OBJECTIVES)
    def test_a_lower_value_is_better(self, name: str) -> None:
        objective, meaning = OBJECTIVES[name]
        assert objective([fared(0.1)] * 20) < objective([fared(0.9)] * 20)
        assert meaning
