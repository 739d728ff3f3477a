"""The proxy that is put to the test: a process, and what can be learned of it from outside."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import yaml
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).resolve().parent.parent.parent
READY_SECONDS = 30.0

RETRIES = {"attempts": 8, "budgetPercent": 100}
BREAKER = {"window": "5s", "open": "1s"}
TIMEOUTS = {"connect": "500ms", "firstByte": "1s", "idle": "1s", "request": "8s"}

Samples = Mapping[tuple[str, frozenset[tuple[str, str]]], float]


@dataclass(frozen=True, slots=True)
class Footprint:
    """`rss` in KiB, and how much of it the prefix index says it has; `descriptors` are open files and sockets."""

    rss: int
    index: int
    descriptors: int


class Program:
    """A running proxy; `folder` has its configuration and what it wrote."""

    def __init__(self, folder: Path, ports: tuple[int, int], process: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.url, self.admin = (f"http://127.0.0.1:{port}" for port in ports)
        self._process = process

    @property
    def reloads(self) -> bool:
        """Whether it catches SIGHUP, which would end it otherwise."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
        return bool(int(caught, 16) & 1 << (signal.SIGHUP - 1))

    def reload(self, weight: int) -> None:
        """With another configuration than before: the first pod has this weight."""
        path = self.folder / "chaos.yaml"
        settings = yaml.safe_load(path.read_text())
        settings["pods"]["static"][0]["weight"] = weight
        path.write_text(yaml.safe_dump(settings))
        self._process.send_signal(signal.SIGHUP)

    async def footprint(self) -> Footprint:
        pids = _tree(self._process.pid)
        rss, descriptors = sum(map(_rss, pids)), sum(map(_descriptors, pids))
        index = sum(value for (name, _), value in (await self.metrics()).items() if name == "kvlane_prefix_index_bytes")
        return Footprint(rss, int(index) // 1024, descriptors)

    async def metrics(self) -> Samples:
        async with aiohttp.ClientSession(self.admin) as session, session.get("/metrics") as response:
            text = await response.text()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def access_log(self) -> dict[str, list[dict[str, Any]]]:
        """The lines by the id of the request."""
        lines: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for raw in (self.folder / "access.log").read_bytes().splitlines():
            line = orjson.loads(raw)
            lines[line["request_id"]].append(line)
        return lines

    def complaints(self) -> list[str]:
        """What it logged of faults of its own."""
        text = (self.folder / "log").read_text(errors="replace")
        return [line for line in text.splitlines() if "Traceback" in line or "never retrieved" in line]

    async def ready(self, pods: int) -> None:
        """Until all its pods are. Raises TimeoutError, or SystemExit if it has ended."""
        async with asyncio.timeout(READY_SECONDS), aiohttp.ClientSession(self.admin) as session:
            while not await _has_ready(session, pods):
                if self._process.poll() is not None:
                    sys.exit("the proxy does not serve:\n" + (self.folder / "log").read_text(errors="replace")[-2_000:])
                await asyncio.sleep(0.1)


@contextmanager
def running(folder: Path, urls: Sequence[str], ports: tuple[int, int], workers: int) -> Iterator[Program]:
    """Stop it at the end; kill it if it does not stop."""
    path = folder / "chaos.yaml"
    path.write_text(yaml.safe_dump(_settings(urls, ports)))
    command = [sys.executable, "-m", "proxy", "serve", "-c", str(path), "--workers", str(workers)]
    with (folder / "access.log").open("wb") as out, (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=log)
    try:
        yield Program(folder, ports, process)
    finally:
        process.terminate()
        try:
            process.wait(15.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _settings(urls: Sequence[str], ports: tuple[int, int]) -> dict[str, Any]:
    return {
        "listen": {"host": "127.0.0.1", "port": ports[0]},
        "admin": {"port": ports[1]},
        "pods": {"static": [{"name": f"pod-{number}", "url": url, "weight": 1} for number, url in enumerate(urls)]},
        "reliability": {"retries": RETRIES, "breaker": BREAKER, "timeouts": TIMEOUTS},
    }


async def _has_ready(session: aiohttp.ClientSession, pods: int) -> bool:
    try:
        async with session.get("/readyz") as response:
            return bool((await response.json())["pods"]["ready"] == pods)
    except aiohttp.ClientError:
        return False


def _rss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


def _descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _tree(pid: int) -> list[int]:
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()
    ]
    return [pid, *(each for child in children for each in _tree(child))]
