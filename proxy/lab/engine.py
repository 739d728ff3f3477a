"""A counting version of the engine of `proxy.lab.sim`: the same steps at the same times, hundreds of times faster.

While a batch only decodes, each of its steps is known in advance: when each sequence ends, when it needs a block, and
how much is read. Such steps are computed together, up to the next step with another event. The tests compare this
engine with `proxy.lab.sim.SimEngine`, step by step.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

from proxy.lab.cache import ChunkPool, Parts, first
from proxy.lab.sim import SimConfig
from proxy.lab.sim.engine import Pace

MOST_STEPS = 256
"""Largest number of steps that are computed together."""

_RESPONSES = 1 << 60
"""Names of chunks from this number on belong to responses of pre-empted sequences."""


@dataclass(slots=True, eq=False)
class CountedRequest:
    """One request in an engine. While it decodes, its computed tokens are the engine's steps plus `offset`."""

    index: int
    prompt: int
    max_tokens: int
    parts: Parts
    """The full blocks of the prompt."""
    grown: Parts = ()
    """The full blocks of prompt and response together, if a later prompt may contain them."""
    stays: bool = field(default=False, kw_only=True)
    """Whether its blocks are kept after its end, until `let_go`."""
    comes: bool = field(default=False, kw_only=True)
    """Whether another pod has computed the prompt, so that this pod fetches it."""
    generated: int = 0
    computed: int = 0
    named: int = 0
    """Number of blocks that it holds under a name; its other blocks are private."""
    order: int = 0
    offset: int = 0
    ends_at: int = -1
    decoding: bool = False
    started: bool = False
    cached: int = 0
    preemptions: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


@dataclass(frozen=True, slots=True)
class EngineEvent:
    """The first token of a sequence, its last token or both; or the arrival of its prompt from another pod."""

    sequence: CountedRequest
    first: bool
    last: bool
    came: bool = False


