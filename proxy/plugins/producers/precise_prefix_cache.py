"""Match prompts, token by token, against the KV events of the pods."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint
from proxy.core.params import Duration, Size, param
from proxy.core.plugin import DataProducer, EndpointRemoved, PostResponse, PreRequest, plugin
from proxy.core.ports import Clock, InstanceName, KvEvents, KvSources
from proxy.core.request import DataKey, InferenceRequest
from proxy.prefix.exact import PAIR_BYTES, ExactIndex, ExactReservation
from proxy.prefix.match import PREFIX_MATCH, TOKEN_IDS, ExactMatch

log = logging.getLogger(__name__)

UNUSED = "accepted and without effect: "
MISMATCH = (
    "%s: pod %s reported %d cached tokens instead of the predicted %d, repeatedly; its cache counts as unknown until "
    "predictions are right again. Check that kvlane has the tokenizer and the chat template of the engine."
)


Predicted = tuple[list[ExactReservation], int | None, int]
"""The reservation, the predicted cached tokens (None if the prediction is uncertain), and the tokens per block."""


@dataclass(frozen=True, slots=True)
class PodDiscovery:
    socket_port: int = param(
        5557,
        "port on which a pod publishes KV events, unless its label kvlane/kv-events-port names another; rank "
        "r uses this port + r",
        at_least=1,
        at_most=65535,
    )
    replay_socket_port: int = param(
        0,
        "port on which a pod replays lost events, unless its label kvlane/kv-replay-port names another; 0: no replay",
        at_least=0,
        at_most=65535,
    )
    pod_label_selector: str = param("", UNUSED + "all pods are followed")
    pod_namespace: str = param("", UNUSED + "pods come from the `pods` section")


@dataclass(frozen=True, slots=True)
class KvEventsConfig:
    zmq_endpoint: str = param("", "address on which kvlane listens for pods, if discoverPods is false")
    topic_filter: str = param("", "prefix of the topics to subscribe to")
    discover_pods: bool = param(True, "connect to every pod; false: pods connect to zmqEndpoint")
    pod_discovery_config: PodDiscovery = field(default=PodDiscovery(), metadata={"doc": "how to connect to the pods"})
    endpoint: str = param("tcp://{host}:{port}", "address of a pod's socket")
    data_parallel_size: int = param(
        1, "ranks of a pod, unless its label kvlane/data-parallel-size gives another number", at_least=1, at_most=1024
    )
    concurrency: int = param(4, UNUSED + "one loop does it")
    engine_type: Literal["vllm", "sglang"] = param("vllm", UNUSED + "both are understood")
    tracing: bool = param(False, UNUSED + "events have no spans")


@dataclass(frozen=True, slots=True)
class TokenProcessor:
    block_size_tokens: int = param(
        16, "tokens per block of a pod that has not reported its block size", aliases=("blockSize",), at_least=1
    )
    hash_seed: str = param("", UNUSED + "nothing depends on how engines hash")
    hash_algorithm: str = param("", UNUSED + "nothing depends on how engines hash")


@dataclass(frozen=True, slots=True)
class Backend:
    name: str = param(doc="cache tier, as pods name it")
    weight: float = param(1.0, "value of a block in this tier; 1: as on the GPU", at_least=0, at_most=1)


@dataclass(frozen=True, slots=True)
class IndexerConfig:
    kv_cache_backend_configs: tuple[Backend, ...] = param(
        (Backend("gpu", 1.0), Backend("cpu", 0.8)), "values of blocks by cache tier; tiers not listed count as the GPU"
    )
    kv_block_index_config: Mapping[str, Any] = param({}, UNUSED + "see maxBytes")
    prefix_store_config: Mapping[str, Any] = param({}, UNUSED + "token ids are remembered by the token-producer")
    tokenizers_pool_config: Mapping[str, Any] = param({}, UNUSED + "prompts are tokenised by the token-producer")


@plugin("precise-prefix-cache-producer")
@dataclass
class PrecisePrefixCacheProducer(DataProducer, PreRequest, PostResponse, EndpointRemoved):
    """Subscribes to the KV events of all pods and matches the token ids of prompts; requires a token-producer that
    produces token ids. Blocks that a pod will store count from the decision on, until its events confirm them.
    Blocks have the size of the engine's blocks; the last token of a prompt is never cached."""

    waits: ClassVar[bool] = False

    name: InstanceName
    clock: Clock
    kv_events: KvEvents
    token_processor_config: TokenProcessor = field(default=TokenProcessor(), metadata={"doc": "blocks"})
    indexer_config: IndexerConfig = field(default=IndexerConfig(), metadata={"doc": "the index"})
    kv_events_config: KvEventsConfig = field(
        default=KvEventsConfig(), metadata={"doc": "where pods publish", "key": "kvEventsConfig"}
    )
    speculative_indexing: bool = param(
        True, "count the blocks of a request that was sent to a pod before the pod's events confirm them"
    )
    speculative_ttl: Duration = param(
        Duration(2.0), "time after a response in which its events must arrive", key="speculativeTTL", more_than=0
    )
    max_bytes: Size = param(Size(1 << 30), "memory of the index; blocks beyond it are ignored", at_least=0)

    def __post_init__(self) -> None:
        self._key = PREFIX_MATCH.of(self.name)
        self._reserved: DataKey[Predicted] = DataKey("Reserved", self.name)
        weights = {backend.name.lower(): backend.weight for backend in self.indexer_config.kv_cache_backend_configs}
        most = self.max_bytes // PAIR_BYTES
        block_size = self.token_processor_config.block_size_tokens
        self.index = ExactIndex(self.clock, self.speculative_ttl, most, weights, block_size)
        self.kv_events.subscribe(self._sources(), self.index)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (self._key,)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (TOKEN_IDS,)

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        state = request.state
        prompt = state.read(TOKEN_IDS)
        if prompt is not None:
            state.write(self._key, ExactMatch(self.index, prompt, request.model, endpoints))

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        match = attempt.request.state.read(self._key)
        if not isinstance(match, ExactMatch) or attempt.stage is Stage.ENCODE:
            return
        (blocks,) = match.matched((endpoint,))
        match.frozen = True
        predicted = blocks * match.block_size
        if attempt.predicted_cached_tokens is None:
            attempt.predicted_cached_tokens = predicted
        index, reserved = self.index, []
        comes = attempt.stage is Stage.DECODE
        is_certain = not comes and not index.expects(endpoint)
        if self.speculative_indexing and not comes:
            reserved = [index.reserve(chain, endpoint, depth) for chain, depth in match.reserved(endpoint)]
        attempt.state[self._reserved] = (reserved, predicted if is_certain else None, index.block_size(endpoint))

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        predicted_here: Predicted | None = attempt.state.pop(self._reserved, None)
        if predicted_here is None:
            return
        reserved, predicted, block_size = predicted_here
        computed = attempt.status is not None and attempt.status < 300 and attempt.first_byte_at is not None
        for reservation in reserved:
            self.index.release(reservation, computed)
        usage = attempt.usage
        if predicted is None or usage is None or usage.cached_tokens is None:
            return
        if predicted or usage.cached_tokens:  # A prompt that no pod had proves nothing.
            was_right = abs(predicted - usage.cached_tokens) <= block_size
            if self.index.judge(endpoint, was_right):
                log.warning(MISMATCH, self.name, endpoint.name, usage.cached_tokens, predicted)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self.index.restarted(endpoint)

    def _sources(self) -> KvSources:
        """Return the sources of events. Raise ValueError for invalid addresses."""
        config = self.kv_events_config
        discovery = config.pod_discovery_config
        if not config.discover_pods and not config.zmq_endpoint:
            raise ValueError("kvEventsConfig: discoverPods is false, so zmqEndpoint must say where pods connect to")
        return KvSources(
            endpoint=config.endpoint,
            port=discovery.socket_port,
            replay_port=discovery.replay_socket_port,
            ranks=config.data_parallel_size,
            topic=config.topic_filter,
            bind="" if config.discover_pods else config.zmq_endpoint,
        )
