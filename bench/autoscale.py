"""Who scales a fleet of prefill and decode pods best: kvlane's recommender, and three others.

    python bench/autoscale.py [--load diurnal,shift] [--seeds 5] [--jobs 2] [--json FILE] [--png DIR]
    python bench/autoscale.py --scaler independent,kvlane --also '{"coordination": {"alpha": 0.5}}'

Requests come when they come (`bench/scaling/loads.py`), pods take two minutes to start, there are GPUs for twelve of
them, and a pod that is taken away finishes what it has. All on the virtual clock; the engines are the ones of
bench/quality.py, every request is prefilled on one pod and decoded on another.

    fixed         all GPUs, divided by what the load needs of each role in the mean
    fixed mean    divided like that: as many pods as kvlane had in the mean, in the same run
    independent   each role by itself, as a HorizontalPodAutoscaler of Kubernetes with its defaults
    hard ratio    the same with the defaults of kthena; then the roles' quotient is put between 1:2 and 2:1
    kvlane        the loop of proxy/autoscale with the defaults of a policy, but for how it shrinks, which is that of
                  config/autoscale/prefill-decode.yaml, mode: preferred, and each role between a third and two thirds,
                  which is the same ratio

All that scale begin with the first, decide every 15 seconds, get the same metrics with the same targets, and may
have eight pods of a role. Only kvlane knows how many GPUs there are; what asks for more waits until some are free.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.placement import plots as matplotlib_plots
from bench.placement.report import Figures, summary
from bench.rig import say, table
from bench.scaling import plots
from bench.scaling.figures import Played, figures
from bench.scaling.fleet import DECODE, PREFILL, Fleet, Shape
from bench.scaling.loads import LOADS, Load
from bench.scaling.scalers import Fixed, Independent, Kvlane, Ratio, Scaler, pool
from bench.scaling.scene import Moment, Scene
from proxy.core.errors import ConfigError
from proxy.core.ports import ManualClock
from proxy.lab.workload import Job

KVLANE, MEAN = "kvlane", "fixed mean"
SCALERS = ("fixed", MEAN, "independent", "hard ratio", KVLANE)

COLUMNS: Mapping[str, tuple[str, str, float]] = {
    "attained": ("SLO kept, %", ".1f", 100.0),
    "gpu_hours": ("GPU hours", ".1f", 1.0),
    "attained_per_gpu_hour": ("% per GPU hour", ".2f", 100.0),
    "moves": ("moves", ".0f", 1.0),
    "turns": ("turns", ".0f", 1.0),
    "ttft_p90": ("TTFT p90, s", ".1f", 1.0),
    "lost": ("lost", ".0f", 1.0),
}
"""Figure -> heading, format, unit."""

SURE = ("attained", "attained_per_gpu_hour", "moves")
"""Behind which the interval stands."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One load under one scaler: a run for each seed, in their order."""

    load: str
    scaler: str
    runs: Sequence[Figures]


def main() -> None:
    options = _options()
    if options.png:
        matplotlib_plots.check()
    runs = [(load, seed) for load in options.load for seed in options.seeds]
    with ProcessPoolExecutor(options.jobs) as pool_of_runs:
        found = dict(zip(runs, pool_of_runs.map(partial(_run, options), *zip(*runs, strict=True)), strict=True))
    cells = [
        Cell(load, scaler, [found[load, seed][scaler] for seed in options.seeds])
        for load in options.load
        for scaler, _ in _contestants(options)
    ]
    print(table([["load", "scaler", *(head for head, _, _ in COLUMNS.values())], *_rows(cells)]))
    if verdict := list(_verdict(cells)):
        print("\n" + table([["load", "this", "against", "% per GPU hour", "moves"], *verdict]))
    if options.json:
        about = {"command": shlex.join(["python", "bench/autoscale.py", *sys.argv[1:]]), "seeds": options.seeds}
        results = [{"load": one.load, "scaler": one.scaler, "runs": one.runs} for one in cells]
        options.json.write_text(json.dumps({**about, "results": results}, indent=1))


def _run(options: argparse.Namespace, name: str, seed: int) -> dict[str, Figures]:
    """By scaler. kvlane goes first, since one of the others is as large as it was."""
    load, shape = LOADS[name], Shape()
    jobs = load.jobs(seed)
    found: dict[str, Figures] = {}
    moments: dict[str, Sequence[Moment]] = {}
    for scaler, policy in sorted(_contestants(options), key=lambda one: one[0] != KVLANE):
        started = time.perf_counter()
        pods = _mean_pods(found[KVLANE], load, shape) if scaler == MEAN else shape.pods
        played = play(load, jobs, scaler, shape, policy, pods)
        found[scaler], moments[scaler] = figures(played), played.moments
        say(f"{name}, seed {seed}, {scaler}: {time.perf_counter() - started:.1f} s")
    if options.png and seed == options.seeds[0]:
        plots.write(name, jobs, load.seconds, {one: moments[one] for one, _ in _contestants(options)}, options.png)
    return found


