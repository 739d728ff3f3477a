"""Configurations of other programs converted to kvlane's, and their parts without an equivalent."""

from __future__ import annotations

import json
import re
import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from proxy.cli import main
from proxy.core.errors import ConfigError
from proxy.core.params import Duration
from proxy.fleet.settings import DataParallelSettings
from proxy.settings import Settings, from_mapping
from proxy.tools.endpoint_picker import endpoint_picker
from proxy.tools.imported import MANY, Imported, InvalidDocument, read_flags
from proxy.tools.litellm import litellm
from proxy.tools.production_stack import production_stack as stack
from proxy.tools.routers import ARITIES, sglang_router, vllm_router
from tests.helpers.docs.pages import ROOT, commands

CONFIG = Path(__file__).parents[3] / "config"


def run(*words: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, ["import", *words], input=stdin)


def settings(made: Imported) -> Settings:
    """As they are read from the text."""
    return from_mapping(yaml.safe_load(made.text()))


def types(made: Imported) -> set[str]:
    return {plugin.type for plugin in settings(made).scheduling.plugins}


def missing(made: Imported) -> set[str]:
    return {left.what for left in made.missing}


class TestWords:
    def test_flags_have_as_many_words_as_they_need(self) -> None:
        words = ["x", "--a", "1", "--b", "2", "3", "--c", "--d=4"]
        found, unknown = read_flags(words, {"--a": 1, "--b": MANY, "--c": 0})
        assert found == {"--a": [["1"]], "--b": [["2", "3"]], "--c": [[]]}
        assert unknown == {"--d": [["4"]]}

    @pytest.mark.parametrize("words", [["x"], ["--a"], ["--c", "stray"]])
    def test_an_invalid_command_line_is_refused(self, words: list[str]) -> None:
        with pytest.raises(InvalidDocument):
            read_flags(words, {"--a": 1, "--c": 0})


