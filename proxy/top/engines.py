"""What a pod's own exposition says it did between two looks. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.autoscale.measures import Buckets, quantile_between
from proxy.telemetry.prometheus_text import SampleReader, sums_by
from proxy.top.picture import Figures

HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
TTFT = ("vllm:time_to_first_token_seconds_bucket", "sglang:time_to_first_token_seconds_bucket")
"""The first that a pod has counts."""

_READER = SampleReader((*HITS, *QUERIES, *TOKENS, *TTFT))


@dataclass(frozen=True, slots=True)
class Look:
    """Totals since the engine's start, at a moment of monotonic time; of all its models."""

    at: float
    hits: float | None
    queries: float | None
    tokens: float | None
    ttft: Buckets


def look(exposition: bytes, at: float) -> Look:
    """Read the totals. Raise ScrapeError for an exposition that cannot be read."""
    samples = _READER.read(exposition)
    found = ([samples[name] for name in names if name in samples][:1] for names in (HITS, QUERIES, TOKENS))
    hits, queries, tokens = (sum(sample.value for sample in one[0]) if one else None for one in found)
    ttft = next((samples[name] for name in TTFT if name in samples), ())
    bounds = {bound: count for (bound,), count in sums_by(ttft, ("le",)).items() if bound}
    return Look(at, hits, queries, tokens, sorted((float(bound), count) for bound, count in bounds.items()))


def between(before: Look, now: Look) -> Figures:
    """Nothing of an engine that has begun anew."""
    hits, queries, tokens = (_grown(getattr(before, key), getattr(now, key)) for key in ("hits", "queries", "tokens"))
    seconds = now.at - before.at
    return Figures(
        hits / queries if hits is not None and queries else None,
        _percentile(50, before, now),
        _percentile(90, before, now),
        tokens / seconds if tokens is not None and seconds > 0 else None,
    )


def _grown(before: float | None, now: float | None) -> float | None:
    return None if before is None or now is None or now < before else now - before


def _percentile(percentile: float, before: Look, now: Look) -> float | None:
    try:
        return quantile_between(percentile, now.ttft, before.ttft)
    except ValueError:
        return None
