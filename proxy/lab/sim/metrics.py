"""The engine's counters in the Prometheus text format, under the names that vLLM uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.engine import EngineStats, SimEngine, SimHistogram
from proxy.lab.sim.sequence import Finish

Labels = Mapping[str, object]

Ranks = Sequence[tuple[Labels, SimEngine]]
"""The engine of each data-parallel rank, with the labels of its series."""

Samples = list[tuple[Labels, float]]

FINISHED_REASONS = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": None, "error": Finish.ERROR}
"""Finish reasons that are counted. Aborts are not among them: the engine's own counter stays at 0."""

RENAMED = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total": "vllm:gpu_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "vllm:gpu_prefix_cache_hits_total",
}
"""Names of metrics in engines before 0.10."""


GAUGES: Mapping[str, Callable[[SimEngine], float]] = MappingProxyType(
    {
        "vllm:num_requests_running": lambda engine: len(engine.running),
        "vllm:num_requests_waiting": lambda engine: engine.waiting_requests,
        "vllm:kv_cache_usage_perc": lambda engine: engine.kv_usage,
    }
)

COUNTERS: Mapping[str, Callable[[EngineStats], float]] = MappingProxyType(
    {
        "vllm:prefix_cache_queries_total": lambda stats: stats.queried_tokens,
        "vllm:prefix_cache_hits_total": lambda stats: stats.hit_tokens,
        "vllm:external_prefix_cache_hits_total": lambda stats: stats.external_tokens,
        "vllm:num_preemptions_total": lambda stats: stats.preemptions,
        "vllm:prompt_tokens_total": lambda stats: stats.prompt_tokens,
        "vllm:generation_tokens_total": lambda stats: stats.generation_tokens,
    }
)

TRANSFER_COUNTERS: Mapping[str, Callable[[EngineStats], float]] = MappingProxyType(
    {
        "vllm:nixl_num_failed_transfers_total": lambda stats: stats.failed_transfers,
        "vllm:nixl_num_kv_expired_reqs_total": lambda stats: stats.expired_transfers,
        "sim:transfers_total": lambda stats: stats.transfers,
        "sim:transferred_tokens_total": lambda stats: stats.transferred_tokens,
        "sim:transfer_seconds_total": lambda stats: stats.transfer_seconds,
    }
)

HISTOGRAMS: Mapping[str, Callable[[EngineStats], SimHistogram]] = MappingProxyType(
    {
        "vllm:time_to_first_token_seconds": lambda stats: stats.first_token,
        "vllm:e2e_request_latency_seconds": lambda stats: stats.end_to_end,
    }
)


def expose(engines: Sequence[SimEngine], wall: float, started_at: float) -> str:
    """Return the metrics of a pod, with the label `engine` for its ranks, as vLLM does. `wall` and
    `started_at` are seconds since the epoch."""
    return "\n".join(_lines(engines, wall, started_at)) + "\n"


def _lines(engines: Sequence[SimEngine], wall: float, started_at: float) -> Iterator[str]:
    yield from _family("process_start_time_seconds", "gauge", [({}, started_at)])
    config = engines[0].config
    ranks: Ranks = [({"engine": rank, "model_name": config.model}, engine) for rank, engine in enumerate(engines)]
    renamed = RENAMED if config.old_metric_names else {}
    for name, gauge in GAUGES.items():
        yield from _family(renamed.get(name, name), "gauge", [(labels, gauge(engine)) for labels, engine in ranks])
    yield from _family("vllm:engine_sleep_state", "gauge", _each(ranks, _sleep_states))
    for name, counter in COUNTERS.items():
        yield from _family(renamed.get(name, name), "counter", [(labels, counter(one.stats)) for labels, one in ranks])
    yield from _family("vllm:prompt_tokens_by_source_total", "counter", _each(ranks, _sources))
    if config.connector:
        for name, counter in TRANSFER_COUNTERS.items():
            yield from _family(name, "counter", [(labels, counter(engine.stats)) for labels, engine in ranks])
        yield from _family("sim:kept_blocks", "gauge", [(labels, engine.kept_blocks) for labels, engine in ranks])
    yield from _family("vllm:request_success_total", "counter", _each(ranks, _finished))
    for name, histogram in HISTOGRAMS.items():
        yield from _histogram(name, [(labels, histogram(engine.stats)) for labels, engine in ranks])
    infos = [(_cache_config(config, rank), 1.0) for rank in range(len(ranks))]
    yield from _family("vllm:cache_config_info", "gauge", infos)
    if config.lora_adapters:
        adapters = {tuple(_adapters(engine).items()): wall for engine in engines}
        yield from _family("vllm:lora_requests_info", "gauge", [(dict(labels), at) for labels, at in adapters.items()])


def _each(ranks: Ranks, samples: Callable[[SimEngine, Labels], Samples]) -> Samples:
    return [sample for labels, engine in ranks for sample in samples(engine, labels)]


def _sources(engine: SimEngine, model: Labels) -> Samples:
    stats = engine.stats
    tokens = {
        "local_compute": stats.prompt_tokens - stats.hit_tokens - stats.external_tokens,
        "local_cache_hit": stats.hit_tokens,
        "external_kv_transfer": stats.external_tokens,
    }
    return [({**model, "source": source}, max(0, count)) for source, count in tokens.items()]


def _finished(engine: SimEngine, model: Labels) -> Samples:
    return [
        ({**model, "finished_reason": reason}, engine.stats.finished[finish] if finish else 0)
        for reason, finish in FINISHED_REASONS.items()
    ]


def _sleep_states(engine: SimEngine, model: Labels) -> Samples:
    levels = enumerate(("awake", "weights_offloaded", "discard_all"))
    return [({**model, "sleep_state": state}, float(engine.sleep_level == level)) for level, state in levels]


def _cache_config(config: SimConfig, rank: int) -> Labels:
    return {
        "block_size": config.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": True,
        "engine": rank,
        "kv_cache_size_tokens": config.block_size * config.num_gpu_blocks,
        "num_gpu_blocks": config.num_gpu_blocks,
        "prefix_caching_hash_algo": "xxhash",
    }


def _adapters(engine: SimEngine) -> Labels:
    return {
        "max_lora": len(engine.config.lora_adapters),
        "running_lora_adapters": ",".join(sorted({s.adapter for s in engine.running if s.adapter})),
        "waiting_lora_adapters": ",".join(sorted({s.adapter for s in engine.waiting if s.adapter})),
    }


def _histogram(name: str, histograms: Sequence[tuple[Labels, SimHistogram]]) -> Iterator[str]:
    yield f"# HELP {name} Histogram in seconds."
    yield f"# TYPE {name} histogram"
    for labels, histogram in histograms:
        count = 0
        for bound, observed in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
            count += observed
            yield _sample(f"{name}_bucket", {**labels, "le": bound}, count)
        yield _sample(f"{name}_count", labels, count)
        yield _sample(f"{name}_sum", labels, histogram.sum)


def _family(name: str, kind: str, samples: Samples) -> Iterator[str]:
    yield f"# HELP {name} {name.removeprefix('vllm:').replace('_', ' ')}."
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield _sample(name, labels, value)


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}"