class TestRouters:
    def test_common_settings_are_imported(self) -> None:
        words = (
            "vllm-router --worker-urls http://a:8000 b:8000 --port 9000 --request-timeout-secs 60"
            " --retry-max-retries 4 --retry-max-backoff-ms 500 --cb-failure-threshold 7 --health-check-endpoint /ping"
            " --max-concurrent-requests 64 --queue-timeout-secs 9 --cors-allowed-origins https://x --log-level warn"
        )
        made = vllm_router(words.split())
        found = settings(made)
        assert [pod.url for pod in found.pods.static] == ["http://a:8000", "http://b:8000"]
        assert (found.listen.port, found.reliability.timeouts.request) == (9000, Duration(60))
        assert (found.reliability.retries.attempts, found.reliability.retries.backoff.max) == (4, 0.5)
        assert (found.reliability.breaker.failures, found.reliability.health.path) == (7, "/ping")
        assert (found.flow_control.max_concurrent, found.flow_control.queue_timeout) == (64, Duration(9))
        assert found.security.cors.origins == ("https://x",)
        assert found.telemetry.log_level.value == "warning"
        assert made.missing == []

    @pytest.mark.parametrize(
        ("policy", "plugin"),
        [
            ("round_robin", "round-robin-picker"),
            ("random", "random-picker"),
            ("power_of_two", "active-request-scorer"),
            ("consistent_hash", "session-affinity-scorer"),
            ("manual", "session-affinity-scorer"),
            ("kv_aware", "precise-prefix-cache-producer"),
        ],
    )
    def test_a_policy_becomes_plugins(self, policy: str, plugin: str) -> None:
        assert plugin in types(vllm_router(["--worker-urls", "http://a:1", "--policy", policy]))

    def test_cache_awareness_is_the_default(self) -> None:
        made = vllm_router(["--worker-urls", "http://a:1", "--cache-threshold", "0.5"])
        assert "scheduling" not in made.settings
        assert {left.what for left in made.needless} == {"--cache-threshold 0.5", "--policy cache_aware"}
        assert missing(vllm_router(["--worker-urls", "http://a:1", "--policy", "bucket"])) == {"--policy bucket"}

    def test_roles_become_roles_and_a_decider(self) -> None:
        made = vllm_router(["--prefill", "http://p:1", "none", "--decode", "http://d:1", "--kv-connector", "nixl"])
        found = settings(made)
        assert [(pod.url, pod.role) for pod in found.pods.static] == [
            ("http://p:1", "prefill"),
            ("http://d:1", "decode"),
        ]
        assert "predicted-latency-pd-decider" in types(made)
        pair = sglang_router(["--pd-disaggregation", "--prefill", "http://p:1", "9001", "--decode", "http://d:1"])
        assert settings(pair).disaggregation.connector == "sglang"
        assert settings(pair).pods.static[0].labels["kvlane/bootstrap-port"] == "9001"
        assert settings(pair).pods.static[0].engine == "sglang"
        assert "always-disagg-pd-decider" in types(pair)

    def test_policies_of_roles_are_not_needed_with_predicted_time(self) -> None:
        words = ["--prefill", "http://p:1", "--decode", "http://d:1", "--prefill-policy", "cache_aware"]
        made = vllm_router([*words, "--decode-policy", "round_robin"])
        assert missing(made) == {"--decode-policy round_robin"}
        assert "--prefill-policy cache_aware" in {left.what for left in made.needless}

    def test_an_unknown_connector_is_reported(self) -> None:
        assert missing(vllm_router(["--prefill", "http://p:1", "--kv-connector", "moriio"])) == {
            "--kv-connector moriio"
        }

    def test_event_sources_become_labels(self) -> None:
        words = ["--worker-urls", "http://a:1", "--policy", "kv_aware", "--kv-event-source"]
        made = vllm_router([*words, "http://a:1=tcp://a:5600,tcp://a:5601"])
        assert settings(made).pods.static[0].labels == {
            "kvlane/kv-events-port": "5600",
            "kvlane/data-parallel-size": "2",
        }

    def test_ranks_of_every_pod_are_declared(self) -> None:
        words = ["--worker-urls", "http://a:1", "http://b:1", "--intra-node-data-parallel-size"]
        made = vllm_router([*words, "8"])
        assert [pod.ranks_declared for pod in settings(made).pods.static] == [8, 8]
        assert made.missing == []
        assert [pod.ranks_declared for pod in settings(vllm_router([*words, "1"])).pods.static] == [None, None]
        cluster = settings(vllm_router(["--service-discovery", "--selector", "a=b", *words[3:], "4"])).pods.kubernetes
        assert cluster is not None
        assert cluster.data_parallel == DataParallelSettings(4)
        with pytest.raises(ValueError, match="no number of ranks"):
            vllm_router([*words, "many"])

    def test_ranks_need_no_flag(self) -> None:
        made = sglang_router(["--worker-urls", "http://a:1", "--dp-aware"])
        assert "--dp-aware" in {left.what for left in made.needless}

    def test_pods_of_a_cluster_stay_pods_of_a_cluster(self) -> None:
        words = ["--service-discovery", "--selector", "app=vllm", "tier=a", "--service-discovery-port", "8080"]
        made = vllm_router([*words, "--service-discovery-namespace", "llm"])
        found = settings(made).pods.kubernetes
        assert found is not None
        assert (found.selector, found.ports, found.namespace) == ("app=vllm,tier=a", (8080,), "llm")
        assert made.missing == []
        other = settings(sglang_router([*words, "--api-key", "x"])).pods.kubernetes
        assert other is not None
        assert (other.engine, other.api_key) == ("sglang", "${POD_API_KEY}")

    def test_secrets_are_not_written(self) -> None:
        for router in (vllm_router, sglang_router):
            made = router(["--worker-urls", "http://a:1", "--api-key", "topsecret", "--some-token", "topsecret"])
            text = made.text() + str(made.missing)
            assert "topsecret" not in text
            assert made.settings["pods"]["static"][0]["apiKey"] == "${POD_API_KEY}"
        assert settings(made).security.api_keys[0].key == "${CLIENT_API_KEY}"

    def test_unsupported_and_unknown_flags_are_reported(self) -> None:
        words = ["--service-discovery", "--decode-selector", "a=b", "--frob", "1", "2", "--log-dir", "/x"]
        made = vllm_router(["--worker-urls", "http://a:1", *words])
        assert missing(made) == {"--service-discovery", "--decode-selector a=b", "--frob 1 2", "--log-dir /x"}
        assert all(f"#   {left}" in made.text() for left in made.missing)

    @pytest.mark.parametrize(
        "word", ["--port x", "--selector a=b --service-discovery-port x", "--max-concurrent-requests x", "--prefill"]
    )
    def test_an_invalid_value_is_refused(self, word: str) -> None:
        with pytest.raises(ValueError):
            vllm_router(["--worker-urls", "http://a:1", *word.split()])

    @given(st.lists(st.sampled_from([*ARITIES, "1", "http://a:1", "x"]), max_size=8))
    def test_no_command_line_breaks_it(self, words: list[str]) -> None:
        with suppress(InvalidDocument, ValueError, ConfigError):
            vllm_router(words).check()


