"""What it is worth that proxies of one deployment know of each other, what that costs, and what it takes to upset them.

    python bench/replicas.py [--only placement|faults|cost|transport] [--seconds 20] [--rounds 2]
                             [--trace FILE [--time-scale 4]] [--proxies 1,2]

Placement: conversations before four simulated pods that together hold all of them, every request through any of the
proxies, as a balancer deals them: one proxy, two and four over a Redis that is started here, and two and four that do
not know of each other. The requests and their moments are the same for all. With `--trace` they are a part of it,
another one for each round, before four pods like `generic-8b` with 410,000 tokens of KV each. Their clock runs
`--time-scale` times as fast, four times by default, which makes news that many times as late.

Faults: two proxies under that load; one is killed and started again, Redis is killed and started again empty, and a
wall stands before Redis for ten seconds. Requests that fail though their own proxy lives; the seconds until each proxy
knows who else there is; and until its sum of requests in flight is that of the clients again, which takes longer where
clients, pods and proxies wait for a CPU.

Cost: microseconds of CPU and bytes that telling others adds to a request, by the requests of a proxy per second; and
what the index by itself takes for one, which tells how fast the machine was.

Transport (`--only transport`): microseconds of CPU to publish one packet and to receive one, by the connection that
kvlane has and by redis-py's own asyncio client.

Needs redis-server and the extra kvlane[redis].
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import itertools
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rig import PATH, Outcome, free_ports, healthy, say, tables

from proxy.cli import demo
from proxy.cluster.redis_transport import RedisConnection
from proxy.cluster.shared import LONG_PROMPT, OwnLoads
from proxy.cluster.transport import SOON, Batch
from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock, SystemClock
from proxy.core.tasks import Tasks
from proxy.lab.workload import load_trace, request_body
from proxy.prefix.forest import Reservation
from proxy.prefix.index import PrefixIndex
from proxy.telemetry.exposition import SampleReader
from tests.helpers.cluster.store import Wall, store
from tests.system.cluster.test_deployment import Proxy, settings

ROOT = Path(__file__).resolve().parent.parent
PODS = 4
IN_FLIGHT = "kvlane_endpoint_in_flight_requests"
LEASE = 5.0
GRACE = 60.0
VARIANTS: dict[str, tuple[int, bool]] = {
    "1": (1, True),
    "2": (2, True),
    "4": (4, True),
    "2, nothing shared": (2, False),
    "4, nothing shared": (4, False),
}
SYSTEMS, SYSTEM_BYTES, TURN_BYTES, TURNS, THINK = 4, 6000, 1200, 6, 2.0
LARGE = ("--gpu", "generic-8b", "--gpu-blocks", "25600")
LONGEST = 100_000
"""Tokens of a request of a trace."""

LONG_OUTPUT = 300
"""Tokens, so that many requests are in flight when something happens."""

PAUSE = 10.0
"""Seconds that the wall stands."""


def main() -> None:
    options = _options()
    found: dict[str, Any] = {}
    if options.only in (None, "placement"):
        found["placement"] = asyncio.run(placement(options))
    if options.only in (None, "faults"):
        found["faults"] = asyncio.run(faults(options))
    if options.only in (None, "cost"):
        found["cost"] = asyncio.run(cost())
    if options.only in (None, "transport"):
        found["transport"] = asyncio.run(transport())
    print(json.dumps(found, indent=1) if options.json else tables(found))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of new requests per round and variant")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second, of all proxies together")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format, .gz or not")
    parser.add_argument("--time-scale", type=float, default=4.0, help="how much faster the clock of a trace's pods is")
    parser.add_argument("--proxies", metavar="N,…", help="variants of placement with this many only [default: all]")
    parser.add_argument("--only", choices=("placement", "faults", "cost", "transport"))
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


# The load.


@dataclass
class Served:
    """A proxy in a process of its own; `open` are the requests that clients have there."""

    port: int
    admin: int
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    open: int = 0
    is_queried: bool = False
    """Whether the balancer deals requests to it."""

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, cwd=ROOT)

    def kill(self) -> None:
        assert self.process is not None
        self.is_queried = False
        self.process.kill()
        self.process.wait()
        self.process = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(20)
                return
            self.process.kill()
            self.process.wait()


def _turns(rng: random.Random, seconds: float, rate: float, tokens: int = 24) -> list[tuple[float, bytes]]:
    """(moment, request), in order: conversations that begin at random and go on after a pause."""
    systems = [_prose(rng, SYSTEM_BYTES) for _ in range(SYSTEMS)]
    found: list[tuple[float, bytes]] = []
    for at in itertools.accumulate(rng.expovariate(rate / TURNS) for _ in itertools.count()):
        if at > seconds:
            break
        messages = [{"role": "system", "content": rng.choice(systems)}]
        for _ in range(TURNS):
            messages.append({"role": "user", "content": _prose(rng, TURN_BYTES)})
            body = {"model": "sim", "messages": messages, "max_tokens": tokens, "ignore_eos": True}
            options = {"stream": True, "stream_options": {"include_usage": True}}
            found.append((at, orjson.dumps({**body, **options})))
            messages.append({"role": "assistant", "content": _prose(rng, 200)})
            at += 1.0 + rng.expovariate(1 / THINK)
    return sorted(turn for turn in found if turn[0] <= seconds)


def _of_trace(file: Path, number: int, seconds: float, rate: float) -> list[tuple[float, bytes]]:
    count = int(seconds * rate)
    jobs = load_trace(file, random.Random(1)).fitting(LONGEST).window(number * count, count).at_rate(rate).jobs
    return [(job.arrival, request_body(job, "sim")) for job in jobs]


def _prose(rng: random.Random, size: int) -> str:
    return " ".join(rng.choices(demo.WORDS, k=size // 4))[:size]


async def _play(
    turns: list[tuple[float, bytes]], proxies: list[Served], rng: random.Random, outcome: Outcome, path: str = PATH
) -> None:
    loop = asyncio.get_running_loop()
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session, Tasks() as tasks:
        start, requests = loop.time(), []
        for at, request_body in turns:
            await asyncio.sleep(start + at - loop.time())
            proxy = rng.choice([proxy for proxy in proxies if proxy.is_queried])
            requests.append(tasks.start(_ask(session, proxy, request_body, outcome, path), "question"))
        if requests:
            await asyncio.wait(requests, timeout=GRACE)


async def _ask(session: aiohttp.ClientSession, proxy: Served, request_body: bytes, outcome: Outcome, path: str) -> None:
    started, process = time.perf_counter(), proxy.process
    headers = {"content-type": "application/json"}
    proxy.open += 1
    try:
        async with session.post(f"http://127.0.0.1:{proxy.port}{path}", data=request_body, headers=headers) as response:
            response.raise_for_status()
            begun = await response.content.readany()
            first = time.perf_counter() - started
            usage = demo._usage(begun + await response.read())
    except (aiohttp.ClientError, TimeoutError):
        if proxy.process is process:
            outcome.failed += 1
        else:
            outcome.cut += 1
        return
    finally:
        if proxy.process is process:
            proxy.open -= 1
    outcome.add(first, usage)


# What stands before and behind it.


@asynccontextmanager
async def _proxies(count: int, url: str | None, *sim: str) -> AsyncIterator[list[Served]]:
    """Before pods of their own, with these options; they share over the store of this URL, if there is one."""
    with tempfile.TemporaryDirectory() as folder:
        async with _pods(*sim) as urls, _started(urls, Path(folder), count, url) as proxies:
            yield proxies


@asynccontextmanager
async def _pods(*options: str) -> AsyncIterator[list[str]]:
    """Four simulated pods in a process of their own."""
    port = demo._free_ports(4)
    arguments = ["--port", str(port), "--pods", "4", "--gpu-blocks", str(demo.KV_BLOCKS), *options]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "proxy", "sim", *arguments, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        urls = [f"http://127.0.0.1:{port + index}" for index in range(4)]
        await healthy(urls)
        yield urls
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


@asynccontextmanager
async def _started(urls: list[str], folder: Path, count: int, url: str | None) -> AsyncIterator[list[Served]]:
    proxies = []
    for number, (port, admin) in enumerate(zip(*[iter(free_ports(2 * count))] * 2, strict=True)):
        file = folder / f"{number}.json"
        file.write_text(json.dumps(_configuration(urls, port, admin, number, url)))
        proxies.append(Served(port, admin, [sys.executable, "-m", "proxy", "serve", "-c", str(file)]))
    try:
        for proxy in proxies:
            proxy.start()
        for proxy in proxies:
            await _ready(proxy, count - 1 if url else 0)
        yield proxies
    finally:
        for proxy in proxies:
            proxy.stop()


def _configuration(urls: list[str], port: int, admin: int, number: int, store_url: str | None) -> dict[str, Any]:
    shared = {"store": store_url, "lease": LEASE, "name": f"proxy-{number}"}
    return {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"port": admin},
        "pods": {"static": [{"url": url, "name": f"pod-{index}"} for index, url in enumerate(urls)]},
        "telemetry": {"accessLog": False, "logLevel": "error"},
        "replicas": shared if store_url else {},
    }


async def _ready(proxy: Served, others: int) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                async with session.get(f"http://127.0.0.1:{proxy.admin}/readyz") as response:
                    body = await response.json()
                    if body["pods"]["ready"] == PODS and len(body.get("replicas", {}).get("others", ())) >= others:
                        proxy.is_queried = True
                        return
            await asyncio.sleep(0.05)


# Placement.


async def placement(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    counts = {int(count) for count in options.proxies.split(",")} if options.proxies else {1, 2, 4}
    variants = {name: variant for name, variant in VARIANTS.items() if variant[0] in counts}
    outcomes = {name: Outcome() for name in variants}
    for number in range(options.rounds):
        for name, (count, shares) in variants.items():
            if options.trace is None:
                turns, path, sim = _turns(random.Random(number), options.seconds, options.rate), PATH, ()
            else:
                turns = _of_trace(options.trace, number, options.seconds, options.rate)
                path, sim = "/v1/completions", (*LARGE, "--time-scale", str(options.time_scale))
            with tempfile.TemporaryDirectory() as folder:
                async with AsyncExitStack() as stack:
                    redis = await stack.enter_async_context(store(Path(folder))) if shares and count > 1 else None
                    proxies = await stack.enter_async_context(_proxies(count, redis.url if redis else None, *sim))
                    await _play(turns, proxies, random.Random(number), outcomes[name], path)
            say(f"round {number + 1}  {name}: {outcomes[name].row()}")
    return {name: outcome.row() for name, outcome in outcomes.items()}


# Faults.


async def faults(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    outcome, rows = Outcome(), {}
    with tempfile.TemporaryDirectory() as folder:
        async with store(Path(folder)) as redis, Wall(redis.port) as wall, _proxies(2, wall.url) as proxies:
            turns = _turns(random.Random(1), 60.0, options.rate, LONG_OUTPUT)
            async with Tasks() as tasks:
                load = tasks.start(_play(turns, proxies, random.Random(1), outcome), "load")
                await asyncio.sleep(4)
                for name, upset in _upsets(redis, wall, proxies):
                    failed, cut, requests = outcome.failed, outcome.cut, len(outcome.ttft)
                    together = await upset()
                    known, right = await _settled(proxies, together)
                    rows[name] = {
                        "others known after": f"{known:.1f} s",
                        "sums right after": f"{right:.1f} s",
                        "requests": len(outcome.ttft) - requests,
                        "cut with their proxy": outcome.cut - cut,
                        "failed": outcome.failed - failed,
                    }
                    say(f"{name}: {rows[name]}")
                await load
    row = outcome.row()
    rows["all"] = {
        "others known after": "",
        "sums right after": "",
        "requests": row["requests"],
        "cut with their proxy": outcome.cut,
        "failed": row["failed"],
    }
    return rows


Upset = Callable[[], Awaitable[bool]]


def _upsets(redis: Any, wall: Wall, proxies: list[Served]) -> Iterator[tuple[str, Upset]]:
    """Each gives whether proxies know of each other afterwards."""
    second = proxies[1]

    async def kill() -> bool:
        second.open = 0
        second.kill()
        return True

    async def again() -> bool:
        second.start()
        await _ready(second, 1)
        return True

    async def kill_redis() -> bool:
        redis.kill()
        return False

    async def start_redis() -> bool:
        await redis.start()
        return True

    async def pause() -> bool:
        wall.up()
        return False

    async def end_pause() -> bool:
        await asyncio.sleep(max(0.0, PAUSE - LEASE))
        wall.down()
        return True

    yield "kill -9 of a proxy", kill
    yield "it is started again", again
    yield "kill -9 of Redis", kill_redis
    yield "it is started again, empty", start_redis
    yield "a wall before Redis", pause
    yield "it is taken down", end_pause


async def _settled(proxies: list[Served], together: bool) -> tuple[float, float]:
    """Seconds until each proxy that lives knows the others, or that it hears of none; and until it says, five times in
    a row, what clients have in flight: through all proxies, or through it."""
    began, in_a_row, known = time.monotonic(), 0, float("inf")
    async with aiohttp.ClientSession() as session:
        while in_a_row < 5:
            alive = [proxy for proxy in proxies if proxy.is_queried]
            others = len(alive) - 1 if together else 0
            if all([await _others(session, proxy) == others for proxy in alive]):
                known = min(known, time.monotonic() - began)
            right = [await _is_right(session, proxy, alive if together else [proxy]) for proxy in alive]
            in_a_row = in_a_row + 1 if all(right) else 0
            if time.monotonic() - began > 4 * LEASE:
                return known, float("inf")
            await asyncio.sleep(0.05)
    return known, time.monotonic() - began - 5 * 0.05


async def _others(session: aiohttp.ClientSession, proxy: Served) -> int:
    async with session.get(f"http://127.0.0.1:{proxy.admin}/readyz") as response:
        return len((await response.json())["replicas"]["others"])


async def _is_right(session: aiohttp.ClientSession, proxy: Served, those: list[Served]) -> bool:
    """One request may be on its way, and others come and go while it is asked: on a busy machine that takes long."""
    before = sum(one.open for one in those)
    found = await _in_flight(session, proxy)
    after = sum(one.open for one in those)
    return min(before, after) - 1 <= found <= max(before, after) + 1


async def _in_flight(session: aiohttp.ClientSession, proxy: Served) -> int:
    async with session.get(f"http://127.0.0.1:{proxy.admin}/metrics") as response:
        samples = SampleReader([IN_FLIGHT]).read(await response.read())
    return int(sum(sample.value for sample in samples.get(IN_FLIGHT, ())))


# Cost.


async def cost() -> dict[str, dict[str, Any]]:
    """Of prompts that grow by 10 blocks of 64 tokens a turn; when a packet goes out is the batch's to say."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        async with store(Path(folder)) as redis:
            for rate in (100, 500, 1000):
                for turns in (2, 10):
                    rows[f"{rate}/s, {turns * 320} tokens"] = await _cost_of(redis.url, rate, turns)
            rows["500/s, long prompts"] = await _cost_of(redis.url, 500, 10, work=2000)
    return rows


