"""The engine's counts in the text format of Prometheus, under the names that vLLM uses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from proxy.lab.sim.engine import Engine, Histogram
from proxy.lab.sim.sequence import Finish

Labels = Mapping[str, object]

FINISHED_REASONS = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": None, "error": Finish.ERROR}
"""Aborts are not counted as such: the engine's own counter stays at 0."""

RENAMED = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total": "vllm:gpu_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "vllm:gpu_prefix_cache_hits_total",
}
"""What engines before 0.10 called them."""


def expose(engine: Engine, wall: float, started_at: float) -> str:
    """`wall` and `started_at` are seconds since the epoch."""
    return "\n".join(_lines(engine, wall, started_at)) + "\n"


def _lines(engine: Engine, wall: float, started_at: float) -> Iterator[str]:
    yield from _family("process_start_time_seconds", "gauge", [({}, started_at)])
    model: Labels = {"engine": 0, "model_name": engine.config.model}
    renamed = RENAMED if engine.config.old_metric_names else {}
    for name, value in _gauges(engine):
        yield from _family(renamed.get(name, name), "gauge", [(model, value)])
    yield from _family("vllm:engine_sleep_state", "gauge", _sleep_states(engine, model))
    for name, value in _counters(engine):
        yield from _family(renamed.get(name, name), "counter", [(model, value)])
    yield from _family("vllm:prompt_tokens_by_source_total", "counter", _sources(engine, model))
    if engine.config.connector:
        yield from _transfers(engine, model)
    yield from _family("vllm:request_success_total", "counter", _finished(engine, model))
    yield from _histogram("vllm:time_to_first_token_seconds", model, engine.stats.first_token)
    yield from _histogram("vllm:e2e_request_latency_seconds", model, engine.stats.end_to_end)
    yield from _family("vllm:cache_config_info", "gauge", [(_cache_config(engine), 1.0)])
    if engine.config.lora_adapters:
        yield from _family("vllm:lora_requests_info", "gauge", [(_adapters(engine), wall)])


def _gauges(engine: Engine) -> list[tuple[str, float]]:
    return [
        ("vllm:num_requests_running", len(engine.running)),
        ("vllm:num_requests_waiting", len(engine.waiting) + len(engine.loading)),
        ("vllm:kv_cache_usage_perc", engine.kv_usage),
    ]


def _counters(engine: Engine) -> list[tuple[str, float]]:
    stats = engine.stats
    return [
        ("vllm:prefix_cache_queries_total", stats.queried_tokens),
        ("vllm:prefix_cache_hits_total", stats.hit_tokens),
        ("vllm:external_prefix_cache_hits_total", stats.external_tokens),
        ("vllm:num_preemptions_total", stats.preemptions),
        ("vllm:prompt_tokens_total", stats.prompt_tokens),
        ("vllm:generation_tokens_total", stats.generation_tokens),
    ]


def _sources(engine: Engine, model: Labels) -> list[tuple[Labels, float]]:
    stats = engine.stats
    tokens = {
        "local_compute": stats.prompt_tokens - stats.hit_tokens - stats.external_tokens,
        "local_cache_hit": stats.hit_tokens,
        "external_kv_transfer": stats.external_tokens,
    }
    return [({**model, "source": source}, max(0, count)) for source, count in tokens.items()]


def _transfers(engine: Engine, model: Labels) -> Iterator[str]:
    """As vLLM has them for NIXL, and what no engine tells: the blocks that it keeps for others."""
    stats = engine.stats
    yield from _family("vllm:nixl_num_failed_transfers_total", "counter", [(model, stats.failed_transfers)])
    yield from _family("vllm:nixl_num_kv_expired_reqs_total", "counter", [(model, stats.expired_transfers)])
    yield from _family("sim:transfers_total", "counter", [(model, stats.transfers)])
    yield from _family("sim:transferred_tokens_total", "counter", [(model, stats.transferred_tokens)])
    yield from _family("sim:transfer_seconds_total", "counter", [(model, stats.transfer_seconds)])
    yield from _family("sim:kept_blocks", "gauge", [(model, engine.kept_blocks)])


def _finished(engine: Engine, model: Labels) -> list[tuple[Labels, float]]:
    return [
        ({**model, "finished_reason": reason}, engine.stats.finished[finish] if finish else 0)
        for reason, finish in FINISHED_REASONS.items()
    ]


def _sleep_states(engine: Engine, model: Labels) -> list[tuple[Labels, float]]:
    levels = enumerate(("awake", "weights_offloaded", "discard_all"))
    return [({**model, "sleep_state": state}, float(engine.sleep_level == level)) for level, state in levels]


def _cache_config(engine: Engine) -> Labels:
    config = engine.config
    return {
        "block_size": config.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": True,
        "engine": 0,
        "kv_cache_size_tokens": config.block_size * config.num_gpu_blocks,
        "num_gpu_blocks": config.num_gpu_blocks,
        "prefix_caching_hash_algo": "xxhash",
    }


def _adapters(engine: Engine) -> Labels:
    return {
        "max_lora": len(engine.config.lora_adapters),
        "running_lora_adapters": ",".join(sorted({s.adapter for s in engine.running if s.adapter})),
        "waiting_lora_adapters": ",".join(sorted({s.adapter for s in engine.waiting if s.adapter})),
    }


def _histogram(name: str, labels: Labels, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} Histogram in seconds."
    yield f"# TYPE {name} histogram"
    count = 0
    for bound, observed in zip((*histogram.bounds, "+Inf"), histogram.counts, strict=True):
        count += observed
        yield _sample(f"{name}_bucket", {**labels, "le": bound}, count)
    yield _sample(f"{name}_count", labels, count)
    yield _sample(f"{name}_sum", labels, histogram.sum)


def _family(name: str, kind: str, samples: list[tuple[Labels, float]]) -> Iterator[str]:
    yield f"# HELP {name} {name.removeprefix('vllm:').replace('_', ' ')}."
    yield f"# TYPE {name} {kind}"
    for labels, value in samples:
        yield _sample(name, labels, value)


def _sample(name: str, labels: Labels, value: float) -> str:
    inside = ",".join(f'{key}="{text}"' for key, text in labels.items())
    return f"{name}{{{inside}}} {float(value)!r}" if inside else f"{name} {float(value)!r}"
