"""What the commands print, and with which exit code they end."""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import chdir
from pathlib import Path

import orjson
import pytest
import yaml
from click.testing import CliRunner, Result

from proxy import __version__
from proxy.cli import COMMANDS, main
from proxy.core.registry import Registry

CONFIG = Path(__file__).parents[3] / "config"


def run(*arguments: str, stdin: str | None = None, **environ: str) -> Result:
    return CliRunner().invoke(main, arguments, input=stdin, env=environ)


def test_the_command_lists_its_commands() -> None:
    for arguments in ((), ("--help",), ("-h",)):
        shown = run(*arguments).output
        assert [name for name in COMMANDS if name not in shown] == []
    assert run("--version").output == f"kvlane, version {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_and_option_has_help(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert result.output.startswith(f"Usage: main {command}")
    assert len(result.output.splitlines()[2]) > 30


@pytest.mark.parametrize("command", ["serve", "check"])
def test_without_a_file_or_pods_the_usage_is_shown(command: str) -> None:
    result = run(command)
    assert result.exit_code == 2
    assert "Usage: main " + command in result.output
    assert "give -c FILE, or --pod URL for each pod" in result.output


def test_check_prints_effective_values_and_marks_defaults() -> None:
    result = run("check", "-c", str(CONFIG / "prefix-aware.yaml"), POD_0="http://a:1", KVLANE_PORT="8123")
    assert result.exit_code == 0
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "port: 8123" in lines
    assert "maxBody: 64MiB  # default" in lines
    assert "keepAlive: 3630s  # default" in lines
    assert "interval: 250ms  # default" in lines
    assert "blockSizeTokens: 64" in lines
    assert "autoTune: true  # default" in lines
    assert result.stderr == "The configuration is good.\n"
    assert yaml.safe_load(result.stdout)["listen"]["port"] == 8123


