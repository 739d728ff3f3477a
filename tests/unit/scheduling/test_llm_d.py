"""Documents of the current llm-d load unchanged; parts without an effect are named."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.core.endpoint import PodTls
from proxy.core.errors import ConfigError
from proxy.core.request import InferenceRequest
from proxy.plugins.producers.agent_identity import AGENT_IDENTITY
from proxy.scheduling.document import Document, read
from proxy.settings import from_mapping
from tests.helpers.plugins.situations import make

PODS = {"static": [{"url": "http://127.0.0.1:1"}]}


def document(*plugins: Any, **sections: Any) -> Document:
    """The document, which is also built, as `kvlane serve` does."""
    from_mapping({"pods": PODS, "scheduling": {"plugins": list(plugins), **sections}})
    return read({"plugins": list(plugins), **sections})


def refs(*names: str) -> list[dict[str, str]]:
    return [{"pluginRef": name} for name in names]


def parameters(document: Document, label: str) -> Any:
    (entry,) = (entry for entry in document.plugins if entry.label == label)
    return entry.parameters


def remarks(document: Document) -> list[str]:
    return [remark.path for remark in document.remarks]


def test_ranks_are_pods_here_so_their_handler_is_that_of_one_profile() -> None:
    handler = {"type": "data-parallel-profile-handler", "parameters": {"primaryPort": 8000}}
    made = document(handler, {"type": "queue-scorer"})
    assert [entry.type for entry in made.plugins] == ["single-profile-handler", "queue-scorer"]


def test_a_filter_by_one_label() -> None:
    given = {"label": "gpu", "validValues": ["a100", "h100"], "allowsNoLabel": True}
    assert parameters(document({"type": "by-label", "parameters": given}), "by-label") == given


def test_the_deprecated_name_of_the_filter_by_a_selector_is_the_filter() -> None:
    selector = {"matchLabels": {"gpu": "a100"}}
    made = document(
        {"type": "by-label-selector", "parameters": selector},
        schedulingProfiles=[{"name": "default", "plugins": refs("by-label-selector")}],
    )
    assert [entry.type for entry in made.plugins] == ["label-selector-filter"]
    assert parameters(made, "by-label-selector") == selector


def test_the_document_of_the_conformance_tests() -> None:
    profile = {"name": "conformance-profile", "plugins": refs("header-based-testing-filter")}
    tests = ("header-based-testing-filter", "destination-endpoint-served-verifier")
    made = document(*({"type": name} for name in tests), schedulingProfiles=[profile])
    assert not made.problems
    assert not made.remarks


def test_null_is_the_same_as_no_key_wherever_it_has_no_meaning_of_its_own() -> None:
    made = document(
        {"type": "queue-scorer", "name": None, "parameters": None},
        {"type": "max-score-picker", "parameters": {"maxNumOfEndpoints": None}},
        {"type": "core-metrics-extractor", "parameters": {"engineConfigs": [{"name": "mine", "customMetrics": None}]}},
        {"type": "session-affinity-scorer", "parameters": {"sessionIdConfig": {"sources": None}, "rebalance": None}},
        featureGates=None,
        schedulingProfiles=None,
        dataLayer={"sources": None, "injectDefaults": None},
        flowControl={"enableEviction": None, "priorityBands": None, "saturationDetector": {"pluginRef": None}},
    )
    assert not made.problems
    with pytest.raises(ConfigError, match=r"plugins\[0\]\.type: is required"):
        document({"type": None})
    with pytest.raises(ConfigError, match="unknown field 'maxNumber'"):
        document({"type": "max-score-picker", "parameters": {"maxNumber": None}})


def test_an_empty_choice_is_the_default() -> None:
    disagg = {"type": "disagg-profile-handler", "parameters": {"stageOrder": ""}}
    algorithm = {"type": "threshold", "threshold": {"operator": "LessThan", "value": 1}}
    missing = {"attribute": "gpu", "onMissing": "", "algorithm": algorithm}
    made = document(
        disagg,
        {"type": "endpoint-attribute-filter", "parameters": missing},
        {"type": "session-affinity-scorer", "parameters": {"strategy": ""}},
        {"type": "topology-affinity-filter", "parameters": {"minAffinity": ""}},
        {"type": "burst-prefix-cache-producer", "parameters": {"balanceBy": ""}},
        schedulingProfiles=[{"name": "decode", "plugins": refs("session-affinity-scorer")}],
    )
    assert not made.problems
    with pytest.raises(ConfigError, match=r"strategy: must be one of .*, not 'cookie'"):
        document({"type": "session-affinity-scorer", "parameters": {"strategy": "cookie"}})


@pytest.mark.parametrize(
    ("gate", "is_on"),
    [("=true", True), ("=True", True), ("=1", True), ("= t ", True), ("=FALSE", False), ("=0", False), ("=f", False)],
)
def test_gates_are_on_or_off_by_any_boolean_of_go(gate: str, is_on: bool) -> None:
    made = document(featureGates=[f"flowControl{gate}"])
    assert ("bands" in made.flow_control) is is_on


def test_a_band_without_a_priority_has_the_priority_0() -> None:
    made = document(featureGates=["flowControl"], flowControl={"priorityBands": [{"maxRequests": 7}]})
    assert [(band["priority"], band["maxQueued"]) for band in made.flow_control["bands"]] == [(0, 7)]


def test_flow_control_with_empty_references_and_the_quantities_of_kubernetes() -> None:
    made = document(
        featureGates=["flowControl"],
        flowControl={
            "maxBytes": "1e9",
            "maxRequests": "1k",
            "defaultRequestTTL": "0",
            "usageLimitPolicyPluginRef": "",
            "saturationDetector": {},
            "defaultPriorityBand": {"priority": 0, "maxBytes": "1.5Gi", "orderingPolicyRef": ""},
            "priorityBands": [{"priority": 1, "maxBytes": "5E", "fairnessPolicyRef": ""}],
        },
    )
    assert (made.flow_control["maxQueuedBytes"], made.flow_control["maxQueued"]) == (10**9, 1000)
    high, default = made.flow_control["bands"]
    assert (high["priority"], high["fairness"], default["ordering"]) == (1, "strict", "fcfs")
    assert made.flow_control["saturation"]["detector"] == "utilization"


@pytest.mark.parametrize("section", [{}, {"saturationDetector": {}}])
@pytest.mark.parametrize("gates", [[], ["flowControl"]])
def test_a_detector_with_the_name_of_the_default_needs_no_reference(section: dict[str, Any], gates: list[str]) -> None:
    detector = {"type": "utilization-detector", "parameters": {"queueDepthThreshold": 3}}
    made = document(detector, flowControl=section, featureGates=gates)
    assert made.flow_control["saturation"]["queueDepth"] == 3


@pytest.mark.parametrize("engine", ["", "vllm", "sglang", "atom", "trtllm-serve", "triton-tensorrt-llm", "triton"])
def test_every_engine_that_llm_d_knows_may_be_the_default(engine: str) -> None:
    document({"type": "core-metrics-extractor", "parameters": {"defaultEngine": engine, "engineLabelKey": ""}})


def test_a_reporter_of_costs_to_an_envoy_has_no_effect() -> None:
    reporter = {"name": "cost", "type": "request-attribute-reporter", "parameters": {"attributes": []}}
    profile = {"name": "default", "plugins": refs("queue-scorer", "cost")}
    made = document(reporter, {"type": "queue-scorer"}, schedulingProfiles=[profile])
    assert [entry.label for entry in made.plugins] == ["queue-scorer"]
    assert remarks(made) == ["plugins.cost"]


def test_plugins_may_name_the_producers_that_llm_d_lets_them_name() -> None:
    load, prefix = {"inFlightLoadProducerName": "load"}, {"prefixMatchInfoProducerName": "prefix"}
    document(
        {"type": "inflight-load-producer", "name": "load"},
        {"type": "approx-prefix-cache-producer", "name": "prefix"},
        {"type": "predicted-latency-producer", "parameters": {**load, **prefix}},
        {"type": "active-request-scorer", "parameters": load},
        {"type": "latency-scorer", "parameters": prefix},
        {
            "type": "no-hit-lru-scorer",
            "parameters": {"prefixPluginType": "prefix-cache-scorer", "prefixPluginName": "p"},
        },
        {
            "type": "utilization-filter",
            "parameters": {**load, "conditions": [{"metric": "active-requests", "maxValue": 9}]},
        },
        {"type": "concurrency-detector", "parameters": load},
        flowControl={"saturationDetector": {"pluginRef": "concurrency-detector"}},
        featureGates=["flowControl"],
    )


def test_a_producer_of_the_load_that_a_scorer_names_must_be_there() -> None:
    with pytest.raises(ConfigError, match="active-request-scorer: no producer of OutputEstimate is named 'load'"):
        document({"type": "active-request-scorer", "parameters": {"inFlightLoadProducerName": "load"}})


def test_a_shut_gate_leaves_what_a_full_pod_is() -> None:
    detector = {"type": "concurrency-detector", "parameters": {"maxConcurrency": 7}}
    section = {"maxRequests": 3, "saturationDetector": {"pluginRef": "concurrency-detector"}}
    made = document(detector, flowControl=section)
    assert made.flow_control["saturation"]["requests"] == 7


def test_two_indexes_and_a_reader_of_neither() -> None:
    """As guides of llm-d for tiered caches have it."""
    names = ("gpu-prefix-cache-producer", "cpu-prefix-cache-producer")
    made = document(
        *({"type": "approx-prefix-cache-producer", "name": name} for name in names),
        *({"type": "prefix-cache-scorer", "name": name[:3], "parameters": {"prefixMatchInfoProducerName": name}}
          for name in names),
        {"type": "no-hit-lru-scorer"},
        schedulingProfiles=[{"name": "default", "plugins": refs("gpu", "cpu", "no-hit-lru-scorer")}],
    )  # fmt: skip
    assert not made.problems


@pytest.mark.parametrize(
    "version",
    [
        "llm-d.ai/v1",
        "llm-d.ai/v1alpha1",
        "inference.networking.x-k8s.io/v1alpha1",
        "config.x-k8s.io/v1alpha1",
        "config.apix.gateway-api-inference-extension.sigs.k8s.io/v1alpha1",
    ],
)
def test_the_versions_and_the_name_of_an_object_in_the_guides(version: str) -> None:
    made = document({"type": "queue-scorer"}, apiVersion=version, metadata={"name": "epp"})
    assert not made.problems
    assert not made.remarks


@pytest.mark.parametrize("discovery", [{"pluginRef": "pods"}, {"endpoints": {"pluginRef": "pods"}}], ids=str)
def test_the_discovery_of_both_versions(discovery: dict[str, Any]) -> None:
    plugin = {"name": "pods", "type": "file-discovery", "parameters": {"path": "pods.yaml"}}
    made = document(plugin, dataLayer={"discovery": discovery})
    assert made.data_layer.discovery is not None
    wrong = {key: {"pluginRef": "pds"} if key == "endpoints" else "pds" for key in discovery}
    with pytest.raises(ConfigError, match="no plugin is named 'pds'; did you mean 'pods'"):
        document(plugin, dataLayer={"discovery": wrong})


@pytest.mark.parametrize(
    ("section", "path"),
    [
        ({"crossReplica": {"syncerPluginRef": "local-syncer", "syncInterval": "5ms"}}, "dataLayer.crossReplica"),
        ({"crossReplicaSyncerPluginRef": "local-syncer"}, "dataLayer.crossReplicaSyncerPluginRef"),
        ({"peerDiscovery": {"pluginRef": "peers"}}, "dataLayer.peerDiscovery"),
        ({"discovery": {"peers": {"pluginRef": "peers"}}}, "dataLayer.discovery.peers"),
    ],
    ids=str,
)
def test_the_exchange_between_replicas_is_a_section_of_its_own(section: dict[str, Any], path: str) -> None:
    made = document({"type": "local-syncer"}, dataLayer=section)
    assert not made.problems
    assert remarks(made) == ["plugins.local-syncer", path]
    assert "the section `replicas`" in made.remarks[-1].message


def test_a_source_of_cached_blocks_has_no_effect() -> None:
    parameters = {"prefixMatchInfoProducerName": "p", "minCachedTokenDelta": 12288, "prefillProfileName": "prefill"}
    made = document({"name": "p2p", "type": "p2p-source-producer", "parameters": parameters})
    assert (made.problems, remarks(made)) == ((), ["plugins.p2p"])


def test_parsers_of_grpc_are_accepted_with_one_of_http() -> None:
    parsers = [{"type": "openai-parser"}, {"type": "vertexai-parser"}, {"name": "grpc", "type": "vllmgrpc-parser"}]
    made = document(*parsers, requestHandler={"parsers": refs("openai-parser", "vertexai-parser", "grpc")})
    assert remarks(made) == ["plugins.vertexai-parser", "plugins.grpc"]
    for sections, path in (
        ({"requestHandler": {"parsers": refs("vertexai-parser", "grpc")}}, r"requestHandler\.parsers\[0\]"),
        ({"parser": {"pluginRef": "grpc"}}, "parser"),
    ):
        with pytest.raises(ConfigError, match=f"scheduling.{path}: is not supported alone, .* add openai-parser"):
            document(*parsers, **sections)


@pytest.mark.parametrize(
    ("kind", "instead"),
    [
        ("multicluster-queue-scorer", "list the gateways of the clusters as pods"),
        ("disaggregatedset-rollout-screener", "a pool of their own"),
        ("thunder-agent", "program-aware-fairness orders programs"),
    ],
)
def test_an_unsupported_type_is_refused_with_what_to_do_instead(kind: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=f"plugins.{kind}: '{kind}' is not supported: .*{instead}"):
        document({"type": kind, "parameters": {"any": 1}})


def test_the_certificates_of_the_metrics_are_those_of_the_pods() -> None:
    files = {"caCertPath": "ca.pem", "clientCertPath": "kvlane.pem", "clientKeyPath": "kvlane.key"}
    scheduling = {"plugins": [{"type": "metrics-data-source", "parameters": {"scheme": "https", **files}}]}
    own = {**PODS, "tls": {"serverName": "vllm"}}
    pods = from_mapping({"pods": own, "scheduling": scheduling}).pods
    assert pods.tls == PodTls(ca="ca.pem", cert="kvlane.pem", key="kvlane.key", server_name="vllm")
    with pytest.raises(ConfigError, match=r"pods\.tls\.ca: is set in scheduling too"):
        from_mapping({"pods": {**PODS, "tls": {"ca": "other.pem"}}, "scheduling": scheduling})
    with pytest.raises(ConfigError, match=r"pods\.tls: must be a mapping"):
        from_mapping({"pods": {**PODS, "tls": 3}, "scheduling": scheduling})


@pytest.mark.parametrize(
    ("parameters", "has_effect"),
    [
        ({}, True),
        ({"scheme": "http"}, True),
        ({"scheme": "https"}, False),
        ({"scheme": "https", "caCertPath": "a"}, True),
    ],
    ids=str,
)
def test_certificates_are_verified_and_a_remark_says_so(parameters: dict[str, str], has_effect: bool) -> None:
    made = read({"plugins": [{"type": "metrics-data-source", "parameters": parameters}]})
    assert remarks(made) == ([] if has_effect else ["plugins.metrics-data-source.parameters.insecureSkipVerify"])


def test_a_band_may_have_a_time_limit_of_its_own() -> None:
    bands = [{"priority": 2, "defaultRequestTTL": "5s"}, {"priority": 1, "defaultRequestTTL": "0s"}, {"priority": 0}]
    made = document(featureGates=["flowControl"], flowControl={"priorityBands": bands})
    assert [band["queueTimeout"] for band in made.flow_control["bands"]] == [5.0, 86400.0, None]


def test_priorities_are_not_propagated_and_buckets_are_not_filled_and_remarks_say_so() -> None:
    made = document({"type": "outlen-bucket"}, {"type": "models-responder"}, requestHandler={"propagatePriority": True})
    assert remarks(made) == ["plugins.outlen-bucket", "requestHandler.propagatePriority"]
    assert not document(requestHandler={"propagatePriority": False}).remarks


@pytest.mark.parametrize(
    ("kind", "given", "limits", "falls_back"),
    [
        ("utilization-detector", {}, {"waiting-queue": 4, "kv-cache-utilization": 0.8}, True),
        (
            "utilization-detector",
            {"queueDepthThreshold": 128, "kvCacheUtilThreshold": 0.95, "headroom": 0.2},
            {"waiting-queue": 153, "kv-cache-utilization": 1.0},
            True,
        ),
        ("concurrency-detector", {"maxConcurrency": 32, "headroom": 0.25}, {"active-requests": 39}, False),
        (
            "concurrency-detector",
            {"maxTokenConcurrency": 1000, "concurrencyMode": "tokens", "failOpen": True},
            {"active-tokens": 999},
            True,
        ),
        (
            "concurrency-detector",
            {"concurrencyMode": "hybrid"},
            {"active-requests": 99, "active-tokens": 999_999},
            False,
        ),
        ("utilization-detector", {"headroom": 1e308}, {"waiting-queue": 2**63, "kv-cache-utilization": 1.0}, True),
        ("concurrency-detector", {"headroom": 1e308}, {"active-requests": 2**63}, False),
    ],
)
def test_a_detector_in_a_profile_keeps_the_pods_below_its_limits(
    kind: str, given: dict[str, Any], limits: dict[str, float], falls_back: bool
) -> None:
    profile = {"name": "default", "plugins": refs("full", "queue-scorer")}
    detector = {"name": "full", "type": kind, "parameters": given}
    made = document(detector, {"type": "queue-scorer"}, schedulingProfiles=[profile])
    (entry,) = (entry for entry in made.plugins if entry.label == "full")
    assert entry.type == "utilization-filter"
    found = {one["metric"]: one["maxValue"] for one in parameters(made, "full")["conditions"]}
    assert found == pytest.approx(limits)
    assert parameters(made, "full")["fallbackOnEmpty"] is falls_back
    assert [ref.plugin_ref for ref in made.profiles[0].plugins] == ["full", "queue-scorer"] if made.profiles else False


QUEUE = {"name": "queue", "type": "utilization-detector", "parameters": {"queueDepthThreshold": 7}}
LOAD = {"name": "load", "type": "concurrency-detector", "parameters": {"maxConcurrency": 32}}


def highest(*names: str, **more: Any) -> Document:
    return document(
        {"name": "max", "type": "max-saturation-detector", "parameters": {"detectors": list(names), **more}},
        QUEUE,
        LOAD,
        {**QUEUE, "name": "other"},
        featureGates=["flowControl"],
        flowControl={"saturationDetector": {"pluginRef": "max"}},
    )


def test_the_higher_saturation_of_two_detectors() -> None:
    saturation = highest("load", "queue").flow_control["saturation"]
    assert (saturation["detector"], saturation["queueDepth"], saturation["requests"]) == ("highest", 7, 32)
    assert highest("load").flow_control["saturation"]["detector"] == "concurrency"


@pytest.mark.parametrize(
    ("names", "more", "message"),
    [
        (("queue", "other"), {}, "must name at most one utilization-detector and one concurrency-detector"),
        (("queue", "max"), {}, "must name at most one"),
        (("queue", "lod"), {}, "no plugin is named 'lod'; did you mean 'load'"),
        ((), {}, "detectors: must not be empty"),
        (("queue",), {"stages": {"queue": ["prefill"]}}, "stages: is not yet supported"),
    ],
)
def test_other_combinations_of_detectors_are_refused(names: tuple[str, ...], more: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        highest(*names, **more)


def test_the_higher_of_two_detectors_is_no_filter() -> None:
    with pytest.raises(ConfigError, match="'max' is no filter, scorer or picker"):
        document(
            {"name": "max", "type": "max-saturation-detector", "parameters": {"detectors": ["queue"]}},
            QUEUE,
            schedulingProfiles=[{"name": "default", "plugins": refs("max")}],
        )


@pytest.mark.parametrize("broken", ["least", "queue"])
def test_a_reference_of_flow_control_to_a_plugin_with_a_fault_is_no_second_fault(broken: str) -> None:
    plugins: list[dict[str, Any]] = [
        {"name": "least", "type": "program-aware-fairness"},
        {"name": "max", "type": "max-saturation-detector", "parameters": {"detectors": ["load", "queue"]}},
        QUEUE,
        LOAD,
    ]
    flow = {"saturationDetector": {"pluginRef": "max"}, "defaultPriorityBand": {"fairnessPolicyRef": "least"}}
    given = [{**one, "parameters": 1} if one["name"] == broken else one for one in plugins]
    with pytest.raises(ConfigError) as caught:
        document(*given, featureGates=["flowControl"], flowControl=flow)
    assert [problem.path for problem in caught.value.problems] == [f"scheduling.plugins.{broken}.parameters"]


def test_parameters_of_later_releases_without_effect_are_accepted() -> None:
    made = document(
        {"type": "token-producer", "parameters": {"modelName": "m", "vllm": {"http": "http://127.0.0.1:2"}}},
        {"type": "metrics-data-source", "parameters": {"families": ["vllm:num_requests_waiting"]}},
        {
            "type": "core-metrics-extractor",
            "parameters": {
                "engineConfigs": [
                    {"name": "x", "customMetrics": [{"attributeKey": "a", "metricSpec": "b", "optional": True}]}
                ]
            },
        },
        {"type": "utilization-detector", "parameters": {"stalenessPolicy": "saturated"}},
        {"type": "precise-prefix-cache-producer", "parameters": {"kvEventsConfig": {"tracing": True}}},
        {"type": "token-load-scorer", "parameters": {"nonTextTokenWeight": 2.0}},
        {
            "type": "prefix-cache-affinity-filter",
            "parameters": {"prefillCalibrationFile": "/c.json", "prefillCalibrationFingerprint": "sha256:0"},
        },
    )
    assert not made.problems


def test_a_calibration_that_is_required_must_be_written_as_the_number() -> None:
    needed = {"prefillCalibrationRequired": True}
    with pytest.raises(ConfigError, match="prefillCalibrationRequired: files are not read; set peakPrefillThroughput"):
        document({"type": "prefix-cache-affinity-filter", "parameters": needed})
    for more in ({"peakPrefillThroughput": 9000}, {"ttftSource": "latencyPredictor"}, {"maxTTFTPenaltyMs": 0}):
        document({"type": "prefix-cache-affinity-filter", "parameters": {**needed, **more}})


def test_a_section_without_its_gate_has_no_effect() -> None:
    made = document(flowControl={"maxRequests": 3})
    assert made.flow_control == {}
    assert remarks(made) == ["flowControl"]


def test_types_without_parameters_may_be_referred_to_without_a_plugin() -> None:
    unlisted = document(flowControl={"saturationDetector": {"pluginRef": "utilization-detector"}})
    assert unlisted.flow_control["saturation"]["detector"] == "utilization"
    assert not document(requestHandler={"parsers": refs("openai-parser")}).problems


def test_estimates_of_media_and_a_model_without_a_mode_have_no_effect() -> None:
    image = {"image": {"mode": "dynamic", "dynamic": {"factor": 1024}}}
    assert not document({"type": "token-producer", "parameters": {"modelName": "m", "estimate": image}}).problems


@pytest.mark.parametrize("type_name", ["token-producer", "tokenizer"])
def test_the_pods_replace_the_deprecated_tokenizer_behind_a_socket_and_a_remark_says_so(type_name: str) -> None:
    uds = {"udsTokenizerConfig": {"socketFile": "/tmp/tokenizer.sock"}, "modelName": "m"}
    made = document({"type": type_name, "parameters": uds})
    assert remarks(made) == [f"plugins.{type_name}.parameters.udsTokenizerConfig"]


class TestAgents:
    @pytest.mark.parametrize(
        ("headers", "session"),
        [
            ({"session_id": "old", "session-id": "codex"}, "codex"),
            ({"session-id": "codex", "x-claude-code-session-id": "claude"}, "claude"),
            ({"x-claude-code-session-id": "claude", "x-mine": " own "}, "own"),
            ({"x-claude-code-session-id": " "}, None),
        ],
    )
    async def test_the_first_header_that_is_not_empty(self, headers: dict[str, str], session: str | None) -> None:
        request = InferenceRequest("r", "/v1/chat/completions", "m", headers=headers)
        await make("agent-identity", name="agent-identity", additionalSessionHeaders=["X-Mine"]).produce(request, [])
        assert request.state.read(AGENT_IDENTITY) == session

    def test_a_session_stays_with_the_pod_of_its_agent(self) -> None:
        sources = {"sources": [{"header": "x-session-id"}, {"attribute": "agent-identity"}]}
        affinity = {"strategy": "session_id", "sessionIdConfig": sources}
        document({"type": "agent-identity"}, {"type": "session-affinity-filter", "parameters": affinity})
