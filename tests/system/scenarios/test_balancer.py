"""Two proxies behind HAProxy, as the profile `ha` of docker-compose.yml has them; and the unit for systemd."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from configparser import ConfigParser
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import click
import pytest
import yaml

from proxy.app import App
from proxy.cli import main
from proxy.config.load import load
from proxy.lab.sim import SimConfig, SimFleet
from proxy.settings import Settings
from tests.helpers.ports import free_port
from tests.helpers.scenarios.stack import CHAT, running
from tests.helpers.waiting import PATIENCE

ROOT = Path(__file__).parents[3]
BALANCER = ROOT / "config" / "deploy" / "haproxy" / "haproxy.cfg"
UNIT = ROOT / "config" / "deploy" / "systemd" / "kvlane.service"
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]

with_haproxy = pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed")

QUESTION = {"model": "sim", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 4}


def local(port: int, servers: dict[str, int]) -> str:
    """The configuration, said of this machine, on which checks come often and may take their time: both proxies that
    are down at once, as a machine that stands still has it, would be HAProxy's own 503."""
    text = BALANCER.read_text().replace("bind *:8000", f"bind 127.0.0.1:{port}")
    text = text.replace("timeout connect 2s", "timeout connect 60s\n    timeout check 60s")
    for name, its in servers.items():
        text = text.replace(f" {name}:8000", f" 127.0.0.1:{its}")
    return text.replace("inter 1s", "inter 50ms")


@asynccontextmanager
async def balanced(tmp_path: Path, servers: dict[str, int]) -> AsyncIterator[str]:
    """The URL of an HAProxy before these."""
    port, file = free_port(), tmp_path / "haproxy.cfg"
    file.write_text(local(port, servers))
    balancer = await asyncio.create_subprocess_exec("haproxy", "-db", "-q", "-f", str(file))
    try:
        async with asyncio.timeout(PATIENCE):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        if balancer.returncode is None:
            balancer.terminate()
        await balancer.wait()


@with_haproxy
@pytest.mark.smoke
def test_haproxy_accepts_the_configuration(tmp_path: Path) -> None:
    file = tmp_path / "haproxy.cfg"
    file.write_text(local(free_port(), {"kvlane-a": 1, "kvlane-b": 2}))
    checked = subprocess.run(["haproxy", "-c", "-q", "-f", str(file)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    assert not checked.stderr


def test_haproxy_names_the_services_of_the_profile() -> None:
    named = re.findall(r"^    server \S+ (\S+):(\d+)$", BALANCER.read_text(), re.MULTILINE)
    profile = {name for name, one in COMPOSE.items() if one.get("profiles") == ["ha"]}
    assert {name for name, _ in named} == profile - {"redis", "haproxy"}
    assert COMPOSE["kvlane-a"] == COMPOSE["kvlane-b"]
    command = COMPOSE["kvlane-a"]["command"]
    environ = COMPOSE["kvlane-a"]["environment"]
    settings = load(ROOT / "config" / Path(command[-1]).relative_to("/etc/kvlane"), environ)
    assert {int(port) for _, port in named} == {settings.listen.port}
    assert settings.replicas.store.startswith("redis://redis:")
    assert {pod.url for pod in settings.pods.static} == {
        value for key, value in environ.items() if key.startswith("POD_")
    }


@with_haproxy
# asyncio's own loop forgets a connection, HAProxy's probe, that it accepts in the turn before its server closes.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_a_stopped_proxy_loses_no_request(tmp_path: Path) -> None:
    draining = {"reliability": {"drain": {"settle": "5s", "grace": "30s"}}}  # HAProxy's own clock goes on
    async with AsyncExitStack() as stack:
        sim = await stack.enter_async_context(SimFleet(2, SimConfig(time_scale=20)))
        first: App = await stack.enter_async_context(running(sim.urls, draining))
        leaving = AsyncExitStack()
        second: App = await leaving.enter_async_context(running(sim.urls, draining))
        stack.push_async_callback(leaving.aclose)
        url = await stack.enter_async_context(balanced(tmp_path, {"kvlane-a": first.port, "kvlane-b": second.port}))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        statuses: list[int] = []
        over = asyncio.Event()

        async def ask() -> None:
            while not over.is_set():
                async with http.post(url + CHAT, json=QUESTION) as response:
                    await response.read()
                    statuses.append(response.status)

        async with asyncio.TaskGroup() as group:
            for _ in range(4):
                group.create_task(ask())
            while len(statuses) < 20:
                await asyncio.sleep(0.01)
            await second.wait_for_balancers()
            await leaving.aclose()
            count = len(statuses)
            while len(statuses) < count + 20:
                await asyncio.sleep(0.01)
            over.set()
        assert set(statuses) == {200}
    gc.collect()


def test_the_unit_runs_an_existing_command_and_waits_for_drains() -> None:
    unit = ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    program, command, *options = unit["Service"]["ExecStart"].split()
    assert program.endswith("/kvlane")
    found = main.get_command(click.Context(main), command)
    assert found is not None
    known = {name for parameter in found.params for name in parameter.opts}
    assert {option for option in options if option.startswith("-")} <= known
    drain = Settings().reliability.drain
    assert float(unit["Service"]["TimeoutStopSec"].rstrip("s")) > drain.settle + drain.grace


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "kvlane.service"
    file.write_text(UNIT.read_text().replace("/opt/kvlane/bin/kvlane", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert str(file) not in checked.stderr
    assert "kvlane.service:" not in checked.stderr
    assert checked.returncode == 0, checked.stderr
