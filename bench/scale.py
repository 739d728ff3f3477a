"""What it costs proxies of a large deployment to know of each other, in a simulation: real code, in-memory store.

    python bench/scale.py [--replicas 8 --pods 1000 --rate 100 --seconds 3] [--json]

Every replica is what `kvlane serve` has for this: `Deployment`, `Replica`, shared prefix index and loads, and all pods.
The clock is virtual; between the replicas stands a store that passes on what is published after half a millisecond.
Conversations of eight turns come at random moments, each to the better of two random pods, where it stays; a turn adds
320 tokens, has its first byte after 0.2 s and its end after 1 s, and the next one follows 0.2 s later. Without
arguments: 8 replicas with 1000 pods, and 100 with 10,000.

    publish      CPU microseconds per request, of the replica that has it: what it adds to the index, what is gathered
                 and packed, and a write to a socket for each packet
    apply        CPU microseconds per request of another one, of each replica that hears of it
    bytes        per request, to each of the others
    staleness    seconds from the moment that a request is sent to a pod until another replica counts it
    crowding     requests on the fullest pod, by the mean of all, as one replica sees them
    memory       MiB per replica, with its pods and its index

CPU is that of the least disturbed tenths of a second: the lowest quarter of them.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import random
import resource
import socket
import statistics
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rig import say, table

from proxy.cluster.deployment import Deployment
from proxy.cluster.prefixes import SharedIndex
from proxy.cluster.redis_transport import command
from proxy.cluster.replica import Replica, new_id
from proxy.cluster.settings import ReplicaSettings
from proxy.core.endpoint import Endpoint
from proxy.core.tasks import Tasks
from proxy.fleet.ledger import Ledger
from proxy.prefix.index import PrefixIndex
from proxy.telemetry.metrics import Catalogue
from tests.helpers.cluster.virtual import VirtualLoop

FIRST_BYTE, END, THINK = 0.2, 1.0, 0.2
TRANSIT = 0.0005
WARM = 2.5
"""Seconds of requests that are not counted: they continue conversations from before the start."""

BLOCKS, TURNS = 5, 8
"""Of 64 tokens that each turn adds."""

INDEX_BYTES = 1 << 26
SIZES = ((8, 1000, 100.0, 3.0), (100, 10_000, 10.0, 0.5))
"""(replicas, pods, requests per second of each replica, seconds)."""


def main() -> None:
    options = _options()
    Plain.measure()
    rows = {}
    for replicas, pods, rate, seconds in _sizes(options):
        say(f"{replicas} replicas, {pods} pods, {rate:g} requests/s each: {seconds:g} s")
        rows[f"{replicas} x {pods}, {rate:g}/s"] = _run(replicas, pods, rate, seconds)
        gc.collect()
    if options.json:
        print(json.dumps(rows, indent=1))
        return
    heads = list(next(iter(rows.values())))
    print(table([["", *heads], *([name, *(str(row[head]) for head in heads)] for name, row in rows.items())]))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int)
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--rate", type=float, default=100.0, help="requests per second of each replica")
    parser.add_argument("--seconds", type=float, default=3.0, help="that count, on the virtual clock")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _sizes(options: argparse.Namespace) -> Sequence[tuple[int, int, float, float]]:
    if options.replicas is None:
        return SIZES
    return ((options.replicas, options.pods, options.rate, options.seconds),)


def _run(replicas: int, pods: int, rate: float, seconds: float) -> dict[str, Any]:
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(Simulation(loop, replicas, pods, rate).run(seconds))
    finally:
        loop.close()


# The world.


class Store:
    """What is published to a channel is with its listeners a moment later, in the same order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listeners: dict[str, list[Callable[[bytes], None]]] = defaultdict(list)
        self._passing: deque[tuple[str, bytes]] = deque()

    def line(self, settings: ReplicaSettings, channels: Sequence[str], deliver: Callable[[bytes], None]) -> MemoryLine:
        for channel in channels:
            self._listeners[channel].append(deliver)
        return MemoryLine(self)

    def publish(self, channel: str, message: bytes) -> None:
        self._passing.append((channel, message))
        self._loop.call_later(TRANSIT, self._deliver)

    def _deliver(self) -> None:
        channel, message = self._passing.popleft()
        for deliver in self._listeners[channel]:
            deliver(message)