class CountingEngine:
    """The counting engine of one pod or rank. `until` is when the current steps end; it is infinite while the engine
    is idle. Then call `finish`, which returns their events and starts the next steps. `submit` may make `until`
    earlier."""

    def __init__(self, config: SimConfig) -> None:
        if config.max_num_seqs >= config.max_num_batched_tokens:
            raise ValueError("max_num_batched_tokens must be more than max_num_seqs")
        self.config = config
        self.pool = ChunkPool(config.num_gpu_blocks)
        self.pace = Pace(config)
        self.waiting: deque[CountedRequest] = deque()
        self.running: list[CountedRequest] = []
        self.until = math.inf
        self.steps = 0
        self.preemptions = 0
        self.prefilled_tokens = 0
        """Prompt tokens that were computed, including requests that were pre-empted later."""
        self.queried_tokens = 0
        self.hit_tokens = 0
        self._generated = 0
        """Tokens that the completed steps generated."""
        self.ends: list[float] = []
        """The end of each of the current steps."""
        self.prefilling: list[tuple[CountedRequest, int]] = []
        """Sequences that compute a prompt in the current step, each with its number of tokens."""
        self.partial: CountedRequest | None = None
        """The last of the running sequences, while its prompt is not completely computed."""
        self.decoding = 0
        self.read = 0
        """Computed tokens of all decoding sequences."""
        self.opening = [0] * config.block_size
        """Number of sequences that need a block in a step, by the step's number modulo the block size."""
        self.endings: list[tuple[int, int, CountedRequest]] = []
        """A heap of (number of the step that ends it, order, decoding sequence); some entries are out of date."""
        self._order = 0
        self._link_free_at = 0.0
        """The end of the last fetch. Concurrent fetches share the network link in the order of their requests."""
        self._coming: list[tuple[float, int, CountedRequest]] = []
        """A heap of (arrival time of its prompt, number, sequence): each sequence has its blocks and waits."""
        self._came: deque[CountedRequest] = deque()
        self._kept = 0
        """Number of ended sequences that still hold their blocks."""

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting or self._coming or self._came)

    @property
    def fetching(self) -> int:
        """Return the number of sequences whose prompt is being fetched, or was fetched and is not scheduled yet."""
        return len(self._coming) + len(self._came)

    def submit(self, sequence: CountedRequest, now: float) -> None:
        """Add a request to the queue. Behind other waiting requests it cannot change the current steps."""
        self.waiting.append(sequence)
        self._adapt(now, is_first=len(self.waiting) == 1)

    def finish(self) -> list[EngineEvent]:
        """Complete the current steps and start the next ones; must be called at the time of `until`."""
        now = self.until
        events = self.end_steps(now)
        self._plan(now)
        return events

    def end_steps(self, now: float) -> list[EngineEvent]:
        taken = len(self.ends)
        if taken:
            self.pool.open(self.opened(1, taken))
        self.read += taken * self.decoding
        self._generated += taken * self.decoding
        self.steps += taken
        events = self._end_decoding() + self._receive(now)
        for sequence, tokens in self.prefilling:
            if not sequence.generated:
                self.prefilled_tokens += tokens
            sequence.computed += tokens
            if sequence.computed == sequence.tokens:
                events.append(self._add_token(sequence))
        return events

    def let_go(self, sequence: CountedRequest, now: float) -> None:
        self._kept -= 1
        self._release(sequence)
        self._adapt(now, is_first=False)

    def used_at(self, now: float) -> int:
        """Return the number of held blocks at a moment of the current steps."""
        begun = min(len(self.ends), bisect_left(self.ends, now) + 1)
        return self.pool.used + (self.opened(1, begun) if begun else 0)

    def kv_usage(self, now: float) -> float:
        return self.used_at(now) / self.pool.capacity

    def generated_tokens(self, now: float) -> int:
        """Return the tokens of all responses, including the current steps that have ended by `now`."""
        return self._generated + self.decoding * sum(end <= now for end in self.ends)

    def opened(self, start: int, end: int) -> int:
        """Return the number of blocks that decoding allocates in steps `start` to `end`, counted from now."""
        size = self.config.block_size
        rounds, rest = divmod(end - start, size)
        first_step = self.steps + start
        return rounds * self.decoding + sum(self.opening[(first_step + at) % size] for at in range(rest))

    def _adapt(self, now: float, *, is_first: bool) -> None:
        """Start steps if none run. End them after the current step if new work `is_first` in the queue."""
        if not self.ends:
            self._plan(now)
        elif is_first and len(self.ends) > 1:
            del self.ends[bisect_left(self.ends, now) + 1 :]
            self.until = self.ends[-1]

    def _plan(self, now: float) -> None:
        if steps := self.start_steps(now):
            self.ends = list(accumulate(self.durations(steps), initial=now))[1:]
            if self._coming and steps > 1:
                del self.ends[bisect_left(self.ends, self._coming[0][0]) + 1 :]
            self.until = self.ends[-1]

    def start_steps(self, now: float) -> int:
        """Schedule the next step. Return how many steps, from this one on, differ only in the tokens that they read; 0
        if no step starts."""
        self.prefilling = []
        if not self.busy:
            self.ends, self.until = [], math.inf
            return 0
        budget = self._schedule_running()
        if budget is not None:
            self._admit_waiting(self._start_those_that_came(budget), now)
            if not self.running:
                if not (self._coming or self._kept):
                    raise RuntimeError("a request needs more blocks than the pod has")
                self.ends, self.until = [], self._coming[0][0] if self._coming else math.inf
                return 0
        return 1 if budget is None else self._steps_alike()

    def _schedule_running(self) -> int | None:
        """Return the remaining token budget; None if a sequence was pre-empted: then no sequence is admitted."""
        budget = self.config.max_num_batched_tokens - self.decoding
        partial = self.partial
        opening = self.opening[self.steps % self.config.block_size]
        chunk = min(partial.tokens - partial.computed, budget) if partial else 0
        if opening + (self._missing(partial, chunk) if partial else 0) > self.pool.free:
            return self._schedule_tightly()
        self.pool.open(opening)
        if partial:
            self._compute(partial, chunk)
        return budget - chunk

    def _schedule_tightly(self) -> int | None:
        """Schedule the sequences one by one and pre-empt the youngest if blocks run out; a sequence without a younger
        one is pre-empted itself. Return as `_schedule_running` does."""
        size, budget, preempted = self.config.block_size, self.config.max_num_batched_tokens, False
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if sequence.decoding:
                tokens, missing = 1, int((self.steps + sequence.offset) % size == 0)
            else:
                tokens = min(sequence.tokens - sequence.computed, budget)
                missing = self._missing(sequence, tokens)
            while missing > self.pool.free:
                preempted = True
                if self._preempt_youngest() is sequence:
                    return None
            if sequence.decoding:
                self.pool.open(missing)
            else:
                self._compute(sequence, tokens)
            budget -= tokens
            index += 1
        return None if preempted else budget

    def _start_those_that_came(self, budget: int) -> int:
        """Start the sequences whose prompts have arrived and return the remaining token budget. The last token of a
        prompt is computed again, for the first token of the response; all blocks are allocated."""
        while self._came and budget > 0:
            sequence = self._came.popleft()
            self._run(sequence)
            self.prefilling.append((sequence, 1))
            self._name_blocks(sequence, sequence.tokens // self.config.block_size)
            budget -= 1
        return budget

    def _admit_waiting(self, budget: int, now: float) -> None:
        pool, config = self.pool, self.config
        while self.waiting and budget > 0 and len(self.running) + self.fetching < config.max_num_seqs:
            sequence = self.waiting[0]
            matched = pool.match(sequence.parts, (sequence.tokens - 1) // config.block_size)
            cached = matched * config.block_size
            tokens = sequence.tokens - cached if sequence.comes else min(sequence.tokens - cached, budget)
            needed = self._blocks_for(cached + tokens) - matched
            if needed > pool.free or needed + pool.count_idle(sequence.parts, matched) > pool.free:
                return
            self.waiting.popleft()
            pool.hold(first(sequence.parts, matched))
            sequence.named, sequence.computed = matched, cached
            if not sequence.started:
                sequence.started, sequence.cached = True, cached
                self.queried_tokens += sequence.prompt
                self.hit_tokens += cached
            if sequence.comes:
                self._fetch(sequence, tokens, now)
                continue
            self._run(sequence)
            self._compute(sequence, tokens)
            budget -= tokens

    def _run(self, sequence: CountedRequest) -> None:
        self._order += 1
        sequence.order = self._order
        self.running.append(sequence)

    def _fetch(self, sequence: CountedRequest, tokens: int, now: float) -> None:
        """Fetch the part of the prompt that is not cached here. This happens once: after a pre-emption, this pod
        computes the prompt."""
        self.pool.open(self._missing(sequence, tokens))
        sequence.computed, sequence.comes = sequence.tokens - 1, False
        timing = self.config.transfer
        self._link_free_at = max(now, self._link_free_at - timing.base) + timing.seconds(tokens)
        heappush(self._coming, (self._link_free_at, sequence.index, sequence))

    def _receive(self, now: float) -> list[EngineEvent]:
        events = []
        while self._coming and self._coming[0][0] <= now:
            sequence = heappop(self._coming)[2]
            self._came.append(sequence)
            events.append(EngineEvent(sequence, False, False, came=True))
        return events

    def _compute(self, sequence: CountedRequest, tokens: int) -> None:
        """Add this many tokens of a prompt to the next step; the last tokens give all full blocks their names."""
        self.pool.open(self._missing(sequence, tokens))
        self.prefilling.append((sequence, tokens))
        if sequence.computed + tokens == sequence.tokens:
            self.partial = None
            self._name_blocks(sequence, sequence.tokens // self.config.block_size)
        else:
            self.partial = sequence

    def _name_blocks(self, sequence: CountedRequest, whole: int) -> None:
        """Make the first `whole` blocks of a sequence, which are computed, available to other sequences."""
        self.pool.name(sequence.parts, sequence.named, whole)
        sequence.named = whole

    def _preempt_youngest(self) -> CountedRequest:
        """Take the blocks of the youngest sequence and put it first in the queue, to be computed again."""
        victim = self.running.pop()
        size = self.config.block_size
        if victim.decoding:
            victim.computed = self.steps + victim.offset
            self._stop_decoding(victim)
        self.partial = None
        of_prompt, known = victim.prompt // size, victim.tokens // size
        if victim.grown:
            victim.parts = tuple(first(victim.grown, known))
        elif known > of_prompt:
            victim.parts = (*first(victim.parts, of_prompt), (_RESPONSES + victim.index, known - of_prompt))
        self._name_blocks(victim, victim.computed // size)
        self.pool.release(first(victim.parts, victim.named), 0, self._blocks_for(victim.computed) - victim.named)
        victim.computed = victim.named = 0
        victim.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(victim)
        return victim

    def _steps_alike(self) -> int:
        """Return how many steps, from the next one on, differ only in the tokens that they read."""
        if self.prefilling or self._came or (self.waiting and len(self.running) < self.config.max_num_seqs):
            return 1
        while self.endings[0][2].ends_at != self.endings[0][0]:
            heappop(self.endings)
        steps = min(MOST_STEPS, self.endings[0][0] - self.steps)
        fit = self.decoding * (steps // self.config.block_size + 1) <= self.pool.free
        return steps if fit else 1

    def durations(self, steps: int) -> list[float]:
        """Return the seconds of each of the next steps, which `start_steps` has scheduled."""
        prefill, attended, read = 0, 0.0, self.read + self.decoding
        for sequence, tokens in self.prefilling:
            if tokens > 1 or not sequence.generated:
                prefill += tokens
                attended += tokens * (sequence.computed + (tokens + 1) / 2)
            else:
                read += sequence.computed + 1
        sequences = self.decoding + len(self.prefilling)
        return [self.pace.seconds(prefill, sequences, attended, read + at * self.decoding) for at in range(steps)]

    def _end_decoding(self) -> list[EngineEvent]:
        events = []
        while self.endings and self.endings[0][0] <= self.steps:
            ends_at, _, sequence = heappop(self.endings)
            if sequence.ends_at == ends_at:
                sequence.computed = self.steps + sequence.offset
                sequence.generated = sequence.max_tokens
                self._stop_decoding(sequence)
                self._end(sequence)
                events.append(EngineEvent(sequence, False, True))
        return events

    def _add_token(self, sequence: CountedRequest) -> EngineEvent:
        """Add the first token, which the step with the last tokens of the prompt generates."""
        sequence.generated += 1
        self._generated += 1
        ended = sequence.generated >= sequence.max_tokens
        if ended:
            self._end(sequence)
        else:
            self._start_decoding(sequence)
        return EngineEvent(sequence, sequence.generated == 1, ended)

    def _start_decoding(self, sequence: CountedRequest) -> None:
        sequence.decoding = True
        sequence.offset = sequence.computed - self.steps
        sequence.ends_at = self.steps + sequence.max_tokens - sequence.generated
        self.decoding += 1
        self.read += sequence.computed
        self.opening[-sequence.offset % self.config.block_size] += 1
        heappush(self.endings, (sequence.ends_at, sequence.order, sequence))

    def _stop_decoding(self, sequence: CountedRequest) -> None:
        sequence.decoding = False
        sequence.generated = sequence.max_tokens - (sequence.ends_at - self.steps)
        sequence.ends_at = -1
        self.decoding -= 1
        self.read -= sequence.computed
        self.opening[-sequence.offset % self.config.block_size] -= 1

    def _end(self, sequence: CountedRequest) -> None:
        self.running.remove(sequence)
        if sequence.stays:
            self._kept += 1
        else:
            self._release(sequence)

    def _release(self, sequence: CountedRequest) -> None:
        whole = sequence.computed // self.config.block_size
        if sequence.grown:
            sequence.parts = sequence.grown
            self._name_blocks(sequence, whole)
        dropped = self._blocks_for(sequence.computed) - whole
        self.pool.release(first(sequence.parts, sequence.named), whole - sequence.named, dropped)

    def _missing(self, sequence: CountedRequest, tokens: int) -> int:
        """Return the number of blocks to allocate before a sequence can compute this many tokens."""
        size, computed = self.config.block_size, sequence.computed
        return -(-(computed + tokens) // size) - -(-computed // size)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)
