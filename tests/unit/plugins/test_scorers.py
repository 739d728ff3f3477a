"""The formulas of the scorers, and their edges."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.endpoint import Endpoint
from proxy.prefix.match import PREFIX_MATCH
from tests.helpers.plugins.situations import Held, fault, pod, request, score

counts = st.lists(st.integers(0, 1000), min_size=1, max_size=8)


def with_metric(field: str, count: int) -> Endpoint:
    scraped: dict[str, Any] = {field: count}
    return pod(**scraped)


@pytest.mark.parametrize(("kind", "field"), [("queue-scorer", "waiting"), ("running-requests-size-scorer", "running")])
class TestMinMax:
    @given(counts=counts)
    def test_the_least_scores_1_and_the_most_0(self, kind: str, field: str, counts: list[int]) -> None:
        scores = score(kind, [with_metric(field, count) for count in counts])
        low, high = min(counts), max(counts)
        if low == high:
            assert set(scores) == {1.0}
        else:
            assert scores == pytest.approx([1 - (count - low) / (high - low) for count in counts])


def test_a_queue_is_the_scrape_adjusted_by_sent_requests() -> None:
    busy, idle = pod("busy", waiting=1), pod("idle", waiting=1)
    busy.charge(3, 0)
    assert score("queue-scorer", [busy, idle]) == [0.0, 1.0]


def test_kv_cache_utilization_is_absolute() -> None:
    assert score("kv-cache-utilization-scorer", [pod(kv_usage=0.25), pod(kv_usage=1.0)]) == [0.75, 0.0]


class TestLoadAware:
    @given(waiting=st.integers(0, 500), threshold=st.integers(-5, 300))
    def test_half_minus_the_share_of_the_threshold(self, waiting: int, threshold: int) -> None:
        effective = threshold if threshold > 0 else 128
        expected = 0.5 if waiting == 0 else 0.5 * (1 - min(waiting, effective) / effective)
        assert score("load-aware-scorer", [pod(waiting=waiting)], threshold=threshold) == [pytest.approx(expected)]

    def test_the_default_threshold_is_128(self) -> None:
        assert score("load-aware-scorer", [pod(waiting=64), pod(waiting=128)]) == [0.25, 0.0]


class TestActiveRequests:
    @given(counts=counts, idle=st.integers(-5, 50), most=st.floats(-1, 2))
    def test_idle_pods_score_1_and_busy_ones_their_distance_to_the_busiest(
        self, counts: list[int], idle: int, most: float
    ) -> None:
        scale = most if 0 <= most <= 1 else 1.0
        scores = score(
            "active-request-scorer", [pod(requests=count) for count in counts], idleThreshold=idle, maxBusyScore=most
        )
        for count, given_score in zip(counts, scores, strict=True):
            expected = 1.0 if count <= max(0, idle) else (max(counts) - count) / max(counts) * scale
            assert given_score == pytest.approx(expected)

    def test_the_old_timeout_is_accepted(self) -> None:
        assert score("active-request-scorer", [pod()], requestTimeout="2m") == [1.0]


class TestTokenLoad:
    def test_without_a_match_the_whole_prompt_counts(self) -> None:
        pods = [pod(tokens=100), pod(tokens=5000)]
        assert score("token-load-scorer", pods, request(300), queueThresholdTokens=1000) == [0.6, 0.0]

    def test_an_idle_pod_scores_1(self) -> None:
        assert score("token-load-scorer", [pod()]) == [1.0]

    def test_invalid_thresholds_use_the_default(self) -> None:
        given: tuple[dict[str, Any], ...] = ({}, {"queueThresholdTokens": 0}, {"queueThresholdTokens": -7})
        for given_threshold in given:
            assert score("token-load-scorer", [pod(tokens=2_097_152)], **given_threshold) == [0.5]

    @given(total=st.integers(0, 20), held=st.integers(0, 20), size=st.integers(0, 64), prompt=st.integers(0, 2000))
    def test_cached_blocks_do_not_count(self, total: int, held: int, size: int, prompt: int) -> None:
        incoming = request(prompt)
        incoming.state.write(PREFIX_MATCH, Held(total, {"pod": held}, size))
        uncached = max(0, (total - held) * size) + max(0, prompt - total * size)
        expected = 1 - min(uncached, 4096) / 4096
        assert score("token-load-scorer", [pod()], incoming, queueThresholdTokens=4096) == [pytest.approx(expected)]


class TestLora:
    def test_active_precedes_free_slot_precedes_waiting(self) -> None:
        pods = [
            pod(active_models=frozenset({"model"}), max_active_models=1),
            pod(active_models=frozenset({"a"}), waiting_models=frozenset({"b"}), max_active_models=3),
            pod(active_models=frozenset({"a"}), waiting_models=frozenset({"model"}), max_active_models=2),
            pod(active_models=frozenset({"a"}), max_active_models=1),
            pod(),
        ]
        assert score("lora-affinity-scorer", pods) == [1.0, 0.8, 0.6, 0.0, 0.0]

    def test_a_base_model_is_not_an_adapter(self) -> None:
        assert score("lora-affinity-scorer", [pod(max_active_models=0)], request(model="base")) == [0.0]


class TestHeaderLabel:
    PARAMETERS: dict[str, Any] = {"headerName": "X-Zone", "labelKey": "zone"}

    def test_equal_labels_score_1(self) -> None:
        pods = [pod(labels={"zone": "a"}), pod(labels={"zone": "b"}), pod()]
        assert score("header-label-affinity-scorer", pods, request(x_zone="a"), **self.PARAMETERS) == [1.0, 0.0, 0.0]

    def test_without_the_header_all_pods_score_0(self) -> None:
        pods = [pod(), pod(labels={"zone": ""})]
        for incoming in (request(), request(x_zone="")):
            assert score("header-label-affinity-scorer", pods, incoming, **self.PARAMETERS) == [0, 0]

    def test_both_parameters_are_required(self) -> None:
        assert "labelKey: is required" in fault("header-label-affinity-scorer", headerName="x")
        assert "must not be empty" in fault("header-label-affinity-scorer", headerName="", labelKey="x")


class TestAttribute:
    @staticmethod
    def parameters(kind: str = "linear_higher_is_better", **normalization: Any) -> dict[str, Any]:
        algorithm = {"type": kind, **({"normalization": normalization} if normalization else {})}
        return {"attributeKey": "gpu", "algorithm": algorithm}

    def pods(self, *values: float | None) -> list[Endpoint]:
        return [pod(attributes={} if value is None else {"gpu": value}) for value in values]

    def test_adaptive_scales_from_the_least_to_the_most(self) -> None:
        pods = self.pods(10, 15, 20, None)
        assert score("endpoint-attribute-scorer", pods, **self.parameters()) == [0.0, 0.5, 1.0, 0.0]
        lower = self.parameters("linear_lower_is_better", adaptiveRange={})
        assert score("endpoint-attribute-scorer", pods, **lower) == [1.0, 0.5, 0.0, 0.0]

    def test_all_equal_score_1_in_both_directions(self) -> None:
        for kind in ("linear_lower_is_better", "linear_higher_is_better"):
            scores = score("endpoint-attribute-scorer", self.pods(3, 3), **self.parameters(kind))
            assert scores == [1.0, 1.0]

    @given(value=st.floats(-100, 100), low=st.floats(-50, 0), width=st.floats(0.001, 50))
    def test_a_fixed_range_is_clamped(self, value: float, low: float, width: float) -> None:
        fixed = self.parameters("linear_lower_is_better", fixedRange={"min": low, "max": low + width})
        expected = 1 - min(1, max(0, (value - low) / (low + width - low)))
        assert score("endpoint-attribute-scorer", self.pods(value), **fixed) == [pytest.approx(expected)]

    def test_a_producer_qualifies_the_name(self) -> None:
        pods = [pod(attributes={"gpu/dcgm": 1.0, "gpu": 9.0}), pod(attributes={"gpu/dcgm": 2.0})]
        assert score("endpoint-attribute-scorer", pods, producer="dcgm", **self.parameters()) == [0.0, 1.0]

    @pytest.mark.parametrize("name", ["gpu", "gpu/dcgm"])
    def test_the_name_may_end_with_its_producer_as_in_earlier_releases_of_llm_d(self, name: str) -> None:
        pods = [pod(attributes={name: 1.0}), pod(attributes={name: 2.0})]
        parameters = {**self.parameters(), "attributeKey": "gpu/dcgm"}
        assert score("endpoint-attribute-scorer", pods, **parameters) == [0.0, 1.0]

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"attributeKey": "", "algorithm": {"type": "linear_lower_is_better"}}, "attributeKey: must not be empty"),
            ({"attributeKey": "a", "algorithm": {"type": "cubic"}}, "must be one of linear_lower_is_better"),
            ({"attributeKey": "a"}, "algorithm: is required"),
        ],
    )
    def test_invalid_parameters_are_refused(self, parameters: dict[str, Any], message: str) -> None:
        assert message in fault("endpoint-attribute-scorer", **parameters)

    def test_invalid_normalisations_are_refused(self) -> None:
        both = self.parameters(fixedRange={"min": 0, "max": 1}, adaptiveRange={})
        assert "exclude each other" in fault("endpoint-attribute-scorer", **both)
        backwards = self.parameters(fixedRange={"min": 1, "max": 1})
        assert "min: must be less than max" in fault("endpoint-attribute-scorer", **backwards)


class TestContextLength:
    LABEL = "llm-d.ai/context-length-range"

    @given(low=st.integers(0, 5000), width=st.integers(1, 50_000), tokens=st.integers(0, 60_000))
    def test_the_formula(self, low: int, width: int, tokens: int) -> None:
        high = low + width
        (given_score,) = score("context-length-aware", [pod(labels={self.LABEL: f"{low}-{high}"})], request(tokens))
        if low <= tokens <= high:
            raw = 0.7 / (1 + width / 10000) + 0.3 * (high - tokens) / width
            assert given_score == pytest.approx(0.3 + 0.7 * raw)
        else:
            distance = max(low - tokens, tokens - high)
            assert given_score == pytest.approx(0.3 / (1 + distance / 1000))

    def test_a_range_of_one_length_scores_1_for_it(self) -> None:
        assert score("context-length-aware", [pod(labels={self.LABEL: "8-8"})], request(8)) == [1.0]

    @pytest.mark.parametrize("text", ["", "8", "a-b", "9-8", "-1-8", "1-2-3"])
    def test_an_invalid_label_scores_0_and_a_missing_one_a_half(self, text: str) -> None:
        assert score("context-length-aware", [pod(labels={self.LABEL: text}), pod()], request(8)) == [0.0, 0.5]

    def test_an_empty_label_name_is_refused(self) -> None:
        assert "must not be empty" in fault("context-length-aware", label="")
