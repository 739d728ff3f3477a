"""Targets of placement: target, result, met or missed.

    python bench/targets.py --trace conversation.jsonl.gz [--policy default] [--requests 3000] [--seeds 3]

All on the virtual clock of bench/quality.py, whose fleets, workloads and policies these are, in one sitting. `--only`
chooses some of the groups; `--json` has every figure. Exits with 1 if a target is missed. Where several loads are to be
kept, each is a target of its own.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.placement.experiment import Experiment
from bench.placement.report import mean
from bench.placement.rivals import RIVALS
from bench.placement.scenario import Scenario
from bench.rig import say, table
from proxy.lab.simulation import SimulationOutcome

LOADS = (0.6, 0.8, 0.95)
BASELINES = ("round-robin", "random", "least-requests", "power-of-two")
ORACLE = "oracle"
BURST = 64
RESTART_AT, RESTART_RUN = 60.0, 150.0
"""Seconds of the fleet."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """`found` and `limit` in the target's own unit; `against` is who was best of the others, where that matters."""

    group: str
    target: str
    found: float
    limit: float
    unit: str = ""
    at_most: bool = True
    against: str = ""

    @property
    def met(self) -> bool:
        return self.found <= self.limit if self.at_most else self.found >= self.limit

    @property
    def cells(self) -> list[str]:
        sign = "<=" if self.at_most else ">="
        shown = "nothing" if math.isnan(self.found) else f"{self.found:.3g} {self.unit}".strip()
        limit = f"{sign} {self.limit:g} {self.unit}".strip()
        return [self.group, self.target, shown, limit, "met" if self.met else "MISSED", self.against]


@dataclass(frozen=True)
class Bench:
    """What the groups measure with. `rivals` are the policies to compare with."""

    policy: str
    rivals: Sequence[str]
    trace: Experiment
    generated: Callable[[str], Experiment]

    def mean(self, experiment: Experiment, policy: str, load: float, figure: str) -> float:
        """Return the mean over the seeds with a value; nan without any."""
        return mean([run[figure] for run in _runs(experiment, policy, load) if not math.isnan(run[figure])])

    def best(self, experiment: Experiment, load: float, figure: str, *, least: bool = True) -> tuple[str, float]:
        found = {name: self.mean(experiment, name, load, figure) for name in self.rivals}
        name = (min if least else max)(found, key=lambda name: found[name])
        return name, found[name]


def main() -> None:
    options = _options()
    bench = _bench(options)
    verdicts: list[Verdict] = []
    for name in options.only:
        say(f"{name}: {GROUPS[name].__doc__}")
        verdicts += GROUPS[name](bench)
    if options.json:
        options.json.write_text(json.dumps([{**asdict(one), "met": one.met} for one in verdicts], indent=1))
    print(table([["", "target", "found", "limit", "", "best other"], *(one.cells for one in verdicts)]))
    missed = sum(not one.met for one in verdicts)
    sys.exit(f"{missed} of {len(verdicts)} missed" if missed else 0)


def conversation(bench: Bench) -> Iterator[Verdict]:
    """the trace of production chat, against every other router and the oracle"""
    experiment = bench.trace
    for load in LOADS:
        group = f"trace, load {load:g}"
        for figure, name in (("ttft_mean", "TTFT mean below the best other"), ("ttft_p90", "TTFT p90 below it")):
            against, theirs = bench.best(experiment, load, figure)
            won = 100 * (1 - bench.mean(experiment, bench.policy, load, figure) / theirs)
            yield Verdict(group, name, won, 20, "%", at_most=False, against=f"{against}, {theirs:.2f} s")
        against, theirs = bench.best(experiment, load, "goodput", least=False)
        more = 100 * (bench.mean(experiment, bench.policy, load, "goodput") - theirs)
        yield Verdict(group, "within SLO above the best other", more, 5, "points", False, f"{against}, {theirs:.1%}")
        yield _to_oracle(bench, experiment, load, group, "ttft_mean", 5)


def slow_pod(bench: Bench) -> Iterator[Verdict]:
    """the same, with one undeclared pod three times slower"""
    scenario = replace(bench.trace.scenario, slow_pod=3.0)
    for load in (0.6, 0.8):
        yield _to_oracle(
            bench, replace(bench.trace, scenario=scenario), load, f"slow pod, load {load:g}", "ttft_p90", 10
        )


