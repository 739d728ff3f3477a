"""What the filters keep."""

from dataclasses import replace
from typing import Any

import pytest

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.plugin import Filter
from proxy.latency.forecast import LATENCY
from proxy.prefix.match import PREFIX_MATCH
from proxy.scheduling.sections import UtilizationDetector
from tests.helpers.plugins.situations import Foretold, Held, attempt, fault, kept, make, pod, request

ROLES = [
    "",
    "decode",
    "prefill",
    "encode",
    "prefill-decode",
    "both",
    "encode-prefill",
    "encode-prefill-decode",
    "other",
]


def by_role() -> list[Endpoint]:
    return [pod(role or "none", labels={"llm-d.ai/role": role} if role else {}) for role in ROLES]


def test_decode_keeps_decode_pods_and_pods_without_a_role() -> None:
    assert kept("decode-filter", by_role()) == ["none", "decode", "prefill-decode", "both", "encode-prefill-decode"]


def test_prefill_keeps_prefill_pods() -> None:
    expected = ["prefill", "prefill-decode", "both", "encode-prefill", "encode-prefill-decode"]
    assert kept("prefill-filter", by_role()) == expected


class TestLabelSelector:
    PODS = [
        pod("h100", labels={"gpu": "h100", "zone": "a"}),
        pod("a100", labels={"gpu": "a100"}),
        pod("bare"),
        pod("decoder", labels={"llm-d.ai/role": "decode"}),
    ]

    @pytest.mark.parametrize(
        ("selector", "expected"),
        [
            ({}, ["h100", "a100", "bare", "decoder"]),
            ({"matchLabels": {"gpu": "h100"}}, ["h100"]),
            ({"matchLabels": {"gpu": "h100", "zone": "b"}}, []),
            ({"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h100", "a100"]}]}, ["h100", "a100"]),
            (
                {"matchExpressions": [{"key": "gpu", "operator": "NotIn", "values": ["h100"]}]},
                ["a100", "bare", "decoder"],
            ),
            ({"matchExpressions": [{"key": "zone", "operator": "Exists"}]}, ["h100"]),
            ({"matchExpressions": [{"key": "gpu", "operator": "DoesNotExist"}]}, ["bare", "decoder"]),
            (
                {"matchLabels": {"gpu": "a100"}, "matchExpressions": [{"key": "zone", "operator": "DoesNotExist"}]},
                ["a100"],
            ),
        ],
    )
    def test_the_operators(self, selector: dict[str, Any], expected: list[str]) -> None:
        assert kept("label-selector-filter", self.PODS, **selector) == expected

    def test_a_configured_role_equals_its_label(self) -> None:
        assert kept("label-selector-filter", [Endpoint("p", role="decode")], matchLabels={"llm-d.ai/role": "decode"})

    @pytest.mark.parametrize("expression", [{"operator": "In"}, {"operator": "Exists", "values": ["x"]}])
    def test_values_go_with_their_operators(self, expression: dict[str, Any]) -> None:
        message = fault("label-selector-filter", matchExpressions=[{"key": "a", **expression}])
        assert "matchExpressions[0]: operator" in message


class TestByLabel:
    @pytest.mark.parametrize(
        ("parameters", "expected"),
        [
            ({"validValues": ["h100", "a100"]}, ["h100", "a100"]),
            ({"validValues": ["h100"], "allowsNoLabel": True}, ["h100", "bare"]),
            ({"allowsNoLabel": True}, ["bare"]),
        ],
    )
    def test_pods_without_the_label_are_kept_only_if_they_are_allowed(
        self, parameters: dict[str, Any], expected: list[str]
    ) -> None:
        pods = [pod("h100", labels={"gpu": "h100"}), pod("a100", labels={"gpu": "a100"}), pod("bare")]
        assert kept("by-label", pods, label="gpu", **parameters) == expected

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"label": "gpu"}, "validValues must not be empty unless allowsNoLabel is true"),
            ({"label": "", "allowsNoLabel": True}, "label: must not be empty"),
        ],
    )
    def test_a_filter_that_would_keep_nothing_is_refused(self, parameters: dict[str, Any], message: str) -> None:
        assert message in fault("by-label", **parameters)