class TestTheProductionStack:
    WORDS = ["--service-discovery", "static", "--static-backends", "http://a:1,http://b:1", "--static-models", "m,n"]

    def test_backends_aliases_and_retries_are_imported(self) -> None:
        made = stack([*self.WORDS, "--static-aliases", "gpt:m", "--max-instance-failover-reroute-attempts", "2"])
        found = settings(made)
        assert [pod.url for pod in found.pods.static] == ["http://a:1", "http://b:1"]
        assert found.models.aliases == {"gpt": "m"}
        assert found.reliability.retries.attempts == 3
        assert made.missing == []

    @pytest.mark.parametrize(
        ("logic", "plugin"),
        [
            ("roundrobin", "round-robin-picker"),
            ("session", "session-affinity-scorer"),
            ("kvaware", "precise-prefix-cache-producer"),
            ("disaggregated_prefill", "disagg-profile-handler"),
        ],
    )
    def test_a_routing_logic_becomes_plugins(self, logic: str, plugin: str) -> None:
        made = stack([*self.WORDS, "--routing-logic", logic, "--session-key", "x-user"])
        assert plugin in types(made)
        assert ("x-user" in made.text()) == (logic == "session")

    def test_a_flag_with_an_empty_word_is_not_set(self) -> None:
        empty = ["--session-key", "", "--k8s-label-selector=", "--static-aliases", ""]
        made = stack([*self.WORDS, "--routing-logic", "session", *empty])
        assert "x-session-id" in made.text()
        assert set(made.settings) == {"pods", "scheduling"}
        assert "kubernetes" not in made.settings["pods"]

    def test_labels_become_roles(self) -> None:
        labels = ["--static-model-labels", "p,d", "--prefill-model-labels", "p", "--decode-model-labels", "d"]
        made = stack([*self.WORDS, *labels, "--routing-logic", "disaggregated_prefill"])
        assert [pod.role for pod in settings(made).pods.static] == ["prefill", "decode"]

    def test_a_dynamic_configuration_is_read_alone_and_overridden_by_the_command_line(self, tmp_path: Path) -> None:
        file = tmp_path / "dynamic.json"
        file.write_text(json.dumps({"routing_logic": "roundrobin", "static_backends": "http://a:1", "frob": 1}))
        alone = stack([str(file)])
        assert "round-robin-picker" in types(alone)
        assert missing(alone) == {"frob"}
        combined = stack(["--routing-logic", "prefixaware", "--dynamic-config-json", str(file)])
        assert "scheduling" not in combined.settings
        assert combined.settings["pods"]["static"] == [{"url": "http://a:1"}]

    def test_its_yaml_has_backends_below_models(self, tmp_path: Path) -> None:
        file = tmp_path / "dynamic.yaml"
        file.write_text(
            "static_models: {m: {static_backends: [http://a:1, http://b:1], static_model_type: chat}}\n"
            "static_aliases: {gpt: m}\n"
        )
        found = settings(stack([str(file)]))
        assert len(found.pods.static) == 2
        assert found.models.aliases == {"gpt": "m"}

    def test_pods_of_a_cluster_stay_pods_of_a_cluster(self) -> None:
        words = ["--service-discovery", "k8s", "--k8s-label-selector", "app=vllm", "--k8s-port", "8080"]
        made = stack([*words, "--k8s-service-discovery-type", "service-name", "--otel-endpoint", "x"])
        found = settings(made).pods.kubernetes
        assert found is not None
        assert (found.selector, found.ports) == ("app=vllm", (8080,))
        assert missing(made) == {"k8s_service_discovery_type service-name", "otel_endpoint x"}
        with pytest.raises(ValueError):
            stack(["--k8s-label-selector", "app=vllm", "--k8s-port", "x"])


