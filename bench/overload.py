"""What three times more than the pods can do comes to: goodput, shares, objectives, refusals, memory.

    python bench/overload.py [--seconds 60] [--workers 1] [--json]

Simulated pods in a process of their own have as many slots as `flowControl.maxConcurrentPerPod` lets requests in, so
that no pod queues behind the proxy. First as many clients as there are slots send one request after the other: the
capacity. Then requests come at random moments, three times as many, from `chat` (of priority 10, streamed, a fifth of
the capacity), from the tenants `a`, `b` and `gold` (whose share is two), and from `batch`, which may be dropped. What
ends in the first ten seconds, while the queue fills, is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rig import PATH, say

from proxy.core.tasks import Tasks

PODS = 4
SLOTS = 8
TOKENS = 64
WARM_UP = 10.0
TIMES = 3.0
OFFERED = {"chat": 0.2, "a": 1.2, "b": 0.6, "gold": 0.7, "batch": 0.3}
"""In capacities; the sum is TIMES."""
SHARES = {"a": 0.25, "b": 0.25, "gold": 0.5}
"""Of what chat leaves."""

CONFIGURATION = """\
listen: {{host: 127.0.0.1, port: {port}}}
admin: {{port: {admin}}}
pods: {{static: [{pods}]}}
models: {{objectives: {{chat: {{priority: 10}}, batch: {{priority: -1}}}}}}
flowControl:
  maxConcurrentPerPod: {slots}
  maxQueued: 500
  queueTimeout: 30s
  shares: {{gold: 2}}
telemetry: {{accessLog: false, logLevel: error}}
"""


@dataclass(frozen=True)
class Ended:
    """Seconds; `first` to the first byte of the response."""

    who: str
    status: int
    reason: str
    at: float
    first: float
    whole: float


@dataclass
class Run:
    capacity: float
    began: float = 0.0
    ended: list[Ended] = field(default_factory=list)
    rss: list[int] = field(default_factory=list)
    late: list[float] = field(default_factory=list)
    """Seconds by which the load's own timers were."""


def main() -> None:
    options = _options()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(65536, hard), hard))
    with tempfile.TemporaryDirectory() as folder, _stack(Path(folder), options.workers) as (url, proxy):
        found = uvloop.run(_measure(url, proxy, options.seconds))
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        _print(found)


async def _measure(url: str, proxy: subprocess.Popen[bytes], seconds: float) -> dict[str, Any]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as http:
        await _ready(http, url)
        capacity = await _capacity(http, url, min(15.0, seconds / 3))
        say(f"{capacity:.1f} requests a second; now {TIMES:g} times as many for {WARM_UP + seconds:.0f} s")
        run = Run(capacity)
        before = _rss(proxy.pid)
        await _overload(http, url, run, proxy.pid, WARM_UP + seconds)
        return {**_figures(run, seconds), "rss_mib": [before / 1024, max(run.rss) / 1024, run.rss[-1] / 1024]}


async def _capacity(http: aiohttp.ClientSession, url: str, seconds: float) -> float:
    """Requests a second of as many clients as there are slots, after three seconds of warming up."""
    run = Run(0.0)
    start = time.monotonic() + 3.0

    async def client() -> None:
        while time.monotonic() < start + seconds:
            await _ask(http, url, "a", run)

    async with Tasks() as tasks:
        await asyncio.gather(*(tasks.start(client(), "client") for _ in range(PODS * SLOTS)))
    return sum(1 for one in run.ended if one.status == 200 and start <= one.at < start + seconds) / seconds


async def _overload(http: aiohttp.ClientSession, url: str, run: Run, pid: int, seconds: float) -> None:
    rng = random.Random(1)
    run.began = time.monotonic()
    names, weights = list(OFFERED), list(OFFERED.values())
    due = run.began
    async with Tasks() as tasks:
        tasks.start(_late(run), "lateness")
        requests = []
        while due < run.began + seconds:
            due += rng.expovariate(run.capacity * TIMES)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            who = rng.choices(names, weights)[0]
            requests.append(tasks.start(_ask(http, url, who, run), "request"))
            if len(requests) % 50 == 0:
                run.rss.append(_rss(pid))
        await asyncio.gather(*requests)
    run.rss.append(_rss(pid))


async def _late(run: Run) -> None:
    while True:
        due = time.monotonic() + 0.01
        await asyncio.sleep(0.01)
        run.late.append(time.monotonic() - due)


