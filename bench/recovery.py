"""Whether a pod that was slow, or is new, gets requests again, and what trying such pods costs.

    python bench/recovery.py --trace conversation.jsonl.gz [--requests 1000] [--seeds 2] [--load 0.2,0.6]

On the virtual clock of bench/quality.py. Half of the time pod 0 is unlike the others, then like them: three or twenty
times slower; unreachable, so that nothing is known of it then; or it is new and twenty times slower for 20 seconds
more, as one that compiles. Contrasts: it is slow to the end, where trying costs most; nothing befalls it; and a fleet
of two kinds of GPU. `untried` is the default as it would be if nothing that a pod has shown were forgotten.

`wait` is how many seconds pass from when pod 0 is like the others until it gets a request, `pause` the longest time
thereafter without one, of any pod, in mean times between two requests of a pod; `share` what pod 0 gets then of what it
would if all got the same, `least` the same of the pod that gets the least.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.ablation import changed
from bench.placement import policies
from bench.placement.experiment import Experiment
from bench.placement.report import mean, percentile
from bench.placement.scenario import Scenario
from bench.rig import say, table
from proxy.core.ports import ManualClock
from proxy.lab.sim.engine import Pace
from proxy.lab.simulation import Restart, Simulation, SimulationOutcome
from proxy.latency.rates import Fading

UNTRIED = "untried"
COLUMNS = ("TTFT s", "p90", "after", "p90", "wait s", "pause", "share", "least")
WARM_UP, COMPILING = 20.0, 20.0
"""Seconds, and times slower."""

ENDLESS = float("inf")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Pod 0 takes `slowdown` times as long until half of the time has passed and `more` seconds; it is `away` for the
    first half. `stays`: it does not become like the others."""

    slowdown: float = 1.0
    away: bool = False
    more: float = 0.0
    stays: bool = False
    hardware: str = "generic-8b"


TROUBLES: Mapping[str, Trouble] = {
    "none": Trouble(),
    "3 times slower": Trouble(3.0),
    "20 times slower": Trouble(20.0),
    "3 times slower to the end": Trouble(3.0, stays=True),
    "20 times slower to the end": Trouble(20.0, stays=True),
    "new": Trouble(away=True),
    "new and compiling": Trouble(COMPILING, away=True, more=WARM_UP),
    "two kinds": Trouble(hardware="h100-llama-3.1-8b+a100-llama-3.1-8b"),
}


class Troubled(Simulation):
    """One whose pod 0 becomes like the others."""

    def heal(self, at: float) -> None:
        self._at(at, self._heal, None)

    def _heal(self, _: None) -> None:
        pace(self.pods[0], 1.0)


def main() -> None:
    options = _options()
    rows = [["trouble", "load", "policy", *COLUMNS]]
    for name in options.only:
        for load in options.load:
            for policy in options.policy:
                found = list(_figures(options, TROUBLES[name], load, policy))
                means = [mean(list(column)) for column in zip(*found, strict=True)]
                rows.append([name, f"{load:g}", policy, *(f"{one:.2f}" for one in means)])
                say("  ".join(rows[-1]))
    print(table(rows))


def _figures(options: argparse.Namespace, trouble: Trouble, load: float, policy: str) -> Iterator[list[float]]:
    experiment = _experiment(options.trace, options.requests, options.seeds, trouble.hardware)
    without = changed((Fading, "seconds", _nothing)) if policy == UNTRIED else nullcontext()
    with without:
        for seed in range(options.seeds):
            yield _figures_of(outcomes(experiment, trouble, load, policy, seed), trouble, experiment.scenario.pods)


@cache
def _experiment(trace: Path, requests: int, seeds: int, hardware: str) -> Experiment:
    return Experiment(Scenario(hardware=hardware), trace, requests=requests, seeds=seeds)


def outcomes(experiment: Experiment, trouble: Trouble, load: float, policy: str, seed: int) -> list[SimulationOutcome]:
    jobs, pods, clock = experiment.workload(seed, load).jobs, experiment.scenario.fleet(seed), ManualClock()
    half = _half(jobs[-1].arrival)
    router = policies.make(_name(policy), pods, clock, Random(seed), says_cached=True)
    pace(pods[0], trouble.slowdown)
    restarts = [Restart(0, 0.0, half)] if trouble.away else []
    simulation = Troubled(jobs, pods, router, clock, Random(seed + 1), restarts)
    if not trouble.stays:
        simulation.heal(half + trouble.more)
    return simulation.run()


def pace(pod: Any, slowdown: float) -> None:
    """Its steps take so many times longer from the next one on, and after it has been away."""
    pod.config = pod.engine.config = replace(pod.config, slowdown=slowdown)
    pod.engine.pace = Pace(pod.config)


def _figures_of(outcomes: Sequence[SimulationOutcome], trouble: Trouble, pods: int) -> list[float]:
    """In the order of COLUMNS."""
    end = outcomes[-1].job.arrival
    since = _half(end) + trouble.more
    later = [one for one in outcomes if one.job.arrival >= since]
    fair = len(later) / pods
    came = [[one.job.arrival for one in later if one.pod == pod] for pod in range(pods)]
    first = came[0][0] - since if came[0] else ENDLESS
    every = (end - since) / fair
    pause = max(b - a for times in came for a, b in pairwise([since, *times, end]))
    return [
        *_first_tokens(outcomes),
        *_first_tokens(later),
        first,
        pause / every,
        len(came[0]) / fair,
        min(map(len, came)) / fair,
    ]


def _first_tokens(outcomes: Sequence[SimulationOutcome]) -> tuple[float, float]:
    """Mean, and p90."""
    waits = sorted(one.first_token - one.job.arrival for one in outcomes if one.first_token is not None)
    return mean(waits), percentile(waits, 0.9)


def _half(end: float) -> float:
    return end / 2


def _name(policy: str) -> str:
    return policies.DEFAULT if policy == UNTRIED else policy


def _nothing(fading: Fading, now: float) -> float:
    return 0.0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="JSON lines in Mooncake's format")
    parser.add_argument("--requests", type=int, default=1_000, help="per run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--load", type=_numbers, default=[0.2, 0.6], metavar="SHARE,…")
    parser.add_argument("--policy", type=_names, default=["default", UNTRIED, "oracle"], metavar="NAME|FILE,…")
    parser.add_argument("--only", type=_names, default=list(TROUBLES), metavar="TROUBLE,…", help=", ".join(TROUBLES))
    options = parser.parse_args()
    if unknown := set(options.only) - set(TROUBLES):
        parser.error(f"no trouble is called {', '.join(unknown)}; there are {', '.join(TROUBLES)}")
    return options


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
