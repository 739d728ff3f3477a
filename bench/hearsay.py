"""What proxies of one deployment lose because each hears of the others late, apart from what their processes cost.

    python bench/hearsay.py [--proxies 1,2,4] [--delays 0,15,60,250] [--trace FILE] [--seeds 3] [--json]

The gateway, scheduler, index and ledger of each proxy, all in one process on a virtual clock: no sockets, no store, and
no CPU that one takes from the other. What a proxy does is gathered for a while, and heard by the others a moment later,
in the bytes that go over the store; `delays` are milliseconds between the two; the first half is spent
gathering. Which blocks are where, and that a pod has less to do, is gathered for `--rest`, if that is longer. Each
request is with any of the proxies. Contrasts: one proxy, and proxies that share nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from bench.placement.generators import generate
from bench.rig import say, table
from proxy.cluster.messages import RecordKind, records
from proxy.cluster.prefixes import SharedIndex
from proxy.cluster.shared import OwnLoads, PeerLoads, PodNumbers
from proxy.cluster.transport import LATER
from proxy.core.attempt import Stage
from proxy.core.endpoint import DEFAULT_POOL, Metrics
from proxy.core.ports import ManualClock
from proxy.fleet.ledger import SharedLedger
from proxy.lab.kvlane import Kvlane
from proxy.lab.replay import ReplayObjectives, averaged, fared, figures
from proxy.lab.sim import SimConfig
from proxy.lab.sim.config import HARDWARE
from proxy.lab.simulation import Policy, Simulation, VirtualPod
from proxy.lab.workload import Job, Workload, load_trace
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.settings import Settings

APART = -1.0
"""The delay of proxies that share nothing."""

LONGEST = 100_000
"""Tokens of a request of a trace."""

SHOWN = ("ttft_mean", "ttft_p90", "hit", "imbalance", "packets")


def main() -> None:
    options = _options()
    rows: dict[str, dict[str, float]] = {}
    for count in options.proxies:
        for delay in (0.0,) if count == 1 else (*options.delays, APART):
            name = "1" if count == 1 else f"{count}, nothing shared" if delay == APART else f"{count}, {delay:g} ms"
            found = averaged([_run(options, count, delay / 1000, seed) for seed in range(options.seeds)])
            rows[name] = {key: found[key] for key in SHOWN}
            say(f"{name}: {rows[name]}")
    print(json.dumps(rows, indent=1) if options.json else _shown(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--proxies", type=_numbers(int), default=(1, 2, 4))
    parser.add_argument("--delays", type=_numbers(float), default=(0.0, 15.0, 60.0, 250.0), help="milliseconds")
    parser.add_argument("--rest", type=float, default=1000 * LATER, help="milliseconds that what may wait is gathered")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="in Mooncake's format; else made-up conversations")
    parser.add_argument("--generator", default="conversations", help="of bench/quality.py, where there is no trace")
    parser.add_argument("--pods", type=int, default=4)
    parser.add_argument("--kv-tokens", type=int, default=409_600)
    parser.add_argument("--rate", type=float, default=2.25, help="requests per second")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3, help="each another part of the trace")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    return lambda text: tuple(kind(each) for each in text.split(","))


def _run(options: argparse.Namespace, count: int, delay: float, seed: int) -> dict[str, float]:
    pods, clock = [VirtualPod(number, config) for number, config in enumerate(_pods(options))], ManualClock()
    policy = Proxies(count, delay, pods, clock, seed, options.rest / 1000)
    simulation = Simulation(_workload(options, seed).jobs, pods, policy, clock, Random(seed + 1))
    outcomes = simulation.run()
    counted = outcomes[len(outcomes) // 10 :]
    return {
        **figures(fared(counted, ReplayObjectives()), simulation.gauges),
        "packets": policy.batches / len(outcomes),
    }


def _pods(options: argparse.Namespace) -> list[SimConfig]:
    config = HARDWARE["generic-8b"].equip(SimConfig(block_size=16))
    return [replace(config, num_gpu_blocks=options.kv_tokens // 16)] * int(options.pods)


def _workload(options: argparse.Namespace, seed: int) -> Workload:
    count = options.requests
    if options.trace is None:
        return generate(options.generator, count, options.rate, Random(seed))
    whole = load_trace(options.trace, Random(seed)).fitting(LONGEST)
    return whole.window(seed * count, count).at_rate(options.rate)


class Sharing(Kvlane):
    """`said` is called when it has something for others, once until that is taken; `said_later` where it may wait, for
    the rest of all there is to say."""

    publish: Callable[[], None]
    publish_later: Callable[[], None]
    ledger: SharedLedger

    def __init__(self, pods: Sequence[VirtualPod], clock: ManualClock, rng: Random) -> None:
        self._loads = OwnLoads(self._touch, self._touch_later)
        super().__init__(Settings(), pods, clock, rng, says_cached=True)
        roster = PodNumbers()
        for endpoint in self._endpoints:
            roster.added(endpoint)
        self._peer_loads = PeerLoads(roster.get, self.ledger.elsewhere)
        self._indexes = []
        for number, producer in enumerate(self.schedulings[DEFAULT_POOL].plugins(ApproxPrefixCacheProducer)):
            producer.index = SharedIndex(
                clock,
                producer.max_bytes,
                tag=number,
                touch=self._touch_later,
                find=roster.get,
            )
            self._indexes.append(producer.index)

    def _make_ledger(self) -> SharedLedger:
        return SharedLedger(self._clock, self._loads.dispatched, self._loads.eased)

    def _touch(self) -> None:
        self.publish()

    def _touch_later(self) -> None:
        self.publish_later()

    def news(self, all_there_is: bool) -> bytes:
        rest = [index.collect_changes() for index in self._indexes] if all_there_is else []
        return b"".join([self._loads.collect_changes(), *rest])

    def hear(self, peer: int, batch: bytes) -> None:
        for kind, body in records(batch):
            if kind is RecordKind.LOAD:
                self._peer_loads.receive(peer, kind, body)
            else:
                for index in self._indexes:
                    index.receive(peer, kind, body)


class Proxies(Policy):
    """Messages of a proxy arrive at their time before any other event; the rest waits so many seconds, where
    these are more than what is spent gathering."""

    def __init__(
        self, count: int, delay: float, pods: Sequence[VirtualPod], clock: ManualClock, seed: int, rest: float = 0.0
    ) -> None:
        self._rng = Random(seed)
        self._clock = clock
        self._delay = delay
        self._proxies = [Sharing(pods, clock, Random(seed + number)) for number in range(count)]
        self.scrapes = self._proxies[0].scrapes
        self._of: dict[int, Sharing] = {}
        self._due: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = self.batches = 0
        for number, proxy in enumerate(self._proxies):
            later = max(0.0, rest - delay / 2)
            proxy.publish = self._saying(number, 0.0, all_there_is=not later)
            proxy.publish_later = self._saying(number, later, all_there_is=True)

    def place(self, index: int, job: Job, now: float) -> int | None:
        self._catch_up(now)
        proxy = self._of[index] = self._rng.choice(self._proxies)
        return proxy.place(index, job, now)

    def stage(self, index: int) -> Stage:
        return self._of[index].stage(index)

    def first_byte(self, index: int, now: float) -> None:
        self._catch_up(now)
        self._of[index].first_byte(index, now)

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        self._catch_up(now)
        self._of[index].ended(index, now, cached_tokens)

    def failed(self, index: int, now: float) -> int | None:
        return self._of[index].failed(index, now)

    def predicted(self, index: int) -> int | None:
        return self._of[index].predicted(index)

    def scrape_sent(self, pod: int) -> list[int]:
        self._catch_up(self._clock.now())
        return [proxy.scrape_sent(pod) for proxy in self._proxies]

    def scraped(self, pod: int, reading: Metrics | None, sent: list[int], sent_at: float) -> None:
        self._catch_up(self._clock.now())
        for proxy, own in zip(self._proxies, sent, strict=True):
            proxy.scraped(pod, reading, own, sent_at)

    def _saying(self, number: int, later: float, all_there_is: bool) -> Callable[[], None]:
        return lambda: self._later(self._clock.now() + later, lambda at: self._gather(number, at, all_there_is))

    def _later(self, since: float, what: Callable[[float], None]) -> None:
        if self._delay >= 0:
            self._order += 1
            heappush(self._due, (since + self._delay / 2, self._order, what))

    def _gather(self, number: int, now: float, all_there_is: bool) -> None:
        batch = self._proxies[number].news(all_there_is)
        self.batches += bool(batch)
        self._later(now, lambda at: self._tell(number, batch))

    def _tell(self, number: int, batch: bytes) -> None:
        for other, proxy in enumerate(self._proxies):
            if other != number:
                proxy.hear(number, batch)

    def _catch_up(self, now: float) -> None:
        while self._due and self._due[0][0] <= now:
            at, _, what = heappop(self._due)
            what(at)


def _shown(rows: dict[str, dict[str, float]]) -> str:
    heads = ("proxies", "TTFT mean", "p90", "prefix hits", "imbalance", "packets a request")
    return table(
        [
            list(heads),
            *(
                [
                    name,
                    f"{row['ttft_mean'] * 1000:.0f} ms",
                    f"{row['ttft_p90'] * 1000:.0f} ms",
                    f"{row['hit']:.1%}",
                    f"{row['imbalance']:.2f}",
                    f"{row['packets']:.1f}",
                ]
                for name, row in rows.items()
            ),
        ]
    )


if __name__ == "__main__":
    main()
