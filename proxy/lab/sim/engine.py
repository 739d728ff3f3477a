"""Continuous batching, step by step, without sockets and without a clock.

A step computes one token of every decoding sequence, fills the rest of its token budget with prefill in order of
arrival, and takes the time that `StepTiming` specifies. It decides in the order of the vLLM v1 scheduler: running
sequences first; when blocks run out, the youngest sequence is pre-empted; a step that pre-empted admits no sequence.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Set
from dataclasses import dataclass, field
from random import Random

from prometheus_client import Histogram

from proxy.lab.cache import ChunkPool, blocks_of
from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.kv_events import KvPublisher
from proxy.lab.sim.sequence import Finish, Output, Phase, Sequence

FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.25, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0)
END_TO_END_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0, 480.0)


def _histogram(name: str, bounds: tuple[float, ...]) -> Histogram:
    return Histogram(f"vllm:{name}", "Histogram in seconds.", buckets=bounds, registry=None)


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine started."""

    steps: int = 0
    preemptions: int = 0
    queried_tokens: int = 0
    hit_tokens: int = 0
    external_tokens: int = 0
    """Prompt tokens that other pods computed."""
    transfers: int = 0
    transferred_tokens: int = 0
    transfer_seconds: float = 0.0
    failed_transfers: int = 0
    expired_transfers: int = 0
    """Prompts that were kept for other pods and not fetched in time."""
    prompt_tokens: int = 0
    generation_tokens: int = 0
    aborted: int = 0
    finished: dict[Finish, int] = field(default_factory=lambda: dict.fromkeys(Finish, 0))
    first_token: Histogram = field(
        default_factory=lambda: _histogram("time_to_first_token_seconds", FIRST_TOKEN_BUCKETS)
    )
    end_to_end: Histogram = field(default_factory=lambda: _histogram("e2e_request_latency_seconds", END_TO_END_BUCKETS))


SEEDS_APART = 7_919
"""Difference between the noise seeds of two ranks of a pod, so that no rank has the noise of another pod."""


class Pace:
    """The random duration of steps, from its own seeded generator. Lives as long as the engine."""

    def __init__(self, config: SimConfig, rank: int = 0) -> None:
        self._timing = config.timing
        self._slowdown = config.slowdown
        self._sigma = math.sqrt(math.log1p(config.noise**2))
        self._rng = Random(config.noise_seed + SEEDS_APART * rank)

    def seconds(self, prefill_tokens: int, sequences: int, attended: float, tokens_read: int) -> float:
        return self._timing.step(prefill_tokens, sequences, attended, tokens_read) * self.factor()

    def factor(self) -> float:
        """Return the factor of one step; its mean is the pod's slowdown."""
        if not self._sigma:
            return self._slowdown
        return self._slowdown * self._rng.lognormvariate(-(self._sigma**2) / 2, self._sigma)


@dataclass(frozen=True, slots=True)
class EngineStep:
    """The work of the next `duration` seconds: the sequences, each with the number of tokens that it computes."""

    chunks: list[tuple[Sequence, int]]
    prefill_tokens: int
    duration: float


