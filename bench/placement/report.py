"""From outcomes to figures: percentiles, shares, and intervals over several seeds."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.lab.simulation import Gauges, Restart, SimulationOutcome, VirtualPod
from proxy.lab.workload import Job

Figures = dict[str, float]

Measured = dict[str, Any]
"""A policy at a load: `policy`, `load`, `figures` (see `summary`) and the `runs` they come from; after a comparison
also `virtual`, the summary of the same runs on the virtual clock, and `differences`, that of the ratios less 1."""

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % of Student's t for 1, 2, … degrees of freedom."""


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count as good, in seconds."""

    first_token: float = 2.0
    per_token: float = 0.05


PREFILL_WINDOW = 10.0
"""Seconds over which the prefill work of engines is compared."""


class PrefillGauges(Gauges):
    """Adds the prefill work of the engines."""

    def __init__(self) -> None:
        super().__init__()
        self.prefills: list[tuple[float, float]] = []
        """For each window of 10 s: the mean number of computed prompt tokens per engine, and the largest number
        relative to the mean."""
        self._window_ends = 0.0
        self._prefilled: Sequence[int] = ()

    def sample(self, pods: Sequence[VirtualPod], now: float) -> None:
        super().sample(pods, now)
        if now < self._window_ends:
            return
        tokens = [pod.engine.prefilled_tokens for pod in pods]
        done = [max(0, after - before) for after, before in zip(tokens, self._prefilled, strict=False)]
        if sum(done):
            self.prefills.append((sum(done) / len(done), max(done) * len(done) / sum(done)))
        self._window_ends, self._prefilled = now + PREFILL_WINDOW, tokens

    @property
    def prefill_skew(self) -> float:
        """Return the largest prefill work of an engine relative to the mean, in the worst window of 10 s with at least
        a quarter of the usual work; nan without such a window."""
        usual = sum(mean for mean, _ in self.prefills) / max(1, len(self.prefills))
        return max((skew for mean, skew in self.prefills if mean >= usual / 4), default=math.nan)


SETTLED = 30.0
"""Seconds after a restart from which on a router's picture of the pod should be right again."""


def figures(
    outcomes: Sequence[SimulationOutcome],
    gauges: Gauges,
    objectives: Objectives,
    warm_up: float,
    restarts: Sequence[Restart] = (),
) -> Figures:
    """Of the requests after the first `warm_up` share of them; what never ended counts as failed."""
    counted = outcomes[int(len(outcomes) * warm_up) :]
    done = [one for one in counted if one.ended is not None and one.first_token is not None]
    first = sorted(one.first_token - one.job.arrival for one in done if one.first_token is not None)
    whole = sorted(one.ended - one.job.arrival for one in done if one.ended is not None)
    paced = sorted(per_token(one) for one in done if one.job.output_tokens > 1)
    good = sum(_is_good(one, objectives) for one in done)
    prompts = sum(one.job.prompt_tokens for one in done) or 1
    foreseen = [one for one in done if one.predicted_tokens is not None]
    return {
        "requests": len(counted),
        "failed": len(counted) - len(done),
        "ttft_mean": mean(first),
        "ttft_p50": percentile(first, 0.5),
        "ttft_p90": percentile(first, 0.9),
        "ttft_p99": percentile(first, 0.99),
        "tpot_mean": mean(paced),
        "tpot_p90": percentile(paced, 0.9),
        "e2e_mean": mean(whole),
        "e2e_p90": percentile(whole, 0.9),
        "goodput": good / len(counted),
        "hit": sum(one.cached_tokens for one in done) / prompts,
        "hit_predicted": _predicted_hit(foreseen),
        "hit_error": _hit_error(foreseen),
        "kv_mean": gauges.kv_mean,
        "kv_max": gauges.kv_max,
        "preemptions": sum(one.preemptions for one in counted),
        "split": sum(one.prefill_pod >= 0 for one in done) / (len(done) or 1),
        "imbalance": gauges.imbalance,
        "prefill_skew": gauges.prefill_skew if isinstance(gauges, PrefillGauges) else math.nan,
        "retries": sum(one.retries for one in counted),
        "hit_error_after_restart": _hit_error(
            [one for one in foreseen for restart in restarts if _after(one, restart)]
        ),
    }


def per_token(one: SimulationOutcome) -> float:
    """Seconds from token to token, after the first."""
    assert one.ended is not None
    assert one.first_token is not None
    return (one.ended - one.first_token) / (one.job.output_tokens - 1)