class TestConformance:
    PODS = [
        Endpoint(name, url=f"http://{name}") for name in ("10.0.0.1:80", "10.0.0.1:81", "10.0.0.2:80", "[fd::1]:80")
    ]

    @pytest.mark.parametrize(
        ("header", "expected"),
        [
            ("10.0.0.2", ["10.0.0.2:80"]),
            ("10.0.0.2:80, 10.0.0.1:80", ["10.0.0.1:80", "10.0.0.2:80"]),
            ("10.0.0.1", ["10.0.0.1:80", "10.0.0.1:81"]),
            ("[fd::1]:80", ["[fd::1]:80"]),
            ("[fd::1]", ["[fd::1]:80"]),
            ("fd::1", ["[fd::1]:80"]),
            ("10.0.0.2:81,10.0.0.3", []),
            (" ", []),
        ],
    )
    def test_the_header_lists_addresses_with_or_without_a_port(self, header: str, expected: list[str]) -> None:
        incoming = request(test_epp_endpoint_selection=header)
        assert kept("header-based-testing-filter", self.PODS, incoming) == expected

    def test_without_the_header_no_pod_is_kept(self) -> None:
        assert kept("header-based-testing-filter", self.PODS, request()) == []

    def test_the_response_says_which_pod_served_it(self) -> None:
        sent = attempt(request(), self.PODS[2])
        make("destination-endpoint-served-verifier").pre_request(sent, self.PODS[2])
        assert sent.response_headers == [("x-conformance-test-served-endpoint", "10.0.0.2:80")]


class TestUtilization:
    @pytest.mark.parametrize(
        ("metric", "field", "limit"),
        [
            ("active-requests", "requests", 3),
            ("active-tokens", "tokens", 3000),
            ("running-requests", "running", 3),
            ("waiting-queue", "waiting", 3),
            ("kv-cache-utilization", "kv_usage", 0.5),
        ],
    )
    def test_values_up_to_the_limit_are_kept(self, metric: str, field: str, limit: float) -> None:
        at: dict[str, Any] = {field: limit}
        above: dict[str, Any] = {field: limit * 1.5}
        pods = [pod("at", **at), pod("above", **above), pod("idle")]
        assert kept("utilization-filter", pods, conditions=[{"metric": metric, "maxValue": limit}]) == ["at", "idle"]

    CONDITIONS = [{"metric": "waiting-queue", "maxValue": 1}, {"metric": "kv-cache-utilization", "maxValue": 0.5}]

    def test_all_conditions_count(self) -> None:
        pods = [pod("both"), pod("queue", waiting=2), pod("cache", kv_usage=0.9)]
        assert kept("utilization-filter", pods, conditions=self.CONDITIONS) == ["both"]

    def test_where_is_idle_all_are_busy_or_all_stay(self) -> None:
        pods = [pod("a", waiting=2), pod("b", waiting=3)]
        assert kept("utilization-filter", pods, conditions=self.CONDITIONS) == []
        assert kept("utilization-filter", pods, conditions=self.CONDITIONS, fallbackOnEmpty=True) == ["a", "b"]
        assert make("utilization-filter", conditions=self.CONDITIONS).exhausts is True

    def test_pods_with_stale_metrics_stay_unless_the_filter_is_that_of_a_detector(self) -> None:
        fresh, stale = pod("fresh"), pod("stale")
        stale.publish(Metrics(freshness=Freshness.STALE), 0)
        assert kept("utilization-filter", [stale, fresh], conditions=self.CONDITIONS) == ["stale", "fresh"]
        detector = UtilizationDetector().as_filter()
        assert kept("utilization-filter", [stale, fresh], **detector) == ["fresh"]
        assert kept("utilization-filter", [stale], **detector) == ["stale"], "all stay if none is left"

    @pytest.mark.parametrize(
        "condition",
        [
            {"metric": "kv-cache-utilization", "maxValue": 1.1},
            {"metric": "waiting-queue", "maxValue": -1},
            {"metric": "temperature", "maxValue": 1},
        ],
    )
    def test_invalid_conditions_are_refused(self, condition: dict[str, Any]) -> None:
        assert "conditions[0]" in fault("utilization-filter", conditions=[condition])

    def test_without_conditions_it_is_refused(self) -> None:
        assert fault("utilization-filter") == "utilization-filter.parameters.conditions: is required"
        assert "would keep every pod" in fault("utilization-filter", conditions=[])


