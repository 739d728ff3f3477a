"""How well requests are placed: time to first token, time per token, requests within SLO, cache hits, balance.

    python bench/quality.py --virtual --trace FILE [--load 0.6,0.8,0.95] [--policy default,round-robin,oracle]
    python bench/quality.py --virtual --generator agents --policy default,llm-d --slow-pod 3 --noise 0.3
    python bench/quality.py --slower 2 --trace FILE --requests 400 --policy default,nginx-round-robin,sglang-router
    python bench/quality.py --compare --slower 2 --trace FILE --requests 400 --policy default,round-robin
    python bench/quality.py --virtual --sweep --trace FILE --html report.html --png plots

`--virtual` runs kvlane's gateway, scheduler, ledger, hooks and index as they are, on a virtual clock and without
sockets, before simulated pods. Without it, pods, router and load are real processes and talk over loopback, `--slower`
times slower than the pods' model says; every time is given in seconds of the fleet. A policy is the path of a kvlane
configuration, or one of these:

    default         kvlane without a configuration
    round-robin, random, least-requests, power-of-two
    engine          the pod with the fewest requests, and on it the rank that vLLM's internal balancer takes
    cache-aware     as sglang-router does it
    llm-d           the endpoint picker with its default profile
    session-hash, prefix-hash, prefix-aware, load-aware, aibrix, dynamo, ray, llm-d-baseline, llm-d-affinity
                    other routers' policies; bench/placement/rivals says whose
    oracle          knows every pod's cache and queue exactly, and takes the pod with the least time to first token

Over sockets, round-robin, random, least-requests, power-of-two and cache-aware are done by nginx, HAProxy and
sglang-router. The other routers, except kvlane's own, choose on the virtual clock: each request is sent
straight to the pod that it got there. Any program of bench/peers.py can be named as well.

`--compare` measures both modes with the same requests and prints how far they are apart. `--sweep` goes through loads
from 0.2 to 1.2 and says where each policy breaks.

Load 1.0 is measured: what the fleet finishes per second if all requests stand in one queue and a pod takes the next one
whenever its own queue is empty. No pod idles then, and prefixes are found as chance has it; a router that finds more of
them may carry more.

Every seed spreads the arrivals of the trace again (or makes up another workload), and draws the routers' dice and the
noise again. With --requests, every seed uses another part of the trace, with its own load 1 if it is 2000 or more.
± is half of the 95 % interval over the seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench import peers
from bench.placement import page, plots, report, routers
from bench.placement.engines import ENGINES
from bench.placement.experiment import Experiment
from bench.placement.generators import GENERATORS
from bench.placement.report import Measured, reusable_share
from bench.placement.scenario import Scenario
from bench.rig import say, table
from proxy import __version__
from proxy.core.errors import ConfigError
from proxy.lab.sim.config import HARDWARE

LOADS = [0.6, 0.8, 0.95]

SWEEP = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2]

FAR_BEYOND = 5
"""Times the objective: a sweep ends where the p90 of the times to first token is more than that."""

TOO_LATE = 0.02
"""Seconds of the fleet: the load that is sent later than this was not open-loop."""


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that what was started is ended
    if options.png:
        plots.check()
    experiment = _experiment(options)
    about = _about(options, experiment)
    say(about["workload"])
    found = list(_measured(options, experiment))
    _print(options, found)
    if options.json:
        options.json.write_text(json.dumps({**about, "results": found}, indent=1))
    if options.html:
        options.html.write_text(page.html(about, found))
    if options.png:
        plots.write(page.charts(about, found), options.png)


def _measured(options: argparse.Namespace, experiment: Experiment) -> Iterator[Measured]:
    for policy in options.policy:
        for load in options.load:
            one = _measure(options, experiment, policy, load)
            yield one
            if options.sweep and one["figures"]["ttft_p90"][0] > FAR_BEYOND * options.ttft:
                break


def _measure(options: argparse.Namespace, experiment: Experiment, policy: str, load: float) -> Measured:
    runs = [_run(options, experiment, policy, load, seed) for seed in range(experiment.seeds)]
    one: Measured = {"load": load, "policy": policy, "figures": report.summary(runs), "runs": runs}
    if options.compare:
        drawn = [
            [experiment.virtual(policy, load, seed, draw) for draw in range(options.draws)]
            for seed in range(experiment.seeds)
        ]
        model = [{name: report.mean([run[name] for run in each]) for name in each[0]} for each in drawn]
        one |= {"virtual": report.summary(model), "differences": report.differences(model, runs)}
    return one


def _run(options: argparse.Namespace, experiment: Experiment, policy: str, load: float, seed: int) -> report.Figures:
    started = time.perf_counter()
    if options.virtual:
        figures = experiment.virtual(policy, load, seed)
    else:
        figures = experiment.over_sockets(policy, load, seed, options.slower, options.venv)
        if figures["late_p99"] > TOO_LATE:
            say(f"requests were sent up to {figures['late_p99']:.3f} s late: this machine needs a higher --slower")
    say(
        f"load {load:g}, {policy}, seed {seed}: TTFT {figures['ttft_mean']:.3f} s, good {figures['goodput']:.1%};"
        f" {figures['seconds']:.0f} s of the fleet in {time.perf_counter() - started:.1f} s"
    )
    return figures


def _print(options: argparse.Namespace, found: list[Measured]) -> None:
    found = sorted(found, key=lambda one: (one["load"], options.policy.index(one["policy"])))
    heads = ["load", "policy", *(head for head, _, _ in report.COLUMNS.values())]
    print(table([heads, *([f"{one['load']:g}", one["policy"], *report.row(one["figures"])] for one in found)]))
    if options.compare:
        heads, rows = report.compared(found)
        print("\n" + table([heads, *rows]))
    if options.sweep:
        heads = ["the knee", f"TTFT p90 > {options.ttft:g} s at load", f"good < {options.good:.0%} at load"]
        knees = report.knees(found, options.ttft, options.good)
        print("\n" + table([heads, *([name, *knee] for name, knee in knees.items())]))


def _about(options: argparse.Namespace, experiment: Experiment) -> dict[str, Any]:
    """What a reader must know to judge the results, and to repeat them."""
    return {
        "title": "Where requests go: " + ("both modes" if options.compare else _mode(options)),
        "workload": _description(experiment),
        "command": shlex.join(["python", "bench/quality.py", *sys.argv[1:]]),
        "versions": _versions(options),
        "objectives": {"first_token": options.ttft, "per_token": options.tpot},
        "good": options.good,
        "sweep": options.sweep,
        "seeds": options.seeds,
        "warm_up": options.warm_up,
        "capacity": experiment.capacities,
    }


def _mode(options: argparse.Namespace) -> str:
    return "virtual clock" if options.virtual else f"over sockets, {options.slower:g} times slower"


def _description(experiment: Experiment) -> str:
    source, scenario = experiment.source, experiment.scenario
    jobs, full = source.jobs, " or ".join(f"{rate:.3f}" for rate in dict.fromkeys(experiment.capacities))
    known = f"{reusable_share(jobs):.1%} of the prompt tokens were there before"
    prompt, output = (report.mean([getattr(job, name) for job in jobs]) for name in ("prompt_tokens", "output_tokens"))
    part = f", {experiment.requests} of them in each run" if 0 < experiment.requests < len(jobs) else ""
    return (
        f"{source.name}: {len(jobs)} requests{part} of {prompt:.0f} + {output:.0f} tokens, {known};"
        f" {_fleet(scenario)}; load 1: {full} requests/s"
    )


def _fleet(scenario: Scenario) -> str:
    usual = Scenario(scenario.pods, scenario.hardware)
    unusual = [f"{name} {value}" for name, value in asdict(scenario).items() if value != asdict(usual)[name]]
    return ", ".join([f"{scenario.pods} pods of {scenario.hardware}", *unusual])


def _versions(options: argparse.Namespace) -> dict[str, str]:
    found = {"kvlane": f"{__version__} {_revision()}".strip(), "Python": platform.python_version()}
    for policy in () if options.virtual else options.policy:
        name = routers.PROGRAMS.get(policy, policy)
        if name in peers.ALL:
            found[name] = peers.program(name, options.venv).version
    return found


def _revision() -> str:
    """Of the checkout, if it is one."""
    command = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    try:
        completed = subprocess.run(command, cwd=routers.ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return completed.stdout.strip()


def _experiment(options: argparse.Namespace) -> Experiment:
    scenario = Scenario(
        pods=options.pods,
        engine=options.engine,
        hardware=options.gpu,
        kv_tokens=options.kv_tokens,
        slow_pod=options.slow_pod,
        ranks=options.ranks,
        lockstep=options.lockstep,
        noise=options.noise,
        restart_at=options.restart_at,
        restart_seconds=options.restart_seconds,
    )
    return Experiment(
        scenario=scenario,
        trace=options.trace,
        generator=options.generator or "",
        requests=options.requests,
        seeds=options.seeds,
        known_capacity=options.capacity,
        objectives=report.Objectives(options.ttft, options.tpot),
        warm_up=options.warm_up,
        says_cached=not options.no_cached_tokens,
        complete=options.complete,
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--virtual", action="store_true", help="on a virtual clock, without sockets")
    mode.add_argument("--compare", action="store_true", help="over sockets and on the virtual clock, same requests")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format, .gz or not")
    what.add_argument("--generator", choices=GENERATORS, help="a workload that is made up")
    parser.add_argument("--requests", type=int, default=0, help="per run  [all of the trace; 8000 of a generator]")
    parser.add_argument("--load", type=_numbers, metavar="SHARE,…", help="[0.6,0.8,0.95; 0.2 to 1.2 with --sweep]")
    parser.add_argument("--sweep", action="store_true", help="find the load at which each policy breaks")
    parser.add_argument("--capacity", type=float, default=0.0, help="requests per second at load 1, if you know it")
    parser.add_argument("--policy", type=_names, default=["default", "round-robin"], metavar="NAME|FILE,…")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ttft", type=float, default=2.0, help="objective of a good request, seconds")
    parser.add_argument("--tpot", type=float, default=0.05, help="objective of a good request, seconds per token")
    parser.add_argument("--good", type=float, default=0.9, help="share of good requests below which a policy is broken")
    parser.add_argument("--warm-up", type=float, default=0.1, help="share of the requests that do not count, the first")
    parser.add_argument("--no-cached-tokens", action="store_true", help="pods do not report cached_tokens")
    parser.add_argument(
        "--complete", type=float, default=0.0, help="share of requests that are not streamed (--virtual)"
    )
    real = parser.add_argument_group("over sockets")
    real.add_argument("--slower", type=float, default=2.0, help="than the pods' model says")
    real.add_argument("--venv", type=Path, default=peers.VENV, help=peers.VENV_HELP)
    real.add_argument("--draws", type=int, default=5, help="of --compare: virtual runs per run over sockets")
    out = parser.add_argument_group("results")
    out.add_argument("--json", type=Path, metavar="FILE", help="all figures of all runs")
    out.add_argument("--html", type=Path, metavar="FILE", help="a report that needs no other file")
    out.add_argument("--png", type=Path, metavar="DIR", help="the charts; needs matplotlib")
    fleet = parser.add_argument_group("the fleet")
    fleet.add_argument("--pods", type=int, default=8)
    fleet.add_argument("--ranks", type=int, default=1, help="data-parallel ranks of a pod, each like --gpu; --virtual")
    fleet.add_argument("--lockstep", action="store_true", help="the ranks of a pod step together")
    fleet.add_argument("--engine", choices=ENGINES, default="vllm", help="the model of an engine; others are --virtual")
    fleet.add_argument("--gpu", type=_hardware, default="generic-8b", metavar="NAME[+NAME…]", help=", ".join(HARDWARE))
    fleet.add_argument("--kv-tokens", type=int, default=0, help="KV cache of a pod, if not that of the hardware")
    fleet.add_argument("--slow-pod", type=float, default=1.0, metavar="FACTOR", help="pod 0 takes so many times longer")
    fleet.add_argument("--noise", type=float, default=0.0, help="standard deviation of a factor on every step")
    fleet.add_argument(
        "--restart-at", type=float, default=0.0, metavar="SECONDS", help="pod 0 dies, and comes back empty"
    )
    fleet.add_argument("--restart-seconds", type=float, default=5.0, help="how long it is unreachable")
    options = parser.parse_args()
    options.load = options.load or (SWEEP if options.sweep else LOADS)
    return options


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _hardware(text: str) -> str:
    for name in text.split("+"):
        if name not in HARDWARE:
            raise argparse.ArgumentTypeError(f"{name} is unknown; choose from {', '.join(HARDWARE)}")
    return text


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, routers.NoSuchRouter, plots.NoMatplotlib) as error:
        sys.exit(str(error))