def _mean_pods(found: Figures, load: Load, shape: Shape) -> int:
    return round(found["gpu_hours"] * 3600 / load.seconds / shape.gpus)


def _contestants(options: argparse.Namespace) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Names, and for kvlane what is changed of its policy."""
    for scaler in options.scaler:
        yield scaler, {}
    for changed in options.also:
        yield f"{KVLANE} {json.dumps(changed)}", changed


def play(
    load: Load, jobs: Sequence[Job], scaler: str, shape: Shape, changed: Mapping[str, Any], pods: int | None = None
) -> Played:
    """`pods` at the beginning: all there can be, unless given. Raises ConfigError for a wrong policy."""
    clock, fleet = ManualClock(), Fleet(shape)
    fleet.start(_fixed(jobs, shape, pods or shape.pods))
    make: Mapping[str, Callable[[], Scaler]] = {
        "fixed": Fixed,
        MEAN: Fixed,
        "independent": lambda: Independent(shape.most),
        "hard ratio": lambda: Ratio(shape.most),
    }
    with ExitStack() as stack:
        chosen = make[scaler]() if scaler in make else stack.enter_context(Kvlane(pool(shape, **changed), clock))
        scene = Scene(jobs, load.seconds, fleet, chosen, clock)
        outcomes = scene.run()
    return Played(outcomes, scene.moments, fleet.moves)


def _fixed(jobs: Sequence[Job], shape: Shape, pods: int) -> dict[str, int]:
    """So many, divided by seconds of prefill and by KV caches times seconds."""
    prefill = sum(job.prompt_tokens for job in jobs) / shape.prefill_rate
    decode = sum(_held(job, shape) for job in jobs) / shape.kv_tokens
    count = min(max(round(pods * prefill / (prefill + decode)), 1), pods - 1)
    return {PREFILL: count, DECODE: pods - count}


def _held(job: Job, shape: Shape) -> float:
    """Tokens times seconds in a KV cache that is half full."""
    tokens = job.prompt_tokens + job.output_tokens / 2
    sequences = max(1, int(shape.kv_tokens / 2 / tokens))
    return tokens * job.output_tokens * shape.config.timing.step(0, sequences, 0.0, shape.kv_tokens // 2)


def _rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for cell in cells:
        found = summary(cell.runs)
        yield [cell.load, cell.scaler, *(_reported(name, *found[name]) for name in COLUMNS)]


def _reported(name: str, value: float, half: float) -> str:
    _, form, unit = COLUMNS[name]
    sure = f" ±{half * unit:{form}}" if name in SURE and not math.isnan(half) else ""
    return format(value * unit, form) + sure


def _verdict(cells: Sequence[Cell]) -> Iterator[list[str]]:
    """Each kvlane over each of the others, seed by seed, less 1; moves as their difference."""
    for own in cells:
        for other in cells if own.scaler.startswith(KVLANE) else ():
            if other.load == own.load and not other.scaler.startswith(KVLANE):
                yield [own.load, own.scaler, other.scaler, *_compared(list(zip(own.runs, other.runs, strict=True)))]


def _compared(pairs: Sequence[tuple[Figures, Figures]]) -> list[str]:
    rate = "attained_per_gpu_hour"
    found = summary([{rate: a[rate] / b[rate] - 1, "moves": a["moves"] - b["moves"]} for a, b in pairs])
    (by, half), (more, more_half) = found[rate], found["moves"]
    if math.isnan(half):
        return [f"{by:+.1%}", f"{more:+.0f}"]
    return [f"{by:+.1%} ±{half:.1%}", f"{more:+.0f} ±{more_half:.0f}"]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=_names, default=list(LOADS), metavar="NAME,…", help=", ".join(LOADS))
    parser.add_argument("--scaler", type=_names, default=list(SCALERS), metavar="NAME,…", help=", ".join(SCALERS))
    parser.add_argument(
        "--also", type=json.loads, action="append", default=[], metavar="JSON", help="changes to kvlane's policy"
    )
    parser.add_argument("--seeds", type=_seeds, default=_seeds("3"), metavar="COUNT", help="how many, or 4-6  [3]")
    parser.add_argument("--jobs", type=int, default=1, metavar="COUNT", help="processes to run in  [1]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures of all runs")
    parser.add_argument("--png", type=Path, metavar="DIR", help="replicas and load over time; needs matplotlib")
    options = parser.parse_args()
    if unknown := {*options.load} - {*LOADS} | {*options.scaler} - {*SCALERS}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if MEAN in options.scaler and KVLANE not in options.scaler:
        parser.error(f"{MEAN} is as large as {KVLANE}, which must run too")
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _seeds(text: str) -> list[int]:
    first, dash, last = text.partition("-")
    return list(range(int(first), int(last) + 1)) if dash else list(range(int(first)))


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, matplotlib_plots.NoMatplotlib) as error:
        sys.exit(str(error))
