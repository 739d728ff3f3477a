"""Latency that a proxy adds at a fifth of its capacity, against asking a pod directly.

    python bench/latency.py [--peers sglang-router,nginx] [--case 1k] [--share 0.2] [--rounds 3] [--seconds 5] [--json]

The capacity of each proxy is measured first, with as much load as it takes. Then in every round the same load, with
pauses drawn from an exponential distribution so that requests come by chance, goes to a pod and to the proxy, one
after the other. What is added is the difference of percentiles within a round; shown is the median of the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import peers
from cpu import CASES
from rig import Engines, Load, Rig, Running, ask, post_script, say, table

PERCENTILES = ("p50", "p90", "p99", "p99.9")
CONNECTIONS = 64
"""So many that rarely all of them wait for a response: then requests no longer arrive at random."""

PAUSES = """
math.randomseed(SEED)
delay = function() return math.floor(-math.log(1 - math.random()) * MEAN_MS + 0.5) end
"""


@dataclass(frozen=True)
class Round:
    """Latencies in microseconds by percentile, at `per_second` requests."""

    program: str
    per_second: int
    direct: dict[str, float]
    proxied: dict[str, float]
    failed: int

    def added(self, percentile: str) -> float:
        return self.proxied[percentile] - self.direct[percentile]


def main() -> None:
    options = _options()
    programs = peers.chosen(options)
    with Rig(options.proxy_cores, options.load_cores) as rig:
        engines = rig.engines()
        running = [rig.start(program, engines) for program in programs]
        rounds = list(_rounds(rig, running, engines, options))
    results = [_result([one for one in rounds if one.program == program.name]) for program in programs]
    if options.json:
        print(
            json.dumps({"case": options.case, "results": results, "rounds": [asdict(one) for one in rounds]}, indent=1)
        )
    else:
        print(_as_text(results))
    if any(one.failed for one in rounds):
        sys.exit("some responses were invalid")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    peers.add_options(parser)
    parser.add_argument("--case", default="1k", choices=[name for name, case in CASES.items() if not case.interval_us])
    parser.add_argument("--share", type=float, default=0.2, help="of the proxy's capacity")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0, help="per measurement")
    return parser.parse_args()


def _rounds(rig: Rig, running: list[Running], engines: Engines, options: argparse.Namespace) -> Iterable[Round]:
    case = CASES[options.case]
    rates = {}
    for proxy in running:
        ask(proxy.site.port, case.body())
        capacity = rig.wrk(proxy.site.port, case.script(), case.connections, 3)().requests / 3
        rates[proxy.name] = max(1, round(capacity * options.share))
        say(f"{proxy.name}: {capacity:.0f} requests a second at most, asked for {rates[proxy.name]}")
    for number in range(options.rounds):
        for proxy in running:
            rate = rates[proxy.name]
            direct, proxied = (_paced(rig, port, rate, number, options) for port in (engines.ports[0], proxy.site.port))
            one = Round(proxy.name, rate, direct.latency, proxied.latency, direct.failed + proxied.failed)
            say(f"round {number + 1}  {proxy.name:<14} adds {one.added('p50'):.0f} us, p99 {one.added('p99'):.0f}")
            yield one


def _paced(rig: Rig, port: int, rate: int, seed: int, options: argparse.Namespace) -> Load:
    pauses = PAUSES.replace("SEED", str(seed)).replace("MEAN_MS", str(1000 * CONNECTIONS / rate))
    script = post_script(CASES[options.case].body()) + pauses
    return rig.wrk(port, script, CONNECTIONS, options.seconds)()


def _result(rounds: list[Round]) -> dict[str, Any]:
    def median(values: Iterable[float]) -> float:
        return round(statistics.median(values), 1)

    return {
        "program": rounds[0].program,
        "per_second": rounds[0].per_second,
        "direct_us": {name: median(one.direct[name] for one in rounds) for name in PERCENTILES},
        "proxied_us": {name: median(one.proxied[name] for one in rounds) for name in PERCENTILES},
        "added_us": {name: median(one.added(name) for one in rounds) for name in PERCENTILES},
    }


def _as_text(results: list[dict[str, Any]]) -> str:
    rows = [["microseconds", "a second", *(f"{kind} {name}" for kind in ("direct", "added") for name in PERCENTILES)]]
    for result in results:
        cells = [f"{result[kind][name]:.0f}" for kind in ("direct_us", "added_us") for name in PERCENTILES]
        rows.append([str(result["program"]), str(result["per_second"]), *cells])
    return table(rows)


if __name__ == "__main__":
    main()
