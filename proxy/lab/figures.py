"""From what came of requests to the figures that configurations are compared by."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from proxy.lab.simulation import Gauges, Outcome

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Objectives:
    """What a request must keep to count as good unless it says so itself, in seconds."""

    ttft: float = 2.0
    tpot: float = 0.05


@dataclass(frozen=True, slots=True)
class Fared:
    """How one request fared. Seconds; infinite for what never came, and nan per token where there was only one."""

    ttft: float
    tpot: float
    e2e: float
    is_good: bool
    prompt_tokens: int
    cached_tokens: int


ROWS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "ttft_mean": ("TTFT mean, s", ".3f"),
        "ttft_p50": ("TTFT p50, s", ".3f"),
        "ttft_p90": ("TTFT p90, s", ".3f"),
        "ttft_p99": ("TTFT p99, s", ".3f"),
        "tpot_mean": ("TPOT mean, s", ".4f"),
        "tpot_p90": ("TPOT p90, s", ".4f"),
        "e2e_mean": ("E2E mean, s", ".2f"),
        "e2e_p90": ("E2E p90, s", ".2f"),
        "goodput": ("within objectives", ".1%"),
        "hit": ("prompt tokens from cache", ".1%"),
        "imbalance": ("busiest pod / mean", ".2f"),
        "kv_mean": ("KV cache in use, mean", ".1%"),
        "preemptions": ("pre-emptions", ".0f"),
        "failed": ("without an answer", ".0f"),
    }
)
"""Figure -> what it is called, and its format."""


def fared(outcomes: Sequence[Outcome], objectives: Objectives) -> list[Fared]:
    return [_fared(one, objectives) for one in outcomes]


def figures(found: Sequence[Fared], gauges: Gauges | None = None, preemptions: float = math.nan) -> dict[str, float]:
    """Of requests that never ended only the number counts, and that they kept no objective."""
    done = [one for one in found if one.e2e < math.inf]
    first, whole = sorted(one.ttft for one in done), sorted(one.e2e for one in done)
    paces = sorted(one.tpot for one in done if not math.isnan(one.tpot))
    prompts = sum(one.prompt_tokens for one in done)
    return {
        "ttft_mean": mean(first),
        "ttft_p50": percentile(first, 0.5),
        "ttft_p90": percentile(first, 0.9),
        "ttft_p99": percentile(first, 0.99),
        "tpot_mean": mean(paces),
        "tpot_p90": percentile(paces, 0.9),
        "e2e_mean": mean(whole),
        "e2e_p90": percentile(whole, 0.9),
        "goodput": sum(one.is_good for one in found) / len(found) if found else math.nan,
        "hit": sum(one.cached_tokens for one in done) / prompts if prompts else math.nan,
        "imbalance": gauges.imbalance if gauges and gauges.balanced_samples else math.nan,
        "kv_mean": gauges.kv_mean if gauges else math.nan,
        "preemptions": preemptions,
        "failed": len(found) - len(done),
    }


def averaged(runs: Sequence[Figures]) -> dict[str, float]:
    return {name: mean([run[name] for run in runs]) for name in runs[0]}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def judged(ttft: float, tpot: float, own: tuple[float | None, float | None], objectives: Objectives) -> bool:
    """Whether a request kept its `own` objectives, or those of all where it has none."""
    most_ttft = objectives.ttft if own[0] is None else own[0]
    most_tpot = objectives.tpot if own[1] is None else own[1]
    return ttft <= most_ttft and not tpot > most_tpot


def _fared(one: Outcome, objectives: Objectives) -> Fared:
    """Without a stream, the first token comes with the last."""
    job = one.job
    if one.first_token is None or one.ended is None:
        return Fared(math.inf, math.nan, math.inf, False, job.prompt_tokens, 0)
    tokens = job.output_tokens - 1
    streamed = job.asked.stream
    ttft = (one.first_token if streamed else one.ended) - job.arrival
    tpot = (one.ended - one.first_token) / tokens if tokens and streamed else math.nan
    good = judged(ttft, tpot, (job.asked.ttft, job.asked.tpot), objectives)
    return Fared(ttft, tpot, one.ended - job.arrival, good, job.prompt_tokens, one.cached_tokens)
