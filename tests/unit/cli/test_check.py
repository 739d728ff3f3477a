"""What `kvlane check` refuses, as `kvlane serve` does."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from proxy.cli import main


def test_a_second_file_is_refused_instead_of_replacing_the_first(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["check", "-c", str(tmp_path / "a.yaml"), "-c", str(tmp_path / "b.yaml")])
    assert result.exit_code == 2
    assert "give one file, not 2; files are not merged" in result.output


def test_a_missing_extra_of_the_replicas_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    file = tmp_path / "kvlane.yaml"
    file.write_text("pods: {static: [{url: http://a:1}]}\nreplicas: {store: redis://a:6379}\n")
    result = CliRunner().invoke(main, ["check", "-c", str(file)])
    assert result.exit_code == 2
    assert f"replicas.store: needs the extra: {sys.executable} -m pip install 'kvlane[redis]'" in result.output
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = CliRunner().invoke(main, ["check", "-c", str(file)])
    assert f"replicas.store: needs the extra: uv pip install --python {sys.executable} 'kvlane[redis]'" in result.output


def checked(tmp_path: Path, text: str) -> Result:
    file = tmp_path / "kvlane.yaml"
    file.write_text(text)
    return CliRunner().invoke(main, ["check", "-c", str(file)])


def faults(result: Result) -> list[str]:
    assert result.exit_code == 2
    return [line.strip() for line in result.stderr.splitlines() if line.startswith("  ")]


def test_a_variable_that_is_not_set_hides_no_other_fault(tmp_path: Path) -> None:
    text = 'pods: {static: [{url: "http://a:1"}, {url: "${NOPE}"}]}\nlisten: {port: abc, prot: 3}'
    assert sorted(faults(checked(tmp_path, text))) == [
        "listen.port: must be a whole number, not the text 'abc'",
        "listen: unknown field 'prot'; did you mean 'port'?",
        "pods.static[1].url: environment variable NOPE is not set; set it or write ${NOPE:-default}",
    ]


def test_the_variable_of_a_key_that_does_not_exist_is_no_fault_of_its_own(tmp_path: Path) -> None:
    text = """
