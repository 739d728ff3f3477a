"""What a step of a real engine takes: measured by a few probes, fitted by least squares."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from statistics import median

from bench.validation.real import Real, Stream
from bench.validation.script import ids
from proxy.lab.sim import StepTiming

PROMPTS = (32, 128, 256, 480, 900, 1_400, 2_000, 3_000, 4_000, 6_000)
"""Tokens of the prompts that are computed alone."""

BATCHES = ((1, 32), (2, 32), (4, 32), (8, 32), (16, 32), (4, 900), (8, 900), (2, 3_000))
"""Sequences that decode together, and tokens of the prompt of each."""

DECODED = 120

ATTEMPTS = 20
"""A probe is repeated if its sequences do not overlap, on a machine that is busy otherwise."""


@dataclass(frozen=True, slots=True)
class Constants:
    """`overhead`: seconds of a request outside of the engine's steps, before its first token."""

    timing: StepTiming
    overhead: float


class Probes:
    """Rounds of probes; the median of each counts. `budget`: prompt tokens of a step."""

    def __init__(self, real: Real, budget: int, rng: Random) -> None:
        self._real = real
        self._budget = budget
        self._rng = rng
        self._alone: dict[int, list[float]] = {tokens: [] for tokens in PROMPTS}
        self._together: dict[tuple[int, int], list[float]] = {batch: [] for batch in BATCHES}

    async def round(self) -> None:
        for tokens, found in self._alone.items():
            found.append((await self._real.ask(ids(self._rng, tokens), 1)).times[0])
        for batch, steps in self._together.items():
            steps.append(await _step_of(self._real, *batch, self._rng))

    @property
    def alone(self) -> dict[int, float]:
        """Seconds to the first token, by prompt tokens."""
        return {tokens: median(found) for tokens, found in self._alone.items()}

    @property
    def together(self) -> dict[tuple[int, int], float]:
        """Seconds of a step, by (sequences that decode, prompt tokens of each)."""
        return {batch: median(steps) for batch, steps in self._together.items()}

    def constants(self) -> Constants:
        return constants(self.alone, self.together, self._budget)


def constants(alone: dict[int, float], together: dict[tuple[int, int], float], budget: int) -> Constants:
    """From the time to the first token by prompt tokens, and the time of a step by (sequences, tokens of a prompt)."""
    batches = [(1.0, sequences, sequences * (tokens + DECODED / 2)) for sequences, tokens in together]
    base, per_sequence, per_read = fitted(batches, list(together.values()))
    steps = {tokens: -(-tokens // budget) for tokens in alone}
    overhead, per_token, per_attended = fitted(
        [(1.0, tokens, tokens * (tokens + 1) / 2) for tokens in alone],
        [max(1e-6, seconds - steps[tokens] * (base + per_sequence)) for tokens, seconds in alone.items()],
    )
    return Constants(StepTiming(base, per_token, per_sequence, per_attended, per_read), overhead)


def fitted(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Coefficients >= 0 with the least sum of squared relative errors; one that would be negative is left out."""
    kept = list(range(len(rows[0])))
    while True:
        scaled = [[row[at] / y for at in kept] for row, y in zip(rows, seconds, strict=True)]
        found = _solve(scaled)
        if min(found) >= 0 or len(kept) == 1:
            break
        del kept[found.index(min(found))]
    return [max(0.0, found[kept.index(at)]) if at in kept else 0.0 for at in range(len(rows[0]))]


async def _step_of(real: Real, sequences: int, tokens: int, rng: Random) -> float:
    """Seconds of a step while all of them decode. The prompts are there already, so that they decode at once."""
    prompts = [ids(rng, tokens) for _ in range(sequences)]
    if tokens > 100:
        for prompt in prompts:
            await real.ask(prompt, 1)
    for _ in range(ATTEMPTS):
        streams = await asyncio.gather(*(real.ask(prompt, DECODED) for prompt in prompts))
        if seconds := _between_tokens(streams):
            return seconds
    raise RuntimeError(f"{sequences} sequences do not decode together")


def _between_tokens(streams: Sequence[Stream]) -> float | None:
    """While all of them decode; None if they hardly do."""
    start = max(stream.sent + stream.times[0] for stream in streams)
    end = min(stream.sent + stream.times[-1] for stream in streams)
    gaps = []
    for stream in streams:
        inside = [at for at in (stream.sent + at for at in stream.times) if start <= at <= end]
        if len(inside) > DECODED / 2:
            gaps.append((inside[-1] - inside[0]) / (len(inside) - 1))
    return sum(gaps) / len(gaps) if len(gaps) == len(streams) else None


def _solve(rows: Sequence[Sequence[float]]) -> list[float]:
    """x with the least |rows · x - 1|, by the normal equations; columns are scaled to be of one size."""
    size = len(rows[0])
    scale = [max(abs(row[at]) for row in rows) or 1.0 for at in range(size)]
    rows = [[row[at] / scale[at] for at in range(size)] for row in rows]
    equations = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    right = [sum(row[i] for row in rows) for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda at: abs(equations[at][i]))
        equations[i], equations[pivot] = equations[pivot], equations[i]
        right[i], right[pivot] = right[pivot], right[i]
        for other in range(size):
            if other != i:
                factor = equations[other][i] / equations[i][i]
                equations[other] = [a - factor * b for a, b in zip(equations[other], equations[i], strict=True)]
                right[other] -= factor * right[i]
    return [right[at] / equations[at][at] / scale[at] for at in range(size)]
