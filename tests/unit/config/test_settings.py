"""One file, every fault with its path, every value with its origin."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proxy.app import App
from proxy.config.load import load
from proxy.core.errors import ConfigError
from proxy.core.params import Duration
from proxy.fleet.settings import DcgmSettings
from proxy.settings import Settings, effective, from_mapping
from proxy.telemetry.settings import LogLevel


class Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, text: str, name: str = "kvlane.yaml") -> Path:
        path = self._folder / name
        path.write_text(text)
        return path

    def load(self, text: str, environ: Mapping[str, str] | None = None) -> Settings:
        return load(self.write(text), environ or {})

    def faults(self, text: str, environ: Mapping[str, str] | None = None) -> list[str]:
        """Return the faults of an invalid file, without its path."""
        with pytest.raises(ConfigError) as caught:
            App(self.load(text, environ))
        return [str(problem).replace(str(self._folder) + "/", "") for problem in caught.value.problems]


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def test_an_empty_mapping_is_all_defaults() -> None:
    settings = from_mapping({})
    assert (settings.listen.host, settings.listen.port) == ("0.0.0.0", 8000)
    assert (settings.admin.host, settings.admin.port, settings.admin.api_key) == ("127.0.0.1", 9190, None)
    assert settings.reliability.timeouts.first_byte == Duration(300)
    assert settings.reliability.retries.attempts == 3
    assert settings.pods.refresh.interval == Duration(0.25)
    assert settings.telemetry.log_level is LogLevel.INFO


def test_every_typo_of_a_file_is_reported_with_its_path_and_a_suggestion(files: Files) -> None:
    text = """
        listn: {port: 1}
        listen: {prot: 8000, port: 70000}
        pods:
          static:
            - {url: http://a:1, wieght: 2}
            - {name: b}
          refresh: {interval: soon}
        reliability: {timeouts: {firstbyte: 1s}, retries: {attempts: 0}}
        telemetry: {logLevel: inof, accessLog: "yes"}
        security: {relayPaths: [sleep]}
        scheduling:
          plugins:
            - {type: queue-scorr}
            - {type: load-aware-scorer, parameters: {treshold: 3}}
    """
    faults = files.faults(text)
    expected = [
        "unknown field 'listn'; did you mean 'listen'?",
        "listen: unknown field 'prot'; did you mean 'port'?",
        "listen.port: must be at most 65535, not 70000",
        "pods.static[0]: unknown field 'wieght'; did you mean 'weight'?",
        "pods.static[1].url: is required",
        "reliability.timeouts: unknown field 'firstbyte'; did you mean 'firstByte'?",
        "reliability.retries.attempts: must be at least 1, not 0",
        "telemetry.logLevel: must be one of debug, info, warning, error, not 'inof'; did you mean 'info'?",
        "telemetry.accessLog: must be true or false, not the text 'yes'",
    ]
    assert [fault for fault in expected if fault not in faults] == []
    assert any(fault.startswith("pods.refresh.interval: ") for fault in faults)
    assert any(fault.startswith("security.relayPaths[0]: 'sleep'") for fault in faults)


def test_typos_of_the_scheduling_section_are_all_reported_too(files: Files) -> None:
    text = """
        scheduling:
          plugins:
            - {type: queue-scorr}
            - {type: load-aware-scorer, parameters: {treshold: 3}}
          schedulingProfiles:
            - {name: default, plugins: [{pluginRef: load-aware-scorer, wieght: 2}, {pluginRef: load-awar-scorer}]}
    """
    faults = files.faults(text)
    for path, suggestion in [
        ("scheduling.plugins.queue-scorr", "did you mean 'queue-scorer'?"),
        ("scheduling.plugins.load-aware-scorer", "did you mean 'threshold'?"),
        ("scheduling.schedulingProfiles.default.plugins[0]", "did you mean 'weight'?"),
        ("scheduling.schedulingProfiles.default.plugins[1].pluginRef", "did you mean 'load-aware-scorer'?"),
    ]:
        assert any(fault.startswith(path) and fault.endswith(suggestion) for fault in faults), (path, faults)


def test_a_duplicate_key_is_an_error_with_its_position(files: Files) -> None:
    assert files.faults("listen:\n  port: 1\n  host: a\n  port: 2\n") == ["kvlane.yaml:4:3: key 'port' stands twice"]


def test_a_second_document_is_an_error(files: Files) -> None:
    (fault,) = files.faults("listen: {port: 1}\n---\nadmin: {port: 2}\n")
    assert fault.startswith("kvlane.yaml:2:1: a second document after ---: a configuration is one")


THIRTEENTH_MONTH = "month must be in 1..12" + (", not 13" if sys.version_info >= (3, 14) else "")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "listen: {port: {{ .Values.port }}}",
            "kvlane.yaml:1:17: a key must be text; a value that begins with { needs quotes",
        ),
        (
            "listen: {host: 2024-13-45}",
            f"kvlane.yaml:1:16: '2024-13-45' cannot be read as timestamp: {THIRTEENTH_MONTH}",
        ),
        (
            "pods: {refresh: 5}\nscheduling: {plugins: [{type: metrics-data-source, parameters: {interval: 1s}}]}",
            "pods.refresh: must be a mapping, not 5; its keys are interval, timeout, maxCore, attributes, …",
        ),
    ],
)
def test_a_file_of_another_format_is_refused_without_a_traceback(files: Files, text: str, fault: str) -> None:
    assert files.faults(text) == [fault]


def test_a_syntax_error_has_line_and_column(files: Files) -> None:
    (fault,) = files.faults("listen:\n  port: [1\n")
    assert fault.startswith("kvlane.yaml:3:1: ")


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("pods:\n\tstatic:", "kvlane.yaml:2:1: a tab: YAML is indented with spaces"),
        (
            "pods:\n  static:\n  - url: a\n   weight: 2",
            "kvlane.yaml:4:4: not indented as what it belongs to, in what begins",
        ),
        ("pods: {static: [{url: @a}]}", "kvlane.yaml:1:23: a text that begins so needs quotes"),
        ("pods:\n  static\n    - url: a", "kvlane.yaml:3:10: no key can be here: a line above may lack its colon"),
        ("pods: !secret a", "kvlane.yaml:1:7: a tag such as !name, or a lone =; a text that begins so needs quotes"),
        ("listen: {keepAlive: 1:30}", "kvlane.yaml:1:21: YAML reads 1:30 as a number of base 60; write"),
        ("pods:\n  url: a\nlisten\n", "kvlane.yaml:4:1: no colon with a space after it"),
    ],
)
def test_a_syntax_error_explains_its_likely_cause(files: Files, text: str, advice: str) -> None:
    (fault,) = files.faults(text)
    assert fault.startswith(advice)


def test_an_unclosed_bracket_is_reported_with_its_position(files: Files) -> None:
    (fault,) = files.faults("pods: {static: []\nlisten: 1\n")
    assert fault.endswith("in what begins at 1:7")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "pods: {static: [http://a:8000]}",
            "pods.static[0]: must be a mapping, not the text 'http://a:8000'; write {url: http://a:8000}",
        ),
        (
            "pods:\n  static:\n  - url:http://a:8000",
            "pods.static[0]: must be a mapping, not the text 'url:http://a:8000'; a space is missing after 'url:'",
        ),
        (
            "pods:\n  - url: http://a:8000",
            "pods: must be a mapping, not a list; its keys are static, file, dns, kubernetes, …",
        ),
        (
            "pods: {static: [{url: http://a:8000/v1/}]}",
            "pods.static[0].url: 'http://a:8000/v1/' ends in /v1, with which the paths of requests begin; leave it out",
        ),
        ("listen: {port: 9190}", "admin.port: 9190 is the port of listen, too"),
    ],
)
def test_common_wrong_spellings_are_recognised(files: Files, text: str, fault: str) -> None:
    assert files.faults(text) == [fault]


def test_ports_may_be_equal_on_addresses_that_are_not() -> None:
    assert from_mapping({"listen": {"host": "10.0.0.1", "port": 9190}}).admin.port == 9190
    assert from_mapping({"listen": {"port": 0}, "admin": {"port": 0}}).admin.port == 0


@pytest.mark.parametrize("text", ["", "- a list", "text"])
def test_a_file_without_a_mapping_is_reported(files: Files, text: str) -> None:
    what = "must hold a mapping of sections" if text else "is empty"
    assert files.faults(text) == [
        f"kvlane.yaml: {what}; write for example: pods: {{static: [{{url: http://vllm-0:8000}}]}}"
    ]


def test_a_file_in_another_encoding_is_reported_with_the_line(tmp_path: Path) -> None:
    (tmp_path / "latin.yaml").write_bytes(b"listen:\n  host: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"is not UTF-8 \(byte 0xe9 in line 2\); save the file as UTF-8"):
        load(tmp_path / "latin.yaml", {})


def test_an_unreadable_file_is_reported(files: Files, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "none.yaml", {})
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load(tmp_path / "binary.yaml", {})


def test_a_boolean_in_place_of_a_section_is_spelled_as_in_yaml(files: Files) -> None:
    (fault,) = files.faults("telemetry: {decisions: true}")
    assert fault.startswith("telemetry.decisions: must be a mapping, not true; its keys are ")


def test_numbers_and_booleans_come_from_the_environment(files: Files) -> None:
    text = """
        listen: {port: "${PORT}", maxBody: "${SIZE:-1MiB}", host: "${HOST:-127.0.0.1}"}
        telemetry: {accessLog: "${LOG}"}
        reliability: {timeouts: {idle: "${IDLE}"}, retries: {attempts: "${TRIES:-2}"}}
        admin: {apiKey: "$$${KEY}"}
    """
    settings = files.load(text, {"PORT": "8123", "LOG": "false", "IDLE": "90s", "KEY": "k"})
    assert (settings.listen.port, settings.listen.max_body, settings.listen.host) == (8123, 1 << 20, "127.0.0.1")
    assert settings.telemetry.access_log is False
    assert settings.reliability.timeouts.idle == Duration(90)
    assert settings.reliability.retries.attempts == 2
    assert settings.admin.api_key == "$k"


def test_every_missing_variable_is_named_with_its_path(files: Files) -> None:
    faults = files.faults('listen: {port: "${PORT}"}\npods: {static: [{url: "http://${HOST}:1"}]}')
    assert [fault.partition(" is not set")[0] for fault in faults] == [
        "listen.port: environment variable PORT",
        "pods.static[0].url: environment variable HOST",
    ]


def test_text_that_only_resembles_variables_and_secrets_is_kept(files: Files) -> None:
    text = 'admin: {apiKey: "${KEY"}\nsecurity: {apiKeys: [{name: a, key: "***"}]}\nlisten: {host: "$${x"}'
    faults = files.faults(text)
    assert [fault.partition(":")[0] for fault in faults] == ["admin.apiKey", "security.apiKeys[0].key"]
    assert "***" in faults[1]


def test_a_key_in_the_place_of_its_entry_is_not_printed(files: Files) -> None:
    (fault,) = files.faults("security: {apiKeys: [kvl_secret]}")
    assert fault == "security.apiKeys[0]: must be a mapping, not a text; its keys are name, key, hash, tenant, …"


def test_all_paths_that_cannot_be_relayed_are_reported(files: Files) -> None:
    control, relative = files.faults("security: {relayPaths: [/metrics, /fine, x]}")
    assert control.startswith("security.relayPaths[0]: /metrics controls an engine")
    assert relative.startswith("security.relayPaths[2]: 'x' must start with /")


def test_a_variable_that_is_not_a_number_is_refused_for_a_number(files: Files) -> None:
    (fault,) = files.faults('listen: {port: "${PORT}"}', {"PORT": "http"})
    assert fault == "listen.port: must be a whole number, not the text 'http'"


def test_faults_of_a_scaling_policy_are_reported_with_all_others(files: Files) -> None:
    role = "{name: a, min: 2, max: 1, metrics: [{name: m, kind: avg, target: 1}]}"
    faults = files.faults(f"autoscale: {{pools: {{default: {{roles: [{role}]}}}}}}\nlisten: {{port: -1}}")
    assert "autoscale.pools.default.roles[0].min: must be <= max" in faults
    assert "listen.port: must be at least 0, not -1" in faults


def test_a_scaling_policy_needs_an_existing_pool(files: Files) -> None:
    role = "{name: a, min: 1, max: 2, metrics: [{name: m, kind: avg, target: 1}]}"
    (fault,) = files.faults(f"autoscale: {{pools: {{defualt: {{roles: [{role}]}}}}}}")
    assert fault == "autoscale.pools.defualt: there is no such pool; did you mean 'default'?"


def test_two_pods_of_one_name_or_url_are_an_error(files: Files) -> None:
    text = "pods: {static: [{url: http://a:1, name: x}, {url: http://b:1, name: x}, {url: http://a:1/, name: y}]}"
    assert files.faults(text) == [
        "pods.static[1].name: 'x' is taken by pods.static[0]",
        "pods.static[2].url: 'http://a:1' is taken by pods.static[0]",
    ]


PICKER = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: metrics-data-source, parameters: {interval: 2s, path: /m, port: 9100}}
- type: core-metrics-extractor
  parameters: {engineConfigs: [{name: own, customMetrics: [{attributeKey: awake, metricSpec: "state{s=awake}"}]}]}
- {type: file-discovery, parameters: {path: /etc/pods.yaml, watchFile: true}}
- {type: queue-scorer}
schedulingProfiles:
- {name: default, plugins: [{pluginRef: queue-scorer}]}
dataLayer:
  sources: [{pluginRef: metrics-data-source, extractors: [{pluginRef: core-metrics-extractor}]}]
  discovery: {pluginRef: file-discovery}
"""


def test_an_endpoint_picker_config_names_the_dcgm_exporter(files: Files) -> None:
    source = "{type: dcgm-data-source, parameters: {port: 9401, useNodeAddress: true, interval: 1s}}"
    document = f"""
kind: EndpointPickerConfig
plugins: [{source}, {{type: dcgm-extractor}}, {{type: sglanghttp-parser}}]
dataLayer: {{sources: [{{pluginRef: dcgm-data-source, extractors: [{{pluginRef: dcgm-extractor}}]}}]}}
requestHandler: {{parsers: [{{pluginRef: sglanghttp-parser}}]}}
"""
    settings = files.load(document)
    assert settings.pods.refresh.dcgm == DcgmSettings(9401, on_node=True, interval=Duration(1.0))
    assert files.load(PICKER).pods.refresh.dcgm is None
    files.write(document, "picker.yaml")
    (fault,) = files.faults("pods: {refresh: {dcgm: {}}}\nscheduling: {file: picker.yaml}")
    assert "pods.refresh.dcgm: is set in scheduling too" in fault


def check_picker(settings: Settings) -> None:
    refresh = settings.pods.refresh
    assert (refresh.interval, refresh.path, refresh.port) == (Duration(2), "/m", 9100)
    assert "awake" in dict(settings.dialects.by_engine["own"].attributes)
    assert settings.pods.file == "/etc/pods.yaml"
    assert [profile.name for profile in settings.scheduling.profiles or ()] == ["default"]


def test_an_endpoint_picker_config_is_a_configuration(files: Files) -> None:
    check_picker(files.load(PICKER))
    check_picker(files.load(PICKER.replace("kind: EndpointPickerConfig\n", "")))


def test_an_endpoint_picker_config_can_be_a_separate_file(files: Files) -> None:
    files.write(PICKER, "picker.yaml")
    settings = files.load("listen: {port: 1}\nscheduling: {file: picker.yaml}")
    check_picker(settings)
    assert settings.listen.port == 1


def test_an_endpoint_picker_config_can_stand_inline(files: Files) -> None:
    indented = "\n".join("  " + line for line in PICKER.splitlines())
    check_picker(files.load(f"scheduling:\n{indented}"))


def test_values_of_an_endpoint_picker_config_have_the_file_as_origin(files: Files) -> None:
    pods = effective(files.load(PICKER))["pods"]
    assert pods["refresh"]["interval"] == {"value": 2.0, "origin": "file"}
    assert pods["refresh"]["timeout"] == {"value": 1.0, "origin": "default"}
    assert pods["file"] == {"value": "/etc/pods.yaml", "origin": "file"}


def test_pods_can_be_added_to_an_endpoint_picker_config(files: Files) -> None:
    overrides = {"pods": {"static": [{"url": "http://a:1"}]}}
    settings = load(files.write(PICKER), {}, overrides)
    check_picker(settings)
    assert [pod.url for pod in settings.pods.static] == ["http://a:1"]


def test_the_same_limit_twice_is_an_error(files: Files) -> None:
    files.write(PICKER, "picker.yaml")
    text = "pods: {file: other.yaml, refresh: {interval: 1s, timeout: 2s}}\nscheduling: {file: picker.yaml}"
    assert files.faults(text) == [
        "pods.refresh.interval: is set in scheduling too; keep one of them",
        "pods.file: is set in scheduling too; keep one of them",
    ]


def test_an_invalid_refresh_section_is_reported_even_with_one_in_scheduling(files: Files) -> None:
    files.write(PICKER, "picker.yaml")
    (fault, *_) = files.faults("pods: {refresh: [1]}\nscheduling: {file: picker.yaml}")
    assert (
        fault == "pods.refresh: must be a mapping, not a list; its keys are interval, timeout, maxCore, attributes, …"
    )


def test_an_empty_admin_key_from_the_environment_does_not_open_the_port(files: Files) -> None:
    faults = files.faults("admin: {apiKey: '${KEY:-}'}")
    assert faults == ["admin.apiKey: is empty; set it, or leave it out to go without one"]


def test_a_scheduling_file_with_further_keys_is_an_error(files: Files) -> None:
    files.write(PICKER, "picker.yaml")
    assert files.faults("scheduling: {file: picker.yaml, plugins: []}") == [
        "scheduling: has a file and keys of its own; keep one of them"
    ]
    (fault,) = files.faults("scheduling: {file: none.yaml}")
    assert fault.startswith("scheduling.file: none.yaml: cannot be read")


@pytest.mark.parametrize("section", ["scheduling", "pods", "listen"])
@pytest.mark.parametrize("value", [3, "text", [1]])
def test_a_section_that_is_not_a_mapping_is_an_error(section: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        from_mapping({section: value})
    assert caught.value.problems[0].path == section


def test_overrides_have_precedence_and_keep_the_rest(files: Files) -> None:
    path = files.write("listen: {host: a, port: 1}")
    settings = load(path, {}, {"listen": {"port": 2}, "admin": {"port": 3}})
    assert (settings.listen.host, settings.listen.port, settings.admin.port) == ("a", 2, 3)


def test_enums_are_read_in_any_case() -> None:
    assert from_mapping({"telemetry": {"logLevel": "WARNING"}}).telemetry.log_level is LogLevel.WARNING


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("security: {apiKeys: [{name: a, key: k}, {name: a, key: l}]}", "security.apiKeys[1].name"),
        ("models: {aliases: {a: b, b: c}}", "models.aliases.a"),
        ("models: {fallbacks: {a: [a]}}", "models.fallbacks.a"),
        ("flowControl: {bands: [{priority: 1}, {priority: 1}]}", "flowControl.bands[1].priority"),
        ("flowControl: {shares: {a: 0}}", "flowControl.shares.a"),
        ("flowControl: {ceilings: reflective, holdback: {minCeiling: 0.5}}", "flowControl.holdback"),
    ],
)
def test_a_contradiction_in_a_list_or_mapping_names_the_item(files: Files, text: str, path: str) -> None:
    (fault,) = files.faults(text)
    assert fault.startswith(f"{path}: ")