async def _cost_of(url: str, rate: int, turns: int, work: int = 101) -> dict[str, Any]:
    """`work`: uncached tokens of a prompt. Long ones are published within 2 ms."""
    alone, costs, sent = [], [], 0
    async with RedisConnection(settings(url), ("unheard",)) as line:
        for _ in range(ROUNDS):
            alone.append(_ticks(rate, turns))
            cost, size = await _published(rate, turns, Proxy(settings(url, lease=60.0)), line, work)
            costs.append(cost)
            sent += size
    return {
        "CPU, us": round((min(costs) - min(alone)) / REQUESTS * 1e6, 1),
        "index alone": round(min(alone) / REQUESTS * 1e6, 1),
        "bytes": round(sent / ROUNDS / REQUESTS),
    }


PACKETS = 1000
PACKET = bytes(75)


async def transport() -> dict[str, dict[str, float]]:
    """Return the least of three rounds of PACKETS packets."""
    with tempfile.TemporaryDirectory() as folder:
        async with store(Path(folder)) as redis:
            mine = [await _own_transport(redis.url) for _ in range(3)]
            theirs = [await _client_of_redis(redis.url) for _ in range(3)]
    return {
        name: {
            what: round(min(column) / PACKETS * 1e6, 1)
            for what, column in zip(HOW, zip(*rows, strict=True), strict=True)
        }
        for name, rows in (("kvlane's connection", mine), ("redis-py's client", theirs))
    }


