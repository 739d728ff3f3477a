"""Send a burst of requests with the same prompt to the same pod, before any pod has the prompt cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import repeat
from typing import Any, Literal

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import DataProducer, plugin
from proxy.core.ports import Clock, InstanceName, Timer
from proxy.core.request import BYTES_PER_TOKEN, DataKey, InferenceRequest
from proxy.prefix.burst import ANY_NUMBER, BurstRequest, Rules, assign
from proxy.prefix.hashing import Chain, chained, namespace
from proxy.prefix.match import PREFIX_MATCH, TOKENIZED_PROMPT, PrefixMatch

MOST_BLOCKS = 2048
"""Default limit of blocks of a prompt; prompts that are equal up to it count as equal."""


class BurstMatch(PrefixMatch):
    """The match of a burst: the assigned pod has the whole prompt. `missing`, the tokens left to compute, is the whole
    prompt for the first request with it."""

    __slots__ = ("_sample", "block_size", "total")

    def __init__(self, sample: BurstRequest, block_size: int) -> None:
        self._sample = sample
        self.block_size = block_size
        self.total = sample.blocks

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        assigned, total = self._sample.assigned, self.total
        return [total if endpoint is assigned else 0 for endpoint in endpoints]

    def blocks_on(self, endpoint: Endpoint) -> int:
        return 0 if self._sample.must_compute else self.matched((endpoint,))[0]

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> list[int]:
        cold = max(prompt_tokens, self.total * self.block_size)
        return [cold - self.blocks_on(endpoint) * self.block_size for endpoint in endpoints]


class _Window:
    """The requests that arrive before its end, in monotonic seconds."""

    def __init__(self, ends: float) -> None:
        self.ends = ends
        self.samples: list[BurstRequest] = []
        self.is_open = True

    def close(self, rules: Rules) -> None:
        """Assign pods to all requests of the window, once: any of them may have been cancelled."""
        if self.is_open:
            self.is_open = False
            assign(self.samples, rules)


@plugin("burst-prefix-cache-producer")
@dataclass
class BurstPrefixCacheProducer(DataProducer):
    """Has each request wait until its window ends, so that those which came in it are placed together: equal prompts on
    one pod, or on as few as `maxPerReplica` allows, pods evenly. A `prefix-cache-scorer` with this producer's name
    prefers the pod. A request without another one like it prefers none; one without a prompt, or with no choice of
    pods, does not wait. Each worker has windows of its own."""

    name: InstanceName
    clock: Clock
    timer: Timer
    window_duration_ms: int = param(100, "Milliseconds that a request waits at most.", at_least=1, at_most=10_000)
    max_per_replica: int = param(ANY_NUMBER, "Requests with one prompt that go to one pod; -1: any number.")
    block_size_tokens: int = param(64, "Tokens per block.", at_least=1)
    max_prefix_tokens_to_match: int = param(0, "Tokens of a prompt that are compared; 0: 2048 blocks.", at_least=0)
    min_colocate_blocks: int = param(
        0, "Blocks that different prompts share from the start on if they are to go together; 0: never.", at_least=0
    )
    max_batch_size: int = param(1000, "Requests of a window; more do not wait. -1: any number.")
    balance_by: Literal["requests", "tokens"] = param(
        "requests", "What pods get evenly: requests, or blocks that they do not get from others of the window."
    )

    def __post_init__(self) -> None:
        for name, number in (("maxPerReplica", self.max_per_replica), ("maxBatchSize", self.max_batch_size)):
            if number != ANY_NUMBER and number < 1:
                raise ValueError(f"{name} must be -1 or at least 1")
        if 0 < self.max_prefix_tokens_to_match < self.block_size_tokens:
            raise ValueError("maxPrefixTokensToMatch must be 0 or at least blockSizeTokens")
        self._key = PREFIX_MATCH.of(self.name)
        self._window: _Window | None = None
        self._rules = Rules(self.max_per_replica, self.min_colocate_blocks, self.balance_by == "tokens")

    @property
    def takes(self) -> float:  # type: ignore[override]  # it depends on the window
        return self.window_duration_ms / 1000

    @property
    def provides(self) -> tuple[DataKey[Any], ...]:
        return (self._key,)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        return (TOKENIZED_PROMPT,)

    async def produce(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> None:
        sample = BurstRequest(self._chains(request), endpoints)
        if not sample.blocks or len(endpoints) < 2:
            return
        window = self._current()
        if self.max_batch_size != ANY_NUMBER and len(window.samples) >= self.max_batch_size:
            return
        window.samples.append(sample)
        await self.timer.sleep(window.ends - self.clock.now())
        window.close(self._rules)
        request.state.write(self._key, BurstMatch(sample, self.block_size_tokens))

    def _current(self) -> _Window:
        now, window = self.clock.now(), self._window
        if window is None or not window.is_open or now >= window.ends:
            window = self._window = _Window(now + self.takes)
        return window

    def _chains(self, request: InferenceRequest) -> list[Chain]:
        """Return the hashes of full blocks and of the rest behind the last one."""
        prompt, size = request.state.read(TOKENIZED_PROMPT) or request.prompt, self.block_size_tokens
        most = self.max_prefix_tokens_to_match // size or MOST_BLOCKS
        seed, length = namespace(request.model, prompt.salt), size * BYTES_PER_TOKEN
        return [
            chained(map(BytesIO(part).read, repeat(length, min(most, -(-len(part) // length)))), seed)
            for part in prompt.parts
        ]
