"""The value of several workers: their placement compared with one, and their cost per request.

    python bench/workers.py [--seconds 20] [--rounds 3] [--only placement|cost] [--json]

Placement: questions about 24 shared documents, at the same moments for all, each over a connection of its own so that
any worker may get it; four simulated pods that hold a quarter of the documents each. One worker, two, and two that do
not know of each other's requests. Simulated pods run in a process of their own.

Cost: microseconds of CPU of all processes per request: one process, two that know nothing of each other, and two
workers with their supervisor, in turns. `2 serve` is 2 · cost(one) / cost(two workers): how many times the requests of
one core two would serve. All run on one core; that two processes share its caches counts against both kinds of two.
Needs gcc, wrk, taskset.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rig import PATH, Engines, Outcome, Program, Rig, Running, Site, chat, healthy, post_script, prose, say, tables

from proxy.cli import demo
from proxy.cluster.messages import BROKER, Packet
from proxy.cluster.supervisor import Supervisor
from proxy.core.tasks import Tasks
from proxy.settings import from_mapping

ROOT = Path(__file__).resolve().parent.parent
PODS = 4
GRACE = 30.0
VARIANTS = {"1 worker": (1, True), "2 workers": (2, True), "2 workers, nothing shared": (2, False)}
CASES = {"1k": 1000, "32k": 32_000}
CONNECTIONS = 16


def main() -> None:
    options = _options()
    found: dict[str, Any] = {}
    if options.only != "cost":
        found["placement"] = placement(options)
    if options.only != "placement":
        found["cost"] = cost(options)
    print(json.dumps(found, indent=1) if options.json else tables(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of questions per round and variant")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rate", type=float, default=demo.REQUESTS_PER_SECOND, help="questions per second")
    parser.add_argument("--only", choices=("placement", "cost"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# Placement.


def placement(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    outcomes = {name: Outcome() for name in VARIANTS}
    for number in range(options.rounds):
        for name, (workers, shares) in VARIANTS.items():
            with simulated() as urls:
                asyncio.run(_round(urls, workers, shares, number, options, outcomes[name]))
            say(f"round {number + 1}  {name}: {outcomes[name].row()}")
    return {name: outcome.row() for name, outcome in outcomes.items()}


@contextlib.contextmanager
def simulated() -> Iterator[list[str]]:
    port = demo._free_ports(PODS)
    command = [sys.executable, "-m", "proxy", "sim", "--port", str(port), "--pods", str(PODS)]
    process = subprocess.Popen([*command, "--gpu-blocks", str(demo.KV_BLOCKS)], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        yield [f"http://127.0.0.1:{port + index}" for index in range(PODS)]
    finally:
        process.terminate()
        process.wait()


async def _round(
    urls: list[str], workers: int, shares: bool, seed: int, options: argparse.Namespace, outcome: Outcome
) -> None:
    await healthy(urls)
    settings = from_mapping(
        {
            "listen": {"host": "127.0.0.1", "port": 0},
            "admin": {"port": 0},
            "pods": {"static": [{"url": url} for url in urls]},
            "telemetry": {"accessLog": False, "logLevel": "error"},
        }
    )
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    supervisor = Supervisor(settings, workers)
    if not shares:
        _unshare(supervisor)
    async with (
        supervisor,
        aiohttp.ClientSession(connector=connector) as session,
        Tasks() as tasks,
    ):
        rng = random.Random(seed)
        documents = [prose_of(rng) for _ in range(demo.DOCUMENTS)]
        loop = asyncio.get_running_loop()
        start, at = loop.time(), 0.0
        sent = []
        while (at := at + rng.expovariate(options.rate)) < options.seconds:
            body = demo._question(rng.choice(documents), rng.randrange(10**6))
            await asyncio.sleep(start + at - loop.time())
            work = _ask(session, f"http://127.0.0.1:{supervisor.port}{PATH}", body, outcome)
            sent.append(tasks.start(work, "question"))
        await asyncio.wait(sent, timeout=GRACE)


def _unshare(supervisor: Supervisor) -> None:
    """Pass nothing between workers."""
    broker, replica = supervisor._broker, supervisor._replica
    pass_on = broker._pass_on

    def pass_on_to_supervisor(packet: Packet, sender: int | None) -> None:
        if sender == BROKER or packet.to == replica.id:
            pass_on(packet, sender)
        elif packet.to is None:
            replica.received(packet)

    broker._pass_on = pass_on_to_supervisor  # type: ignore[method-assign]


def prose_of(rng: random.Random) -> str:
    return " ".join(rng.choices(demo.WORDS, k=demo.DOCUMENT_BYTES // 5))[: demo.DOCUMENT_BYTES]


async def _ask(session: aiohttp.ClientSession, url: str, body: bytes, outcome: Outcome) -> None:
    started = time.perf_counter()
    try:
        async with session.post(url, data=body, headers={"content-type": "application/json"}) as response:
            response.raise_for_status()
            begun = await response.content.readany()
            first = time.perf_counter() - started
            usage = demo._usage(begun + await response.read())
    except aiohttp.ClientError:
        outcome.failed += 1
        return
    outcome.add(first, usage)


# Cost.


def cost(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    rows: dict[str, dict[str, float]] = {}
    with Rig() as rig:
        engines = rig.engines(PODS)
        single, other, both = (
            rig.start(_served(*each), engines) for each in (("single", 1), ("other", 1), ("both", 2))
        )
        variants = {"1 process": [single], "2 strangers": [single, other], "2 workers": [both]}
        for case, size in CASES.items():
            figures: dict[str, list[float]] = {name: [] for name in variants}
            for _ in range(options.rounds):
                for name, proxies in variants.items():
                    figures[name].append(_cpu_us(rig, proxies, engines, size))
                    say(f"{case}  {name}: {figures[name][-1]:.1f} us")
            rows[case] = {name: round(statistics.median(values), 1) for name, values in figures.items()}
            one, _, two = figures.values()
            rows[case]["2 serve"] = round(statistics.median(2 * a / b for a, b in zip(one, two, strict=True)), 2)
    return rows


def _served(name: str, workers: int) -> Program:
    def command(site: Site) -> list[str]:
        pods = [word for url in site.urls for word in ("--pod", url)]
        ports = ["--port", str(site.port), "--admin-port", str(site.spare)]
        return [sys.executable, "-m", "proxy", "serve", "--host", "127.0.0.1", "--workers", str(workers), *ports, *pods]

    return Program(name, command, folder=ROOT)


def _cpu_us(rig: Rig, proxies: list[Running], engines: Engines, size: int) -> float:
    """Both ends of the window lie inside the load, which is the same for one proxy and for several."""
    script = post_script(chat(prose(size)))
    loads = [rig.wrk(proxy.site.port, script, CONNECTIONS // len(proxies), 5.0) for proxy in proxies]
    time.sleep(1.0)
    cpu, count = sum(proxy.cpu_seconds() for proxy in proxies), engines.count()["requests"]
    time.sleep(3.0)
    spent = sum(proxy.cpu_seconds() for proxy in proxies) - cpu
    done = engines.count()["requests"] - count
    if failed := sum(load().failed for load in loads):
        sys.exit(f"{failed} requests failed")
    for proxy in proxies:
        proxy.trim_log()
    return spent / max(1, done) * 1e6


if __name__ == "__main__":
    main()
