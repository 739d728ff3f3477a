"""Match prompts against what this proxy has sent to which pod, and learn from what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Ending, Exchange
from proxy.core.params import param
from proxy.core.plugin import DataProducer, EndpointRemoved, PostResponse, PreRequest, plugin
from proxy.core.ports import Clock, InstanceName
from proxy.core.request import InferenceRequest
from proxy.core.units import Duration, Size
from proxy.prefix.hashing import chains
from proxy.prefix.index import PrefixIndex, Reservation
from proxy.prefix.keys import PREFIX_MATCH, TOKENIZED_PROMPT
from proxy.prefix.match import ChainMatch

SMALLEST_BLOCK = 64
"""Tokens. Smaller blocks are raised to it, as the reference scheduler does: they would cost time and find no more."""

DEFAULT_CAPACITY = 31250

UNLIMITED = 1 << 62


@plugin("approx-prefix-cache-producer")
@dataclass(slots=True)
class ApproxPrefixCacheProducer(DataProducer, PreRequest, PostResponse, EndpointRemoved):
    """Hashes the prompt once and reserves its blocks on the pod that is chosen. A good answer confirms them, a failure
    takes them back, and a pod that repeatedly reports no hits where some were due is taken to have restarted.

    The first 64 blocks of a prompt have a hash each; further down a hash stands for as many as are 1/32 of what is
    before it, or fewer. All that is counted in blocks is counted in those of `blockSizeTokens`.

    All pods share one block size; `autoTune` asks them for their KV capacity only.
    """

    waits: ClassVar[bool] = False

    name: InstanceName
    clock: Clock
    auto_tune: bool = param(True, "Remember as many tokens per pod as its KV cache holds, where the pod says so.")
    block_size_tokens: int = param(
        64,
        "Tokens per block; at least 64 in effect. Deep in long prompts several blocks have one hash.",
        aliases=("blockSize",),
    )
    max_prefix_tokens_to_match: int = param(131072, "Tokens of a prompt that are hashed; 0: no limit.", at_least=0)
    max_prefix_blocks_to_match: int = param(
        2048, "Blocks of a prompt that are hashed, if maxPrefixTokensToMatch is 0; 0: no limit.", at_least=0
    )
    lru_capacity_per_server: int = param(
        DEFAULT_CAPACITY, "Blocks remembered of a pod whose KV capacity is not known; 0 or less: the default."
    )
    ttl: Duration = param(Duration(3600.0), "What was not used for so long is forgotten.", more_than=0)
    max_bytes: Size = param(Size(256 << 20), "Memory of the whole index; what was used longest ago goes.", at_least=0)
    max_siblings: int = param(
        16, "Requests that may wait on one pod for the same blocks before these attract no more.", at_least=1
    )
    index: PrefixIndex = field(init=False, repr=False, compare=False)
    _key: DataKey[ChainMatch] = field(init=False, repr=False, compare=False)
    _reservations: dict[Exchange, Reservation] = field(init=False, repr=False, compare=False, default_factory=dict)
    _block_size: int = field(init=False, repr=False, compare=False)
    _max_blocks: int = field(init=False, repr=False, compare=False)
    _fixed_capacity: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.auto_tune and self.block_size_tokens <= 0:
            raise ValueError("blockSizeTokens must be more than 0 while autoTune is false")
        self._block_size = max(self.block_size_tokens, SMALLEST_BLOCK)
        self._max_blocks = self._block_limit()
        self._fixed_capacity = self.lru_capacity_per_server if self.lru_capacity_per_server > 0 else DEFAULT_CAPACITY
        self._key = DataKey(PREFIX_MATCH.kind, self.name)
        self.index = PrefixIndex(self.clock, self.max_siblings, self.ttl, self.max_bytes)

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (PREFIX_MATCH.of(self.name),)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        state, block_size = request.state, self._block_size
        prompt = state.read(TOKENIZED_PROMPT) or request.prompt
        hashed = chains(prompt, request.model, block_size, self._max_blocks)
        state.write(self._key, ChainMatch(self.index, hashed, block_size))

    def pre_request(self, exchange: Exchange, endpoint: Endpoint) -> None:
        request = exchange.request
        match = request.state.read(self._key)
        if match is None:
            return
        (before,) = match.matched((endpoint,))
        match.frozen = True
        self._reservations[exchange] = self.index.reserve(match.chains, endpoint, self._capacity(endpoint))
        if exchange.predicted_cached_tokens is None:
            exchange.predicted_cached_tokens = min(before * self._block_size, request.prompt.tokens)

    def post_response(self, exchange: Exchange, endpoint: Endpoint) -> None:
        reservation = self._reservations.pop(exchange, None)
        if reservation is None:
            return
        computed, usage = _computed(exchange), exchange.usage
        self.index.settle(reservation, computed)
        if not computed or usage is None or usage.cached_tokens is None:
            return
        if not self.index.observe(reservation, usage.prompt_tokens, usage.cached_tokens):
            self.index.confirm(self.index.reserve(reservation.chains, endpoint, self._capacity(endpoint)))

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self.index.forget(endpoint)

    def _capacity(self, endpoint: Endpoint) -> int:
        """Blocks of ours that a pod can hold."""
        metrics = endpoint.metrics
        tokens = metrics.block_size * metrics.blocks
        if self.auto_tune and tokens > 0:
            return tokens // self._block_size
        return self._fixed_capacity

    def _block_limit(self) -> int:
        if self.max_prefix_tokens_to_match:
            return max(1, self.max_prefix_tokens_to_match // self._block_size)
        return self.max_prefix_blocks_to_match or UNLIMITED


def _computed(exchange: Exchange) -> bool:
    """Whether the pod has been through the prompt: a good answer was complete, or under way when somebody ended it."""
    status, ending = exchange.status, exchange.ending
    if status is None or status >= 300:
        return False
    if ending is Ending.COMPLETE:
        return True
    return ending in (Ending.CLIENT_GONE, Ending.EVICTED) and exchange.first_byte_at is not None
