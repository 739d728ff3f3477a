"""The engine's counters in the Prometheus text format, under the names that vLLM uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from prometheus_client import Histogram, Metric, generate_latest
from prometheus_client.registry import Collector

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.engine import EngineStats, SimEngine
from proxy.lab.sim.sequence import Finish

Samples = Iterable[tuple[Mapping[str, object], float]]
"""Labels and value of each."""

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


GAUGES: Mapping[str, Callable[[SimEngine], float]] = MappingProxyType(
    {
        "vllm:num_requests_running": lambda engine: len(engine.running),
        "vllm:num_requests_waiting": lambda engine: engine.waiting_requests,
        "vllm:kv_cache_usage_perc": lambda engine: engine.kv_usage,
    }
)

COUNTERS: Mapping[str, Callable[[SimEngine], float]] = MappingProxyType(
    {
        "vllm:prefix_cache_queries_total": lambda engine: engine.stats.queried_tokens,
        "vllm:prefix_cache_hits_total": lambda engine: engine.stats.hit_tokens,
        "vllm:external_prefix_cache_hits_total": lambda engine: engine.stats.external_tokens,
        "vllm:num_preemptions_total": lambda engine: engine.stats.preemptions,
        "vllm:prompt_tokens_total": lambda engine: engine.stats.prompt_tokens,
        "vllm:generation_tokens_total": lambda engine: engine.stats.generation_tokens,
    }
)

TRANSFER_COUNTERS: Mapping[str, Callable[[SimEngine], float]] = MappingProxyType(
    {
        "vllm:nixl_num_failed_transfers_total": lambda engine: engine.stats.failed_transfers,
        "vllm:nixl_num_kv_expired_reqs_total": lambda engine: engine.stats.expired_transfers,
        "sim:transfers_total": lambda engine: engine.stats.transfers,
        "sim:transferred_tokens_total": lambda engine: engine.stats.transferred_tokens,
        "sim:transfer_seconds_total": lambda engine: engine.stats.transfer_seconds,
    }
)


def expose(engines: Sequence[SimEngine], wall: float, started_at: float) -> str:
    """Return the metrics of a pod, with the label `engine` for its ranks, as vLLM does. `wall` and
    `started_at` are seconds since the epoch."""
    return generate_latest(_Exposition(engines, wall, started_at)).decode()


@dataclass(frozen=True, slots=True)
class _Exposition(Collector):
    engines: Sequence[SimEngine]
    wall: float
    started_at: float

    def collect(self) -> Iterator[Metric]:
        config, ranks = self.engines[0].config, range(len(self.engines))
        yield _metric("process_start_time_seconds", "gauge", [({}, self.started_at)])
        yield from self._families("gauge", GAUGES)
        yield self._of_ranks("vllm:engine_sleep_state", "gauge", _sleep_states)
        yield from self._families("counter", COUNTERS)
        yield self._of_ranks("vllm:prompt_tokens_by_source_total", "counter", _sources)
        if config.connector:
            yield from self._families("counter", TRANSFER_COUNTERS)
            yield from self._families("gauge", {"sim:kept_blocks": lambda engine: engine.kept_blocks})
        yield self._of_ranks("vllm:request_success_total", "counter", _finished)
        yield self._histogram(lambda stats: stats.first_token)
        yield self._histogram(lambda stats: stats.end_to_end)
        yield _metric("vllm:cache_config_info", "gauge", [(_cache_config(config, rank), 1.0) for rank in ranks])
        if config.lora_adapters:
            adapters = {tuple(_adapters(engine).items()) for engine in self.engines}
            yield _metric("vllm:lora_requests_info", "gauge", [(dict(labels), self.wall) for labels in adapters])

    def _families(self, kind: str, values: Mapping[str, Callable[[SimEngine], float]]) -> Iterator[Metric]:
        renamed = RENAMED if self.engines[0].config.old_metric_names else {}
        for name, value in values.items():
            samples = [(labels, value(engine)) for labels, engine in self._ranks()]
            yield _metric(renamed.get(name, name), kind, samples)

    def _of_ranks(self, name: str, kind: str, samples: Callable[[SimEngine], Samples]) -> Metric:
        found = [({**labels, **extra}, value) for labels, engine in self._ranks() for extra, value in samples(engine)]
        return _metric(name, kind, found)

    def _histogram(self, histogram: Callable[[EngineStats], Histogram]) -> Metric:
        found = [(labels, next(iter(histogram(engine.stats).collect()))) for labels, engine in self._ranks()]
        metric = Metric(found[0][1].name, found[0][1].documentation, "histogram")
        for labels, own in found:
            for sample in own.samples:
                if not sample.name.endswith("_created"):
                    metric.add_sample(sample.name, _texts(labels | sample.labels), sample.value)
        return metric

    def _ranks(self) -> Iterator[tuple[dict[str, object], SimEngine]]:
        """Yield the engine of each data-parallel rank, with the labels of its series."""
        for rank, engine in enumerate(self.engines):
            yield {"engine": rank, "model_name": engine.config.model}, engine


def _metric(name: str, kind: str, samples: Samples) -> Metric:
    documentation = name.removeprefix("vllm:").replace("_", " ")
    metric = Metric(name.removesuffix("_total"), f"{documentation}.", kind)
    for labels, value in samples:
        metric.add_sample(name, _texts(labels), value)
    return metric


def _texts(labels: Mapping[str, object]) -> dict[str, str]:
    return {name: str(value) for name, value in labels.items()}


def _sources(engine: SimEngine) -> Samples:
    stats = engine.stats
    tokens = {
        "local_compute": stats.prompt_tokens - stats.hit_tokens - stats.external_tokens,
        "local_cache_hit": stats.hit_tokens,
        "external_kv_transfer": stats.external_tokens,
    }
    return [({"source": source}, max(0, count)) for source, count in tokens.items()]


def _finished(engine: SimEngine) -> Samples:
    for reason, finish in FINISHED_REASONS.items():
        yield {"finished_reason": reason}, engine.stats.finished[finish] if finish else 0


def _sleep_states(engine: SimEngine) -> Samples:
    return [({"sleep_state": state}, engine.sleep_level == level) for level, state in enumerate(SLEEP_STATES)]


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
