"""The metric names of each engine, as tables: another engine is another row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from proxy.core.endpoint import Endpoint
from proxy.telemetry.exposition import MetricSpec, parse_spec

Engine = Literal["vllm", "sglang", "atom", "trtllm-serve", "triton-tensorrt-llm", "triton", "llamacpp"]

DEFAULT_ENGINE: Engine = "vllm"

ENGINE_LABELS = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
"""Labels that name a pod's engine, the older one last."""

Specs = tuple[MetricSpec, ...]
"""Names of one metric through an engine's versions: the first that is exposed is read."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The metric names of one engine. Empty: the engine has no such metric; its value is 0, of counters of tokens
    unknown.

    `kv_usage` is a share from 0 to 1, although some names end in `perc`. `cache_info` is a series whose labels
    `block_size_label` and `blocks_label` have the size and number of KV blocks; `block_size` and `blocks` are series
    whose values are these numbers. `prefix_queries` and `prefix_hits` count tokens. `prompt_tokens` and
    `generation_tokens` are counters: if any is given, one must grow while a request runs, else a busy pod counts as
    hung; with neither, hung engines are not detected. `lora` is a series with vLLM's labels. `awake` is 1 for a rank
    that is awake and 0 for one that sleeps; `discarded` is not 0 if it sleeps without its weights. `rank_label` is the
    label for data-parallel ranks; without `lists_all_ranks`, a rank without traffic may have no series. `attributes`
    are custom values, by the key that scorers read.
    """

    waiting: Specs = ()
    running: Specs = ()
    kv_usage: Specs = ()
    lora: Specs = ()
    cache_info: Specs = ()
    block_size_label: str = "block_size"
    blocks_label: str = "num_gpu_blocks"
    block_size: Specs = ()
    blocks: Specs = ()
    prefix_queries: Specs = ()
    prefix_hits: Specs = ()
    prompt_tokens: Specs = ()
    generation_tokens: Specs = ()
    awake: Specs = ()
    rank_label: str = ""
    lists_all_ranks: bool = True
    discarded: Specs = ()
    attributes: tuple[tuple[str, MetricSpec], ...] = ()

    def __hash__(self) -> int:
        """Hash one field: hashing all would dominate the look-up of cached results."""
        return hash(self.waiting)

    @property
    def names(self) -> frozenset[str]:
        """The metric families to search for."""
        groups = (self.waiting, self.running, self.kv_usage, self.lora, self.cache_info, self.block_size, self.blocks)
        counters = (self.prefix_queries, self.prefix_hits, self.prompt_tokens, self.generation_tokens)
        custom = tuple(spec for _, spec in self.attributes)
        return frozenset(
            spec.name for group in (*groups, *counters, self.awake, self.discarded, custom) for spec in group
        )

    def with_attributes(self, specs: Mapping[str, str]) -> Dialect:
        """Add custom values. Raise ValueError for an invalid spec; an empty one is not scraped."""
        parsed = ((key, parse_spec(text)) for key, text in specs.items())
        return replace(self, attributes=self.attributes + tuple((key, spec) for key, spec in parsed if spec))


def specs(*texts: str) -> Specs:
    """Raise ValueError for an invalid spec."""
    return tuple(spec for text in texts if (spec := parse_spec(text)))


DIALECTS: Mapping[str, Dialect] = {
    "vllm": Dialect(
        waiting=specs("vllm:num_requests_waiting"),
        running=specs("vllm:num_requests_running"),
        kv_usage=specs("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        lora=specs("vllm:lora_requests_info"),
        cache_info=specs("vllm:cache_config_info"),
        prefix_queries=specs("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
        prefix_hits=specs("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
        prompt_tokens=specs("vllm:prompt_tokens_total"),
        generation_tokens=specs("vllm:generation_tokens_total"),
        awake=specs("vllm:engine_sleep_state{sleep_state=awake}"),
        discarded=specs("vllm:engine_sleep_state{sleep_state=discard_all}"),
        rank_label="engine",
    ),
    "sglang": Dialect(
        waiting=specs("sglang:num_queue_reqs", "sglang_num_queue_reqs"),
        running=specs("sglang:num_running_reqs", "sglang_num_running_reqs"),
        kv_usage=specs("sglang:token_usage", "sglang_token_usage"),
        cache_info=specs("sglang:cache_config_info", "sglang_cache_config_info"),
        block_size_label="page_size",
        blocks_label="num_pages",
        prefix_queries=specs("sglang:prompt_tokens_total", "sglang_prompt_tokens_total"),
        prefix_hits=specs("sglang:cached_tokens_total", "sglang_cached_tokens_total"),
        prompt_tokens=specs("sglang:prompt_tokens_total", "sglang_prompt_tokens_total"),
        generation_tokens=specs("sglang:generation_tokens_total", "sglang_generation_tokens_total"),
        rank_label="dp_rank",
        lists_all_ranks=False,
    ),
    "atom": Dialect(
        waiting=specs("atom:num_requests_waiting"),
        running=specs("atom:num_requests_running"),
        kv_usage=specs("atom:kv_cache_usage_perc"),
        cache_info=specs("atom:cache_config_info"),
    ),
    "trtllm-serve": Dialect(
        waiting=specs("trtllm_num_requests_waiting"),
        running=specs("trtllm_num_requests_running"),
        kv_usage=specs("trtllm_kv_cache_utilization"),
        block_size=specs("trtllm_kv_cache_tokens_per_block"),
        blocks=specs("trtllm_kv_cache_max_blocks"),
    ),
    "triton-tensorrt-llm": Dialect(
        waiting=specs("nv_trt_llm_request_metrics{request_type=waiting}"),
        running=specs("nv_trt_llm_request_metrics{request_type=scheduled}"),
        kv_usage=specs("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=fraction}"),
        block_size=specs("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=tokens_per}"),
        blocks=specs("nv_trt_llm_kv_cache_block_metrics{kv_cache_block_type=max}"),
    ),
    "triton": Dialect(  # its counter of executions is no number of running requests
        waiting=specs("nv_inference_pending_request_count"),
    ),
    "llamacpp": Dialect(
        waiting=specs("llamacpp:requests_deferred"),
        running=specs("llamacpp:requests_processing"),
        kv_usage=specs("llamacpp:kv_cache_usage_ratio"),
        prompt_tokens=specs("llamacpp:prompt_tokens_total"),
        generation_tokens=specs("llamacpp:tokens_predicted_total"),
    ),
}


@dataclass(frozen=True, slots=True)
class Dialects:
    """The engine and dialect of a pod: of its engine label if that is known, else of its `engine`. `engine: vllm` and
    an unset `engine` are the same, so both get `default`. If `default` is another engine, mark vLLM pods by the
    label."""

    by_engine: Mapping[str, Dialect] = field(default_factory=lambda: DIALECTS)
    labels: tuple[str, ...] = ENGINE_LABELS
    default: str = DEFAULT_ENGINE

    def engine(self, labels: Mapping[str, str], engine: str) -> str:
        """Return the engine of a pod with these labels and this `engine`."""
        for label in self.labels:
            if (named := labels.get(label, "")) in self.by_engine:
                return named
        return self.default if engine == DEFAULT_ENGINE else engine

    def of(self, endpoint: Endpoint) -> Dialect:
        return self.by_engine[self.engine(endpoint.labels, endpoint.engine)]

    def with_attributes(self, specs: Mapping[str, str]) -> Dialects:
        """As `Dialect.with_attributes`, for all dialects."""
        return replace(self, by_engine={name: one.with_attributes(specs) for name, one in self.by_engine.items()})
