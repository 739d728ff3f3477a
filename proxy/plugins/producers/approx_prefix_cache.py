"""Match prompts against the requests that this proxy has sent to each pod, and learn from the responses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from proxy.core.attempt import COMPLETE, WHOLE, Attempt, Ending, Stage
from proxy.core.endpoint import Endpoint
from proxy.core.params import Size, param
from proxy.core.plugin import DataProducer, EndpointRemoved, PostResponse, PreRequest, plugin
from proxy.core.ports import Clock, InstanceName
from proxy.core.request import DataKey, InferenceRequest
from proxy.core.state import PluginState
from proxy.prefix.feedback import MOST_ATTEMPTS, HitWindow, figures
from proxy.prefix.forest import Reservation
from proxy.prefix.hashing import ASSISTANT, chains, last_turn
from proxy.prefix.index import PrefixIndex
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, ChainMatch, most_cached

SMALLEST_BLOCK = 64
"""Tokens. Smaller block sizes are raised to it, as the reference scheduler does: they would cost time and find no
more."""

DEFAULT_CAPACITY = 31250

UNLIMITED = 1 << 62

DECODE = Stage.DECODE

SHORTEST_RESPONSE = 16
"""Tokens; shorter responses fill no block of an engine."""

PROVE_INTERVAL = 0.05

MISSING = 0.75
"""Share of the predicted hits that a pod's counters must confirm. Predictions are based on bytes, so they are never
exact."""

JUDGE_INTERVAL = 2.0


@plugin("approx-prefix-cache-producer")
@dataclass
class ApproxPrefixCacheProducer(DataProducer, PreRequest, PostResponse, EndpointRemoved):
    """Hashes the prompt once and reserves its blocks on the pod that is chosen. A response confirms them, a failure
    removes them. The response is expected in the next turn of the conversation. Fewer cached tokens than expected, as
    responses report or the pod counts them, show what the pod has forgotten since; a pod that
    repeatedly reports no hits where some were due is taken to have restarted.

    Where one pod prefills and another decodes, both hold the prompt: the first as soon as it is chosen, the other when
    its response has started.

    The first 64 blocks of a prompt have a hash each; further down a hash stands for as many as are 1/32 of what is
    before it, or fewer. Every number of blocks means blocks of `blockSizeTokens`.

    All pods share one block size; `autoTune` asks them for their KV capacity only.
    """

    uses: ClassVar[tuple[DataKey[Any], ...]] = (TOKENIZED_PROMPT,)
    waits: ClassVar[bool] = False

    name: InstanceName
    clock: Clock
    state: PluginState
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
    max_bytes: Size = param(Size(256 << 20), "Memory of the whole index; what was used longest ago goes.", at_least=0)

    def __post_init__(self) -> None:
        if not self.auto_tune and self.block_size_tokens <= 0:
            raise ValueError("blockSizeTokens must be more than 0 while autoTune is false")
        self._block_size = max(self.block_size_tokens, SMALLEST_BLOCK)
        self._max_blocks = self.max_prefix_blocks_to_match or UNLIMITED
        if self.max_prefix_tokens_to_match:
            self._max_blocks = max(1, self.max_prefix_tokens_to_match // self._block_size)
        self._fixed_capacity = self.lru_capacity_per_server if self.lru_capacity_per_server > 0 else DEFAULT_CAPACITY
        self._capacity_of = lru_cache(self._capacity)
        self._key: DataKey[ChainMatch] = DataKey(PREFIX_MATCH.kind, self.name, ChainMatch)
        self._judge_at = self._prove_at = -math.inf
        self._keep_state()

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (PREFIX_MATCH.of(self.name),)

    def _keep_state(self) -> None:
        """Reuse the index of the previous producer, unless its blocks have another size."""
        state, size = self.state, self._block_size
        index = self.index = state.get("index", lambda: PrefixIndex(self.clock, max_bytes=self.max_bytes), size)
        self._windows: dict[Endpoint, HitWindow] = state.get("windows", dict, size)
        self._reservations: dict[Attempt, Reservation] = state.get("reservations", dict, size)
        state.at_commit(lambda: setattr(index, "max_bytes", self.max_bytes))

    def derive(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        state, model, index, block_size = request.state, request.model, self.index, self._block_size
        prompt = state.read(TOKENIZED_PROMPT) or request.prompt
        hashed, parts = chains(prompt, model, block_size, self._max_blocks), prompt.parts
        match = ChainMatch(index, hashed, block_size)
        # `rfind` searches a long prompt faster than `in` (hot path, see docs/notes/cpu.md).
        if not prompt.starts_conversation and len(parts) == 1 and parts[0].rfind(ASSISTANT) >= 0:
            match.turn = last_turn(parts[0], model, prompt.salt, hashed[0], block_size, self._max_blocks)
        if index.is_crowded:
            self._prove()
        state.write(self._key, match)

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        request, metrics = attempt.request, endpoint.metrics
        match = request.state.read(self._key)
        if match is None:
            return
        before = match.blocks_on(endpoint)
        match.frozen = True
        if attempt.started_at >= self._judge_at:
            self._judge(attempt.started_at)
        capacity = self._capacity_of(metrics.block_size * metrics.blocks)
        self._reservations[attempt] = reservation = self.index.reserve(match.chains, endpoint, capacity)
        if match.turn is not None:
            self.index.note_turn(reservation, match.turn)
        if attempt.stage is not WHOLE:
            self._adapt(attempt, reservation)
        if attempt.predicted_cached_tokens is None:
            cached, most = before * self._block_size, most_cached(request.prompt.tokens, metrics.block_size)
            attempt.predicted_cached_tokens = cached if cached < most else most

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        reservation = self._reservations.pop(attempt, None)
        if reservation is None:
            return
        status = attempt.status
        if status is None or status >= 300 or (attempt.ending is not COMPLETE and not _is_computed(attempt)):
            self.index.release(reservation)
            return
        usage, is_right = attempt.usage, True
        tokens = attempt.chunks if usage is None else usage.completion_tokens
        if tokens >= SHORTEST_RESPONSE:
            self.index.record_response(reservation, tokens, -(-tokens // self._block_size))
        if attempt.first_byte_at is not None:
            (self._windows.get(endpoint) or self._open(endpoint)).ended.append(figures(attempt))
        # The cached tokens of a decode pod came from another pod.
        if usage is not None and usage.cached_tokens is not None and attempt.stage is not DECODE:
            is_right = self.index.observe(reservation, usage.prompt_tokens, usage.cached_tokens)
        if is_right:
            self.index.settle(reservation, True)  # as `confirm`, without its frame
        else:  # What was known of the pod is void; this it has.
            capacity = self._capacity_of(endpoint.metrics.block_size * endpoint.metrics.blocks)
            self.index.confirm(self.index.reserve(reservation.chains, endpoint, capacity))

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self.index.forget(endpoint)
        self._windows.pop(endpoint, None)

    def _adapt(self, attempt: Attempt, reservation: Reservation) -> None:
        """Adapt the reservation to the stage: a decode pod fetches the cache from another pod and does not have it yet;
        an encode pod never will."""
        if attempt.stage is DECODE:
            self.index.hide(reservation)
        elif attempt.stage is Stage.ENCODE:
            self.index.release(self._reservations.pop(attempt))

    def _open(self, endpoint: Endpoint) -> HitWindow:
        window = self._windows[endpoint] = HitWindow(endpoint.metrics)
        return window

    def _judge(self, now: float) -> None:
        """Compare the predictions with the counters of the pods."""
        self._judge_at = now + JUDGE_INTERVAL
        running: dict[Endpoint, list[Any]] = {}
        for attempt in self._reservations:
            if attempt.first_byte_at is not None and attempt.predicted_cached_tokens is not None:
                running.setdefault(attempt.endpoint, []).append(figures(attempt))
        for endpoint, window in self._windows.items():
            found = window.found(endpoint.metrics, running.get(endpoint, ()))
            if found is not None and found < MISSING:
                self.index.forget_share(endpoint, found)
            if found is not None or len(window.ended) > MOST_ATTEMPTS:
                window.open(endpoint.metrics)

    def _prove(self) -> None:
        """Count the prompts as computed once their responses have started."""
        now, index = self.clock.now(), self.index
        if now < self._prove_at:
            return
        self._prove_at = now + PROVE_INTERVAL
        for attempt, reservation in self._reservations.items():
            if attempt.first_byte_at is not None and attempt.status is not None and attempt.status < 300:
                index.prove(reservation)
        index.is_crowded = any(map(index.is_stuck, self._reservations.values()))

    def _capacity(self, tokens: int) -> int:
        """Return the number of own blocks that fit into a KV cache of `tokens` tokens. `tokens` is 0 for a pod that
        does not report it: then the configured capacity applies."""
        return tokens // self._block_size if self.auto_tune and tokens > 0 else self._fixed_capacity


def _is_computed(attempt: Attempt) -> bool:
    """Return whether the pod has computed the prompt: a successful response had started before the end."""
    return attempt.ending in (Ending.CLIENT_GONE, Ending.EVICTED) and attempt.first_byte_at is not None
