"""`kvlane serve --workers N`, as an operator runs and ends it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from proxy.lab.sim import SimConfig, SimFleet
from proxy.lab.sim.config import StepTiming
from tests.helpers.cluster.host import CHAT, held, question
from tests.helpers.waiting import PATIENCE, until

SLOW = SimConfig(timing=StepTiming(base=0.05))


class Served:
    """A running command and what it logs."""

    def __init__(self, process: Process) -> None:
        self.process = process
        self.log: list[str] = []
        self.lines: list[bytes] = []

    async def read_log(self) -> None:
        assert self.process.stderr is not None
        async for line in self.process.stderr:
            self.log.append(line.decode())

    async def read_lines(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.lines.append(line)

    def says(self, text: str) -> bool:
        return any(text in line for line in self.log)

    @property
    def url(self) -> str:
        found = re.search(r"serving on [\d.]+:(\d+) ", "".join(self.log))
        assert found
        return f"http://127.0.0.1:{found[1]}"

    @property
    def workers(self) -> set[int]:
        """Pids of the children that live."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return {int(pid) for pid in children.split()}


@asynccontextmanager
async def serving(config: Path, workers: int = 2) -> AsyncIterator[Served]:
    command = (sys.executable, "-m", "proxy", "serve", "-c", str(config), "--workers", str(workers))
    process = await asyncio.create_subprocess_exec(*command, stdout=PIPE, stderr=PIPE)
    served = Served(process)
    readers = [asyncio.create_task(served.read_log()), asyncio.create_task(served.read_lines())]
    try:
        await until(lambda: served.says("serving on") or process.returncode is not None)
        yield served
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await asyncio.gather(*readers)


@pytest.fixture
async def sim() -> AsyncIterator[SimFleet]:
    async with SimFleet(2, SLOW) as fleet:
        yield fleet


@pytest.fixture
def config(sim: SimFleet, tmp_path: Path) -> Path:
    path = tmp_path / "kvlane.yaml"
    given = {
        "listen": {"host": "127.0.0.1", "port": 0},
        "admin": {"port": 0},
        "pods": {"static": [{"url": url} for url in sim.urls]},
        "reliability": {"drain": {"settle": 0}},
    }
    path.write_text(yaml.safe_dump(given))
    return path


def rewrite(config: Path, **sections: Any) -> None:
    """With these sections in place of those it has; `listen2` does not stay."""
    given = yaml.safe_load(config.read_text())
    given.pop("listen2", None)
    config.write_text(yaml.safe_dump({**given, **sections}))


async def response_to(url: str, tokens: int, stream: bool = True, model: str = "sim") -> bytes:
    body = {**question("Hello", tokens, stream), "model": model}
    async with aiohttp.ClientSession() as session, session.post(url + CHAT, json=body) as response:
        response.raise_for_status()
        return await response.read()


async def begun(sim: SimFleet, count: int) -> None:
    """Until so many requests have reached the pods and run."""
    await until(lambda: sum(len(pod.requests.open) for pod in sim.pods) == count)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # before, or while it is read
        return False


async def test_sigterm_drains_every_worker_and_every_request_is_logged(config: Path, sim: SimFleet) -> None:
    async with serving(config) as served:
        short = await asyncio.gather(*(response_to(served.url, 1) for _ in range(20)))
        running = [asyncio.create_task(response_to(served.url, 20)) for _ in range(6)]
        await begun(sim, 6)
        served.process.send_signal(signal.SIGTERM)
        streams = await asyncio.gather(*running)
        assert all(stream.endswith(b"data: [DONE]\n\n") for stream in (*short, *streams))
        assert await asyncio.wait_for(served.process.wait(), PATIENCE) == 0
    assert len(served.lines) == 26
    assert all(line.startswith(b'{"time"') and line.endswith(b"}\n") for line in served.lines)


async def test_sighup_reloads_and_a_faulty_file_changes_nothing(config: Path, sim: SimFleet) -> None:
    async with serving(config) as served:
        before = served.workers
        rewrite(config, reliability={"retries": {"attempts": "none"}}, listen2={})
        served.process.send_signal(signal.SIGHUP)
        await until(lambda: served.says("not reloaded"))
        await until(lambda: served.says("reliability.retries.attempts") and served.says("listen2"))
        assert served.workers == before
        rewrite(config, reliability={"retries": {"attempts": 2}})
        running = asyncio.create_task(response_to(served.url, 30))
        await begun(sim, 1)
        served.process.send_signal(signal.SIGHUP)
        await until(lambda: served.says("reloaded: 2 workers"))
        assert (await running).endswith(b"data: [DONE]\n\n")
        assert served.workers == before
        await response_to(served.url, 1)


async def test_a_worker_that_gets_sigterm_finishes_its_requests_while_its_successor_serves(config: Path) -> None:
    async with SimFleet(2, [SLOW, replace(SLOW, model="slow")]) as sim:
        rewrite(config, pods={"static": [{"url": url} for url in sim.urls]})
        async with serving(config, workers=2) as served:
            before = served.workers
            async with held(sim.pods[1:]):
                running = [asyncio.create_task(response_to(served.url, 20, model="slow")) for _ in range(8)]
                await begun(sim, 8)
                os.kill(min(before), signal.SIGTERM)
                await until(lambda: served.says("ends on its own") and len(served.workers - before) == 1)
                short = await asyncio.gather(*(response_to(served.url, 1) for _ in range(12)))
                assert not any(task.done() for task in running)
            streams = await asyncio.gather(*running)
            assert all(stream.endswith(b"data: [DONE]\n\n") for stream in (*short, *streams))


async def test_workers_without_a_supervisor_finish_their_requests_and_exit(config: Path, sim: SimFleet) -> None:
    async with serving(config) as served:
        workers = served.workers
        assert len(workers) == 2
        running = [asyncio.create_task(response_to(served.url, 40)) for _ in range(4)]
        await begun(sim, 4)
        os.kill(served.process.pid, signal.SIGKILL)
        streams = await asyncio.gather(*running)
        assert all(stream.endswith(b"data: [DONE]\n\n") for stream in streams)
        await until(lambda: not any(map(alive, workers)))


async def test_with_a_port_in_use_no_worker_starts(config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        rewrite(config, listen={"host": "127.0.0.1", "port": other.getsockname()[1]})
        async with serving(config) as served:
            assert await asyncio.wait_for(served.process.wait(), PATIENCE) == 1
    assert served.says("Address already in use (while attempting to bind on address")
