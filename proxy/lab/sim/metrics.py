"""The engine's counters in the Prometheus text format, under the names that vLLM uses."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from prometheus_client import Metric, generate_latest
from prometheus_client.registry import Collector

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.engine import SimEngine
from proxy.lab.sim.sequence import Finish

FINISHED_REASONS = {"stop": Finish.STOP, "length": Finish.LENGTH, "abort": None, "error": Finish.ERROR}
"""Finish reasons that are counted. Aborts are not among them: the engine's own counter stays at 0."""

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""Names of the sleep levels from 0."""

RENAMED = {
    "vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc",
    "vllm:prefix_cache_queries_total": "vllm:gpu_prefix_cache_queries_total",
    "vllm:prefix_cache_hits_total": "vllm:gpu_prefix_cache_hits_total",
}
"""Names of metrics in engines before 0.10."""

GAUGE, COUNTER, HISTOGRAM = "gauge", "counter", "histogram"


class PodSample(NamedTuple):
    """A sample of the metric `name`; `suffix` distinguishes the samples of a histogram."""

    kind: str
    name: str
    labels: Mapping[str, object]
    value: float
    suffix: str = ""


def expose(engines: Sequence[SimEngine], wall: float, started_at: float) -> str:
    """Return the metrics of a pod. `wall` and `started_at` are seconds since the epoch."""
    config = engines[0].config
    samples = [PodSample(GAUGE, "process_start_time_seconds", {}, started_at)]
    for rank, engine in enumerate(engines):
        samples += _of_rank(engine, {"engine": rank, "model_name": config.model})
        samples.append(PodSample(GAUGE, "vllm:cache_config_info", _cache_config(config, rank), 1.0))
    if config.lora_adapters:
        adapters = {tuple(_adapters(engine).items()) for engine in engines}
        samples += [PodSample(GAUGE, "vllm:lora_requests_info", dict(labels), wall) for labels in adapters]
    return generate_latest(_Exposition(samples, RENAMED if config.old_metric_names else {})).decode()


@dataclass(frozen=True, slots=True)
class _Exposition(Collector):
    samples: Iterable[PodSample]
    renamed: Mapping[str, str]

    def collect(self) -> Iterable[Metric]:
        metrics: dict[str, Metric] = {}
        for kind, known_name, labels, value, suffix in self.samples:
            name = self.renamed.get(known_name, known_name)
            if name not in metrics:
                documentation = f"{name.removeprefix('vllm:').replace('_', ' ')}."
                metrics[name] = Metric(name.removesuffix("_total"), documentation, kind)
            metrics[name].add_sample(name + suffix, {key: str(text) for key, text in labels.items()}, value)
        return metrics.values()


def _of_rank(engine: SimEngine, rank: dict[str, object]) -> Iterator[PodSample]:
    """Yield the samples of one data-parallel rank, with its labels."""
    stats = engine.stats
    yield PodSample(GAUGE, "vllm:num_requests_running", rank, len(engine.running))
    yield PodSample(GAUGE, "vllm:num_requests_waiting", rank, engine.waiting_requests)
    yield PodSample(GAUGE, "vllm:kv_cache_usage_perc", rank, engine.kv_usage)
    for level, state in enumerate(SLEEP_STATES):
        yield PodSample(GAUGE, "vllm:engine_sleep_state", {**rank, "sleep_state": state}, engine.sleep_level == level)
    yield PodSample(COUNTER, "vllm:prefix_cache_queries_total", rank, stats.queried_tokens)
    yield PodSample(COUNTER, "vllm:prefix_cache_hits_total", rank, stats.hit_tokens)
    yield PodSample(COUNTER, "vllm:external_prefix_cache_hits_total", rank, stats.external_tokens)
    yield PodSample(COUNTER, "vllm:num_preemptions_total", rank, stats.preemptions)
    yield PodSample(COUNTER, "vllm:prompt_tokens_total", rank, stats.prompt_tokens)
    yield PodSample(COUNTER, "vllm:generation_tokens_total", rank, stats.generation_tokens)
    for source, tokens in {
        "local_compute": stats.prompt_tokens - stats.hit_tokens - stats.external_tokens,
        "local_cache_hit": stats.hit_tokens,
        "external_kv_transfer": stats.external_tokens,
    }.items():
        yield PodSample(COUNTER, "vllm:prompt_tokens_by_source_total", {**rank, "source": source}, max(0, tokens))
    if engine.config.connector:
        yield PodSample(COUNTER, "vllm:nixl_num_failed_transfers_total", rank, stats.failed_transfers)
        yield PodSample(COUNTER, "vllm:nixl_num_kv_expired_reqs_total", rank, stats.expired_transfers)
        yield PodSample(COUNTER, "sim:transfers_total", rank, stats.transfers)
        yield PodSample(COUNTER, "sim:transferred_tokens_total", rank, stats.transferred_tokens)
        yield PodSample(COUNTER, "sim:transfer_seconds_total", rank, stats.transfer_seconds)
        yield PodSample(GAUGE, "sim:kept_blocks", rank, engine.kept_blocks)
    for reason, finish in FINISHED_REASONS.items():
        finished = stats.finished[finish] if finish else 0
        yield PodSample(COUNTER, "vllm:request_success_total", {**rank, "finished_reason": reason}, finished)
    for histogram in (stats.first_token, stats.end_to_end):
        for metric in histogram.collect():
            for name, labels, value, *_ in metric.samples:
                if not name.endswith("_created"):
                    suffix = name.removeprefix(metric.name)
                    yield PodSample(HISTOGRAM, metric.name, {**rank, **labels}, value, suffix)


def _cache_config(config: SimConfig, rank: int) -> Mapping[str, object]:
    return {
        "block_size": config.block_size,
        "cache_dtype": "auto",
        "enable_prefix_caching": True,
        "engine": rank,
        "kv_cache_size_tokens": config.block_size * config.num_gpu_blocks,
        "num_gpu_blocks": config.num_gpu_blocks,
        "prefix_caching_hash_algo": "xxhash",
    }


def _adapters(engine: SimEngine) -> Mapping[str, object]:
    return {
        "max_lora": len(engine.config.lora_adapters),
        "running_lora_adapters": ",".join(sorted({s.adapter for s in engine.running if s.adapter})),
        "waiting_lora_adapters": ",".join(sorted({s.adapter for s in engine.waiting if s.adapter})),
    }