class SimEngine:
    """The engine of one rank. Sequences enter by `submit`; between `start_step` and `finish_step` the caller lets time
    pass."""

    def __init__(self, config: SimConfig, embeddings: Set[int] = frozenset(), rank: int = 0) -> None:
        self.config = config
        self._evicted: list[int] = []
        """Blocks that were evicted since the last published events."""
        self.pool = ChunkPool(config.num_gpu_blocks, self._evicted.append)
        self.stats = EngineStats()
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.loading: dict[Sequence, None] = {}
        """Sequences that have their blocks and wait for another pod to fill them."""
        self.kept: dict[Sequence, None] = {}
        """Sequences that have ended and still have their blocks, for another pod to copy."""
        self.embeddings = embeddings
        self.encoded: set[int] = set()
        """Hashes of the media whose embeddings are cached."""
        self._to_encode: set[int] = set()
        self.pace = Pace(config, rank)
        self.events: KvPublisher | None = None
        self.sleep_level = 0
        """0 awake, 1 asleep, 2 asleep without its weights."""

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def waiting_requests(self) -> int:
        """Return the number of requests without a first step: in the queue, or waiting for another pod to fill their
        blocks."""
        return len(self.waiting) + len(self.loading)

    @property
    def kept_blocks(self) -> int:
        return sum(sequence.hashed_blocks + sequence.open_blocks for sequence in self.kept)

    @property
    def kv_usage(self) -> float:
        return self.pool.used / self.pool.capacity

    def submit(self, sequence: Sequence, now: float) -> None:
        sequence.progress.arrived = now
        sequence.extend_hashes(self.config.block_size)
        self.waiting.append(sequence)

    def abort(self, sequence: Sequence, now: float) -> None:
        """Remove a sequence in any phase; a sequence that has ended is ignored."""
        if sequence.phase is not Phase.ENDED:
            self._remove(sequence, now)
            self.stats.aborted += 1

    def fail(self, sequence: Sequence, now: float) -> list[Output]:
        """Remove a sequence with an error; a sequence that has ended is ignored."""
        if sequence.phase is Phase.ENDED:
            return []
        self._remove(sequence, now)
        sequence.finish = Finish.ERROR
        self.stats.finished[Finish.ERROR] += 1
        return [Output(sequence, b"", Finish.ERROR)]

    def fail_all(self, now: float) -> list[Output]:
        return [output for one in (*self.running, *self.loading, *self.waiting) for output in self.fail(one, now)]

    def loaded(self, sequence: Sequence, *, cached: bool) -> None:
        """Continue a sequence whose prompt has arrived; its last token is computed again. `cached`: full blocks have
        arrived, which count as cached."""
        if sequence.phase is not Phase.LOADING:
            return
        del self.loading[sequence]
        progress = sequence.progress
        if cached:
            sequence.computed = self._full_blocks(sequence) * self.config.block_size
            progress.external_tokens = sequence.computed - progress.cached_tokens
            progress.cached_tokens = sequence.computed
        else:
            sequence.computed = progress.prompt_tokens - 1
            progress.external_tokens = progress.prompt_tokens - progress.cached_tokens
        self.stats.external_tokens += progress.external_tokens
        sequence.phase = Phase.RUNNING
        self.running.append(sequence)
        self._fill_blocks(sequence, sequence.computed)

    def give_back(self, sequence: Sequence) -> None:
        if sequence in self.kept:
            del self.kept[sequence]
            self._release(sequence)

    def step(self, now: float) -> tuple[list[Output], float]:
        """Run one complete step on a virtual clock. Return its outputs and its duration."""
        step = self.start_step(now)
        return self.finish_step(step, now + step.duration), step.duration

    def start_step(self, now: float) -> EngineStep:
        chunks: list[tuple[Sequence, int]] = []
        preemptions = self.stats.preemptions
        budget = self._schedule_running(chunks)
        if self.stats.preemptions == preemptions:
            self._admit_waiting(chunks, budget, now)
        prefill, attended, read = _work(chunks)
        self.stats.steps += 1
        seconds = self.pace.seconds(prefill, len(chunks), attended, read)
        return EngineStep(chunks, prefill, seconds + self._encode())

    def finish_step(self, step: EngineStep, now: float) -> list[Output]:
        outputs = []
        for sequence, tokens in step.chunks:
            if sequence.phase is Phase.ENDED:
                continue
            sequence.computed += tokens
            if sequence.computed == sequence.tokens:
                outputs.append(self._add_token(sequence, now))
        if any(output.finish for output in outputs):
            self.running = [sequence for sequence in self.running if sequence.phase is Phase.RUNNING]
        return outputs

    def forget_prefixes(self) -> None:
        self.pool.forget()
        self._evicted.clear()
        if self.events is not None:
            self.events.cleared()

    def publish_events(self, wall: float) -> None:
        if self.events is not None:
            self.events.removed(self._evicted)
            self.events.publish(wall)
        self._evicted.clear()

    def _schedule_running(self, chunks: list[tuple[Sequence, int]]) -> int:
        """Schedule the running sequences and return the remaining token budget."""
        budget = self.config.max_num_batched_tokens
        index = 0
        while index < len(self.running) and budget > 0:
            sequence = self.running[index]
            tokens = min(sequence.tokens - sequence.computed, budget)
            while not self._reserve(sequence, tokens):
                if self._preempt_youngest() is sequence:
                    return budget
            chunks.append((sequence, tokens))
            budget -= tokens
            index += 1
        return budget

    def _admit_waiting(self, chunks: list[tuple[Sequence, int]], budget: int, now: float) -> None:
        while self.waiting and budget > 0 and len(self.running) + len(self.loading) < self.config.max_num_seqs:
            sequence = self.waiting[0]
            full = self._full_blocks(sequence)
            matched = self.pool.match(blocks_of(sequence.hashes[:full]), full)
            cached = matched * self.config.block_size
            arrives = sequence.progress.started is None and sequence.transfer.arrives(cached)
            tokens = sequence.tokens - cached if arrives else min(sequence.tokens - cached, budget)
            prefix, missing = blocks_of(sequence.hashes[:matched]), self._blocks_for(cached + tokens) - matched
            if missing + self.pool.count_idle(prefix, matched) > self.pool.free:
                return
            self.waiting.popleft()
            self.pool.hold(prefix)
            sequence.hashed_blocks, sequence.computed = matched, cached
            self._start(sequence, cached, now)
            if arrives:
                self.pool.open(missing)
                sequence.open_blocks += missing
                sequence.phase = Phase.LOADING
                self.loading[sequence] = None
                sequence.transfer.start(sequence, tokens)
                continue
            sequence.phase = Phase.RUNNING
            self.running.append(sequence)
            self._to_encode.update(sequence.media)
            self._reserve(sequence, tokens)
            chunks.append((sequence, tokens))
            budget -= tokens

    def _encode(self) -> float:
        """Return the seconds to encode the media of the prompts that start in this step."""
        if not self._to_encode:
            return 0.0
        missing = self._to_encode - self.encoded - self.embeddings
        self.encoded |= missing
        self._to_encode.clear()
        return len(missing) * self.config.encode_seconds

    def _full_blocks(self, sequence: Sequence) -> int:
        """Return the full blocks of the known text. The last token is always computed: its output is the next token."""
        return (sequence.tokens - 1) // self.config.block_size

    def _start(self, sequence: Sequence, cached: int, now: float) -> None:
        progress = sequence.progress
        if progress.started is None:
            progress.started = now
            progress.cached_tokens = cached
            self.stats.queried_tokens += progress.prompt_tokens
            self.stats.hit_tokens += cached

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Hold blocks for the next `tokens` tokens. If there are too few, return False and change nothing."""
        end = sequence.computed + tokens
        missing = self._blocks_for(end) - sequence.hashed_blocks - sequence.open_blocks
        if missing > 0:
            if missing > self.pool.free:
                return False
            self.pool.open(missing)
            sequence.open_blocks += missing
        if end >= (sequence.hashed_blocks + 1) * self.config.block_size:
            self._fill_blocks(sequence, end)
        return True

    def _fill_blocks(self, sequence: Sequence, end: int) -> None:
        sequence.extend_hashes(self.config.block_size)
        full = min(end // self.config.block_size, len(sequence.hashes))
        for at in range(sequence.hashed_blocks, full):
            block = sequence.hashes[at]
            if self.events is not None and not self.pool.chunk(block).resident:
                parent = sequence.hashes[at - 1] if at else None
                self.events.stored(block, parent, sequence.block_tokens(at, self.config.block_size))
            self.pool.name(((block, 1),), 0, 1)
        filled = full - sequence.hashed_blocks
        sequence.hashed_blocks += filled
        sequence.open_blocks -= filled

    def _preempt_youngest(self) -> Sequence:
        """Take the blocks of the youngest sequence and put it first in the queue, to be computed again."""
        victim = self.running.pop()
        self._release(victim)
        victim.computed = 0
        victim.phase = Phase.WAITING
        victim.progress.preemptions += 1
        self.stats.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _add_token(self, sequence: Sequence, now: float) -> Output:
        output = sequence.grow()
        progress = sequence.progress
        if progress.first_token is None:
            progress.first_token = now
            self.stats.prompt_tokens += progress.prompt_tokens
            self.stats.first_token.observe(now - progress.arrived)
            sequence.transfer.computed(sequence)
        if sequence.sampling.max_tokens:
            self.stats.generation_tokens += 1
        if output.finish:
            self.stats.finished[output.finish] += 1
            self.stats.end_to_end.observe(now - progress.arrived)
            sequence.phase = Phase.ENDED
            progress.ended = now
            if output.finish is Finish.LENGTH and sequence.transfer.keeps(sequence):
                self.kept[sequence] = None
            else:
                self._release(sequence)
                sequence.transfer.abandon()
        return output

    def _remove(self, sequence: Sequence, now: float) -> None:
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is Phase.LOADING:
            del self.loading[sequence]
        else:
            self.running.remove(sequence)
        self._release(sequence)
        sequence.phase = Phase.ENDED
        sequence.progress.ended = now
        sequence.transfer.abandon()

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(blocks_of(sequence.hashes[: sequence.hashed_blocks]), dropped=sequence.open_blocks)
        sequence.hashed_blocks = sequence.open_blocks = 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)


def _work(chunks: list[tuple[Sequence, int]]) -> tuple[int, float, int]:
    """Return the number of prompt tokens to compute, of pairs of a prompt token and a token it attends to, and of
    tokens of KV cache to read."""
    prefill, attended, read = 0, 0.0, 0
    for sequence, tokens in chunks:
        if tokens > 1 or not sequence.progress.generated_tokens:
            prefill += tokens
            attended += tokens * (sequence.computed + (tokens + 1) / 2)
        else:
            read += sequence.computed + 1
    return prefill, attended, read