def test_check_warns_of_a_configuration_without_pods(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("listen: {port: 8123}")
    result = run("check", "-c", str(file))
    assert result.exit_code == 0
    assert "Warning: no pods are configured" in result.stderr


def test_check_warns_of_an_open_admin_port_and_a_missing_file_of_pods(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("admin: {host: 0.0.0.0}\npods: {file: /none/pods.yaml}\n")
    result = run("check", "-c", str(file))
    assert result.exit_code == 0
    assert "Warning: admin.host: anyone who can reach 0.0.0.0 can change everything" in result.stderr
    assert "Warning: pods.file: /none/pods.yaml does not exist" in result.stderr
    file.write_text("admin: {host: 0.0.0.0, apiKey: k}\npods: {file: kvlane.yaml}\n")
    assert "admin.host" not in run("check", "-c", str(file)).stderr
    file.write_text("admin: {host: localhost}\npods: {static: [{url: http://a:1}]}\n")
    assert run("check", "-c", str(file)).stderr == "The configuration is good.\n"


def test_check_refuses_a_document_of_an_earlier_release_which_the_import_rewrites(tmp_path: Path) -> None:
    file, rewritten = tmp_path / "epp.yaml", tmp_path / "kvlane.yaml"
    file.write_text("kind: EndpointPickerConfig\nplugins: [{type: kv-cache-scorer}]\n")
    result = run("check", "-c", str(file))
    assert result.exit_code == 2
    assert "'kv-cache-scorer' was renamed to kv-cache-utilization-scorer" in result.stderr
    assert "`kvlane import endpoint-picker` rewrites it" in result.stderr
    assert run("import", "endpoint-picker", "-o", str(rewritten), str(file)).exit_code == 0
    assert run("check", "-c", str(rewritten)).exit_code == 0


def test_check_warns_of_a_section_without_its_feature_gate(tmp_path: Path) -> None:
    file = tmp_path / "epp.yaml"
    file.write_text("kind: EndpointPickerConfig\nplugins: []\nflowControl: {maxRequests: 3}\n")
    result = run("check", "-c", str(file))
    assert result.exit_code == 0
    assert "Warning: scheduling.flowControl: has no effect without" in result.stderr


def test_a_mistyped_command_gets_a_suggestion() -> None:
    result = run("serv", "--pod", "http://a:1")
    assert result.exit_code == 2
    assert "there is no command 'serv'; did you mean 'serve'?" in result.output
    assert "there is no command 'xyz'\n" in run("xyz").output


def test_check_prints_json_for_programs() -> None:
    described = json.loads(run("check", "-c", str(CONFIG / "minimal.yaml"), "--json").stdout)
    assert described["listen"]["port"] == {"value": 8000, "origin": "default"}
    assert described["pods"]["static"]["origin"] == "file"
    plugins = {plugin["name"]: plugin["origin"] for plugin in described["scheduling"]["plugins"]}
    assert plugins["latency-scorer"] == plugins["approx-prefix-cache-producer"] == "injected"


def test_check_prints_pools_and_their_faults(tmp_path: Path) -> None:
    result = run("check", "-c", str(CONFIG / "pools.yaml"))
    assert result.exit_code == 0
    large = yaml.safe_load(result.stdout)["pools"]["large"]
    assert large["flowControl"]["maxConcurrentPerPod"] == 32
    assert {plugin["type"] for plugin in large["scheduling"]["plugins"]} >= {"queue-scorer"}
    file = tmp_path / "kvlane.yaml"
    file.write_text("pools: {large: {scheduling: {plugins: [{type: queue-scorr}]}, pods: {statics: []}}}")
    result = run("check", "-c", str(file))
    assert result.exit_code == 2
    assert "pools.large.scheduling.plugins.queue-scorr: unknown plugin type 'queue-scorr'" in result.output
    assert "pools.large.pods: unknown field 'statics'; did you mean 'static'?" in result.output


def test_check_shows_no_secret(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("admin: {apiKey: topsecret}\npods: {static: [{url: http://a:1, apiKey: topsecret}]}")
    for arguments in ((), ("--json",)):
        result = run("check", "-c", str(file), *arguments)
        assert result.exit_code == 0
        assert "topsecret" not in result.output


def test_check_reports_all_faults_and_ends_with_two(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("listen: {prot: 1}\nscheduling: {plugins: [{type: queue-scorr}]}\nreplicas: {stor: x}\n")
    result = run("check", "-c", str(file))
    assert result.exit_code == 2
    assert "the configuration has 3 faults:" in result.output
    for fault in (
        "listen: unknown field 'prot'; did you mean 'port'?",
        "unknown plugin type 'queue-scorr'; did you mean 'queue-scorer'?",
        "replicas: unknown field 'stor'; did you mean 'store'?",
    ):
        assert fault in result.output
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["serve", "check"])
def test_a_file_without_its_option_is_named_with_it(command: str) -> None:
    result = run(command, "kvlane.yaml")
    assert result.exit_code == 2
    assert "Got unexpected extra argument (kvlane.yaml); use -c kvlane.yaml" in result.output


def test_a_url_without_its_option_is_named_with_it() -> None:
    result = run("serve", "--pod", "http://a:1", "http://b:1", "http://c:1")
    assert result.exit_code == 2
    assert "use --pod http://b:1 --pod http://c:1\n" in result.output


def test_the_help_of_a_group_shows_each_command_in_a_whole_sentence() -> None:
    for group in ("import", "autoscale"):
        assert "..." not in run(group, "--help").output.partition("Commands:")[2]


def test_an_empty_url_is_refused() -> None:
    result = run("drain", "pod-0", "--url", "")
    assert (result.exit_code, "is empty; write http://HOST:9190" in result.output) == (2, True)


@pytest.mark.parametrize("package", ["msgpack", "zmq"])
def test_simulated_kv_events_without_their_packages_name_the_extra(
    package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    result = run("sim", "--port", "1", "--kv-events-port", "2")
    assert result.exit_code == 2
    assert "--kv-events-port: needs the extra: " in result.output
    assert "'kvlane[precise]'" in result.output


def test_check_names_the_setting_of_a_file_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "cert.pem").write_text("no PEM")
    for name, fault in (
        ("listen: {tls: {cert: cert.pem}}", "listen.tls.cert: cert.pem holds no certificate in PEM format"),
        ("security: {apiKeysFile: none.yaml}", "security.apiKeysFile: none.yaml: cannot be read: No such file"),
        ("scheduling: {file: none.yaml}", f"scheduling.file: {tmp_path}/none.yaml: cannot be read: No such file"),
    ):
        (tmp_path / "kvlane.yaml").write_text(f"pods: {{static: [{{url: http://a:1}}]}}\n{name}\n")
        with chdir(tmp_path):
            result = run("check", "-c", str(tmp_path / "kvlane.yaml"))
        assert result.exit_code == 2
        assert fault in result.output


def test_check_reports_a_missing_file_and_an_invalid_pod() -> None:
    missing = run("check", "-c", "/none/kvlane.yaml")
    assert missing.exit_code == 2
    assert "/none/kvlane.yaml: cannot be read" in missing.output
    wrong = run("check", "--pod", "vllm-0")
    assert wrong.exit_code == 2
    assert "'vllm-0' is no URL of a pod; write http://host:port" in wrong.output


def test_plugins_describes_the_types_of_llm_d_that_become_settings() -> None:
    described = run("plugins", "core-metrics-extractor")
    assert described.exit_code == 0
    assert "become settings" in described.output
    assert "engineConfigs[].queuedRequestsSpec: text, default none" in described.output


def test_plugins_lists_every_type_and_describes_one() -> None:
    listed = [line.split()[0] for line in run("plugins").output.splitlines()]
    assert listed == [cls.plugin_type for cls in Registry.discover()]
    page = run("plugins", "load-aware-scorer").output
    assert "threshold: integer, default 128" in page
    assert json.loads(run("plugins", "load-aware-scorer", "--json").output)["type"] == "load-aware-scorer"
    unknown = run("plugins", "load-awar-scorer")
    assert unknown.exit_code == 2
    assert "did you mean 'load-aware-scorer'?" in unknown.output


def test_invalid_roles_are_refused() -> None:
    result = run("sim", "--port", "1", "--roles", "2X")
    assert result.exit_code == 2
    assert "'2X' is not of the form 2P2D" in result.output


@pytest.mark.parametrize("command", [("sim",), ("serve", "--pod", "http://127.0.0.1:1", "--admin-port", "0")])
def test_an_invalid_port_is_refused(command: tuple[str, ...]) -> None:
    result = run(*command, "--port", "70000")
    assert result.exit_code == 2
    assert "70000" in result.output


def test_simulated_pods_beyond_the_last_port_are_refused() -> None:
    result = run("sim", "--port", "65534", "--pods", "5")
    assert result.exit_code == 2
    assert "5 pods need the ports 65534 to 65538; the largest port is 65535" in result.output


STATE = {
    "scheduling": {"plugins": [{"type": "queue-scorer"}]},
    "endpoints": [{"name": "a", "metrics": {"waiting": 3}}, {"name": "b"}],
}


def test_explain_takes_the_scheduling_of_a_pool_of_a_configuration(tmp_path: Path) -> None:
    file, stated = tmp_path / "kvlane.yaml", json.dumps({key: STATE[key] for key in STATE if key != "scheduling"})
    file.write_text("pools: {large: {scheduling: {plugins: [{type: running-requests-size-scorer}]}}}")
    plain = json.loads(run("explain", "--state", "-", "-c", str(file), stdin=stated).stdout)
    of_large = json.loads(run("explain", "--state", "-", "-c", str(file), "--pool", "large", stdin=stated).stdout)
    names = [[one["name"] for one in each["profiles"]["default"]["scorers"]] for each in (plain, of_large)]
    assert "running-requests-size-scorer" not in names[0]
    assert names[1] == ["running-requests-size-scorer"]
    missing = run("explain", "--state", "-", "-c", str(file), "--pool", "huge", stdin=stated)
    assert (missing.exit_code, "there is no pool 'huge'" in missing.output) == (2, True)


def test_explain_reads_json_and_yaml_from_a_file_and_from_stdin(tmp_path: Path) -> None:
    file = tmp_path / "state.yaml"
    file.write_text(yaml.safe_dump(STATE))
    results = [run("explain", "--state", str(file)), run("explain", "--state", "-", stdin=json.dumps(STATE))]
    for result in results:
        assert result.exit_code == 0
        explained = json.loads(result.stdout)
        assert explained["decision"] == {"target": "b"}
        assert explained["profiles"]["default"]["scorers"][0]["scores"] == {"a": 0.0, "b": 1.0}


@pytest.mark.parametrize("text", ["[", "{a: 1, a: 2}", json.dumps({"endpoint": []}), "3"])
def test_explain_reports_faults_of_a_state(text: str) -> None:
    result = run("explain", "--state", "-", stdin=text)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.strip()
    assert "Traceback" not in result.stderr


def test_demo_as_json_compares_two_policies() -> None:
    result = run("demo", "--json", "--seconds", "2")
    assert result.exit_code == 0
    results = orjson.loads(result.stdout)
    assert list(results) == ["round robin", "prefix-aware"]
    for row in results.values():
        assert row["failed"] == 0
        assert row["requests"] > 10
        assert sum(row["pod_shares"].values()) == pytest.approx(1, abs=0.01)
    assert results["round robin"]["requests"] == results["prefix-aware"]["requests"]
    assert results["prefix-aware"]["hit_rate"] > results["round robin"]["hit_rate"]


def test_demo_with_ranks_compares_kvlane_with_the_engines_balancer() -> None:
    result = run("demo", "--ranks", "4", "--json", "--seconds", "2")
    assert result.exit_code == 0
    results = orjson.loads(result.stdout)
    assert list(results) == ["the engine's balancer", "kvlane"]
    for row in results.values():
        assert row["failed"] == 0
        assert list(row["rank_shares"]) == ["0", "1", "2", "3"]
    assert results["kvlane"]["hit_rate"] > results["the engine's balancer"]["hit_rate"]


def test_check_warns_of_unreachable_thresholds(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("pods: {static: [{url: http://a:1}]}\nreliability: {timeouts: {idle: 1h, request: 10m}}")
    result = run("check", "-c", str(file))
    assert result.exit_code == 0
    assert "Warning: reliability.timeouts.idle: 3600 s have no effect" in result.stderr


def test_a_key_and_its_hash_belong_together() -> None:
    key, hashed = (line.split()[1] for line in run("key").output.splitlines())
    assert hashed == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    assert run("key").output.split()[1] != key


def test_an_unknown_plugin_type_gets_a_suggestion_or_the_command_that_lists_all() -> None:
    assert "there is no plugin type 'queue-scorr'; did you mean 'queue-scorer'?" in run("plugins", "queue-scorr").stderr
    assert "there is no plugin type 'queue'; `kvlane plugins` lists all types" in run("plugins", "queue").stderr
