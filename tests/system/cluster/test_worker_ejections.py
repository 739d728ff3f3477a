"""What one worker has against a pod, all of a host have; and they try it together."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from proxy.cluster.supervisor import Supervisor
from proxy.settings import from_mapping
from tests.helpers.cluster.host import CHAT, UNHURRIED, state, until_workers_show
from tests.helpers.http.support import Pod, Received, plain
from tests.helpers.scenarios.stack import BY_LOAD
from tests.helpers.waiting import until


class Engine:
    """Responds, or fails, or holds its responses back."""

    def __init__(self) -> None:
        self.is_ill = False
        self.is_unwell = False
        self.requests = 0
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.pod = Pod(self._script)

    async def _script(self, request: Received) -> None:
        await request.body()
        path = request.line.split()[1].decode()
        if path.startswith("/v1/chat"):
            self.requests += 1
            await self.go_on.wait()
            await request.send(plain().replace(b"200 OK", b"500 Internal Server Error" if self.is_ill else b"200 OK"))
        elif path == "/v1/models":
            await request.send(plain(json.dumps({"data": [{"id": "m"}]}).encode()))
        elif path == "/health":
            await request.send(plain().replace(b"200 OK", b"503 Unwell" if self.is_unwell else b"200 OK"))
        else:
            await request.send(plain(b"vllm:num_requests_running 0\nvllm:num_requests_waiting 0\n"))


class World:
    def __init__(self, supervisor: Supervisor, engines: list[Engine], given: Mapping[str, Any]) -> None:
        self.supervisor, self.engines, self._given = supervisor, engines, given

    async def reload(self, **reliability: Any) -> None:
        given = {**self._given, "reliability": {**self._given["reliability"], **reliability}}
        await self.supervisor.reload(from_mapping(given))

    async def ask(self) -> str:
        """Over a new connection, so that any worker may get it; the name of the pod that responded."""
        url = f"http://127.0.0.1:{self.supervisor.port}{CHAT}"
        body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}]}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            await response.read()
            return response.headers.get("x-kvlane-endpoint", "")

    async def ask_all(self, number: int = 30) -> set[str]:
        """One after the other, so that workers exchange updates in between."""
        return {await self.ask() for _ in range(number)}

    def breaker(self) -> str:
        return self.supervisor._breakers.state(self.supervisor.fleet.endpoints[0])

    def ejection_reasons(self) -> list[str]:
        return list(self.supervisor.fleet.ejection_reasons(self.supervisor.fleet.endpoints[0]))


@asynccontextmanager
async def world(**reliability: Any) -> AsyncIterator[World]:
    engines = [Engine(), Engine(), Engine()]
    async with engines[0].pod as a, engines[1].pod as b, engines[2].pod as c:
        static = [{"url": pod.endpoint.url, "name": f"pod-{index}"} for index, pod in enumerate((a, b, c))]
        given = {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "pods": {"static": static},
            "telemetry": {"accessLog": False, "logLevel": "error"},
            "reliability": {**UNHURRIED, **reliability},
            **BY_LOAD,
        }
        async with Supervisor(from_mapping(given), 2) as supervisor:
            await until(lambda: len(supervisor.fleet.ready) == 3)
            yield World(supervisor, engines, given)


async def test_a_breaker_that_one_worker_opens_is_open_in_all_workers() -> None:
    async with world(breaker={"failures": 3, "open": "1h"}) as w:
        ill = w.engines[0]
        ill.is_ill = True
        while w.breaker() == "closed":
            await w.ask()
        await until_workers_show(w.supervisor, lambda lines: breaker("open") in lines)
        before = ill.requests
        assert await w.ask_all() == {"pod-1", "pod-2"}
        assert ill.requests == before


async def test_one_trial_request_at_a_time_over_all_workers() -> None:
    async with world(breaker={"failures": 3, "open": "100ms", "slowStart": 0}) as w:
        ill = w.engines[0]
        ill.is_ill = True
        while w.breaker() == "closed":
            await w.ask()
        await until_workers_show(w.supervisor, lambda lines: breaker("closed") not in lines)
        ill.is_ill = False
        ill.go_on.clear()
        await w.reload(breaker={"failures": 3, "open": "1h", "slowStart": 0})  # for workers that wait for a trial
        await until_workers_show(w.supervisor, lambda lines: breaker("half-open") in lines)
        before = ill.requests
        trial = [asyncio.ensure_future(_later(w, number * 0.03)) for number in range(40)]
        await until(lambda: ill.requests > before)
        await until(lambda: sum(one.done() for one in trial) >= 39)
        assert ill.requests == before + 1
        ill.go_on.set()
        assert "pod-0" in await asyncio.gather(*trial)
        await until(lambda: w.breaker() == "closed" and not w.ejection_reasons())
        await until_workers_show(w.supervisor, lambda lines: {breaker("closed"), state("pod-0", "ready")} <= lines)
        assert "pod-0" in await w.ask_all()


async def test_all_workers_know_the_ejections_of_the_supervisor() -> None:
    async with world(health={"interval": "50ms", "timeout": "30s"}, breaker={"slowStart": 0}) as w:
        w.engines[0].is_unwell = True
        await until(lambda: bool(w.ejection_reasons()))
        await until_workers_show(w.supervisor, lambda lines: state("pod-0", "ready") not in lines)
        assert await w.ask_all() == {"pod-1", "pod-2"}
        w.engines[0].is_unwell = False
        await until(lambda: not w.ejection_reasons())
        await until_workers_show(w.supervisor, lambda lines: state("pod-0", "ready") in lines)
        assert "pod-0" in await w.ask_all()


async def test_a_worker_that_starts_later_knows_the_ejections_of_the_supervisor() -> None:
    async with world(health={"interval": "50ms", "timeout": "30s"}) as w:
        w.engines[0].is_unwell = True
        await until(lambda: bool(w.ejection_reasons()))
        killed = w.supervisor.pids[0]
        os.kill(killed, signal.SIGKILL)
        await until(lambda: killed not in w.supervisor.pids and w.supervisor.workers_serving == 2)
        await until_workers_show(w.supervisor, lambda lines: state("pod-0", "ready") not in lines)
        assert await w.ask_all() == {"pod-1", "pod-2"}


def breaker(state: str) -> str:
    """The line that says it of the first pod."""
    return f'kvlane_endpoint_breaker_state{{endpoint="pod-0",state="{state}"}} 1.0'


async def _later(w: World, seconds: float) -> str:
    await asyncio.sleep(seconds)
    return await w.ask()