class TestTheEndpointPicker:
    @pytest.mark.parametrize("file", sorted(CONFIG.glob("endpoint-picker*.yaml")), ids=lambda path: path.name)
    def test_a_loadable_document_loses_nothing(self, file: Path) -> None:
        made = endpoint_picker(file)
        assert made.missing == []
        assert made.settings["scheduling"] == yaml.safe_load(file.read_text())

    def test_older_words_are_rewritten_and_named(self, tmp_path: Path) -> None:
        file = tmp_path / "picker.yaml"
        file.write_text("kind: EndpointPickerConfig\nplugins: [{type: kv-cache-scorer}]\n")
        made = endpoint_picker(file)
        assert types(made) == {"kv-cache-utilization-scorer"}
        assert any("'kv-cache-scorer' is kv-cache-utilization-scorer now" in note for note in made.notes)
        assert not any("works as it is" in note for note in made.notes)

    def test_unloadable_parts_are_left_out(self, tmp_path: Path) -> None:
        file = tmp_path / "picker.yaml"
        file.write_text("""
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
featureGates: [frobnication]
frob: {}
plugins:
- {type: queue-scorer, parameters: {frob: 1}}
- {type: multicluster-queue-scorer}
- {type: nobody-knows-scorer, name: mine}
- {type: max-score-picker}
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: multicluster-queue-scorer, weight: 2}
  - {pluginRef: mine}
  - {pluginRef: queue-scorer, weight: 1}
  - {pluginRef: max-score-picker}
""")
        made = endpoint_picker(file)
        assert types(made) == {"queue-scorer", "max-score-picker"}
        profile = made.settings["scheduling"]["schedulingProfiles"][0]
        assert [ref["pluginRef"] for ref in profile["plugins"]] == ["queue-scorer", "max-score-picker"]
        named = missing(made)
        assert {"plugins.mine", "plugins.multicluster-queue-scorer", "featureGates[0]", "frob"} <= named
        assert "plugins.queue-scorer.parameters.frob" in named

    def test_mistakes_of_the_original_are_left_out_as_faulty(self, tmp_path: Path) -> None:
        file = tmp_path / "picker.yaml"
        file.write_text("""
apiVersion: foo/v9
kind: EndpointPickerConfg
plugins:
- {type: queue-scorer}
- {type: prefix-cache-scorr}
- {type: multicluster-queue-scorer}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: queue-scorer, weight: heavy}, {pluginRef: kv}, {pluginRef: prefix-cache-scorr}]
""")
        made = endpoint_picker(file)
        assert types(made) == {"queue-scorer"}
        assert [left.what for left in made.faulty] == [
            "apiVersion",
            "kind",
            "schedulingProfiles.default.plugins[0].weight",
            "schedulingProfiles.default.plugins[1]",
            "plugins.prefix-cache-scorr",
        ]
        foreign, reference = map(str, made.missing)
        assert foreign.startswith("plugins.multicluster-queue-scorer: 'multicluster-queue-scorer' is not supported: ")
        assert reference == ("schedulingProfiles.default.plugins[1]: refers to 'prefix-cache-scorr', which is left out")

    def test_a_plugin_whose_package_is_missing_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "zmq", None)
        monkeypatch.delitem(sys.modules, "proxy.prefix.kv_sockets", raising=False)
        file = tmp_path / "picker.yaml"
        file.write_text("kind: EndpointPickerConfig\nplugins: [{type: precise-prefix-cache-scorer}]\n")
        made = endpoint_picker(file)
        assert made.settings["scheduling"]["plugins"] == [{"type": "precise-prefix-cache-scorer"}]
        assert [(kind, left.what) for kind, left in made.incomplete] == [
            ("Missing package", "scheduling.plugins.precise-prefix-cache-scorer")
        ]
        assert "needs the package pyzmq" in made.text()
        result = run("endpoint-picker", str(file))
        assert result.exit_code == 1
        assert "Missing package: scheduling.plugins.precise-prefix-cache-scorer: needs the package" in result.stderr

    def test_a_config_map_is_unwrapped(self, tmp_path: Path) -> None:
        inner = "kind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n"
        file = tmp_path / "map.yaml"
        file.write_text(yaml.safe_dump({"kind": "ConfigMap", "data": {"a.yaml": inner}}))
        assert "queue-scorer" in types(endpoint_picker(file))

    def test_one_of_several_manifests_is_found_and_others_are_named(self, tmp_path: Path) -> None:
        inner = (CONFIG / "endpoint-picker.yaml").read_text()
        holder = {"kind": "ConfigMap", "data": {"a.yaml": inner}}
        stray = {"kind": "Deployment", "spec": {"plugins": []}}
        file = tmp_path / "rendered.yaml"
        file.write_text(yaml.safe_dump_all([stray, holder, {"kind": "Service"}]))
        made = endpoint_picker(file)
        assert "prefix-cache-scorer" in types(made)
        assert not any("such documents" in note for note in made.notes)
        file.write_text(yaml.safe_dump_all([holder, holder]))
        assert any("it holds 2 such documents" in note for note in endpoint_picker(file).notes)

    def test_the_template_of_a_chart_is_recognised(self, tmp_path: Path) -> None:
        file = tmp_path / "template.yaml"
        file.write_text("a: {{- .Values.plugins }}\nkind: EndpointPickerConfig")
        with pytest.raises(InvalidDocument, match="helm template"):
            endpoint_picker(file)

    def test_values_of_a_chart_and_enclosing_objects_are_unwrapped(self, tmp_path: Path) -> None:
        inner = {"kind": "EndpointPickerConfig", "plugins": [{"type": "queue-scorer"}]}
        values = {"router": {"epp": {"replicas": 1, "pluginsCustomConfig": {"p.yaml": yaml.safe_dump(inner)}}}}
        stated = {"kind": "LLMInferenceService", "spec": {"router": {"scheduler": {"config": {"inline": inner}}}}}
        for number, outer in enumerate((values, stated)):
            file = tmp_path / f"{number}.yaml"
            file.write_text(yaml.safe_dump(outer))
            assert "queue-scorer" in types(endpoint_picker(file))

    @pytest.mark.parametrize(
        "text",
        ["a: 1", "[]", "a: 'x kind: EndpointPickerConfig'", "kind: ConfigMap", "kind: ConfigMap\ndata: []", "a: ["],
    )
    def test_a_file_without_one_is_refused(self, text: str, tmp_path: Path) -> None:
        file = tmp_path / "none.yaml"
        file.write_text(text)
        with pytest.raises(InvalidDocument):
            endpoint_picker(file)