class TestAttribute:
    PODS = [pod("low", attributes={"gpu": 1.0}), pod("high", attributes={"gpu": 9.0}), pod("none")]

    @staticmethod
    def parameters(operator: str, value: float) -> dict[str, Any]:
        return {
            "attribute": "gpu",
            "algorithm": {"type": "threshold", "threshold": {"operator": operator, "value": value}},
        }

    @pytest.mark.parametrize(
        ("operator", "value", "expected"),
        [
            ("LessThan", 9, ["low", "none"]),
            ("LessThanOrEqual", 9, ["low", "high", "none"]),
            ("GreaterThan", 1, ["high", "none"]),
            ("GreaterThanOrEqual", 1, ["low", "high", "none"]),
            ("Equal", 1, ["low", "none"]),
            ("NotEqual", 1, ["high", "none"]),
        ],
    )
    def test_the_operators(self, operator: str, value: float, expected: list[str]) -> None:
        assert kept("endpoint-attribute-filter", self.PODS, **self.parameters(operator, value)) == expected

    def test_the_name_may_end_with_its_producer_as_in_earlier_releases_of_llm_d(self) -> None:
        parameters = {**self.parameters("LessThan", 2), "attribute": "gpu/dcgm-extractor"}
        pods = [pod("busy", attributes={"gpu": 3.0}), pod("idle", attributes={"gpu": 1.0})]
        assert kept("endpoint-attribute-filter", pods, **parameters) == ["idle"]

    def test_a_missing_value_may_fail_and_an_empty_result_may_fall_back(self) -> None:
        parameters = {**self.parameters("GreaterThan", 99), "onMissing": "Fail"}
        assert kept("endpoint-attribute-filter", self.PODS, **parameters) == []
        fallback = kept("endpoint-attribute-filter", self.PODS, **parameters, fallbackOnEmpty=True)
        assert fallback == ["low", "high", "none"]


class TestContextLength:
    LABEL = "llm-d.ai/context-length-range"

    def test_it_drops_pods_only_if_configured(self) -> None:
        pods = [
            pod("fits", labels={self.LABEL: "10-20"}),
            pod("short", labels={self.LABEL: "0-9"}),
            pod("bad", labels={self.LABEL: "many"}),
            pod("none"),
        ]
        assert kept("context-length-aware", pods, request(10)) == ["fits", "short", "bad", "none"]
        assert kept("context-length-aware", pods, request(10), enableFiltering=True) == ["fits", "none"]


class TestPrefixCacheAffinity:
    KIND = "prefix-cache-affinity-filter"

    @staticmethod
    def with_blocks(total: int = 10, **blocks: int) -> Any:
        incoming = request()
        incoming.state.write(PREFIX_MATCH, Held(total, blocks))
        return incoming

    def test_pods_with_the_prefix_are_kept(self) -> None:
        pods = [pod("full"), pod("enough"), pod("little"), pod("none")]
        assert kept(self.KIND, pods, self.with_blocks(full=10, enough=8, little=7)) == ["full", "enough"]

    def test_exactly_the_threshold_suffices(self) -> None:
        for percent in range(1, 101):
            incoming = self.with_blocks(total=100, a=percent)
            assert kept(self.KIND, [pod("a"), pod("b")], incoming, affinityThreshold=percent / 100) == ["a"]

    def test_without_a_sufficient_match_all_are_kept(self) -> None:
        assert kept(self.KIND, [pod("a"), pod("b")], self.with_blocks(a=7)) == ["a", "b"]

    def test_without_matches_or_a_threshold_all_are_kept(self) -> None:
        pods = [pod("a"), pod("b")]
        assert kept(self.KIND, pods) == ["a", "b"]
        assert kept(self.KIND, pods, self.with_blocks(total=0)) == ["a", "b"]
        assert kept(self.KIND, pods, self.with_blocks(a=10), affinityThreshold=0) == ["a", "b"]

    @pytest.mark.parametrize(
        ("tokens", "penalty", "expected"),
        [(1001, 1000, ["a", "b"]), (1000, 1000, ["a"]), (9999, 0, ["a"]), (1001, 1500, ["a"])],
    )
    def test_a_pod_with_the_prefix_that_would_be_too_late_is_dropped(
        self, tokens: int, penalty: float, expected: list[str]
    ) -> None:
        pods = [pod("a", tokens=tokens), pod("b")]
        parameters = {"maxTTFTPenaltyMs": penalty, "peakPrefillThroughput": 1000}
        assert kept(self.KIND, pods, self.with_blocks(a=10), **parameters) == expected

    def test_the_least_loaded_pods_of_both_sides_are_compared(self) -> None:
        pods = [pod("a", tokens=99_999), pod("a2", tokens=10), pod("b", tokens=10), pod("b2", tokens=0)]
        parameters = {"maxTTFTPenaltyMs": 100, "peakPrefillThroughput": 1000}
        assert kept(self.KIND, pods, self.with_blocks(a=10, a2=10), **parameters) == ["a", "a2"]

    def test_a_throughput_of_0_is_a_fault_only_where_it_is_used(self) -> None:
        assert "must be more than 0 with ttftSource" in fault(self.KIND, peakPrefillThroughput=0)
        for unused in ({"ttftSource": "latencyPredictor"}, {"maxTTFTPenaltyMs": 0}):
            pods = [pod("a", tokens=99), pod("b")]
            assert kept(self.KIND, pods, self.with_blocks(a=10), peakPrefillThroughput=0, **unused) == ["a"]

    def test_exploration_keeps_all_with_its_probability(self) -> None:
        explorer = make(self.KIND, explorationProbability=0.25)
        pods, incoming = [pod("a"), pod("b")], self.with_blocks(a=10)
        widths = [len(explorer.filter(None, incoming, pods)) for _ in range(2000)]
        assert 400 < widths.count(2) < 600

    def test_a_bound_producer_is_the_one_that_is_read(self) -> None:
        incoming = request()
        incoming.state.write(PREFIX_MATCH.of("other"), Held(10, {"b": 10}))
        incoming.state.write(PREFIX_MATCH.of("mine"), Held(10, {"a": 10}))
        assert kept(self.KIND, [pod("a"), pod("b")], incoming, prefixMatchInfoProducerName="mine") == ["a"]

    @pytest.mark.parametrize(("is_predicted", "names"), [(True, ["a", "b"]), (False, ["a"])])
    def test_the_latency_predictor_is_used_if_present(self, is_predicted: bool, names: list[str]) -> None:
        incoming = self.with_blocks(a=10)
        if is_predicted:
            incoming.state.write(LATENCY, Foretold({"a": 2.0, "b": 0.9}))
        given: dict[str, Any] = {"ttftSource": "latencyPredictor", "maxTTFTPenaltyMs": 1000}
        assert make(self.KIND, **given).requires == (PREFIX_MATCH, LATENCY)
        assert kept(self.KIND, [pod("a"), pod("b")], incoming, **given) == names


