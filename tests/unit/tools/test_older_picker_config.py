"""Documents of earlier releases of llm-d are rewritten in current words, and every change is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.scheduling.document import Document, read
from proxy.settings import from_mapping
from proxy.tools.endpoint_picker import current

PODS = {"static": [{"url": "http://127.0.0.1:1"}]}


def rewritten(*plugins: Any, **sections: Any) -> tuple[Document, list[str]]:
    """The current document, built as `kvlane serve` does, and the paths of the changes."""
    scheduling, changes = current({"plugins": list(plugins), **sections})
    from_mapping({"pods": PODS, "scheduling": scheduling})
    return read(scheduling), [change.path for change in changes]


def document(*plugins: Any, **sections: Any) -> Document:
    return rewritten(*plugins, **sections)[0]


def refs(*names: str) -> list[dict[str, str]]:
    return [{"pluginRef": name} for name in names]


def parameters(document: Document, label: str) -> Any:
    (entry,) = (entry for entry in document.plugins if entry.label == label)
    return entry.parameters


def test_a_document_of_today_is_left_alone() -> None:
    today = {"plugins": [{"type": "prefix-cache-scorer", "parameters": {"matchLengthWeight": 0.5}}, {"type": "a"}]}
    assert current(today) == (today, [])


def test_the_document_that_was_given_is_not_changed() -> None:
    given = {"plugins": [{"type": "prefix-cache-scorer", "parameters": {"hashBlockSize": 256}}]}
    current(given)
    assert given == {"plugins": [{"type": "prefix-cache-scorer", "parameters": {"hashBlockSize": 256}}]}


def test_parameters_of_the_index_go_from_the_scorer_to_the_producer() -> None:
    scorer = {"hashBlockSize": 512, "maxPrefixBlocksToMatch": 100, "lruCapacityPerServer": 9000, "autoTune": False}
    made, changes = rewritten({"type": "prefix-cache-scorer", "parameters": scorer})
    assert parameters(made, "approx-prefix-cache-producer") == {
        "autoTune": False,
        "blockSizeTokens": 128,
        "lruCapacityPerServer": 9000,
        "maxPrefixBlocksToMatch": 100,
    }
    assert parameters(made, "prefix-cache-scorer") == {}
    assert changes == ["plugins.prefix-cache-scorer"]


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
        ("running-queue-size-scorer", "running-requests-size-scorer"),
        ("predicted-latency-scorer", "latency-scorer"),
    ],
)
def test_older_names_of_types_are_referred_to_as_before(older: str, today: str) -> None:
    made = document({"type": older}, schedulingProfiles=[{"name": "default", "plugins": refs(older)}])
    assert [(entry.label, entry.type) for entry in made.plugins] == [(older, today)]


def test_the_extractor_of_metrics_had_the_name_of_their_protocol() -> None:
    made = document({"type": "model-server-protocol-metrics", "parameters": {"defaultEngine": "sglang"}})
    assert made.data_layer.core is not None
    assert made.data_layer.core.default_engine == "sglang"


def test_of_the_scorer_that_predicted_itself_the_parameters_of_the_score_are_left() -> None:
    given = {"headroomTTFTWeight": 0.7, "headroomSelectionStrategy": "most", "samplingMean": 1000.0}
    scorer = {"type": "predicted-latency-scorer", "parameters": given}
    made = document(scorer)
    assert parameters(made, "predicted-latency-scorer") == {"ttftWeight": 0.7, "headroomSelectionStrategy": "most"}
    assert "samplingMean: have no equivalent" in str(current({"plugins": [scorer]})[1][0])


def test_speculation_inside_of_the_indexer() -> None:
    made = document(
        {"type": "precise-prefix-cache-scorer", "parameters": {"indexerConfig": {"speculativeIndexing": True}}}
    )
    assert parameters(made, "precise-prefix-cache-scorer") == {"indexerConfig": {}, "speculativeIndexing": True}


def test_a_threshold_of_the_handler_of_splits_is_its_decider() -> None:
    stages = [{"name": name, "plugins": refs(f"{name}-filter")} for name in ("prefill", "decode")]
    filters = ({"type": "prefill-filter"}, {"type": "decode-filter"})
    made = document(
        {"type": "pd-profile-handler", "parameters": {"threshold": 400}}, *filters, schedulingProfiles=stages
    )
    assert parameters(made, "prefix-based-pd-decider") == {"nonCachedTokens": 100}
    made = document({"type": "pd-profile-handler", "parameters": {"threshold": 0}}, *filters, schedulingProfiles=stages)
    assert parameters(made, "pd-profile-handler") == {"deciderPluginName": "always-disagg-pd-decider"}


@pytest.mark.parametrize("empty", [{}, {"parameters": None}, {"parameters": {}}])
def test_a_handler_of_splits_without_a_threshold_split_every_request(empty: dict[str, Any]) -> None:
    stages = [{"name": name, "plugins": refs(f"{name}-filter")} for name in ("prefill", "decode")]
    filters = ({"type": "prefill-filter"}, {"type": "decode-filter"})
    made = document({"type": "pd-profile-handler", **empty}, *filters, schedulingProfiles=stages)
    assert parameters(made, "pd-profile-handler") == {"deciderPluginName": "always-disagg-pd-decider"}
    decider = {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 9}}
    made = document({"type": "pd-profile-handler"}, decider, *filters, schedulingProfiles=stages)
    assert parameters(made, "pd-profile-handler") is None


def test_tokens() -> None:
    made = document(
        {"type": "token-producer", "parameters": {"modelName": "m", "vllm": {"http": "http://127.0.0.1:2"}}}
    )
    assert parameters(made, "token-producer") == {"modelName": "m", "vllm": {"url": "http://127.0.0.1:2"}}


def test_the_detector_was_no_plugin() -> None:
    older = document(saturationDetector={"queueDepthThreshold": 9, "metricsStalenessThreshold": "200ms"})
    assert older.flow_control["saturation"]["queueDepth"] == 9


def test_older_top_levels() -> None:
    source = {"type": "metrics-data-source"}
    made = document(source, data={"sources": [{"pluginRef": "metrics-data-source"}]}, metadata={"name": "epp"})
    assert made.data_layer.metrics is not None
    assert not document(apiVersion="config.x-k8s.io/v1alpha1").problems


def test_gates_that_were_removed() -> None:
    made, changes = rewritten(featureGates=["dataLayer", "enableLegacyMetrics"])
    assert not made.problems
    assert changes == ["featureGates", "featureGates"]


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
    read(current(tree)[0])
