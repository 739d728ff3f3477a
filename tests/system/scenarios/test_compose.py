"""The commands and the environment of docker-compose.yml, run as processes on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, Any] = COMPOSE["services"]
DEBIAN = "docker-compose is not installed; in Debian it is the package docker-compose"


class Stack:
    """Services as processes; every port of a container is a free port of this machine."""

    def __init__(self, environ: Mapping[str, str], stand_ins: Mapping[str, str]) -> None:
        """`stand_ins` are services in place of others."""
        self._environ = environ
        self._stand_ins = stand_ins
        self._ports: dict[tuple[str, int], int] = {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Stack:
        """With the configurations of the containers, on loopback."""
        self._config = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        for file in (ROOT / "config").glob("*.yaml"):
            (self._config / file.name).write_text(file.read_text().replace("0.0.0.0", "127.0.0.1"))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def port(self, service: str, port: int) -> int:
        service = self._stand_ins.get(service, service)
        if (service, port) not in self._ports:
            self._ports[service, port] = free_port()
        return self._ports[service, port]

    def start(self, service: str, command: list[str], ports: list[str]) -> None:
        """`ports` are further arguments, for what the command line leaves at its default."""
        given = {name: self.local(str(value)) for name, value in SERVICES[service].get("environment", {}).items()}
        process = subprocess.Popen(
            [sys.executable, "-m", "proxy", *map(self.local, command), *ports],
            env={**os.environ, "PYTHONPATH": str(ROOT), **given},
            stdout=subprocess.DEVNULL,
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.terminate)

    def simulate(self, service: str) -> None:
        command = SERVICES[service]["command"]
        at = command.index("--port") + 1
        self.start(service, [*command[:at], str(self.port(service, int(command[at]))), *command[at + 1 :]], [])

    def serve(self, service: str) -> None:
        data, admin = self.port(service, 8000), self.port(service, 9190)
        self.start(
            service,
            SERVICES[service]["command"],
            ["--host", "127.0.0.1", "--port", str(data), "--admin-port", str(admin)],
        )

    def local(self, text: str) -> str:
        """As the text reads in the container, said of this machine."""
        text = re.sub(r"\$\{(\w+):-([^}]*)\}", lambda match: self._environ.get(match[1], match[2]), text)
        text = text.replace("0.0.0.0", "127.0.0.1").replace("/etc/kvlane", str(self._config))
        return re.sub(r"http://([a-z0-9-]+):(\d+)", self._address, text)

    def _address(self, match: re.Match[str]) -> str:
        service, port = match[1], int(match[2])
        return f"http://127.0.0.1:{self.port(service, port)}" if service in SERVICES else match[0]

    def healthy(self, service: str, test: list[str], port: int) -> None:
        """Runs a health check as the container would, until it succeeds."""
        assert test[0] == "python"
        command = [sys.executable, *(part.replace(f":{port}/", f":{self.port(service, port)}/") for part in test[1:])]
        end = time.monotonic() + PATIENCE
        while not self._listens(service, port) or subprocess.run(command, capture_output=True, check=False).returncode:
            assert time.monotonic() < end, f"{service} is not healthy"
            time.sleep(0.05)

    def _listens(self, service: str, port: int) -> bool:
        """Costs less than a health check, which starts an interpreter."""
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port(service, port))) == 0

    def ask(self, service: str, port: int, path: str, body: Any = None, key: str = "") -> tuple[int, str]:
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        url = f"http://127.0.0.1:{self.port(service, port)}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=PATIENCE) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()


def image_health_check() -> list[str]:
    """The command of the image's HEALTHCHECK."""
    found = re.search(r"^HEALTHCHECK.*?CMD (\[.*?\])$", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    command: list[str] = json.loads(found[1])
    return command


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """Both profiles; simulated pods stand in for the real ones."""
    environ = {"KVLANE_ADMIN_KEY": "key of this test"}
    with Stack(environ, {"vllm-0": "sim-0", "vllm-1": "sim-1"}) as stack:
        pods = [name for name in SERVICES if name.startswith("sim-")]
        for name in pods:
            stack.simulate(name)
        for name in pods:
            stack.healthy(name, SERVICES[name]["healthcheck"]["test"][1:], 8000)
        for name in ("kvlane", "kvlane-vllm"):
            stack.serve(name)
        for name in ("kvlane", "kvlane-vllm"):
            stack.healthy(name, image_health_check(), 9190)
        yield stack


CHAT = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


def test_the_default_stack_responds_through_every_pod(running: Stack) -> None:
    status, body = running.ask("kvlane", 8000, "/v1/chat/completions", CHAT)
    assert status == 200, body
    assert json.loads(body)["choices"]
    status, body = running.ask("kvlane", 9190, "/admin/pods", key="key of this test")
    assert [pod["state"] for pod in json.loads(body)["pods"]] == ["ready"] * 4


def test_the_default_stack_opens_metrics_to_all_and_the_rest_to_the_key(running: Stack) -> None:
    status, metrics = running.ask("kvlane", 9190, "/metrics")
    assert status == 200
    assert '\nkvlane_pool_ready_endpoints{pool="default"} 4.0\n' in metrics
    assert running.ask("kvlane", 9190, "/healthz")[0] == 200
    assert running.ask("kvlane", 9190, "/readyz")[0] == 200
    assert running.ask("kvlane", 9190, "/admin/pods")[0] == 401
    assert running.ask("kvlane", 9190, "/admin/config", key="change-me")[0] == 401


def test_the_stack_of_real_pods_resolves_their_names(running: Stack) -> None:
    assert {name for name, one in SERVICES.items() if one.get("profiles") == ["vllm"]} == {
        "kvlane-vllm",
        "vllm-0",
        "vllm-1",
    }
    assert running.ask("kvlane-vllm", 8000, "/v1/chat/completions", CHAT)[0] == 200
    assert '\nkvlane_pool_ready_endpoints{pool="default"} 2.0\n' in running.ask("kvlane-vllm", 9190, "/metrics")[1]


def test_mounted_files_exist_and_name_the_services() -> None:
    mounted = [volume for one in SERVICES.values() for volume in one.get("volumes", []) if volume.startswith("./")]
    assert len(mounted) == 4
    for volume in mounted:
        assert (ROOT / volume.split(":")[0]).exists(), volume
    deploy = ROOT / "config" / "deploy"
    scraped = yaml.safe_load((deploy / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    assert [target for job in scraped for one in job["static_configs"] for target in one["targets"]] == ["kvlane:9190"]
    provisioning = deploy / "grafana" / "provisioning"
    (source,) = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards" / "kvlane.yml").read_text())["providers"]
    folder = next(volume for volume in mounted if provider["options"]["path"] in volume).split(":")[0]
    assert json.loads((ROOT / folder / "kvlane.json").read_text())["panels"]


@pytest.mark.skipif(shutil.which("docker-compose") is None, reason=DEBIAN)
def test_docker_compose_accepts_both_profiles() -> None:
    command = ["docker-compose", "--file", str(ROOT / "docker-compose.yml"), "--profile", "vllm", "config", "--quiet"]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