async def _ask(http: aiohttp.ClientSession, url: str, who: str, run: Run) -> None:
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": f"{who} {random.random()} " + "word " * 60}],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "stream": who == "chat",
    }
    headers = {"x-llm-d-inference-fairness-id": who, "x-llm-d-inference-objective": who}
    began = time.monotonic()
    async with http.post(url + PATH, json=body, headers=headers) as response:
        await response.content.readany()
        first = time.monotonic()
        await response.read()
        now = time.monotonic()
        reason = response.headers.get("x-kvlane-reason", "")
        run.ended.append(Ended(who, response.status, reason, now, first - began, now - began))


def _figures(run: Run, seconds: float) -> dict[str, Any]:
    start = run.began + WARM_UP
    counted = [one for one in run.ended if start <= one.at < start + seconds]
    good = [one for one in counted if one.status == 200]
    served = Counter(one.who for one in good)
    fair = sum(served[who] for who in SHARES)
    saturated = [one.whole for one in counted if one.reason == "rejected-saturated"]
    refused = Counter(one.reason for one in counted if one.status != 200)
    return {
        "capacity": run.capacity,
        "goodput": len(good) / seconds,
        "served": {who: served[who] / seconds for who in OFFERED},
        "shares": {who: served[who] / fair for who in SHARES},
        "chat_ttft": _percentiles([one.first for one in good if one.who == "chat"]),
        "chat_not_served": sum(1 for one in counted if one.who == "chat" and one.status != 200),
        "refused": dict(refused),
        "refused_after": _percentiles(saturated),
        "load_late": _percentiles(run.late),
        "made_room_after": _percentiles([one.whole for one in counted if one.reason == "evicted-queue-pressure"]),
    }


def _percentiles(seconds: list[float]) -> dict[str, float]:
    if len(seconds) < 2:
        return {"p50": 0.0, "p99": 0.0, "max": 0.0}
    cuts = statistics.quantiles(seconds, n=100)
    return {"p50": cuts[49], "p99": cuts[98], "max": max(seconds)}


@contextlib.contextmanager
def _stack(folder: Path, workers: int) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    first = _first_of(PODS + 2)
    port, admin = first + PODS, first + PODS + 1
    pods = ", ".join(f"{{url: 'http://127.0.0.1:{first + at}', name: pod-{at}}}" for at in range(PODS))
    file = folder / "kvlane.yaml"
    file.write_text(CONFIGURATION.format(port=port, admin=admin, pods=pods, slots=SLOTS))
    kvlane = [sys.executable, "-m", "proxy"]
    sims = [*kvlane, "sim", "--port", str(first), "--pods", str(PODS), "--max-num-seqs", str(SLOTS)]
    serve = [*kvlane, "serve", "-c", str(file), "--workers", str(workers)]
    with contextlib.ExitStack() as stack:
        running = []
        for command in (sims, serve):
            process = subprocess.Popen(command, cwd=Path(__file__).resolve().parent.parent, stdout=subprocess.DEVNULL)
            stack.callback(process.wait, 20)
            stack.callback(process.send_signal, signal.SIGINT)
            running.append(process)
        yield f"http://127.0.0.1:{port}", running[1]


def _first_of(count: int) -> int:
    """The first of so many consecutive free ports, below the ephemeral ports."""
    while True:
        first = random.randrange(15_000, 30_000)
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return first


async def _ready(http: aiohttp.ClientSession, url: str) -> None:
    async with asyncio.timeout(30.0):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with http.get(url + "/health") as response:
                    if response.status == 200:
                        return
            await asyncio.sleep(0.2)


def _rss(pid: int) -> int:
    """KiB of a process and its children."""
    total = 0
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    for one in (str(pid), *children):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{one}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))
    return total


def _print(found: dict[str, Any]) -> None:
    ratio = found["goodput"] / found["capacity"]
    rows = [
        ("capacity", f"{found['capacity']:.1f} requests/s"),
        ("goodput", f"{found['goodput']:.1f} requests/s, {ratio:.1%} of the capacity"),
        *((f"share of {who}", f"{share:.1%} (fair: {SHARES[who]:.0%})") for who, share in found["shares"].items()),
        ("served, requests/s", ", ".join(f"{who} {rate:.1f}" for who, rate in found["served"].items())),
        ("chat, first byte", _milliseconds(found["chat_ttft"])),
        ("chat, not served", str(found["chat_not_served"])),
        ("refused", ", ".join(f"{reason} {number}" for reason, number in found["refused"].items())),
        ("refused after", _milliseconds(found["refused_after"])),
        ("the load itself is late by", _milliseconds(found["load_late"])),
        ("made room after", _milliseconds(found["made_room_after"])),
        ("memory of the proxy, MiB", " -> ".join(f"{mib:.0f}" for mib in found["rss_mib"]) + " (before, most, after)"),
    ]
    for name, value in rows:
        print(f"{name:30}{value}")


def _milliseconds(percentiles: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1000:.1f} ms" for name, seconds in percentiles.items())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