HOW = ("publish, us", "receive, us")


async def _own_transport(url: str) -> tuple[float, float]:
    """Return the CPU seconds to publish, and to receive."""
    received, is_done = 0, asyncio.Event()

    def count(_: bytes) -> None:
        nonlocal received
        received += 1
        if received == PACKETS:
            is_done.set()

    async with RedisConnection(settings(url), ("unheard",)) as sender:
        began = time.process_time()
        await _publish_all(sender)
        publishing = time.process_time() - began
        async with RedisConnection(settings(url), ("heard",), count):
            began = time.process_time()
            await _publish_all(sender, "heard")
            await is_done.wait()
            return publishing, time.process_time() - began - publishing


async def _client_of_redis(url: str) -> tuple[float, float]:
    import redis.asyncio

    client = redis.asyncio.Redis.from_url(url)
    listener = client.pubsub()
    began = time.process_time()
    for _ in range(PACKETS):
        await client.publish("unheard", PACKET)
    publishing = time.process_time() - began
    await listener.subscribe("heard")
    async with RedisConnection(settings(url), ("unheard",)) as sender:
        began = time.process_time()
        await _publish_all(sender)
        sending = time.process_time() - began
        began, received = time.process_time(), 0
        await _publish_all(sender, "heard")
        while received < PACKETS:
            received += await listener.get_message(ignore_subscribe_messages=True, timeout=5.0) is not None
        receiving = time.process_time() - began - sending
    await listener.aclose()
    await client.aclose()
    return publishing, receiving