class TestSloHeadroomTier:
    def kept(self, header: str = "x-llm-d-slo-ttft-ms", *, stream: bool = True, **given: Any) -> str:
        incoming = replace(request(10), stream=stream, headers={header: "500"})
        incoming.state.write(LATENCY, Foretold({"a": 0.2, "b": 0.5, "c": 0.9}))
        return "".join(kept("slo-headroom-tier-filter", [pod(name) for name in "abc"], incoming, **given))

    @pytest.mark.parametrize("header", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms", "x-slo-tpot-ms"])
    def test_pods_predicted_to_break_an_objective_are_dropped(self, header: str) -> None:
        assert self.kept(header, epsilonExploreNeg=0) == "ab"

    def test_with_a_small_probability_they_are_kept_alone(self) -> None:
        assert self.kept(epsilonExploreNeg=1) == "c"
        assert [self.kept(seed=seed) for seed in range(500)].count("c") in range(1, 20)

    def test_all_stay_without_objectives_or_predictions(self) -> None:
        assert self.kept("x-other", epsilonExploreNeg=1) == "abc"
        hurried = replace(request(10), headers={"x-llm-d-slo-ttft-ms": "500"})
        assert kept("slo-headroom-tier-filter", [pod("a"), pod("b")], hurried, epsilonExploreNeg=1) == ["a", "b"]
        assert kept("slo-headroom-tier-filter", [pod("a")], request(10)) == ["a"]

    @pytest.mark.parametrize("seconds", [0.1, 0.9])
    def test_all_stay_if_all_or_none_meet_it(self, seconds: float) -> None:
        incoming = replace(request(10), headers={"x-slo-ttft-ms": "500"})
        incoming.state.write(LATENCY, Foretold({"a": seconds, "b": seconds}))
        assert kept("slo-headroom-tier-filter", [pod("a"), pod("b")], incoming, epsilonExploreNeg=1) == ["a", "b"]

    def test_complete_responses_have_no_objective_per_token(self) -> None:
        assert self.kept("x-slo-tpot-ms", stream=False, epsilonExploreNeg=0) == "abc"


def test_only_the_utilization_filter_reports_exhaustion() -> None:
    assert Filter.exhausts is False
    assert make("decode-filter").exhausts is False