class MemoryLine:
    """A `proxy.cluster.deployment.Connection`; what publishing costs on a socket is paid here too."""

    waiting = 0

    def __init__(self, store: Store) -> None:
        self._store = store
        self._socket, self._reader = socket.socketpair()
        self.spent = 0.0

    async def __aenter__(self) -> MemoryLine:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._socket.close()
        self._reader.close()

    def publish(self, channel: str, message: bytes) -> None:
        began = time.thread_time()
        self._socket.send(command(channel, message)[:65536])
        self.spent += time.thread_time() - began
        self._reader.recv(65536)
        self._store.publish(channel, message)

    async def lost(self) -> None:
        await asyncio.Event().wait()


# A replica, and what it does.


class Plain:
    """What `SharedIndex` inherits, on a meter of its own."""

    spent = 0.0

    @classmethod
    def measure(cls) -> None:
        for name in ("reserve", "settle"):
            setattr(PrefixIndex, name, cls._timed(getattr(PrefixIndex, name)))

    @classmethod
    def _timed(cls, plain: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*given: Any) -> Any:
            began = time.thread_time()
            done = plain(*given)
            cls.spent += time.thread_time() - began
            return done

        return timed


class Host:
    def __init__(self, number: int, pods: int, store: Store, loop: VirtualLoop, used: Callable[..., None]) -> None:
        self.spent = {"publish": 0.0, "apply": 0.0}
        self._is_metered = False
        self.lines: list[MemoryLine] = []
        self.pods = {f"pod-{each}": Endpoint(f"pod-{each}") for each in range(pods)}
        ledger = Ledger(loop)

        def apply(pod: Endpoint, requests: int, tokens: int, work: int) -> None:
            ledger.elsewhere(pod, requests, tokens, work)
            used(pod.name, work)

        self.replica = Replica(
            new_id(),
            loop,
            endpoints=lambda: list(self.pods.values()),
            apply=apply,
            receive=lambda peer, kind, body: None,
            catalogue=Catalogue("bench"),
            lease=10.0,
        )
        self.index = SharedIndex(loop, INDEX_BYTES, tag=1, touch=self.replica.touch_later, find=self.replica.roster.get)
        self.replica.state.put(indexes=[self.index])
        for pod in self.pods.values():
            self.replica.added(pod)
        settings = ReplicaSettings(store="redis://memory", name=f"host-{number}", lease=10.0)

        def line(given: ReplicaSettings, channels: Sequence[str], deliver: Callable[[bytes], None]) -> MemoryLine:
            self.lines.append(store.line(given, channels, deliver))
            return self.lines[-1]

        self.deployment = Deployment(
            settings,
            loop,
            random.Random(number),
            Catalogue("scale"),
            self.replica,
            lambda: "same",
            connect=line,
        )
        self.series = self.deployment.series
        self.replica.join(self.deployment)
        for part in ("_send_soon", "flush"):
            self._meter(self.replica._batch, part, "publish")
        self._meter(self.deployment, "publish", "publish")
        self._meter(self.deployment, "_received", "apply")

    def add(self, part: str, work: Callable[[], Any]) -> Any:
        """Subtract the cost of the index of a proxy without peers, and count nothing twice."""
        if self._is_metered:
            return work()
        self._is_metered = True
        began, plain = time.thread_time(), Plain.spent
        done = work()
        self._is_metered = False
        self.spent[part] += time.thread_time() - began - (Plain.spent - plain if part == "publish" else 0.0)
        return done

    def clear(self) -> None:
        for part in self.spent:
            self.spent[part] = 0.0
        for line in self.lines:
            line.spent = 0.0

    def _meter(self, owner: Any, name: str, part: str) -> None:
        plain = getattr(owner, name)
        setattr(owner, name, lambda *given: self.add(part, lambda: plain(*given)))