async def _publish_all(sender: RedisConnection, channel: str = "unheard") -> None:
    for number in range(PACKETS):
        sender.publish(channel, PACKET)
        if not number % 10:
            await asyncio.sleep(0)
        if sender.waiting:
            await asyncio.sleep(0)


REQUESTS, ROUNDS = 2000, 8
TICK = 0.01
"""Seconds."""

AT_ONCE, OPEN = 100, 60
"""Conversations, one turn of each after the other; and requests in flight: when one comes, the oldest of them ends."""


def _ticks(rate: int, turns: int) -> float:
    load = Load(PrefixIndex(SystemClock(), 1 << 26), Endpoint("a"), None)
    batches = list(_batches(rate, turns))
    gc.collect()
    began = time.process_time()
    for batch in batches:
        for chain in batch:
            load.step(chain)
    return time.process_time() - began


async def _published(rate: int, turns: int, proxy: Proxy, line: RedisConnection, work: int) -> tuple[float, int]:
    """Seconds of CPU, and bytes. The clock is read twice in all: where the machine is a virtual one, that can take a
    millisecond. Timers go off when a tick is over, by a clock that goes by ticks."""
    deployment = proxy.deployment
    deployment.is_connected, deployment._connection = True, line
    load, loop = Load(proxy.index, proxy.pod, proxy.replica.own_loads, work), asyncio.get_running_loop()
    tick = TICK if work < LONG_PROMPT else SOON
    batches = list(_batches(rate, turns, tick))
    clock = ManualClock(loop.time())
    loop.time = clock.now  # type: ignore[method-assign]
    gc.collect()
    began = time.process_time()
    for batch in batches:
        for chain in batch:
            load.step(chain)
        clock.advance(tick)
        _go_off(proxy.replica._batch, clock.now())
        if line.waiting:
            await asyncio.sleep(0)
    proxy.replica._batch.flush()
    spent = time.process_time() - began
    del loop.time
    return spent, int(deployment.series.sent.value)