class TestLiteLlm:
    @staticmethod
    def made(tmp_path: Path, **sections: Any) -> Imported:
        file = tmp_path / "litellm.yaml"
        file.write_text(yaml.safe_dump(sections))
        return litellm(file)

    @staticmethod
    def entry(name: str, model: str, base: str | None = "http://a:8000/v1", **more: Any) -> dict[str, Any]:
        return {"model_name": name, "litellm_params": {"model": model, "api_base": base, **more}}

    def test_servers_names_and_settings_are_imported(self, tmp_path: Path) -> None:
        made = self.made(
            tmp_path,
            model_list=[
                self.entry("llama", "hosted_vllm/meta/Llama", api_key="os.environ/VLLM_KEY"),
                self.entry("llama", "hosted_vllm/meta/Llama", "http://b:8000/v1", api_key="EMPTY"),
                self.entry("small", "openai/qwen", "http://c:8000/v1"),
            ],
            router_settings={"num_retries": 2, "timeout": 30, "allowed_fails": 3, "cooldown_time": 60},
            litellm_settings={"fallbacks": [{"llama": ["small"]}]},
            general_settings={"master_key": "sk-topsecret", "max_parallel_requests": 50},
        )
        found = settings(made)
        assert [(pod.url, pod.api_key) for pod in found.pods.static] == [
            ("http://a:8000", "${VLLM_KEY}"),
            ("http://b:8000", None),
            ("http://c:8000", None),
        ]
        assert found.models.aliases == {"llama": "meta/Llama", "small": "qwen"}
        assert found.models.fallbacks == {"meta/Llama": ("qwen",)}
        assert (found.reliability.retries.attempts, found.reliability.timeouts.request) == (3, Duration(30))
        assert (found.reliability.breaker.failures, found.reliability.breaker.open) == (4, Duration(60))
        assert found.flow_control.max_concurrent == 50
        assert "topsecret" not in made.text()
        assert found.security.api_keys[0].key == "${LITELLM_MASTER_KEY}"
        assert made.missing == []

    def test_a_fallback_without_a_pod_is_not_imported(self, tmp_path: Path) -> None:
        made = self.made(
            tmp_path,
            model_list=[self.entry("llama", "hosted_vllm/meta/Llama"), self.entry("gpt-4o", "gpt-4o", None)],
            litellm_settings={"fallbacks": [{"llama": ["gpt-4o"]}]},
        )
        assert "fallback of llama to gpt-4o" in missing(made)
        assert not settings(made).models.fallbacks

    def test_several_models_under_a_name_become_a_rewrite(self, tmp_path: Path) -> None:
        entries = [
            self.entry("a", "hosted_vllm/x", weight=3),
            self.entry("a", "hosted_vllm/y", "http://b:1/v1", weight=1),
        ]
        found = settings(self.made(tmp_path, model_list=entries))
        assert [(target.model, target.weight) for target in found.models.rewrites[0].targets] == [("x", 3), ("y", 1)]

    def test_models_outside_vllm_are_reported(self, tmp_path: Path) -> None:
        entries = [
            self.entry("gpt", "openai/gpt-4o", None),
            self.entry("claude", "anthropic/claude", "http://x:1"),
            self.entry("azure", "openai/x", "https://y.openai.azure.com"),
            self.entry("m", "hosted_vllm/m", rpm=10, temperature=0),
        ]
        made = self.made(tmp_path, model_list=entries, router_settings={"redis_host": "r", "frob": 1}, frobs={})
        assert len(settings(made).pods.static) == 1
        assert {what.partition(" (")[0] for what in missing(made)} == {
            "model gpt",
            "model claude",
            "model azure",
            "rpm of m",
            "temperature of m",
            "router_settings.redis_host",
            "router_settings.frob",
            "frobs",
        }

    @pytest.mark.parametrize(
        ("strategy", "plugin"), [("simple-shuffle", "random-picker"), ("least-busy", "active-request-scorer")]
    )
    def test_a_strategy_becomes_plugins(self, strategy: str, plugin: str, tmp_path: Path) -> None:
        entries = [self.entry("m", "hosted_vllm/m")]
        made = self.made(tmp_path, model_list=entries, router_settings={"routing_strategy": strategy})
        assert plugin in types(made)

    @pytest.mark.parametrize(
        "sections",
        [
            {"model_list": {}},
            {"model_list": [1]},
            {"model_list": [], "router_settings": [1]},
            {"model_list": [], "litellm_settings": {"fallbacks": 1}},
            {"model_list": [], "router_settings": {"num_retries": None}},
        ],
    )
    def test_a_file_without_models_is_refused(self, sections: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises((InvalidDocument, ValueError)):
            self.made(tmp_path, **sections)


class TestTheCommand:
    def test_a_complete_import_exits_with_0_and_an_incomplete_one_with_1(self) -> None:
        whole = run("vllm-router", "vllm-router", "--worker-urls", "http://a:1")
        assert whole.exit_code == 0
        assert yaml.safe_load(whole.stdout) == {"pods": {"static": [{"url": "http://a:1"}]}}
        part = run("vllm-router", "--worker-urls", "http://a:1", "--log-dir", "/x")
        assert part.exit_code == 1
        assert "No equivalent: --log-dir /x: logs go to" in part.stderr

    @pytest.mark.parametrize(
        "words",
        [
            ["--port", "x"],
            ["nothing"],
            ["--worker-urls", "ftp://a:1"],
            ["--worker-urls", "http://a:1", "--log-level", "loud"],
            ["--worker-urls 'http://a:1"],
        ],
    )
    def test_an_impossible_import_exits_with_2_and_writes_nothing(self, words: list[str], tmp_path: Path) -> None:
        output = tmp_path / "kvlane.yaml"
        result = run("vllm-router", "-o", str(output), *words)
        assert result.exit_code == 2, result.output
        assert "Traceback" not in result.output
        assert not output.exists()

    def test_a_command_line_is_read_as_text_and_from_stdin(self, tmp_path: Path) -> None:
        text = "vllm-router \\\n  --worker-urls http://a:1 \\\n  --port 9000\n"
        output = tmp_path / "kvlane.yaml"
        assert run("vllm-router", "-o", str(output), "-", stdin=text).exit_code == 0
        assert run("sglang-router", text).exit_code == 0
        assert run("production-stack", "--static-backends http://a:1 --static-models m").exit_code == 0
        assert yaml.safe_load(output.read_text())["listen"] == {"port": 9000}

    @pytest.mark.parametrize("text", ["model_list: []", "servingEngineSpec: {}\nrouterSpec: {routingLogic: session}"])
    def test_a_file_without_a_setting_of_the_router_is_refused(self, tmp_path: Path, text: str) -> None:
        file = tmp_path / "values.yaml"
        file.write_text(text)
        result = run("production-stack", str(file))
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{file} has no setting of the router" in result.stderr
        assert ("give the router's command line" in result.stderr) == ("routerSpec" in text)

    def test_files_are_read(self, tmp_path: Path) -> None:
        file = tmp_path / "litellm.yaml"
        file.write_text(
            "model_list: [{model_name: m, litellm_params: {model: hosted_vllm/m, api_base: http://a:1/v1}}]"
        )
        assert run("litellm", str(file)).exit_code == 0
        assert run("endpoint-picker", str(CONFIG / "endpoint-picker.yaml")).exit_code == 0
        assert run("litellm", str(tmp_path / "none")).exit_code == 2
        assert run("endpoint-picker", str(file)).exit_code == 2


SHOWN = [words for line in commands() if (words := shlex.split(line))[:2] == ["kvlane", "import"]]


class TestThePage:
    @pytest.mark.parametrize("words", SHOWN, ids=" ".join)
    def test_a_documented_command_makes_a_configuration(
        self, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        entry = {"model_name": "m", "litellm_params": {"model": "hosted_vllm/m", "api_base": "http://a:1/v1"}}
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"model_list": [entry]}))
        (tmp_path / "dynamic_config.yaml").write_text("static_backends: http://a:1\n")
        (tmp_path / "picker.yaml").write_text((CONFIG / "endpoint-picker.yaml").read_text())
        monkeypatch.chdir(tmp_path)
        given = words[2 : words.index("<")] if "<" in words else words[2:]
        result = run(*given, stdin="sglang-router --worker-urls http://a:1")
        assert result.exit_code == 0, result.output
        from_mapping(yaml.safe_load((tmp_path / "kvlane.yaml").read_text()))

    def test_every_documented_flag_is_known(self) -> None:
        page = (ROOT / "docs" / "MIGRATE.md").read_text()
        section = page.partition("## vllm-router")[2].partition("## production-stack")[0]
        shown = set(re.findall(r"`(--[a-z-]+[a-z])(?=[` ])", section))
        assert len(shown) > 20
        assert shown <= set(ARITIES)
