"""How well requests are placed: time to first token, time per token, requests within SLO, cache hits, balance.

    python bench/quality.py --virtual --trace FILE [--load 0.6,0.8,0.95] [--policy default,round-robin,oracle]
    python bench/quality.py --virtual --generator agents --policy default,llm-d --slow-pod 3 --noise 0.3

`--virtual` runs kvlane's gateway, scheduler, ledger, hooks and index as they are, on a virtual clock and without
sockets, before simulated pods. A policy is the path of a kvlane configuration, or one of these:

    default         kvlane without a configuration
    round-robin, random, least-requests, power-of-two
    cache-aware     as sglang-router does it
    llm-d           the endpoint picker with its default profile
    oracle          knows every pod's cache and queue exactly, and takes the pod with the least time to first token

Load 1.0 is measured: what the fleet finishes per second if all requests stand in one queue and a pod takes the next one
whenever it has nobody waiting. No pod idles then, and prefixes are found as chance has it; a router that finds more of
them may carry more.

Every seed spreads the arrivals of the trace anew (or makes up another workload), and draws the routers' dice and the
noise anew. With --requests, every seed takes another part of the trace, with a load 1 of its own. ± is half of the
95 % interval over the seeds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rig import say, table

from bench.placement import policies, report
from bench.placement.capacity import capacity
from bench.placement.generators import GENERATORS, generate
from bench.placement.pods import VirtualPod
from bench.placement.scenario import Scenario
from bench.placement.simulation import Simulation
from bench.placement.workload import Workload, load_trace, reusable_share
from proxy.core.clock import ManualClock
from proxy.core.errors import ConfigError
from proxy.sim.hardware import HARDWARE

GENERATED = 8_000
"""Requests, unless --requests says otherwise."""

FIRST_GUESS = 50.0
"""Requests per second that a workload is made up for, before it is known how many the fleet takes."""


def main() -> None:
    options = _options()
    scenario = _scenario(options)
    whole, most = _capacity(options, scenario)
    _describe(whole, scenario, most)
    found = [_measure(options, scenario, policy, load, most) for load in options.load for policy in options.policy]
    if options.json:
        about = {"workload": whole.name, "scenario": options.given, "capacity": most}
        options.json.write_text(json.dumps({**about, "results": found}, indent=1))
    heads = ["load", "policy", *(head for head, _, _ in report.COLUMNS.values())]
    print(table([heads, *([f"{one['load']:g}", one["policy"], *report.row(one["figures"])] for one in found)]))


def _measure(
    options: argparse.Namespace, scenario: Scenario, policy: str, load: float, most: list[float]
) -> dict[str, Any]:
    runs = []
    for seed, full in enumerate(most):
        workload = _workload(options, scenario, seed, load * full)
        started = time.perf_counter()
        simulation = _simulation(options, scenario, workload, policy, seed)
        outcomes = simulation.run()
        seconds = time.perf_counter() - started
        runs.append(report.figures(outcomes, simulation.gauges, options.objectives, options.warm_up, scenario.restarts))
        say(
            f"load {load:g}, {policy}, seed {seed}: TTFT {runs[-1]['ttft_mean']:.3f} s, good {runs[-1]['goodput']:.1%};"
            f" {simulation.now:.0f} s of the fleet in {seconds:.1f} s"
        )
    return {"load": load, "policy": policy, "figures": report.summary(runs), "runs": runs}


def _simulation(
    options: argparse.Namespace, scenario: Scenario, workload: Workload, name: str, seed: int
) -> Simulation:
    pods = [VirtualPod(index, config) for index, config in enumerate(scenario.configs(seed))]
    clock = ManualClock()
    policy = policies.make(name, pods, clock, Random(seed), says_cached=not options.no_cached_tokens)
    return Simulation(workload.jobs, pods, policy, clock, Random(seed + 1), scenario.restarts)


def _capacity(options: argparse.Namespace, scenario: Scenario) -> tuple[Workload, list[float]]:
    """The workload, and the requests per second that are load 1 for each seed. The parts of a trace differ in it, the
    seeds of a whole one do not."""
    configs, seeds = scenario.configs(), options.seeds
    if options.generator:
        most = options.capacity or FIRST_GUESS
        for _ in range(0 if options.capacity else 3):
            most = capacity(_made(options, scenario, 0, most).jobs, configs)
        return _made(options, scenario, 0, most), [most] * seeds
    whole = _trace(options, scenario, 0)
    if options.capacity:
        return whole, [options.capacity] * seeds
    if len(_part(options, whole, 0).jobs) == len(whole.jobs):
        return whole, [capacity(whole.jobs, configs)] * seeds
    return whole, [capacity(_part(options, whole, seed).jobs, configs) for seed in range(seeds)]


def _workload(options: argparse.Namespace, scenario: Scenario, seed: int, rate: float) -> Workload:
    if options.generator:
        return _made(options, scenario, seed, rate)
    return _part(options, _trace(options, scenario, seed), seed).at_rate(rate)


def _part(options: argparse.Namespace, whole: Workload, seed: int) -> Workload:
    """Another part for every seed, where one was asked for."""
    spare = len(whole.jobs) - options.requests
    if not options.requests or spare <= 0:
        return whole
    return whole.window(seed * spare // max(1, options.seeds - 1), options.requests)


def _made(options: argparse.Namespace, scenario: Scenario, seed: int, rate: float) -> Workload:
    made = generate(options.generator, options.requests or GENERATED, rate, Random(seed))
    return made.fitting(scenario.configs()[0].context_length)


def _trace(options: argparse.Namespace, scenario: Scenario, seed: int) -> Workload:
    return load_trace(options.trace, Random(seed)).fitting(scenario.configs()[0].context_length)


def _describe(source: Workload, scenario: Scenario, most: list[float]) -> None:
    jobs, full = source.jobs, " or ".join(f"{rate:.3f}" for rate in dict.fromkeys(most))
    prompt, answer = (report.mean([getattr(job, name) for job in jobs]) for name in ("prompt_tokens", "output_tokens"))
    say(
        f"{source.name}: {len(jobs)} requests of {prompt:.0f} + {answer:.0f} tokens, {reusable_share(jobs):.1%} of the"
        f" prompt tokens were there before; {scenario.pods} pods of {scenario.hardware}; load 1: {full} requests/s"
    )


def _scenario(options: argparse.Namespace) -> Scenario:
    return Scenario(
        pods=options.pods,
        hardware=options.gpu,
        kv_tokens=options.kv_tokens,
        slow_pod=options.slow_pod,
        noise=options.noise,
        restart_at=options.restart_at,
        restart_seconds=options.restart_seconds,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", action="store_true", required=True, help="on a virtual clock, without sockets")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format, .gz or not")
    what.add_argument("--generator", choices=GENERATORS, help="a workload that is made up")
    parser.add_argument("--requests", type=int, default=0, help="per run  [all of the trace; 8000 of a generator]")
    parser.add_argument("--load", type=_numbers, default=[0.6, 0.8, 0.95], metavar="SHARE,…")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests per second at load 1, if you know it")
    parser.add_argument("--policy", type=_names, default=["default", "round-robin", "oracle"], metavar="NAME|FILE,…")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=2.0, help="objective of a good request, seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="objective of a good request, seconds per token")
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the requests that do not count, the first")
    parser.add_argument("--no-cached-tokens", action="store_true", help="pods do not report cached_tokens")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all figures of all runs")
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument("--pods", type=int, default=8)
    fleet.add_argument("--gpu", choices=HARDWARE, default="generic-8b")
    fleet.add_argument("--kv-tokens", type=int, default=0, help="KV cache of a pod, if not that of the hardware")
    fleet.add_argument("--slow-pod", type=float, default=1.0, metavar="FACTOR", help="pod 0 takes so many times longer")
    fleet.add_argument("--noise", type=float, default=0.0, help="standard deviation of a factor on every step")
    fleet.add_argument(
        "--restart-at", type=float, default=0.0, metavar="SECONDS", help="pod 0 dies, and comes back empty"
    )
    fleet.add_argument("--restart-seconds", type=float, default=5.0, help="how long it is away")
    options = parser.parse_args()
    options.given = {name: str(value) for name, value in vars(options).items()}
    options.objectives = report.Objectives(options.ttft, options.tpot)
    return options


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    try:
        main()
    except ConfigError as error:
        sys.exit(str(error))
