"""Gains of computing prompts on other pods than decoding: whole, split, and split where it pays.

    python bench/disagg.py [--mix 8000+100,agents] [--fleet 2P2D,both] [--load 0.4,0.7] [--json FILE] [--png DIR]
    python bench/disagg.py --trace conversation.jsonl.gz --mix trace

kvlane's gateway, hand-off, scheduler, ledger and hooks as they are, on the virtual clock of bench/quality.py. A fleet
has four pods: `1P3D` are one prefill pod and three decode pods, `both` are four that do both. A mix is a
generator of bench/quality.py, the trace, or lengths of prompt and response in tokens. Load 1 is what the fleet `both`
finishes per second if no request is split and no pod idles.

    whole        no request is split: what computes prompts only is idle
    always       every one is
    threshold    prompts with 512 tokens or more that the decode pod has not cached
    predicted    where that is predicted to be better (predicted-latency-pd-decider)

The verdict holds `predicted` against the better one of `whole` and `always`, mix by mix, fleet by fleet and load by
load: by the mean time to the complete response, and by the share of requests that keep both objectives. Behind ± is
half the width of the 95 % interval over the seeds; all policies get each seed.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.placement import plots, report
from bench.placement.charts import Chart
from bench.placement.experiment import Experiment
from bench.placement.generators import GENERATORS
from bench.placement.scenario import Scenario
from bench.rig import say, table
from proxy.core.errors import ConfigError
from proxy.lab.sim.config import HARDWARE

PODS = 4
THRESHOLD = 512
ENOUGH = 3_000
TRACE = "trace"

MIXES = ["8000+100", "4000+500", "1000+1000", "500+100", "bimodal", "agents", "conversations"]

FLEETS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "both": ("both",) * 4,
        "1P3D": ("prefill", "decode", "decode", "decode"),
        "2P2D": ("prefill", "prefill", "decode", "decode"),
        "3P1D": ("prefill", "prefill", "prefill", "decode"),
    }
)

DECIDERS: Mapping[str, Mapping[str, Any] | None] = MappingProxyType(
    {
        "whole": None,
        "always": {"type": "always-disagg-pd-decider"},
        "threshold": {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": THRESHOLD}},
        "predicted": {"type": "predicted-latency-pd-decider"},
    }
)
"""What decides, as a plugin of the configuration; None: nothing is split."""

SIMPLE = ("whole", "always")
VERDICT = ["mix", "fleet", "load", "E2E mean, s: whole, always / predicted", "slower", "points less good"]

TOLERATED = 0.03
"""Share by which the verdict lets a mean time be longer, and goodput smaller."""

FIGURES = {
    "ttft_mean": ("TTFT mean, s", ".2f", 1.0),
    "ttft_p90": ("p90", ".2f", 1.0),
    "ttft_p99": ("p99", ".2f", 1.0),
    "tpot_mean": ("TPOT mean, ms", ".1f", 1000.0),
    "tpot_p90": ("p90", ".1f", 1000.0),
    "e2e_mean": ("E2E mean, s", ".2f", 1.0),
    "goodput": ("good, %", ".1f", 100.0),
    "hit": ("hits, %", ".0f", 100.0),
    "split": ("split, %", ".0f", 100.0),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One mix before one fleet at one load, and what its policies made of it: figures of the seeds, in their order."""

    mix: str
    fleet: str
    load: float
    runs: Mapping[str, Sequence[Mapping[str, float]]]

    @property
    def found(self) -> Mapping[str, Mapping[str, float]]:
        """Means over the seeds, by policy."""
        return {
            policy: {name: report.mean([run[name] for run in runs]) for name in FIGURES}
            for policy, runs in self.runs.items()
        }

    @property
    def slower(self) -> tuple[float, float]:
        """Share by which the mean time to the complete response exceeds that of the better simple policy; and half
        the width of its interval."""
        best = min(SIMPLE, key=lambda policy: self.found[policy]["e2e_mean"])
        return self._against(best, "e2e_mean", lambda one, other: one / other - 1.0)

    @property
    def worse(self) -> tuple[float, float]:
        """Share of all requests that keep their objectives with the better simple policy, and do not here."""
        best = max(SIMPLE, key=lambda policy: self.found[policy]["goodput"])
        return self._against(best, "goodput", lambda one, other: other - one)

    def _against(self, policy: str, figure: str, difference: Callable[[float, float], float]) -> tuple[float, float]:
        pairs = zip(self.runs["predicted"], self.runs[policy], strict=True)
        return report.summary([{figure: difference(one[figure], other[figure])} for one, other in pairs])[figure]


def main() -> None:
    options = _options()
    if options.png:
        plots.check()
    with TemporaryDirectory() as folder:
        cells = list(_cells(options, Path(folder)))
    print(table([["mix", "fleet", "load", "policy", *(head for head, _, _ in FIGURES.values())], *_rows(cells)]))
    if {*SIMPLE, "predicted"} <= set(options.policy):
        print("\n" + table([VERDICT, *_verdict(cells)]))
    if options.json:
        about = {"command": shlex.join(["python", "bench/disagg.py", *sys.argv[1:]]), "seeds": options.seeds}
        results = [{"mix": one.mix, "fleet": one.fleet, "load": one.load, "runs": one.runs} for one in cells]
        options.json.write_text(json.dumps({**about, "results": results}, indent=1))
    if options.png:
        plots.write(list(_charts(cells)), options.png)