def summary(runs: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """Mean, and half the width of its 95 % interval (Student's t; nan for a single run), by name."""
    return {name: (mean([run[name] for run in runs]), _half_width([run[name] for run in runs])) for name in runs[0]}


def of_policy(results: Sequence[Measured]) -> dict[str, list[Measured]]:
    """By policy, in order of load."""
    found: dict[str, list[Measured]] = {one["policy"]: [] for one in results}
    for one in sorted(results, key=lambda one: float(one["load"])):
        found[one["policy"]].append(one)
    return found


def knees(results: Sequence[Measured], ttft: float, good: float) -> dict[str, tuple[str, str]]:
    """For each policy the load at which the p90 of the times to first token passes `ttft`, and that at which the share
    of good requests falls below `good`."""
    found: dict[str, tuple[str, str]] = {}
    for policy, ones in of_policy(results).items():
        late = [(one["load"], one["figures"]["ttft_p90"][0] - ttft) for one in ones]
        bad = [(one["load"], good - one["figures"]["goodput"][0]) for one in ones]
        found[policy] = _turn(late), _turn(bad)
    return found


def _turn(points: Sequence[tuple[float, float]]) -> str:
    """Where the value turns positive, on a straight line between two points."""
    if points[0][1] > 0:
        return f"below {points[0][0]:g}"
    for (load, value), (next_load, next_value) in itertools.pairwise(points):
        if next_value > 0:
            return f"{load - value * (next_load - load) / (next_value - value):.2f}"
    return f"above {points[-1][0]:g}"


COMPARED = ("ttft_mean", "ttft_p90", "tpot_mean", "e2e_mean", "goodput", "hit", "imbalance")


def differences(virtual: Sequence[Figures], sockets: Sequence[Figures]) -> dict[str, tuple[float, float]]:
    """How much more the second of each pair is, as a share of the first."""
    pairs = list(zip(virtual, sockets, strict=True))
    return summary(
        [{name: real[name] / model[name] - 1 if model[name] else 0.0 for name in COMPARED} for model, real in pairs]
    )


def compared(results: Sequence[Measured]) -> tuple[list[str], list[list[str]]]:
    """Heads, and a row for each figure that was measured in both modes."""
    rows = []
    for one in results:
        for name in COMPARED if "differences" in one else ():
            _, form, unit = COLUMNS[name]
            model, real = (format(one[mode][name][0] * unit, form) for mode in ("virtual", "figures"))
            off, half = one["differences"][name]
            sure = "" if math.isnan(half) else f" ±{half:.1%}"
            rows.append([one["policy"], f"{one['load']:g}", heading(name), model, real, f"{off:+.1%}{sure}"])
    return ["policy", "load", "figure", "virtual", "sockets", "difference"], rows


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


COLUMNS: Mapping[str, tuple[str, str, float]] = {
    "ttft_mean": ("TTFT s", ".3f", 1),
    "ttft_p50": ("p50", ".3f", 1),
    "ttft_p90": ("p90", ".3f", 1),
    "ttft_p99": ("p99", ".2f", 1),
    "tpot_mean": ("TPOT ms", ".1f", 1000),
    "tpot_p90": ("p90", ".1f", 1000),
    "e2e_mean": ("E2E s", ".2f", 1),
    "goodput": ("good %", ".1f", 100),
    "hit": ("hit %", ".1f", 100),
    "hit_predicted": ("pred %", ".1f", 100),
    "kv_mean": ("KV %", ".0f", 100),
    "kv_max": ("max", ".0f", 100),
    "preemptions": ("preempt", ".0f", 1),
    "imbalance": ("max/mean", ".2f", 1),
    "prefill_skew": ("prefill", ".2f", 1),
    "failed": ("failed", ".0f", 1),
}
"""Figure -> heading, format, unit."""


def heading(name: str) -> str:
    """For a column that stands alone: of what it is a percentile."""
    head = COLUMNS[name][0]
    return f"{name.partition('_')[0].upper()} {head}" if re.fullmatch(r"p\d+", head) else head


def row(found: Mapping[str, tuple[float, float]]) -> list[str]:
    """The interval stands behind the figures that routers are compared by."""
    cells = []
    for name, (_, form, unit) in COLUMNS.items():
        value, half = found[name]
        cell = "-" if math.isnan(value) else format(value * unit, form)
        if name in ("ttft_mean", "ttft_p90", "goodput") and not math.isnan(half):
            cell += f" ±{half * unit:{form}}"
        cells.append(cell)
    return cells


def _is_good(one: SimulationOutcome, objectives: Objectives) -> bool:
    assert one.first_token is not None
    soon = one.first_token - one.job.arrival <= objectives.first_token
    return soon and (one.job.output_tokens == 1 or per_token(one) <= objectives.per_token)


def _predicted_hit(foreseen: Sequence[SimulationOutcome]) -> float:
    if not foreseen:
        return math.nan
    return sum(one.predicted_tokens or 0 for one in foreseen) / sum(one.job.prompt_tokens for one in foreseen)


def _hit_error(foreseen: Sequence[SimulationOutcome]) -> float:
    """Mean of |predicted - cached|, as a share of the prompt tokens."""
    if not foreseen:
        return math.nan
    wrong = sum(abs((one.predicted_tokens or 0) - one.cached_tokens) for one in foreseen)
    return wrong / sum(one.job.prompt_tokens for one in foreseen)


def _after(one: SimulationOutcome, restart: Restart) -> bool:
    return one.pod == restart.pod and one.job.arrival >= restart.at + restart.down + SETTLED


def _half_width(values: Sequence[float]) -> float:
    if len(values) < 2:
        return math.nan
    middle = mean(values)
    variance = sum((value - middle) ** 2 for value in values) / (len(values) - 1)
    student = STUDENT[min(len(values) - 1, len(STUDENT)) - 1]
    return student * math.sqrt(variance / len(values))


def reusable_share(jobs: Sequence[Job]) -> float:
    """Return the share of prompt tokens that one cache without limit would contain on arrival."""
    seen: set[int] = set()
    reused = 0.0
    for job in jobs:
        start = 0
        for node, end in zip(job.nodes, job.ends_of(len(job.nodes)), strict=True):
            if node not in seen:
                break
            reused += min(end * job.scale, job.prompt_tokens) - start * job.scale
            start = end
        seen.update(job.nodes)
    return reused / sum(job.prompt_tokens for job in jobs)
