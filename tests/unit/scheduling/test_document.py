"""An EndpointPickerConfig is parsed piece by piece, and all its faults are reported at once."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.core.errors import ConfigError
from proxy.scheduling.document import Document, read
from tests.helpers.scheduling.situations import scheduling

DATA = Path(__file__).parent / "data"


def load(name: str) -> Any:
    return yaml.safe_load((DATA / name).read_text())


def faults(document: Document) -> list[str]:
    return [str(problem) for problem in document.problems]


def test_the_picker_configuration_of_a_gateway_loads_unchanged() -> None:
    built = scheduling(load("endpoint_picker.yaml"))
    assert [profile.name for profile in built.effective.profiles] == ["prefill", "decode"]
    assert set(built.instances) >= {"approx", "pick", "prefix-cache-scorer", "header-profile-handler"}
    assert not any(plugin.origin.value == "injected" for plugin in built.effective.plugins)


def test_scraping_discovery_and_parsing_of_it_are_available() -> None:
    layer = read(load("endpoint_picker.yaml")).data_layer
    assert layer.metrics is not None
    assert (layer.metrics.scheme, layer.metrics.path, layer.metrics.port) == ("http", "/metrics", None)
    assert layer.metrics.interval == pytest.approx(0.1)
    assert layer.discovery is not None
    assert (layer.discovery.path, layer.discovery.watch_file) == ("/etc/epp/endpoints.yaml", True)
    assert layer.core is not None


def test_every_typo_is_reported_at_once_with_path_and_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        scheduling(load("endpoint_picker_with_typos.yaml"))
    assert sorted(map(str, caught.value.problems)) == sorted(
        [
            "unknown field 'plugin'; did you mean 'plugins'?",
            "apiVersion: must be one of llm-d.ai/v1, llm-d.ai/v1alpha1, inference.networking.x-k8s.io/v1alpha1, "
            "not 'llm-d.ai/v1alpha2'",
            "featureGates[0]: unknown feature gate 'flowControll'; did you mean 'flowControl'?",
            "featureGates[1]: 'haPopulateNonLeaderDatastore' must be true or false, not 'maybe'",
            "plugins.approx: unknown plugin type 'aprox-prefix-cache-producer'; "
            "did you mean 'approx-prefix-cache-producer'?",
            "plugins.queue-scorer.parameters: unknown field 'threshold'; it has no fields",
            "plugins.load-aware-scorer.parameters: unknown field 'treshold'; did you mean 'threshold'?",
            "plugins.kv-cache-utilization-scorer: two plugins have this name",
            "plugins.pick.parameters: unknown field 'maxNumOfEndpoint'; did you mean 'maxNumOfEndpoints'?",
            "plugins.nameless.type: is required",
            "plugins.metrics-data-source.parameters.scheme: must be one of http, https, not 'ftp'",
            "plugins.metrics-data-source.parameters.interval: 'fast' is not a duration; "
            "write 250ms, 15s, 5m, 1h30m or 7d",
            "schedulingProfiles.decode.plugins[0].pluginRef: no plugin is named 'queue-scorrer'; "
            "did you mean 'queue-scorer'?",
            "schedulingProfiles.decode.plugins[1].weight: must be at least 0, not -1",
            "schedulingProfiles.decode.plugins[2].weight: must be a finite number, not nan",
            "schedulingProfiles.decode.plugins[3].pluginRef: is required",
            "schedulingProfiles[1].name: is required",
            "schedulingProfiles[1].plugins[0].pluginRef: no plugin is named 'qeue-scorer'; "
            "did you mean 'queue-scorer'?",
            "schedulingProfiles.decode: two profiles have this name",
            "dataLayer.sources[0].pluginRef: 'queue-scorer' is no data source",
            "dataLayer.sources[1].pluginRef: no plugin is named 'metric-data-source'; "
            "did you mean 'metrics-data-source'?",
            "requestHandler.parsers[0].pluginRef: 'pick' is no parser",
        ]
    )


def test_paths_start_at_the_section() -> None:
    document = read({"plugins": [{"type": "queue-scorer", "nam": "x"}], "kind": "Pod"}, "scheduling")
    assert faults(document) == [
        "scheduling.kind: must be EndpointPickerConfig, not 'Pod'",
        "scheduling.plugins.queue-scorer: unknown field 'nam'; did you mean 'name'?",
    ]


@pytest.mark.parametrize("data", [[], "text", 3])
def test_a_section_that_is_not_a_mapping_is_one_fault(data: object) -> None:
    assert len(read(data, "scheduling").problems) == 1


@pytest.mark.parametrize("key", ["plugins", "schedulingProfiles", "featureGates"])
def test_an_invalid_list_is_one_fault(key: str) -> None:
    assert faults(read({key: {"a": 1}})) == [f"{key}: must be a list, not dict"]


def test_a_missing_and_an_empty_section_are_valid() -> None:
    assert not read(None).problems
    assert not read({}).problems
    assert not read({"flowControl": {}, "plugins": None}).problems


def test_the_deprecated_api_version_and_parser_key_are_accepted() -> None:
    document = read(
        {
            "apiVersion": "inference.networking.x-k8s.io/v1alpha1",
            "plugins": [{"type": "openai-parser", "name": "mine"}],
            "parser": {"pluginRef": "mine"},
        }
    )
    assert not document.problems


def test_gates_are_known_by_name_and_value() -> None:
    limit = {"flowControl": {"maxRequests": 3}}
    document = read({"featureGates": ["flowControl", "haPopulateNonLeaderDatastore=false"], **limit})
    assert (faults(document), document.flow_control["maxQueued"]) == ([], 3)
    assert read({"featureGates": ["flowControl=false"], **limit}).flow_control == {}
    assert faults(read({"featureGates": ["flowControl="]})) == [
        "featureGates[0]: 'flowControl' must be true or false, not ''"
    ]


def test_an_unsupported_type_is_no_typo_and_may_be_referred_to() -> None:
    document = read(
        {
            "plugins": [{"type": "thunder-agent"}, {"name": "screen", "type": "disaggregatedset-rollout-screener"}],
            "schedulingProfiles": [{"name": "p", "plugins": [{"pluginRef": "screen"}]}],
        }
    )
    first, second = faults(document)
    assert first.startswith("plugins.thunder-agent: 'thunder-agent' is not supported: ")
    assert second.startswith("plugins.screen: 'disaggregatedset-rollout-screener' is not supported: ")


def test_a_removed_type_is_refused_with_its_replacement() -> None:
    document = read(
        {
            "plugins": [{"type": "low-queue-filter", "parameters": {"threshold": 3}}],
            "schedulingProfiles": [{"name": "p", "plugins": [{"pluginRef": "low-queue-filter"}]}],
        }
    )
    assert faults(document) == [
        "plugins.low-queue-filter: 'low-queue-filter' no longer exists; use queue-scorer, or utilization-filter with "
        "'conditions: [{metric: waiting-queue, maxValue: 128}]'"
    ]
    assert faults(read({"plugins": [{"type": "kv-cache-scorer"}]})) == [
        "plugins.kv-cache-scorer: 'kv-cache-scorer' was renamed to kv-cache-utilization-scorer"
    ]


def test_producers_of_pod_changes_may_be_named_as_extractors() -> None:
    types = ["mm-embeddings-cache-producer", "precise-prefix-cache-producer"]
    plugins = [{"type": kind} for kind in ("endpoint-notification-source", *types)]
    source = {"pluginRef": "endpoint-notification-source", "extractors": [{"pluginRef": kind} for kind in types]}
    assert not read({"plugins": plugins, "dataLayer": {"sources": [source]}}).problems


def test_a_source_of_notifications_names_its_resources() -> None:
    source = {"type": "k8s-notification-source", "parameters": {"group": "", "version": "v1", "kind": "Pod"}}
    assert not read({"plugins": [source]}).problems


def test_custom_metrics_of_an_engine_are_read() -> None:
    engine = {"name": "mine", "kvUsageSpec": "kv", "customMetrics": [{"attributeKey": "gpu", "metricSpec": "gpu_util"}]}
    document = read({"plugins": [{"type": "core-metrics-extractor", "parameters": {"engineConfigs": [engine]}}]})
    assert not document.problems
    assert document.data_layer.core is not None
    (config,) = document.data_layer.core.engine_configs
    assert (config.kv_usage_spec, config.custom_metrics[0].attribute_key) == ("kv", "gpu")


def test_two_sources_of_metrics_are_an_error() -> None:
    plugins = [{"type": "metrics-data-source"}, {"name": "other", "type": "metrics-data-source"}]
    assert faults(read({"plugins": plugins})) == [
        "plugins.other: there is another 'metrics-data-source'; one is enough"
    ]


keys = st.sampled_from(["plugins", "schedulingProfiles", "dataLayer", "requestHandler", "featureGates", "type", "name"])
words = st.sampled_from(
    ["queue-scorer", "max-score-picker", "data-parallel-profile-handler", "file-discovery", "x", ""]
)
values = st.recursive(
    words | st.none() | st.booleans() | st.integers() | st.floats(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(keys | st.sampled_from(["pluginRef", "weight", "parameters", "sources"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(st.dictionaries(keys, values, max_size=5) | values)
@settings(deadline=None)
def test_any_document_is_built_or_refused(data: Any) -> None:
    with contextlib.suppress(ConfigError):
        scheduling(data)
