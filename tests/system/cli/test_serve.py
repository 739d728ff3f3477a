"""`kvlane serve` and `kvlane sim` as processes: they start, they stop, and they report errors."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.cli.kvlane import Kvlane, ask, kvlane, until_ready
from tests.helpers.ports import free_port

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def pods() -> Iterator[list[str]]:
    """Two simulated pods in one process."""
    port = free_port(2)
    with kvlane("sim", "--port", str(port), "--pods", "2", "--lora", "poems", "--time-scale", "2") as sim:
        urls = [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
        for url in urls:
            until_ready(url + "/health", sim)
        yield urls
        sim.signal(signal.SIGINT)
        assert sim.ended() == 0
        assert sim.output == f"2 simulated pods of model 'sim' on 127.0.0.1, port {port} to {port + 1}\n"
        assert sim.errors == ""


@dataclass(frozen=True)
class Serving:
    process: Kvlane
    url: str
    admin: str


@pytest.fixture
def serving(pods: list[str]) -> Iterator[Serving]:
    data, admin = free_port(), free_port()
    ports = ["--host", "127.0.0.1", "--port", str(data), "--admin-port", str(admin)]
    with kvlane("serve", *(word for url in pods for word in ("--pod", url)), *ports) as process:
        serving = Serving(process, f"http://127.0.0.1:{data}", f"http://127.0.0.1:{admin}")
        until_ready(serving.url + "/health", process)
        yield serving


def test_sim_serves_its_model_and_its_adapters(pods: list[str]) -> None:
    _, body = ask(pods[1] + "/v1/models")
    assert [card["id"] for card in json.loads(body)["data"]] == ["sim", "poems"]


def test_sim_pods_alternate_between_the_named_gpus() -> None:
    port = free_port(2)
    gpus = ("--gpu", "generic-8b", "--gpu", "h100-tp4-llama-3.3-70b")
    with kvlane("sim", "--port", str(port), "--pods", "2", *gpus, "--slow-pod", "3", "--noise", "0.1") as sim:
        for at, blocks in enumerate((25_625, 28_125)):
            until_ready(f"http://127.0.0.1:{port + at}/health", sim)
            assert f'num_gpu_blocks="{blocks}"'.encode() in ask(f"http://127.0.0.1:{port + at}/metrics")[1]


def test_sim_pods_have_roles_and_transfer_prompts() -> None:
    port = free_port(2)
    body = {"model": "sim", "prompt": "Hello!", "max_tokens": 1}
    with kvlane("sim", "--port", str(port), "--roles", "PD", "--time-scale", "2") as sim:
        prefill, decode = (f"http://127.0.0.1:{port + at}" for at in range(2))
        for url in (prefill, decode):
            until_ready(url + "/health", sim)
        _, reply = ask(prefill + "/v1/completions", {**body, "kv_transfer_params": {"do_remote_decode": True}})
        params = json.loads(reply)["kv_transfer_params"]
        assert ask(decode + "/v1/completions", {**body, "kv_transfer_params": params})[0] == 200
        assert b'source="external_kv_transfer"} 2.0' in ask(decode + "/metrics")[1]
        sim.signal(signal.SIGINT)
        assert sim.ended() == 0
        assert sim.output.endswith(f"port {port} to {port + 1}: prefill, decode\n")


def test_pods_on_the_command_line_are_sufficient(serving: Serving, pods: list[str]) -> None:
    status, body = ask(serving.url + "/v1/chat/completions", CHAT)
    assert (status, len(json.loads(body)["choices"])) == (200, 1)
    _, listed = ask(serving.admin + "/admin/pods")
    assert [pod["url"] for pod in json.loads(listed)["pods"]] == pods
    serving.process.signal(signal.SIGINT)
    assert serving.process.ended() == 0
    access = [json.loads(line) for line in serving.process.output.splitlines()]
    assert [line["status"] for line in access if line["path"] == "/v1/chat/completions"] == [200]
    assert "Hello!" not in serving.process.output + serving.process.errors


def test_a_port_that_is_in_use_is_reported_and_not_served(pods: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for ports in (["--port", port, "--admin-port", "0"], ["--port", "0", "--admin-port", port]):
            with kvlane("serve", "--pod", pods[0], "--host", "127.0.0.1", *ports) as process:
                assert process.ended() == 1
                assert f"Error: cannot listen: error while attempting to bind on address ('127.0.0.1', {port})" in (
                    process.errors
                )
                assert "Traceback" not in process.errors


def test_all_ports_that_are_in_use_are_named(pods: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        data, admin = (str(each.getsockname()[1]) for each in (one, other))
        with kvlane(
            *("serve", "--pod", pods[0], "--host", "127.0.0.1", "--port", data, "--admin-port", admin)
        ) as process:
            assert process.ended() == 1
            assert f"Error: cannot listen: listen.port {data} and admin.port {admin} are in use" in process.errors


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize(
    ("listen", "message"),
    [
        ({"host": "no-such-host.invalid"}, "Error: cannot listen: "),
        ({"host": "192.0.2.1"}, "this machine has no such address; choose another one with --host"),
        (
            {"host": "127.0.0.1", "tls": {"cert": "none.pem", "key": "none.pem"}},
            "cannot start: listen.tls.cert: none.pem cannot",
        ),
        (
            {"host": "127.0.0.1", "tls": {"cert": "bad.pem", "key": "bad.pem"}},
            "cannot start: listen.tls.cert: bad.pem holds",
        ),
    ],
)
def test_what_prevents_a_start_is_reported_in_one_line(
    tmp_path: Path, listen: dict[str, object], message: str, workers: str
) -> None:
    (tmp_path / "bad.pem").write_text("no PEM")
    settings = {"listen": {"port": 0, "maxConnections": 10, **listen}, "admin": {"port": 0}}
    pods = {"static": [{"url": "http://127.0.0.1:9"}]}
    (tmp_path / "kvlane.yaml").write_text(json.dumps({**settings, "pods": pods}))
    with kvlane("serve", "-c", "kvlane.yaml", "--workers", workers, cwd=tmp_path) as process:
        assert process.ended() == 1
        assert message in process.errors
        assert str(listen["host"]) in process.errors or "tls" in listen
        assert len(process.errors.splitlines()) == 1


def test_sim_reports_a_port_that_is_in_use(pods: list[str]) -> None:
    with kvlane("sim", "--port", pods[0].rpartition(":")[2]) as process:
        assert process.ended() == 1
        assert process.errors.startswith("Error: cannot listen: ")
        assert "Traceback" not in process.errors


@pytest.mark.smoke
def test_options_override_the_file(pods: list[str], tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text(
        "listen: {host: 127.0.0.1, port: 1}\nadmin: {port: 0}\npods: {static: [{url: '${POD}', name: mine}]}\n"
        "telemetry: {accessLog: false, logFormat: json}\nreliability: {drain: {settle: 0s}}\n"
    )
    port = free_port()
    with kvlane("serve", "-c", str(file), "--port", str(port), POD=pods[0]) as process:
        until_ready(f"http://127.0.0.1:{port}/health", process)
        assert ask(f"http://127.0.0.1:{port}/v1/chat/completions", CHAT)[0] == 200
        process.signal(signal.SIGTERM)
        assert process.ended() == 0
        assert process.output == ""
        assert all(json.loads(line) for line in process.errors.splitlines())


def test_a_setting_without_effect_is_reported_at_the_start(pods: list[str], tmp_path: Path) -> None:
    file, data = tmp_path / "epp.yaml", free_port()
    file.write_text("kind: EndpointPickerConfig\nflowControl: {maxRequests: 3}\n")
    ports = ["--host", "127.0.0.1", "--port", str(data), "--admin-port", "0", "--pod", pods[0]]
    with kvlane("serve", "-c", str(file), *ports) as process:
        until_ready(f"http://127.0.0.1:{data}/health", process)
        process.signal(signal.SIGINT)
        assert process.ended() == 0
    assert "scheduling.flowControl: has no effect without 'featureGates: [flowControl]': maxRequests" in process.errors


def test_a_file_with_faults_is_not_served(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text("listn: {}\npods: {static: [{ulr: http://a:1}]}")
    with kvlane("serve", "-c", str(file)) as process:
        assert process.ended() == 2
        assert process.errors.splitlines() == [
            "Error: the configuration has 3 faults:",
            "  unknown field 'listn'; did you mean 'listen'?",
            "  pods.static[0]: unknown field 'ulr'; did you mean 'url'?",
            "  pods.static[0].url: is required",
        ]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_an_unreadable_referenced_file_prevents_the_start(tmp_path: Path, workers: str) -> None:
    file = tmp_path / "kvlane.yaml"
    file.write_text(
        "listen: {port: 0, maxConnections: 10}\nadmin: {port: 0}\npods: {static: [{url: http://127.0.0.1:9}]}\n"
        "security: {apiKeysFile: /nowhere/keys.yaml}\n"
    )
    with kvlane("serve", "-c", str(file), "--workers", workers) as process:
        assert process.ended() == 2
        assert process.errors.splitlines() == [
            "Error: the configuration has a fault:",
            "  security.apiKeysFile: /nowhere/keys.yaml: cannot be read: No such file or directory",
        ]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_the_pause_signal_without_scaling_policies_ends_no_process(pods: list[str], workers: str) -> None:
    data = free_port()
    ports = ["--host", "127.0.0.1", "--port", str(data), "--admin-port", "0", "--pod", pods[0]]
    with kvlane("serve", *ports, "--workers", workers) as process:
        until_ready(f"http://127.0.0.1:{data}/health", process)
        process.signal(signal.SIGUSR1)
        until_ready(f"http://127.0.0.1:{data}/health", process)
        process.signal(signal.SIGINT)
        assert process.ended() == 0
    assert "ignored SIGUSR1" in process.errors


OPTIONAL = """
    proxy.auth.limits proxy.autoscale.distribution proxy.autoscale.scaled_pool proxy.cluster.replica
    proxy.cluster.supervisor proxy.disagg.connector proxy.disagg.transfer proxy.extproc.addresses proxy.extproc.server
    proxy.fleet.discovery.dns proxy.fleet.discovery.file proxy.fleet.warmup proxy.flowcontrol.controller
    proxy.kubernetes.api proxy.models.cluster proxy.reliability.hedging proxy.telemetry.recorder proxy.telemetry.traces
"""

MOST_MODULES = 220
"""Modules of kvlane that one static pod may need."""

BUILD = """
import sys
from proxy.cli.serve import app_of
from proxy.settings import from_mapping

app_of(from_mapping({"pods": {"static": [{"url": "http://127.0.0.1:9"}]}}))
print(*sys.modules)
"""


def test_a_proxy_imports_no_modules_of_sections_that_its_configuration_does_not_have() -> None:
    built = subprocess.run([sys.executable, "-c", BUILD], check=True, capture_output=True, text=True)
    imported = built.stdout.split()
    assert "proxy.gateway" in imported
    assert not set(OPTIONAL.split()) & set(imported)
    assert sum(name.partition(".")[0] == "proxy" for name in imported) <= MOST_MODULES
