"""When a request would have its first token if a pod got it now: its engine played forward with nothing hidden.

No further requests are expected; they would wait behind it anyway. Evictions are simulated in their order;
pre-emptions are not foreseen.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from proxy.lab.cache import Parts, first
from proxy.lab.engine import CountedRequest, CountingEngine


class Forecast:
    """One engine and one request that joins its queue. Lives as long as `first_token`; the engine is only looked at."""

    def __init__(self, engine: CountingEngine, newcomer: CountedRequest, now: float) -> None:
        self._engine = engine
        self._config = engine.config
        self._size = engine.config.block_size
        self._newcomer = newcomer
        self._queue = [*engine.waiting, newcomer]
        self._resident: dict[int, int] = {}
        """Blocks of a chunk that are cached at this moment of the forecast, where the pool says something else."""
        self._held: dict[int, int] = {}
        """Blocks taken into use since."""
        self._holders: dict[int, int] = {}
        """How many more hold a chunk than at the beginning of the forecast, or less."""
        self._pieces: Iterator[list[int]] = engine.pool.pieces()
        self._oldest: tuple[int, int, int] | None = None
        """What is left of the piece that is evicted next."""
        self._taken: set[int] = set()
        """Chunks whose pieces were taken into use since: they are no longer where the pool has them in its order."""
        self._given_back: deque[tuple[int, int, int]] = deque()
        """Pieces that became idle since; their turn comes after all others."""
        self._endings = [ending for ending in engine.endings if ending[2].ends_at == ending[0]]
        heapify(self._endings)
        self._opening = list(engine.opening)
        self._order = 1 << 60
        self._decoding = engine.decoding
        self._partial: tuple[CountedRequest, int] | None = None
        """The prompt that is being computed, and how far."""
        begun = 0
        if engine.until == math.inf:
            self._at = now
        else:
            begun = min(len(engine.ends), bisect_left(engine.ends, now) + 1)
            self._at = engine.ends[begun - 1]
        self._step = engine.steps + begun
        self._read = engine.read + begun * engine.decoding
        self._used = engine.used_at(now)
        self._idle = engine.pool.idle
        self._running = len(engine.running)
        self.cached = 0
        """Tokens of the prompt that it will find."""
        if engine.partial:
            self._count(engine.partial.parts[len(first(engine.partial.parts, engine.partial.named)) :])
        if begun:
            for sequence, tokens in engine.prefilling:
                self._computed(sequence, sequence.computed + tokens)
        self._end_decoding()

    def first_token(self, before: float = math.inf) -> float:
        """On the virtual clock; infinite if it will not come `before` some time."""
        while self._at < before:
            prefilled = self._run_step()
            for sequence, computed in prefilled:
                if sequence is self._newcomer and computed == sequence.tokens:
                    return self._at
                self._computed(sequence, computed)
            self._end_decoding()
        return math.inf

    def _run_step(self) -> list[tuple[CountedRequest, int]]:
        """One, or all that only decode up to the next end; returns whose prompts got how far."""
        budget = self._config.max_num_batched_tokens - self._decoding
        self._open(self._opening[self._step % self._size])
        chunks: list[tuple[CountedRequest, int, int]] = []
        if self._partial:
            sequence, computed = self._partial
            self._partial = None
            budget -= self._add(chunks, sequence, computed, budget)
        self._admit(chunks, budget)
        steps = 1
        if not chunks and self._endings:
            steps = max(1, self._endings[0][0] - self._step)
            self._open(sum(self._opening[(self._step + at) % self._size] for at in range(1, min(steps, 4096))))
        self._pass(chunks, steps)
        return [(sequence, start + tokens) for sequence, start, tokens in chunks]

    def _admit(self, chunks: list[tuple[CountedRequest, int, int]], budget: int) -> None:
        while self._queue and budget > 0 and self._running < self._config.max_num_seqs:
            sequence = self._queue[0]
            matched, idle = self._match(sequence)
            start = matched * self._size
            tokens = min(sequence.tokens - start, budget)
            needed = -(-(start + tokens) // self._size) - matched + idle
            if needed > self._engine.pool.capacity - self._used and (self._endings or chunks):
                return
            del self._queue[0]
            self._running += 1
            self._used += idle
            self._idle -= idle
            self._hold(first(sequence.parts, matched))
            self._count(sequence.parts)
            if sequence is self._newcomer:
                self.cached = start
            budget -= self._add(chunks, sequence, start, budget)

    def _add(
        self, chunks: list[tuple[CountedRequest, int, int]], sequence: CountedRequest, start: int, budget: int
    ) -> int:
        tokens = min(sequence.tokens - start, budget)
        self._open(-(-(start + tokens) // self._size) - -(-start // self._size))
        chunks.append((sequence, start, tokens))
        if start + tokens == sequence.tokens and sequence is not self._newcomer:
            self._hold(sequence.parts)
        return tokens

    def _pass(self, chunks: list[tuple[CountedRequest, int, int]], steps: int) -> None:
        """Time goes on by so many steps."""
        timing, decoding = self._config.timing, self._decoding
        prefill = sum(tokens for _, _, tokens in chunks)
        attended = sum(tokens * (start + (tokens + 1) / 2) for _, start, tokens in chunks)
        one = timing.step(prefill, decoding + len(chunks), attended, self._read + decoding)
        growth = timing.per_token_read * decoding * steps * (steps - 1) / 2
        self._at += (one * steps + growth) * self._config.slowdown
        self._step += steps
        self._read += steps * decoding

    def _computed(self, sequence: CountedRequest, computed: int) -> None:
        """So much of a prompt is; if that is all of it, it decodes from here on."""
        if computed < sequence.tokens:
            self._partial = (sequence, computed)
            return
        left = sequence.max_tokens - sequence.generated - 1
        if left <= 0:
            if sequence.generated < sequence.max_tokens:
                self._running -= 1
                self._give_back(sequence, computed)
            return
        self._decoding += 1
        self._read += computed
        self._opening[(self._step - computed) % self._size] += 1
        self._order += 1
        heappush(self._endings, (self._step + left, self._order, sequence))

    def _end_decoding(self) -> None:
        while self._endings and self._endings[0][0] <= self._step:
            _, _, sequence = heappop(self._endings)
            computed = sequence.prompt + sequence.max_tokens - 1
            self._decoding -= 1
            self._running -= 1
            self._read -= computed
            self._opening[(self._step - computed) % self._size] -= 1
            self._give_back(sequence, computed)

    def _give_back(self, sequence: CountedRequest, computed: int) -> None:
        """Blocks that only this sequence held become idle."""
        whole = computed // self._size
        parts = first(sequence.parts, sequence.named) if sequence.decoding else sequence.parts
        if sequence.grown:
            parts = first(sequence.grown, whole)
        self._used -= -(-computed // self._size) - whole
        freed = whole - sum(blocks for _, blocks in parts)
        self._given_back.append((-1, 0, freed))
        for name, blocks in reversed(parts):
            more = self._holders[name] = self._holders.get(name, 0) - 1
            if len(self._engine.pool.chunk(name).holders) + more <= 0:
                self._held.pop(name, None)
                self._given_back.append((name, 0, blocks))
                self._resident[name] = max(blocks, self._here(name))
                freed += blocks
        self._used -= freed
        self._idle += freed

    def _count(self, parts: Parts) -> None:
        """One more sequence that holds these, now or when it has computed them."""
        for name, _ in parts:
            self._holders[name] = self._holders.get(name, 0) + 1

    def _hold(self, parts: Parts) -> None:
        for name, blocks in parts:
            self._taken.add(name)
            self._held[name] = max(blocks, self._held.get(name, 0))
            self._resident[name] = max(blocks, self._here(name))

    def _here(self, name: int) -> int:
        known = self._resident.get(name)
        return self._engine.pool.chunk(name).resident if known is None else known

    def _match(self, sequence: CountedRequest) -> tuple[int, int]:
        """(cached blocks it would find, idle ones of them)."""
        pool, most = self._engine.pool, (sequence.tokens - 1) // self._size
        matched = idle = 0
        for name, blocks in sequence.parts:
            here = min(blocks, self._here(name), most - matched)
            matched += here
            idle += max(0, here - max(pool.chunk(name).held, self._held.get(name, 0)))
            if here < blocks:
                break
        return matched, idle

    def _open(self, blocks: int) -> None:
        """Evict the least recently used blocks that are not in use."""
        self._used += blocks
        excess = self._used + self._idle - self._engine.pool.capacity
        while excess > 0:
            name, start, end = self._next_piece()
            gone = min(excess, end - start)
            if name >= 0:
                self._resident[name] = end - gone
            if end - gone > start:
                self._oldest = (name, start, end - gone)
            self._idle -= gone
            excess -= gone

    def _next_piece(self) -> tuple[int, int, int]:
        if self._oldest and self._oldest[0] not in self._held:
            piece, self._oldest = self._oldest, None
            return piece
        for name, start, end in self._pieces:
            if name not in self._taken:
                return name, start, end
        while self._given_back:
            piece = self._given_back.popleft()
            if piece[0] not in self._held:
                return piece
        return -1, 0, self._engine.pool.capacity
