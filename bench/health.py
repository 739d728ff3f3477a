"""How long anything blocks the event loop of a proxy, scenario by scenario.

    python bench/health.py [SCENARIO ...] [--seconds 4] [--collector kvlane|python|both] [--json]

Each scenario has a proxy of its own, with its shipped defaults, in front of four mock engines, and a background of
small requests, 200 a second. A task of the proxy asks to be woken every millisecond:

- `p50` to `max` are milliseconds by which it was late. On a machine that does other things too, those are in it.
- `own` is the largest CPU time that the loop's thread took between two of its wakings, without the millisecond that is
  due: what the proxy blocks by itself, whatever the machine does. `> 5 ms` counts how often that was more than 5.
- `gc` is the longest garbage collection, likewise in CPU time.

SCENARIOS are the beginnings of names. `--collector both` runs each with the garbage collection of `kvlane serve` and
with Python's own. Needs gcc, wrk and taskset, like everything that stands on `bench/rig.py`. Takes about two minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import index as index_bench
import uvloop
from rig import HERE, PATH, Engines, Program, Rig, Running, Site, chat, free_ports, prose, say, table

from proxy.app import App
from proxy.cluster.gc_tuning import Collector, resident
from proxy.config.load import load
from proxy.core.tasks import Tasks

MILLISECOND = 0.001
LIMIT = 0.005
POD_BLOCKS = 50_000
"""Of 64 tokens each, so that 200,000 blocks fill the index of four pods."""

LARGE_FLEET = 500

SETTLING = 2.5
"""Seconds until what follows from a sudden growth of the memory is over: no index is filled within a second."""

BACKGROUND = 200
CONNECTIONS = 8
UNLIMITED = 1 << 30

Scenario = Callable[["Proxy", float], Awaitable[object]]


@dataclass(frozen=True)
class Lag:
    """Milliseconds."""

    scenario: str
    collector: str
    p50: float
    p99: float
    p999: float
    max: float
    own: float
    above: int
    collection: float


def main() -> None:
    options = _options()
    if options.serve:
        uvloop.run(serve(Path(options.serve), options.control, options.collector))
        return
    collectors = ("kvlane", "python") if options.collector == "both" else (options.collector,)
    rows: list[Lag] = []
    for name, scenario in SCENARIOS.items():
        if options.scenarios and not name.startswith(tuple(options.scenarios)):
            continue
        for collector in collectors:
            with Rig() as rig:
                rows.append(asyncio.run(_measure(rig, name, scenario, collector, options.seconds)))
            say(f"{name}, {collector}: {rows[-1].own:.1f} ms")
    print(json.dumps([asdict(row) for row in rows]) if options.json else _as_text(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help=", ".join(SCENARIOS))
    parser.add_argument("--seconds", type=float, default=4.0, help="of background load per scenario, at least")
    parser.add_argument("--collector", choices=("kvlane", "python", "both"), default="kvlane")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--control", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


# The proxy's process.


class Ticker:
    """How late each waking was, and the CPU time of the thread since the one before; and of garbage collections."""

    def __init__(self) -> None:
        self._late = array("d")
        self._busy = array("d")
        self._collections = array("d")
        self._collecting = 0.0
        gc.callbacks.append(self._collected)

    def start(self) -> None:
        del self._late[:], self._busy[:], self._collections[:]

    def report(self) -> dict[str, float]:
        late, own = sorted(self._late), [max(0.0, busy - MILLISECOND) for busy in self._busy]
        at = {name: late[min(len(late) - 1, int(len(late) * share))] * 1e3 for name, share in PERCENTILES.items()}
        collection = max(self._collections, default=0.0) * 1e3
        above = sum(busy > LIMIT for busy in own)
        return {**at, "max": late[-1] * 1e3, "own": max(own) * 1e3, "above": above, "collection": collection}

    def _collected(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.thread_time()
        else:
            self._collections.append(time.thread_time() - self._collecting)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, busy = loop.time() + MILLISECOND, time.thread_time()
            await asyncio.sleep(MILLISECOND)
            self._late.append(max(0.0, time.monotonic() - due))
            self._busy.append(time.thread_time() - busy)


PERCENTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}


async def serve(config: Path, control: int, collector: str) -> None:
    """A proxy that obeys commands: a word and its arguments in JSON per line, a result per line."""
    app = App(load(config, os.environ))
    tuned = Collector(lambda: not app.ledger.in_flight, lambda: resident() - app.index_bytes)
    ticker = Ticker()
    async with tuned if collector == "kvlane" else contextlib.nullcontext(), app, Tasks() as tasks:
        tasks.start(ticker.run(), "ticker")
        server = await asyncio.start_server(partial(_obey, app, ticker), "127.0.0.1", control)
        await server.serve_forever()


async def _obey(app: App, ticker: Ticker, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while line := await reader.readline():
        word, *arguments = json.loads(line)
        result: Any = None
        if word == "begin":
            ticker.start()
        elif word == "report":
            result = ticker.report()
        elif word == "fill":
            await _fill(app, *arguments)
        elif word == "pods":
            result = len(app.fleet.ready)
        writer.write(json.dumps(result).encode() + b"\n")
    writer.close()


async def _fill(app: App, shape: str, blocks: int, pods: int) -> None:
    """So many blocks of prompts of a shape that `bench/index.py` knows, on the first pods."""
    (index,) = app._indexes()
    endpoints = list(app.fleet.endpoints)[:pods]
    for number, (hashes, endpoint) in enumerate(index_bench.SHAPES[shape](endpoints)):
        index.confirm(index.reserve((hashes,), endpoint, UNLIMITED))
        if index.pairs >= blocks or number > blocks:
            return
        if number % 20 == 0:
            await asyncio.sleep(0)


# The process that puts load on it.


class Proxy:
    """The proxy as a scenario sees it."""

    def __init__(self, running: Running, engines: Engines, large_fleet: list[int]) -> None:
        self.port, self.admin_port = running.site.port, running.site.spare
        self.engines = engines
        self.large_fleet = large_fleet
        self._pods_file = running.site.folder / "pods.yaml"
        self._control = int((running.site.folder / "control").read_text())

    async def tell(self, *words: Any) -> Any:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._control)
        writer.write(json.dumps(words).encode() + b"\n")
        reply = json.loads(await reader.readline())
        writer.close()
        return reply

    async def set_pods(self, ports: list[int], weight: float = 1.0) -> None:
        """Returns when they are ready and no others are."""
        lines = [f"- {{url: 'http://127.0.0.1:{port}', weight: {weight}}}\n" for port in ports]
        self._pods_file.write_text("".join(lines) or "[]")
        async with asyncio.timeout(120):
            while await self.tell("pods") != len(ports):  # noqa: ASYNC110
                await asyncio.sleep(0.1)


async def _measure(rig: Rig, name: str, scenario: Scenario, collector: str, seconds: float) -> Lag:
    engines = rig.engines(4, POD_BLOCKS * 4)
    more = CEILING if "maxBytes" in name else ""
    with large_fleet() if f"{LARGE_FLEET}" in name else contextlib.nullcontext([]) as ports:
        proxy = Proxy(rig.start(Program("kvlane", partial(_command, collector, more)), engines), engines, ports)
        async with background(proxy.port):
            await asyncio.sleep(1)
            await scenario(proxy, seconds)
            return Lag(name, collector, **await proxy.tell("report"))


def _command(collector: str, more: str, site: Site) -> list[str]:
    control = str(free_ports(1)[0])
    site.write("control", control)
    pods = site.write("pods.yaml", "".join(f"- {{url: '{url}'}}\n" for url in site.urls))
    config = site.write(
        "kvlane.yaml",
        f"listen: {{host: 127.0.0.1, port: {site.port}}}\nadmin: {{port: {site.spare}}}\npods: {{file: {pods}}}\n"
        f"reliability: {{drain: {{grace: 1s}}}}\n{more}",
    )
    return [sys.executable, str(HERE / "health.py"), "--serve", config, "--control", control, "--collector", collector]


@asynccontextmanager
async def background(port: int) -> AsyncIterator[None]:
    request = _post(chat(prose(1024)))
    async with Tasks() as tasks:
        for number in range(CONNECTIONS):
            tasks.start(_client(port, lambda: request, number / BACKGROUND), "client")
        yield


async def _client(port: int, request: Callable[[], bytes], wait: float, times: int = UNLIMITED) -> None:
    """One request after the other, as a client that keeps its connection; each at its time, or later."""
    pace = CONNECTIONS / BACKGROUND
    await asyncio.sleep(wait)
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    due = time.monotonic()
    for _ in range(times):
        writer.write(request())
        await _read_response(reader)
        due += pace
        await asyncio.sleep(max(0.0, due - time.monotonic()))
    writer.close()


async def _read_response(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length[15:]))


def _post(body: bytes) -> bytes:
    head = f"POST {PATH} HTTP/1.1\r\nHost: kvlane\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


# The scenarios: what happens while the background goes on.


async def quiet(proxy: Proxy, seconds: float) -> None:
    await proxy.tell("begin")
    await asyncio.sleep(seconds)


async def large_bodies(body: Callable[[], bytes], proxy: Proxy, seconds: float) -> None:
    """The same one, as often as there is time for."""
    request = _post(body())
    await _client(proxy.port, lambda: request, 0.0, 2)
    await proxy.tell("begin")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        await _client(proxy.port, lambda: request, 0.0, 1)


def _text(mib: int) -> bytes:
    return chat(prose(mib << 20))


def _messages(mib: int, number: int) -> bytes:
    content = "w" * max(1, (mib << 20) // number - len('{"role":"user","content":""},'))
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": content}] * number}).encode()


def _parts(mib: int) -> bytes:
    """Messages of several parts: not read in the short way."""
    part = {"type": "text", "text": "w" * 200}
    message = {"role": "user", "content": [part, part]}
    return json.dumps({"model": "m", "messages": [message] * ((mib << 20) // 500)}).encode()


async def new_prompts(proxy: Proxy, seconds: float) -> None:
    """32 KB that no pod has seen, as often as the background."""
    fresh = count()
    text = prose(32 * 1024)
    async with Tasks() as tasks:
        for number in range(CONNECTIONS):
            wait = number / BACKGROUND
            tasks.start(_client(proxy.port, lambda: _post(chat(f"{next(fresh)} {text}")), wait), "new prompts")
        await proxy.tell("begin")
        await asyncio.sleep(seconds)


async def full_index(shape: str, proxy: Proxy, seconds: float) -> None:
    await proxy.tell("fill", shape, 4 * POD_BLOCKS, 4)
    await asyncio.sleep(SETTLING)
    await new_prompts(proxy, seconds)


async def a_pod_leaves(proxy: Proxy, seconds: float) -> None:
    """With 100,000 blocks, each a segment of its own."""
    await proxy.tell("fill", "scraps", 2 * POD_BLOCKS, 1)
    await asyncio.sleep(SETTLING)
    await proxy.tell("begin")
    await proxy.set_pods(list(proxy.engines.ports[1:]))
    await asyncio.sleep(seconds)


async def refresh(proxy: Proxy, seconds: float) -> None:
    await proxy.set_pods([*proxy.engines.ports, *proxy.large_fleet])
    await asyncio.sleep(seconds)
    await proxy.tell("begin")
    await asyncio.sleep(2 * seconds)


async def reload(proxy: Proxy, seconds: float) -> None:
    """The file changes: pods come, pods change, pods leave."""
    few = list(proxy.engines.ports)
    await proxy.tell("begin")
    await proxy.set_pods([*few, *proxy.large_fleet])
    await asyncio.sleep(seconds)
    await proxy.set_pods([*few, *proxy.large_fleet], weight=2.0)
    await asyncio.sleep(seconds)
    await proxy.set_pods(few, weight=2.0)


async def metrics(proxy: Proxy, seconds: float) -> None:
    await proxy.set_pods([*proxy.engines.ports, *proxy.large_fleet])
    await asyncio.sleep(seconds)
    await proxy.tell("begin")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        reader, writer = await asyncio.open_connection("127.0.0.1", proxy.admin_port, limit=1 << 24)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: kvlane\r\nConnection: close\r\n\r\n")
        assert len(await reader.read()) > 100_000
        writer.close()
        await asyncio.sleep(0.2)


@contextmanager
def large_fleet() -> Iterator[list[int]]:
    """Pods with expositions of real size."""
    command = ["taskset", "-c", "1", sys.executable, str(HERE / "refresh.py"), "--serve", str(LARGE_FLEET)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())
        finally:
            process.terminate()


SCENARIOS: dict[str, Scenario] = {
    "1 KB": quiet,
    "32 KB, new": new_prompts,
    "1 MiB": partial(large_bodies, partial(_text, 1)),
    "8 MiB": partial(large_bodies, partial(_text, 8)),
    "32 MiB": partial(large_bodies, partial(_text, 32)),
    "1 MiB, 10,000 messages": partial(large_bodies, partial(_messages, 1, 10_000)),
    "8 MiB, 100,000 messages": partial(large_bodies, partial(_messages, 8, 100_000)),
    "8 MiB, messages of parts": partial(large_bodies, partial(_parts, 8)),
    "index full of chats": partial(full_index, "chat"),
    "index full of scraps": partial(full_index, "scraps"),
    "index at maxBytes": partial(full_index, "scraps"),
    "a pod leaves": a_pod_leaves,
    f"reload, {LARGE_FLEET} pods": reload,
    f"refresh, {LARGE_FLEET} pods": refresh,
    f"metrics, {LARGE_FLEET} pods": metrics,
}

CEILING = """
scheduling:
  plugins: [{type: approx-prefix-cache-producer, parameters: {maxBytes: 32MiB}}]
"""


def _as_text(rows: list[Lag]) -> str:
    lines = [["scenario", "collector", "p50", "p99", "p99.9", "max", "own", "> 5 ms", "gc"]]
    for row in rows:
        figures = (row.p50, row.p99, row.p999, row.max, row.own)
        lines.append(
            [
                row.scenario,
                row.collector,
                *(f"{figure:.1f}" for figure in figures),
                str(row.above),
                f"{row.collection:.1f}",
            ]
        )
    return table(lines)


if __name__ == "__main__":
    main()