class Simulation:
    def __init__(self, loop: VirtualLoop, replicas: int, pods: int, rate: float) -> None:
        self._loop = loop
        self._rate = rate
        self._random = random.Random(1)
        before = _resident()
        store = Store(loop)
        self._sent_at: dict[str, deque[float]] = defaultdict(deque)
        self._staleness: list[float] = []
        self._hosts = [
            Host(number, pods, store, loop, self._receive if number == 0 else lambda name, work: None)
            for number in range(replicas)
        ]
        self._built = _resident() - before
        self._requests = self._recent = 0
        self._publish: list[float] = []
        self._apply: list[float] = []
        """Seconds per request, of each tenth of a second."""
        self._crowding: list[float] = []

    async def run(self, seconds: float) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            for host in self._hosts:
                stack.push_async_callback(host.replica.close)
                await stack.enter_async_context(host.deployment)
            tasks = await stack.enter_async_context(Tasks())
            for number, host in enumerate(self._hosts):
                tasks.start(self._load(host, random.Random(number), tasks, number > 0), "load")
            await asyncio.sleep(WARM)
            self._clear()
            sent = sum(host.series.sent.value for host in self._hosts)
            for _ in range(int(seconds * 10)):
                await asyncio.sleep(0.1)
                self._sample()
                self._account()
            return self._row(sum(host.series.sent.value for host in self._hosts) - sent)

    async def _load(self, host: Host, rng: random.Random, tasks: Tasks, is_watched: bool) -> None:
        names = list(host.pods)

        async def talk(turns: int, wait: float) -> None:
            await asyncio.sleep(wait)
            one, other = rng.choices(names, k=2)
            pod = min(host.pods[one], host.pods[other], key=lambda each: each.load.requests)
            chain = [rng.getrandbits(63) for _ in range(BLOCKS * (TURNS - turns))]
            for _ in range(turns):
                chain = [*chain, *(rng.getrandbits(63) for _ in range(BLOCKS))]
                if is_watched:
                    self._sent_at[pod.name].append(self._loop.time())
                self._recent += 1
                await self._serve(host, pod, chain)
                await asyncio.sleep(THINK)

        for _ in range(int(self._rate * (END + THINK))):
            tasks.start(talk(rng.randint(1, TURNS), rng.random() * (END + THINK)), "conversation that had begun")
        while True:
            await asyncio.sleep(rng.expovariate(self._rate / TURNS))
            tasks.start(talk(TURNS, 0.0), "conversation")

    async def _serve(self, host: Host, pod: Endpoint, chain: list[int]) -> None:
        loads = host.replica.own_loads
        pod.charge(1, 100)
        host.add("publish", lambda: loads.dispatched(pod, 101))
        reservation = host.add("publish", lambda: host.index.reserve((chain,), pod, 1 << 20))
        await asyncio.sleep(FIRST_BYTE)
        pod.charge(0, -100)
        host.add("publish", lambda: loads.eased(pod))
        await asyncio.sleep(END - FIRST_BYTE)
        host.add("publish", lambda: host.index.settle(reservation, True))
        pod.charge(-1, 0)
        host.add("publish", lambda: loads.eased(pod))

    def _receive(self, name: str, work: int) -> None:
        sent = self._sent_at[name]
        if work and sent:
            self._staleness.append(self._loop.time() - sent.popleft())

    def _sample(self) -> None:
        """As the first replica sees it: its own and all others'."""
        seen = [pod.load.requests for pod in self._hosts[0].pods.values()]
        self._crowding.append(max(seen) / max(1e-9, statistics.mean(seen)))

    def _account(self) -> None:
        """Of the last tenth of a second."""
        hosts, requests = self._hosts, max(1, self._recent)
        publish = sum(host.spent["publish"] + sum(line.spent for line in host.lines) for host in hosts)
        self._publish.append(publish / requests)
        self._apply.append(sum(host.spent["apply"] for host in hosts) / requests / (len(hosts) - 1))
        self._requests += self._recent
        self._recent = 0
        for host in hosts:
            host.clear()

    def _clear(self) -> None:
        self._account()
        self._requests = 0
        self._staleness.clear()
        self._publish.clear()
        self._apply.clear()

    def _row(self, sent: float) -> dict[str, Any]:
        ordered = sorted(self._staleness)
        return {
            "requests": self._requests,
            "publish, us": _least(self._publish),
            "apply, us": _least(self._apply),
            "bytes": round(sent / self._requests),
            "staleness": f"{statistics.median(ordered) * 1000:.0f} ms",
            "p99": f"{ordered[len(ordered) * 99 // 100] * 1000:.0f} ms",
            "crowding": round(statistics.mean(self._crowding), 2),
            "memory": f"{(self._built / len(self._hosts)) / 2**20:.1f} MiB",
        }


def _least(seconds: list[float]) -> float:
    """Microseconds: the mean of the lowest quarter."""
    lowest = sorted(seconds)[: max(1, len(seconds) // 4)]
    return round(statistics.mean(lowest) * 1e6, 1)


def _resident() -> float:
    """Bytes."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


if __name__ == "__main__":
    main()
