"""Flow control as an EndpointPickerConfig words it."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.errors import ConfigError
from proxy.core.params import Duration, Size
from proxy.flowcontrol.queue import Queue
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings, Holdback, LeastService, ShedByLoad
from proxy.settings import from_mapping

PODS = {"static": [{"url": "http://a:1"}]}


def loaded(flow_control: Any = None, plugins: Any = (), gates: Any = ("flowControl",), **sections: Any) -> Any:
    scheduling = {"featureGates": list(gates), "plugins": list(plugins)}
    if flow_control is not None:
        scheduling["flowControl"] = flow_control
    return from_mapping({"pods": PODS, "scheduling": scheduling, **sections}).flow_control


def faults(*arguments: Any, **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        loaded(*arguments, **sections)
    return list(map(str, caught.value.problems))


def test_without_the_gate_nothing_is_queued() -> None:
    assert loaded(gates=()) == FlowControlSettings()
    assert not loaded(gates=("flowControl=false",)).limits


def test_the_gate_alone_queues_by_utilization_in_order_of_arrival() -> None:
    settings = loaded()
    assert settings.saturation.detector == "utilization"
    assert settings.bands == (BandSettings(0, fairness="strict", ordering="fcfs"),)
    assert settings.limits


def test_all_fields_become_the_section_of_the_same_name() -> None:
    settings = loaded(
        {
            "maxBytes": "10Gi",
            "maxRequests": "1k",
            "defaultRequestTTL": "30s",
            "noEndpointRequestTTL": "300s",
            "saturationDetector": {"pluginRef": "sat"},
            "usageLimitPolicyPluginRef": "holdback",
            "enableEviction": True,
            "defaultPriorityBand": {
                "maxBytes": "1Gi",
                "maxRequests": 5000,
                "fairnessPolicyRef": "rr",
                "orderingPolicyRef": "edf",
            },
            "defaultNegativePriorityBand": {"maxRequests": 100},
            "priorityBands": [{"priority": 100, "maxRequests": 2000}],
        },
        [
            {
                "name": "sat",
                "type": "concurrency-detector",
                "parameters": {"concurrencyMode": "hybrid", "maxConcurrency": 64, "headroom": 0.2},
            },
            {"name": "rr", "type": "round-robin-fairness-policy"},
            {"name": "edf", "type": "edf-ordering-policy"},
            {"name": "holdback", "type": "priority-holdback-policy", "parameters": {"minCeiling": 0.5}},
        ],
    )
    assert (settings.max_queued, settings.max_queued_bytes, settings.queue_timeout) == (1000, 10 << 30, 30.0)
    assert settings.no_endpoint_timeout == 300.0
    assert settings.evict_sheddable
    saturation = settings.saturation
    assert (saturation.detector, saturation.requests, saturation.tokens) == ("concurrency", 64, 1_000_000)
    assert settings.bands == (
        BandSettings(100, "", 2000, fairness="strict", ordering="fcfs", ceiling=1.0),
        BandSettings(0, "", 5000, Size(1 << 30), fairness="round-robin", ordering="edf"),
        BandSettings(-1, "", 100, fairness="strict", ordering="fcfs"),
    )
    assert settings.holdback == Holdback(0.5)


@pytest.mark.parametrize(
    ("section", "seconds"),
    [
        ({}, 60.0),
        ({"defaultRequestTTL": "5s"}, 5.0),
        ({"defaultRequestTTL": "5s", "noEndpointRequestTTL": "5m"}, 300.0),
        ({"noEndpointRequestTTL": "0s"}, 86400.0),
    ],
    ids=str,
)
def test_requests_wait_for_the_first_ready_pod(section: dict[str, str], seconds: float) -> None:
    assert loaded(section).no_endpoint_timeout == seconds
    assert loaded(section, gates=()).no_endpoint_timeout is None


@pytest.mark.parametrize(
    ("parameters", "ceilings"),
    [
        ({"minCeiling": 0.5}, [1.0, 0.75, 0.5]),
        ({"minCeiling": 0.2, "maxCeiling": 0.8, "domain": "value"}, [0.8, 0.26, 0.2]),
    ],
)
def test_lower_priorities_are_held_back_sooner(parameters: dict[str, Any], ceilings: list[float]) -> None:
    settings = loaded(
        {"usageLimitPolicyPluginRef": "h", "priorityBands": [{"priority": 9}, {"priority": -1}]},
        [{"name": "h", "type": "priority-holdback-policy", "parameters": parameters}],
    )
    assert [band.ceiling for band in Queue(settings).bands] == pytest.approx(ceilings)


def test_priorities_that_are_not_listed_are_held_back_too() -> None:
    holdback = {"type": "priority-holdback-policy", "parameters": {"minCeiling": 0.4}}
    queue = Queue(loaded({"usageLimitPolicyPluginRef": "priority-holdback-policy"}, [holdback]))
    assert [band.ceiling for band in queue.bands] == [1.0]
    for priority in (10, -5, 5):
        queue.band(priority)
    ceilings = {band.priority: band.ceiling for band in queue.bands}
    assert ceilings == pytest.approx({10: 1.0, 5: 0.8, 0: 0.6, -5: 0.4})


def test_without_the_gate_a_detector_refuses_sheddable_requests_while_pods_are_full() -> None:
    plugins = [{"type": "utilization-detector", "parameters": {"queueDepthThreshold": 3}}]
    settings = loaded({"saturationDetector": {"pluginRef": "utilization-detector"}}, plugins, gates=())
    assert settings.saturation.queue_depth == 3
    normal, sheddable = settings.bands
    assert (normal.priority, normal.ceiling > 1e6) == (0, True)
    assert (sheddable.priority, sheddable.ceiling, sheddable.max_queued) == (-1, 1.0, 0)


def of_a_document(*plugins: Any, gates: Any = (), **sections: Any) -> Any:
    scheduling = {"kind": "EndpointPickerConfig", "featureGates": list(gates), "plugins": list(plugins)}
    return from_mapping({"pods": PODS, "scheduling": scheduling, **sections}).flow_control


class TestTheDefaultDetectorOfLlmD:
    WHILE_FULL = ShedByLoad(5, 0.8, power=1e9, k=1.0)

    def test_a_document_without_a_detector_refuses_sheddable_requests_while_pods_are_full(self) -> None:
        settings = of_a_document({"type": "queue-scorer"})
        assert settings.shedding.by_load == self.WHILE_FULL
        assert not settings.limits, "other requests need no queue"
        assert of_a_document(flowControl={}) == of_a_document(flowControl=None) == settings

    def test_it_is_not_added_to_queues_or_to_another_detector(self) -> None:
        assert of_a_document(gates=["flowControl"]).shedding.by_load is None
        given = of_a_document({"type": "utilization-detector", "parameters": {"queueDepthThreshold": 3}})
        assert (given.saturation.queue_depth, given.shedding.by_load) == (3, None)

    def test_kvlanes_own_section_decides_for_itself(self) -> None:
        assert of_a_document(flowControl={"maxConcurrent": 3}) == FlowControlSettings(max_concurrent=3)
        assert from_mapping({"pods": PODS, "scheduling": {"plugins": []}}).flow_control == FlowControlSettings()

    def test_admitters_are_added_to_it(self) -> None:
        settings = of_a_document({"type": "latency-slo-admitter"})
        assert (settings.shedding.missed_objectives, settings.shedding.by_load) == (True, self.WHILE_FULL)

    def test_an_admitter_that_refuses_no_less_replaces_it(self) -> None:
        settings = of_a_document({"type": "probabilistic-admitter", "parameters": {"queueDepthThreshold": 4}})
        assert (settings.shedding.by_load.queue_depth, settings.limits) == (4, False)

    @pytest.mark.parametrize("parameters", [{"k": 0.5}, {"queueDepthThreshold": 9}, {"kvCacheUtilThreshold": 0.9}])
    def test_an_admitter_that_refuses_less_does_not_replace_it(self, parameters: dict[str, Any]) -> None:
        settings = of_a_document({"type": "probabilistic-admitter", "parameters": parameters})
        assert settings.shedding.by_load != self.WHILE_FULL
        assert (settings.saturation.detector, settings.saturation.queue_depth) == ("utilization", 5)
        assert [(band.priority, band.max_queued) for band in settings.bands] == [(0, None), (-1, 0)]


def test_the_same_limit_set_twice_is_a_fault() -> None:
    assert faults({"maxRequests": 10}, flowControl={"maxQueued": 20, "maxConcurrent": 3}) == [
        "flowControl.maxQueued: is set in scheduling too; keep one of them"
    ]
    assert loaded({"maxRequests": 10}, flowControl={"maxConcurrent": 3}).max_concurrent == 3


def test_faults_are_reported_with_their_path() -> None:
    plugins = [{"name": "rr", "type": "round-robin-fairness-policy"}]
    section = {
        "saturationDetector": {"pluginRef": "rr"},
        "usageLimitPolicyPluginRef": "none",
        "priorityBands": [{"priority": 1, "orderingPolicyRef": "rr"}],
    }
    assert faults(section, plugins) == [
        "scheduling.flowControl.saturationDetector.pluginRef: 'rr' is no saturation detector",
        "scheduling.flowControl.usageLimitPolicyPluginRef: no plugin is named 'none'; the names are rr; "
        "declare it under scheduling.plugins",
        "scheduling.flowControl.priorityBands[0].orderingPolicyRef: 'rr' is no ordering policy",
    ]
    assert faults({"maxRequest": 3}) == [
        "scheduling.flowControl: unknown field 'maxRequest'; did you mean 'maxRequests'?"
    ]
    wrong = [{"type": "priority-holdback-policy", "parameters": {"minCeiling": 2}}]
    assert faults({}, wrong) == [
        "scheduling.plugins.priority-holdback-policy.parameters: minCeiling must be less than maxCeiling"
    ]


def test_reflective_ceilings_have_no_parameters() -> None:
    reflective = {"type": "soft-reflective-ceiling-policy"}
    section = {"usageLimitPolicyPluginRef": "soft-reflective-ceiling-policy", "priorityBands": [{"priority": 5}]}
    settings = loaded(section, [reflective])
    assert settings.ceilings == "reflective"
    assert [band.ceiling for band in settings.bands] == [1.0, 1.0]
    assert loaded({}).ceilings == "fixed"
    (fault,) = faults(section, [{**reflective, "parameters": {"threshold": 1}}])
    assert "unknown field 'threshold'" in fault


def test_programs_are_tenants_and_the_least_served_is_first() -> None:
    parameters = {"lasWeightService": 0.6, "lasWeightHeadWait": 0.4, "lasHalfLifeSeconds": 0, "evictionTtlSeconds": 60}
    aware = {"type": "program-aware-fairness", "parameters": parameters}
    section = {"defaultPriorityBand": {"fairnessPolicyRef": "program-aware-fairness"}}
    settings = loaded(section, [aware])
    assert settings.bands[0].fairness == "least-service"
    assert settings.least_service == LeastService(0.6, 0.4, Duration(0.0), Duration(60.0))
    assert loaded(section, [{"type": "program-aware-fairness"}]).least_service == LeastService()
    (fault,) = faults(section, [aware, {**aware, "name": "other"}])
    assert fault == "scheduling.plugins.other: there is another 'program-aware-fairness'; one is enough"
    (fault,) = faults(section, [{**aware, "parameters": {"evictionSweepSeconds": 0}}])
    assert "evictionSweepSeconds" in fault


def test_a_profile_cannot_filter_by_a_policy() -> None:
    scheduling = {
        "plugins": [{"type": "edf-ordering-policy"}],
        "schedulingProfiles": [{"name": "p", "plugins": [{"pluginRef": "edf-ordering-policy"}]}],
    }
    with pytest.raises(ConfigError) as caught:
        from_mapping({"pods": PODS, "scheduling": scheduling})
    assert list(map(str, caught.value.problems)) == [
        "scheduling.schedulingProfiles.p.plugins[0].pluginRef: 'edf-ordering-policy' is no filter, scorer or picker"
    ]


def test_admitters_work_with_the_gate_and_without() -> None:
    plugins = [
        {"type": "probabilistic-admitter", "parameters": {"queueDepthThreshold": 4, "k": 10}},
        {"type": "latency-slo-admitter"},
    ]
    for gates in ((), ("flowControl",)):
        settings = loaded(plugins=plugins, gates=gates)
        assert settings.shedding.missed_objectives
        assert settings.shedding.by_load is not None
        assert (settings.shedding.by_load.queue_depth, settings.shedding.by_load.k) == (4, 10.0)
        assert settings.limits is bool(gates)
