"""The whole proxy starts and stops pods that are processes, under load, and no request notices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from proxy.app import App
from proxy.settings import from_mapping
from tests.helpers.scenarios import scale_pods
from tests.helpers.waiting import PATIENCE, until

ACTUATOR = Path(scale_pods.__file__)

POLICY: dict[str, Any] = {
    "mode": "active",
    "settle": "0s",
    "behavior": {
        "scaleUp": {"select": "none"},
        "scaleDown": {"select": "none", "stabilization": "0s"},
        "panic": {"hold": "0s"},
    },
    "roles": [
        {
            "name": "both",
            "min": 1,
            "max": 3,
            "metrics": [{"name": "requests_in_flight", "kind": "avg", "target": 4}],
        }
    ],
}


@dataclass
class Rig:
    app: App
    http: aiohttp.ClientSession
    directory: Path
    actuator: dict[str, Any]
    responses: list[dict[str, Any]] = field(default_factory=list)

    async def ask(self, tokens: int) -> None:
        """One stream, to its end; what came of it is in `answers`, unless it is cancelled."""
        body = {"model": "sim", "prompt": "Tell me more.", "max_tokens": tokens, "stream": True, "ignore_eos": True}
        found: dict[str, Any] = {"wanted": tokens, "got": 0, "done": False}
        self.responses.append(found)
        try:
            async with self.http.post(f"http://127.0.0.1:{self.app.port}/v1/completions", json=body) as response:
                found["status"] = response.status
                async for line in response.content:
                    if line.startswith(b"data: [DONE]"):
                        found["done"] = True
                    elif line.startswith(b"data: "):
                        found["got"] += bool(json.loads(line[6:]).get("choices"))
        except asyncio.CancelledError:
            self.responses.remove(found)
            raise

    async def autoscale(self, path: str = "", body: Any = None) -> Any:
        url = f"http://127.0.0.1:{self.app.admin_port}/autoscale/pools/default{path}"
        async with self.http.request("GET" if body is None else "POST", url, json=body) as response:
            return await response.json()

    @property
    def ready(self) -> int:
        return len(self.app.fleet.ready)

    @property
    def log(self) -> list[str]:
        return (self.directory / "log").read_text().splitlines()

    @property
    def stopped(self) -> int:
        return sum(line.startswith("stop") for line in self.log)


@asynccontextmanager
async def rig(directory: Path, **policy: Any) -> AsyncIterator[Rig]:
    (directory / "pods.yaml").write_text("[]")
    command = [sys.executable, str(ACTUATOR), str(directory), "both", "1", ""]
    await asyncio.to_thread(subprocess.run, command, check=True)
    actuator = {
        "type": "exec",
        "command": [sys.executable, str(ACTUATOR), str(directory), "{role}", "{desired}", "{victims}"],
        "upInterval": "0s",
        "downInterval": "0s",
        "timeout": "60s",
    }
    settings = from_mapping(
        {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "pods": {"file": str(directory / "pods.yaml"), "refresh": {"interval": "100ms"}},
            "telemetry": {"accessLog": False},
            "scheduling": {
                "plugins": [{"type": "active-request-scorer"}],
                "schedulingProfiles": [{"name": "default", "plugins": [{"pluginRef": "active-request-scorer"}]}],
            },
            "reliability": {"retries": {"attempts": 1}},
            "autoscale": {"interval": "200ms", "pools": {"default": {**POLICY, "actuator": actuator, **policy}}},
        }
    )
    try:
        async with App(settings) as app, aiohttp.ClientSession() as http:
            found = Rig(app, http, directory, actuator)
            await until(lambda: found.ready == 1)
            yield found
    finally:
        for line in (directory / "log").read_text().splitlines():
            what, pid = line.split()
            if what == "start":
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)


async def keep_sending(rig: Rig, tokens: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        await rig.ask(tokens)


async def test_pods_are_added_under_load_and_removed_after_it_without_losing_a_request(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        over = asyncio.Event()
        drained: list[str] = []
        async with asyncio.TaskGroup() as clients:
            crowd = [clients.create_task(keep_sending(it, 4000, over)) for _ in range(12)]
            await until(lambda: it.ready == 3)
            for _ in range(4):  # some on each pod, and no more than one of them is for
                clients.create_task(keep_sending(it, 1000, over))
            await until(lambda: all(pod.load.requests for pod in it.app.fleet.endpoints))
            for client in crowd:
                client.cancel()

            async def watch() -> None:
                while it.stopped < 2:
                    drain = (await it.autoscale())["roles"]["both"]["drain"]
                    drained.extend(one["name"] for one in drain if one["inflight"])
                    if drained:
                        over.set()
                    await asyncio.sleep(0.05)
                over.set()

            clients.create_task(watch())
        await until(lambda: len(it.app.fleet.endpoints) == 1)
        assert len(it.responses) >= 4
        bad = [one for one in it.responses if one["status"] != 200 or not one["done"] or one["got"] < one["wanted"]]
        assert bad == []
        assert drained, "a pod was drained while it had requests"
        assert [line.split()[0] for line in it.log] == ["start"] * 3 + ["stop"] * 2
        latest = await it.autoscale()
        assert (latest["valid"], latest["roles"]["both"]["desired"]) == (True, 1)


async def test_demand_that_returns_ends_a_drain(tmp_path: Path) -> None:
    async with rig(tmp_path, mode="active") as it:
        await it.autoscale("/override", {"roles": {"both": 2}, "ttl": "1m"})
        await until(lambda: it.ready == 2)
        async with asyncio.TaskGroup() as clients:
            for _ in range(4):
                clients.create_task(it.ask(1000))
            await until(lambda: all(pod.load.requests for pod in it.app.fleet.endpoints))
            await it.autoscale("/override", {"roles": {"both": 1}, "ttl": "1m"})
            await until(lambda: it.ready == 1)
            await it.autoscale("/override", {"roles": {"both": 2}, "ttl": "1m"})
            await until(lambda: it.ready == 2)
        assert it.stopped == 0
        assert all(one["done"] and one["status"] == 200 for one in it.responses)


async def test_the_admin_port_accepts_no_actuator_command(tmp_path: Path) -> None:
    async with rig(tmp_path) as it:
        url = f"http://127.0.0.1:{it.app.admin_port}/admin/config"
        pods = {"file": str(tmp_path / "pods.yaml")}
        actuator = {"type": "exec", "command": ["touch", str(tmp_path / "run")]}
        settings = {"pods": pods, "autoscale": {"pools": {"default": {**POLICY, "actuator": actuator}}}}
        for query in ("", "?dry_run=1"):
            async with it.http.post(url + query, json=settings) as response:
                (problem,) = (await response.json())["error"]["problems"]
                assert (response.status, problem["path"]) == (400, "autoscale.pools.default.actuator")
        settings["autoscale"] = {"pools": {"default": {**POLICY, "actuator": it.actuator, "mode": "dry_run"}}}
        async with it.http.post(url, json=settings) as response:
            assert response.status == 200, await response.text()
        await until(lambda: it.app.autoscaling.pools["default"].settings.mode == "dry_run")


async def test_a_dry_run_scales_nothing(tmp_path: Path) -> None:
    async with rig(tmp_path, mode="dry_run") as it:
        await it.autoscale("/override", {"roles": {"both": 3}, "ttl": "1m"})
        async with asyncio.timeout(PATIENCE):
            while (await it.autoscale())["outcomes"] != {"both": "dry_run"}:
                await asyncio.sleep(0.05)
        assert len(it.log) == 1
