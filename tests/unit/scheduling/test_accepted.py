"""Documents of other releases of llm-d load, and what was said in older words is told."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.errors import ConfigError
from proxy.core.request import InferenceRequest
from proxy.plugins.producers.agent_identity import AGENT_IDENTITY
from proxy.scheduling.accepted import accepted
from proxy.scheduling.document import Document, read
from proxy.settings import from_mapping
from tests.helpers.plugins.situations import make

PODS = {"static": [{"url": "http://127.0.0.1:1"}]}


def document(*plugins: Any, **sections: Any) -> Document:
    """Read, as good: it is also built, as `kvlane serve` would."""
    from_mapping({"pods": PODS, "scheduling": {"plugins": list(plugins), **sections}})
    return read({"plugins": list(plugins), **sections})


def refs(*names: str) -> list[dict[str, str]]:
    return [{"pluginRef": name} for name in names]


def parameters(document: Document, label: str) -> Any:
    (entry,) = (entry for entry in document.plugins if entry.label == label)
    return entry.parameters


def remarks(document: Document) -> list[str]:
    return [remark.path for remark in document.remarks]


def test_a_document_of_today_is_left_alone() -> None:
    today = {"plugins": [{"type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": 0.5}}, {"type": "a"}]}
    assert accepted(today) == (today, [])


def test_the_document_that_was_given_is_not_changed() -> None:
    given = {"plugins": [{"type": "prefix-cache-scorer", "parameters": {"hashBlockSize": 256}}]}
    accepted(given)
    assert given == {"plugins": [{"type": "prefix-cache-scorer", "parameters": {"hashBlockSize": 256}}]}


def test_parameters_of_the_index_go_from_the_scorer_to_the_producer() -> None:
    scorer = {"hashBlockSize": 512, "maxPrefixBlocksToMatch": 100, "lruCapacityPerServer": 9000, "autoTune": False}
    made = document({"type": "prefix-cache-scorer", "parameters": scorer})
    assert parameters(made, "approx-prefix-cache-producer") == {
        "autoTune": False,
        "blockSizeTokens": 128,
        "lruCapacityPerServer": 9000,
        "maxPrefixBlocksToMatch": 100,
    }
    assert parameters(made, "prefix-cache-scorer") == {}
    assert remarks(made) == ["plugins.prefix-cache-scorer"]


def test_what_the_producer_says_itself_counts_more() -> None:
    made = document(
        {"type": "prefix-cache-scorer", "parameters": {"blockSizeTokens": 64, "lruCapacityPerServer": 9000}},
        {"type": "approx-prefix-cache-producer", "parameters": {"blockSizeTokens": 256}},
    )
    assert parameters(made, "approx-prefix-cache-producer") == {"blockSizeTokens": 256, "lruCapacityPerServer": 9000}


def test_parameters_of_the_index_go_to_a_declared_producer_without_parameters() -> None:
    made = document(
        {"type": "prefix-cache-scorer", "parameters": {"lruCapacityPerServer": 9000}},
        {"type": "approx-prefix-cache-producer"},
    )
    assert parameters(made, "approx-prefix-cache-producer") == {"lruCapacityPerServer": 9000}


def test_scorers_of_two_stages_have_an_index_each_unless_they_say_the_same() -> None:
    made = document(
        *({"type": "prefix-cache-scorer", "name": name, "parameters": {"lruCapacityPerServer": most}}
          for name, most in (("decode", 10), ("prefill", 20), ("again", 20))),
    )  # fmt: skip
    assert parameters(made, "decode") == {}
    assert parameters(made, "prefill") == {"prefixMatchInfoProducerName": "prefill-index"}
    assert parameters(made, "again") == {"prefixMatchInfoProducerName": "prefill-index"}
    assert parameters(made, "prefill-index") == {"lruCapacityPerServer": 20}


def test_an_index_that_follows_events_was_a_mode_of_the_scorer() -> None:
    tracking = {"mode": "cache_tracking", "tokenProcessorConfig": {"blockSizeTokens": 64}}
    made = document(
        {"type": "prefix-cache-scorer", "parameters": tracking},
        schedulingProfiles=[{"name": "default", "plugins": refs("prefix-cache-scorer")}],
    )
    assert [entry.type for entry in made.plugins] == ["precise-prefix-cache-scorer"]
    assert parameters(made, "prefix-cache-scorer") == {"tokenProcessorConfig": {"blockSizeTokens": 64}}


def test_a_block_size_inside_of_the_indexer() -> None:
    inner = {"indexerConfig": {"tokenProcessorConfig": {"blockSize": 64}}}
    made = document({"type": "precise-prefix-cache-scorer", "parameters": inner})
    assert parameters(made, "precise-prefix-cache-scorer")["tokenProcessorConfig"] == {"blockSize": 64}


@pytest.mark.parametrize(
    ("older", "today"),
    [
        ("kv-cache-scorer", "kv-cache-utilization-scorer"),
        ("prefix-cache", "prefix-cache-scorer"),
        ("max-score", "max-score-picker"),
        ("by-label-selector", "label-selector-filter"),
    ],
)
def test_older_names_of_types_are_referred_to_as_before(older: str, today: str) -> None:
    made = document({"type": older}, schedulingProfiles=[{"name": "default", "plugins": refs(older)}])
    assert [(entry.label, entry.type) for entry in made.plugins] == [(older, today)]


def test_ranks_are_pods_here_so_their_handler_is_that_of_one_profile() -> None:
    handler = {"type": "data-parallel-profile-handler", "parameters": {"primaryPort": 8000}}
    made = document(handler, {"type": "queue-scorer"})
    assert [entry.type for entry in made.plugins] == ["single-profile-handler", "queue-scorer"]


def test_a_filter_by_one_label() -> None:
    made = document({"type": "by-label", "parameters": {"label": "gpu", "validValues": ["a100", "h100"]}})
    wanted = {"key": "gpu", "operator": "In", "values": ["a100", "h100"]}
    assert parameters(made, "by-label") == {"matchExpressions": [wanted]}


def test_a_threshold_of_the_handler_of_splits_is_its_decider() -> None:
    stages = [{"name": name, "plugins": refs(f"{name}-filter")} for name in ("prefill", "decode")]
    filters = ({"type": "prefill-filter"}, {"type": "decode-filter"})
    made = document(
        {"type": "pd-profile-handler", "parameters": {"threshold": 400}}, *filters, schedulingProfiles=stages
    )
    assert parameters(made, "prefix-based-pd-decider") == {"nonCachedTokens": 100}
    made = document({"type": "pd-profile-handler", "parameters": {"threshold": 0}}, *filters, schedulingProfiles=stages)
    assert parameters(made, "pd-profile-handler") == {"deciderPluginName": "always-disagg-pd-decider"}


def test_tokens() -> None:
    made = document(
        {"type": "token-producer", "parameters": {"modelName": "m", "vllm": {"http": "http://127.0.0.1:2"}}}
    )
    assert parameters(made, "token-producer") == {"modelName": "m", "vllm": {"url": "http://127.0.0.1:2"}}
    image = {"image": {"mode": "dynamic", "dynamic": {"factor": 1024}}}
    made = document({"type": "token-producer", "parameters": {"modelName": "m", "estimate": image}})
    assert parameters(made, "token-producer") == {}
    assert len(made.remarks) == 2


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


def test_gates_that_are_gone_and_a_gate_that_is_shut() -> None:
    made = document(featureGates=["dataLayer", "enableLegacyMetrics"], flowControl={"maxRequests": 3})
    assert (made.flow_control, made.gates) == ({}, {})
    assert remarks(made) == ["featureGates", "featureGates", "flowControl"]


def test_a_shut_gate_leaves_what_a_full_pod_is() -> None:
    detector = {"type": "concurrency-detector", "parameters": {"maxConcurrency": 7}}
    section = {"maxRequests": 3, "saturationDetector": {"pluginRef": "concurrency-detector"}}
    made = document(detector, flowControl=section)
    assert made.flow_control["saturation"]["requests"] == 7


def test_the_detector_was_no_plugin_and_still_needs_not_be_listed() -> None:
    older = document(saturationDetector={"queueDepthThreshold": 9, "metricsStalenessThreshold": "200ms"})
    assert older.flow_control["saturation"]["queueDepth"] == 9
    unlisted = document(flowControl={"saturationDetector": {"pluginRef": "utilization-detector"}})
    assert unlisted.flow_control["saturation"]["detector"] == "utilization"
    assert document(requestHandler={"parsers": refs("openai-parser")}).data_layer.parsers == ("openai-parser",)


def test_older_top_levels() -> None:
    source = {"type": "models-data-source"}
    made = document(source, data={"sources": [{"pluginRef": "models-data-source"}]}, metadata={"name": "epp"})
    assert made.data_layer.models is not None
    assert not document(apiVersion="config.x-k8s.io/v1alpha1").problems


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
        asked = InferenceRequest("r", "/v1/chat/completions", "m", headers=headers)
        await make("agent-identity", name="agent-identity", additionalSessionHeaders=["X-Mine"]).produce(asked, [])
        assert asked.state.read(AGENT_IDENTITY) == session

    def test_a_session_stays_with_the_pod_of_its_agent(self) -> None:
        sources = {"sources": [{"header": "x-session-id"}, {"attribute": "agent-identity"}]}
        affinity = {"strategy": "session_id", "sessionIdConfig": sources}
        document({"type": "agent-identity"}, {"type": "session-affinity-filter", "parameters": affinity})


KEYS = (
    *("plugins", "type", "name", "parameters", "featureGates", "flowControl", "saturationDetector", "mode", "data"),
    *("pluginRef", "threshold", "hashBlockSize", "vllm", "http", "schedulingProfiles", "estimate"),
)

TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.sampled_from(["prefix-cache-scorer", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(tree=st.dictionaries(st.sampled_from(["plugins", "flowControl", "featureGates", "parser"]), TREES))
def test_it_never_raises(tree: dict[str, Any]) -> None:
    read(tree)