def _cells(options: argparse.Namespace, folder: Path) -> Iterator[Cell]:
    for mix in options.mix:
        experiment = _experiment(options, mix)
        say(f"{mix}: load 1 is {experiment.capacities[0]:.2f} requests per second")
        for load in options.load:
            for fleet in options.fleet:
                started = time.perf_counter()
                runs = {policy: _runs(experiment, folder, fleet, policy, load) for policy in options.policy}
                say(f"{mix}, {fleet}, load {load:g}: {time.perf_counter() - started:.1f} s")
                yield Cell(mix, fleet, load, runs)


def _runs(experiment: Experiment, folder: Path, fleet: str, policy: str, load: float) -> list[dict[str, float]]:
    path = folder / f"{fleet}-{policy}.yaml"
    path.write_text(json.dumps(_configuration(FLEETS[fleet], DECIDERS[policy])))
    runs = [experiment.virtual(str(path), load, seed) for seed in range(experiment.seeds)]
    return [{name: run[name] for name in FIGURES} for run in runs]


def _configuration(roles: Sequence[str], decider: Mapping[str, Any] | None) -> dict[str, Any]:
    """Of kvlane; JSON is YAML."""
    plugins: list[Mapping[str, Any]] = [
        {"type": "approx-prefix-cache-producer"},
        {"type": "predicted-latency-producer"},
        {"type": "decode-filter"},
        {"type": "prefill-filter"},
        {"type": "latency-scorer"},
        {"type": "disagg-profile-handler", "parameters": {}},
    ]
    if decider is not None:
        plugins[-1] = {"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": decider["type"]}}}
        plugins.append(decider)
    profiles = [
        {"name": stage, "plugins": [{"pluginRef": f"{stage}-filter"}, {"pluginRef": "latency-scorer"}]}
        for stage in ("decode", "prefill")
    ]
    pods = [{"url": f"http://127.0.0.1:{port}", "role": role} for port, role in enumerate(roles, 1)]
    return {"pods": {"static": pods}, "scheduling": {"plugins": plugins, "schedulingProfiles": profiles}}


def _rows(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for cell in cells:
        for policy, found in cell.found.items():
            formatted = [format(found[name] * unit, form) for name, (_, form, unit) in FIGURES.items()]
            yield [cell.mix, cell.fleet, f"{cell.load:g}", policy, *formatted]


def _verdict(cells: Sequence[Cell]) -> Iterator[list[str]]:
    for cell in cells:
        means = [f"{cell.found[name]['e2e_mean']:.2f}" for name in (*SIMPLE, "predicted")]
        (slower, wide), (worse, as_wide) = cell.slower, cell.worse
        kept = "" if slower <= TOLERATED and worse <= TOLERATED else "  <--"
        yield [
            cell.mix,
            cell.fleet,
            f"{cell.load:g}",
            f"{means[0]}, {means[1]} / {means[2]}",
            f"{slower:+.1%} ±{100 * wide:.1f}",
            f"{100 * worse:+.1f} ±{100 * as_wide:.1f}{kept}",
        ]


def _charts(cells: Sequence[Cell]) -> Iterator[Chart]:
    """For each mix, against the load: the fleet that splits nothing, and the others as they do."""
    for mix in dict.fromkeys(cell.mix for cell in cells):
        for figure, title in (
            ("e2e_mean", "mean time to the complete response"),
            ("goodput", "requests within objectives"),
        ):
            series: dict[str, list[tuple[float, float, float]]] = {}
            for cell in cells:
                for policy, found in cell.found.items() if cell.mix == mix else ():
                    if (policy == "whole") == (cell.fleet == "both") and policy != "threshold":
                        point = (cell.load, found[figure], float("nan"))
                        series.setdefault(f"{cell.fleet}, {policy}", []).append(point)
            unit = "seconds" if figure == "e2e_mean" else "share"
            yield Chart(f"{mix}: {title}", unit, series, logarithmic=figure == "e2e_mean")


def _experiment(options: argparse.Namespace, mix: str) -> Experiment:
    """Of load 1 a run of a generator has too few requests to say much: they all fit into the fleet at once."""
    long = Experiment(
        Scenario(pods=PODS, hardware=options.gpu),
        trace=options.trace if mix == TRACE else None,
        generator="" if mix == TRACE else mix,
        requests=options.requests if mix == TRACE else ENOUGH,
        seeds=options.seeds,
        objectives=report.Objectives(options.ttft, options.tpot),
    )
    return replace(long, requests=options.requests, known_capacity=long.capacities[0])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="JSON lines in Mooncake's format, for the mix `trace`"
    )
    parser.add_argument("--mix", type=_names, metavar="NAME,…", help=", ".join(GENERATORS) + ", PROMPT+OUTPUT  [seven]")
    parser.add_argument("--fleet", type=_names, default=list(FLEETS), metavar="NAME,…", help=", ".join(FLEETS))
    parser.add_argument("--policy", type=_names, default=list(DECIDERS), metavar="NAME,…", help=", ".join(DECIDERS))
    parser.add_argument("--load", type=_numbers, default=[0.4, 0.7], metavar="SHARE,…")
    parser.add_argument("--requests", type=int, default=400, help="per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--gpu", choices=HARDWARE, default="generic-8b")
    parser.add_argument("--ttft", type=float, default=2.0, help="objective of a good request, seconds")
    parser.add_argument("--tpot", type=float, default=0.03, help="objective of a good request, seconds per token")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    parser.add_argument("--png", type=Path, metavar="DIR", help="charts; needs matplotlib")
    options = parser.parse_args()
    options.mix = options.mix or [*MIXES, *([TRACE] if options.trace else [])]
    return options


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    try:
        main()
    except (ConfigError, plots.NoMatplotlib) as error:
        sys.exit(str(error))