def _go_off(batch: Batch, now: float) -> None:
    for timer in (batch._late, batch._soon):
        if timer is not None and timer.when() <= now and not timer.cancelled():
            timer._run()


def _batches(rate: int, turns: int, tick: float = TICK) -> Iterator[list[list[int]]]:
    rng = random.Random(1)
    found: list[list[int]] = []
    while len(found) < REQUESTS:
        chains = [[rng.getrandbits(63) for _ in range(5 * turns * 2)] for _ in range(AT_ONCE)]
        found += [chain[: 5 * (turn + 1)] for turn in range(2 * turns) for chain in chains]
    size = max(1, int(rate * tick))
    for start in range(0, REQUESTS, size):
        yield found[start : min(REQUESTS, start + size)]


class Load:
    """What requests do to the loads and the index, each in three parts, for one request; no peer receives any of
    the loads unless there are any for others."""

    def __init__(self, index: PrefixIndex, pod: Endpoint, loads: OwnLoads | None, work: int = 101) -> None:
        self._work = work
        self._index = index
        self._pod = pod
        self._loads = loads
        self._open: deque[Reservation] = deque()

    def step(self, chain: list[int]) -> None:
        index, pod, loads = self._index, self._pod, self._loads
        pod.charge(1, 100)
        if loads is not None:
            loads.dispatched(pod, self._work)
        self._open.append(index.reserve((chain,), pod, 1 << 20))
        pod.charge(0, -100)
        if loads is not None:
            loads.eased(pod)
        if len(self._open) > OPEN:
            index.settle(self._open.popleft(), True)
            pod.charge(-1, 0)
            if loads is not None:
                loads.eased(pod)


if __name__ == "__main__":
    main()