def trap(bench: Bench) -> Iterator[Verdict]:
    """2,048 common tokens, 200 users, load 0.7: everybody has the same prefix"""
    experiment = bench.generated("shared-prompt")
    busiest = bench.mean(experiment, bench.policy, 0.7, "imbalance")
    yield Verdict("shared prompt, load 0.7", "in-flight, max/mean", busiest, 1.5)
    hit = 100 * bench.mean(experiment, bench.policy, 0.7, "hit")
    yield Verdict("shared prompt, load 0.7", "hit rate", hit, 90, "%", at_most=False)


def burst(bench: Bench) -> Iterator[Verdict]:
    """64 requests within 0.1 s about one document that no pod has, in the midst of other business at load 0.5"""
    experiment = bench.generated("burst")
    found = {name: _bursts(experiment, name) for name in (bench.policy, ORACLE)}
    shares = [max(Counter(one.pod for one in each).values()) for run in found[bench.policy] for each in run]
    pods = experiment.scenario.pods
    yield Verdict("cold burst", "busiest pod's requests of a burst over the mean", mean(shares) * pods / BURST, 2)
    mine, theirs = (
        mean([mean(_waits(each)) for run in found[name] for each in run]) for name in (bench.policy, ORACLE)
    )
    yield Verdict(
        "cold burst", "TTFT mean above the oracle's", 100 * (mine / theirs - 1), 10, "%", against=f"{theirs:.2f} s"
    )


def restart(bench: Bench) -> Iterator[Verdict]:
    """a pod dies after a minute and comes back with nothing in its memory"""
    for kind, experiment in (("trace", bench.trace), ("conversations", bench.generated("conversations"))):
        full = experiment.capacities[0]
        requests = max(experiment.requests, int(0.7 * full * RESTART_RUN))
        scenario = replace(experiment.scenario, restart_at=RESTART_AT)
        restarted = replace(experiment, requests=requests, known_capacity=full, scenario=scenario)
        error = 100 * bench.mean(restarted, bench.policy, 0.7, "hit_error_after_restart")
        yield Verdict(f"restart, {kind}", "hits, expected against actual, 30 s later", error, 10, "%")


GROUPS = {"trace": conversation, "slow-pod": slow_pod, "trap": trap, "burst": burst, "restart": restart}


def _to_oracle(bench: Bench, experiment: Experiment, load: float, group: str, figure: str, percent: float) -> Verdict:
    theirs = bench.mean(experiment, ORACLE, load, figure)
    above = 100 * (bench.mean(experiment, bench.policy, load, figure) / theirs - 1)
    name = f"TTFT {figure.removeprefix('ttft_')} above the oracle's"
    return Verdict(group, name, above, percent, "%", against=f"{theirs:.2f} s")


@cache
def _runs(experiment: Experiment, policy: str, load: float) -> list[dict[str, float]]:
    runs = [experiment.virtual(policy, load, seed) for seed in range(experiment.seeds)]
    say(f"  load {load:g}, {policy}: TTFT {mean([run['ttft_mean'] for run in runs]):.3f} s")
    return runs


def _bursts(experiment: Experiment, policy: str) -> list[list[list[SimulationOutcome]]]:
    """For each seed the outcomes of every burst."""
    return [
        _cold(experiment.simulated(policy, experiment.workload(seed, 0.5), seed)[0]) for seed in range(experiment.seeds)
    ]


def _cold(outcomes: Sequence[SimulationOutcome]) -> list[list[SimulationOutcome]]:
    """Requests that share the first chunk of their prompts with 63 others."""
    by: dict[int, list[SimulationOutcome]] = {}
    for one in outcomes:
        by.setdefault(one.job.nodes[0], []).append(one)
    return [each for each in by.values() if len(each) == BURST]


def _waits(outcomes: Sequence[SimulationOutcome]) -> list[float]:
    return [one.first_token - one.job.arrival for one in outcomes if one.first_token is not None]


def _bench(options: argparse.Namespace) -> Bench:
    def generated(name: str) -> Experiment:
        return Experiment(generator=name, requests=options.requests, seeds=options.seeds)

    trace = Experiment(Scenario(), options.trace, requests=options.requests, seeds=options.seeds)
    return Bench(options.policy, options.rivals, trace, cache(generated))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="JSON lines in Mooncake's format")
    parser.add_argument("--policy", default="default", help="what is to keep the targets: default, or a configuration")
    parser.add_argument("--rivals", type=_names, default=[*BASELINES, *RIVALS], metavar="NAME,…")
    parser.add_argument("--requests", type=int, default=3_000, help="per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", type=_names, default=list(GROUPS), metavar="GROUP,…", help=", ".join(GROUPS))
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.only) - set(GROUPS):
        parser.error(f"no group is called {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