listen: {prot: "${NOPE}"}
pods: {refresh: {interval: 250 ms}}
scheduling: {plugins: [{type: queue-scorr}]}
"""
    assert [fault.partition(";")[0] for fault in faults(checked(tmp_path, text))] == [
        "listen: unknown field 'prot'",
        "pods.refresh.interval: '250 ms' is not a duration",
        "scheduling.plugins.queue-scorr: unknown plugin type 'queue-scorr'",
    ]


def test_a_variable_of_any_section_is_a_fault_where_nothing_else_is_wrong(tmp_path: Path) -> None:
    text = 'scheduling: {plugins: [{type: queue-scorer, name: "${NOPE}"}]}\nlisten: {host: "${NOPE}"}'
    (place, other) = faults(checked(tmp_path, text))
    assert "environment variable NOPE is not set" in place
    assert "environment variable NOPE is not set" in other


def test_a_variable_of_a_picker_configuration_is_the_only_fault(tmp_path: Path) -> None:
    plugin = '{type: load-aware-scorer, parameters: {threshold: "${NOPE}"}}'
    result = checked(tmp_path, f"kind: EndpointPickerConfig\nplugins: [{plugin}]")
    assert result.exit_code == 2
    assert result.stderr.splitlines()[1:] == [
        "  scheduling.plugins.load-aware-scorer.parameters.threshold: environment variable NOPE is not set; set it or"
        " write ${NOPE:-default}"
    ]


def test_a_missing_file_of_a_scheduling_hides_no_other_fault(tmp_path: Path) -> None:
    missing, port = faults(checked(tmp_path, "scheduling: {file: none.yaml}\nlisten: {port: abc}"))
    assert missing.startswith(f"scheduling.file: {tmp_path / 'none.yaml'}: cannot be read")
    assert port.startswith("listen.port: must be a whole number")


def test_contradictions_of_a_section_are_all_named(tmp_path: Path) -> None:
    text = (
        'security: {relayPaths: ["images"], apiKeys: [{name: a, key: k, limits: small}], tenants: {t: {limits: large}}}'
    )
    paths = [fault.partition(": ")[0] for fault in faults(checked(tmp_path, text))]
    assert paths == ["security.apiKeys[0].limits", "security.tenants.t.limits", "security.relayPaths[0]"]


def test_warnings_are_printed_with_the_faults_of_files(tmp_path: Path) -> None:
    text = tmp_path / "text.pem"
    text.write_text("no PEM")
    result = checked(tmp_path, f"listen: {{maxBody: 1, tls: {{cert: {text}}}}}")
    assert result.exit_code == 2
    assert "listen.tls" in result.stderr
    assert "Warning: listen.maxBody: 1 bytes are too few" in result.stderr


def test_a_configuration_whose_files_are_missing_is_not_simply_good(tmp_path: Path) -> None:
    result = checked(tmp_path, "pods: {static: [{url: http://a:1}]}\nlisten: {tls: {cert: none.pem}}")
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "The configuration is good, but files that kvlane needs are missing here:",
        "Warning: listen.tls.cert: none.pem does not exist; kvlane does not start without it.",
    ]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("reliability: {retries: {attempts: 99999999999999999999999999}}", "reliability.retries.attempts"),
        ("flowControl: {maxConcurrent: 99999999999999999999999999}", "flowControl.maxConcurrent"),
        ("listen: {maxBody: 99999999999999999999Gi}", "listen.maxBody"),
        (f"listen: {{maxBody: {'9' * 400}Gi}}", "listen.maxBody"),
    ],
)
def test_numbers_beyond_every_use_are_refused(tmp_path: Path, text: str, path: str) -> None:
    result = checked(tmp_path, text)
    assert result.exit_code == 2
    assert f"{path}: must be at most" in result.stderr


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("models: {objectives: {batch: {priority: -99999999999999999999}}}", "models.objectives.batch.priority"),
        ("flowControl: {bands: [{priority: -99999999999999999999}]}", "flowControl.bands[0].priority"),
    ],
)
def test_numbers_below_every_use_are_refused_with_the_least_number(tmp_path: Path, text: str, path: str) -> None:
    result = checked(tmp_path, text)
    assert result.exit_code == 2
    assert f"{path}: must be at least -9223372036854775807" in result.stderr


@pytest.mark.parametrize(
    "text",
    [
        r'security: {apiKeysFile: "keys\0.yaml"}',
        r'listen: {tls: {cert: "cert\0.pem", key: key.pem}}',
        r'telemetry: {record: {file: "folder\0/record.jsonl"}}',
        r'pods: {file: "pods\0.yaml"}',
        r'scheduling: {file: "picker\0.yaml"}',
    ],
)
def test_a_nul_is_refused_with_its_position(tmp_path: Path, text: str) -> None:
    result = checked(tmp_path, text)
    assert result.exit_code == 2
    assert f"kvlane.yaml:1:{text.index(chr(34)) + 1}: the text contains a NUL (\\0); remove it" in result.stderr


def test_a_path_that_the_system_refuses_is_a_fault_with_its_reason(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)
    (fault,) = faults(checked(tmp_path, f"security: {{apiKeysFile: {path}}}"))
    assert fault == f"security.apiKeysFile: {path}: cannot be read: File name too long"


@pytest.mark.parametrize("section", ["listen", "admin", "extproc"])
@pytest.mark.parametrize("host", ["0.0.0.0:8000", "http://0.0.0.0", "vllm.example:80", "[::1]:80"])
def test_a_host_with_a_scheme_or_a_port_is_refused(tmp_path: Path, section: str, host: str) -> None:
    (fault,) = faults(checked(tmp_path, f"{section}: {{host: '{host}'}}"))
    advice = f"write only a name or an address, and the port as {section}.port"
    assert fault == f"{section}.host: {host!r} is not a host; {advice}"


@pytest.mark.parametrize("host", ["", "::", "::1", "fe80::1%eth0", "127.0.0.1", "localhost", "kvlane.example"])
def test_names_and_addresses_are_hosts(tmp_path: Path, host: str) -> None:
    assert checked(tmp_path, f"listen: {{host: '{host}'}}").exit_code == 0


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        (
            "model_list: []\nlitellm_settings: {}",
            "`kvlane import litellm` converts a LiteLLM configuration",
        ),
        (
            "service_discovery: static\nstatic_backends: http://a:1",
            "`kvlane import production-stack` converts the dynamic configuration of its router",
        ),
    ],
)
def test_the_error_about_the_configuration_of_another_router_names_the_import(
    tmp_path: Path, text: str, hint: str
) -> None:
    result = checked(tmp_path, text)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Hint: {tmp_path}/kvlane.yaml: {hint}"
