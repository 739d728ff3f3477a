"""What several tests of the benchmarks' fleet need."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from proxy.lab.engine import CountedRequest, CountingEngine
from proxy.lab.sim import Finish, Output, SimConfig, SimEngine, StepTiming
from proxy.lab.sim.sequence import NO_TRANSFER, Phase, SamplingParams, SequenceProgress
from proxy.lab.workload import CHUNK, Job, blocks_with_response, named, prompt_blocks


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of one request in an engine."""

    first_token: float
    ended: float
    cached_tokens: int
    preemptions: int


@dataclass(frozen=True, slots=True)
class Totals:
    preemptions: int
    evictions: int
    used: int
    idle: int
    steps: int


class Replayed:
    """Stands in for `proxy.lab.sim.Sequence`, its text replaced by the names of its blocks."""

    def __init__(self, index: int, job: Job, block_size: int) -> None:
        self.index = index
        self.sampling = SamplingParams(job.output_tokens)
        self.adapter = None
        self.media = ()
        self.transfer = NO_TRANSFER
        self.phase = Phase.WAITING
        self.computed = self.hashed_blocks = self.open_blocks = 0
        per_chunk = CHUNK // block_size
        self._names = [node * per_chunk + at for node in job.continued_nodes or job.nodes for at in range(per_chunk)]
        self._named = job.prompt_tokens + job.output_tokens if job.continued else 0
        self.hashes = self._names[: job.prompt_tokens // block_size]
        self.tokens = job.prompt_tokens
        self.progress = SequenceProgress(prompt_tokens=self.tokens)

    def extend_hashes(self, block_size: int) -> None:
        for block in range(len(self.hashes), self.tokens // block_size):
            known = (block + 1) * block_size <= self._named
            self.hashes.append(self._names[block] if known else (1 << 62) + self.index * 1_000_000 + block)

    def grow(self) -> Output:
        self.progress.generated_tokens += 1
        self.tokens += 1
        ended = self.progress.generated_tokens >= self.sampling.max_tokens
        return Output(self, b"", Finish.LENGTH if ended else None)  # type: ignore[arg-type]  # it stands in for one


def played(jobs: Sequence[Job], config: SimConfig) -> tuple[list[Fate], Totals]:
    """By the engine of the simulated pods, step by step."""
    engine = SimEngine(config)
    sequences: list[Any] = []
    now, step, ends = 0.0, None, math.inf
    while len(sequences) < len(jobs) or engine.busy:
        arrival = jobs[len(sequences)].arrival if len(sequences) < len(jobs) else math.inf
        if step is None and engine.busy:
            step = engine.start_step(now)
            ends = now + step.duration
        if step is None or arrival < ends:
            now = arrival
            sequences.append(Replayed(len(sequences), jobs[len(sequences)], config.block_size))
            engine.submit(sequences[-1], now)
        else:
            now = ends
            engine.finish_step(step, now)
            step, ends = None, math.inf
    fates = [Fate(p.first_token, p.ended, p.cached_tokens, p.preemptions) for p in (s.progress for s in sequences)]
    pool, stats = engine.pool, engine.stats
    return fates, Totals(stats.preemptions, pool.evictions, pool.used, pool.idle, stats.steps)


def play(engine: Any, jobs: Sequence[Job]) -> tuple[list[CountedRequest], dict[int, float], dict[int, float]]:
    """An engine of the virtual fleet, through all of the jobs: its sequences, their first tokens and their last."""
    sequences: list[CountedRequest] = []
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    while len(sequences) < len(jobs) or engine.busy:
        arrival = jobs[len(sequences)].arrival if len(sequences) < len(jobs) else math.inf
        if arrival < engine.until:
            sequences.append(sequence(len(sequences), jobs[len(sequences)]))
            engine.submit(sequences[-1], arrival)
            continue
        now = engine.until
        for event in engine.finish():
            if event.first:
                first[event.sequence.index] = now
            if event.last:
                last[event.sequence.index] = now
    return sequences, first, last


def counted(jobs: Sequence[Job], config: SimConfig) -> tuple[list[Fate], Totals]:
    """By the engine of the virtual fleet."""
    engine = CountingEngine(config)
    sequences, first, last = play(engine, jobs)
    fates = [Fate(first[one.index], last[one.index], one.cached, one.preemptions) for one in sequences]
    pool = engine.pool
    return fates, Totals(engine.preemptions, pool.evictions, pool.used, pool.idle, engine.steps)


def sequence(index: int, job: Job) -> CountedRequest:
    return CountedRequest(
        index, job.prompt_tokens, job.output_tokens, prompt_blocks(job, 16), blocks_with_response(job, 16)
    )


def crowd(rng: Random, blocks: int = 0) -> tuple[tuple[Job, ...], SimConfig]:
    """Draw requests that share prefixes, some cut within a chunk, and a pod that may be too small for them."""
    config = SimConfig(
        num_gpu_blocks=blocks or rng.choice([200, 400, 800, 3_000]),
        max_num_seqs=rng.choice([3, 8, 64]),
        max_num_batched_tokens=rng.choice([128, 512, 2_048]),
        timing=StepTiming(per_attended=1e-8, per_token_read=1e-7),
        slowdown=rng.choice([1.0, 2.0]),
    )
    rate, now, fresh = rng.choice([1, 5, 30]), 0.0, 1_000
    prompts: list[list[int]] = []
    later: list[list[int]] = []
    jobs = []
    for _ in range(rng.choice([5, 20, 60])):
        now += rng.expovariate(rate)
        if rng.random() < 0.1:
            now += 300.0
            prompts += later
            later.clear()
        ids = rng.choice(prompts)[: rng.randint(1, 6)] if prompts and rng.random() < 0.6 else [rng.randint(0, 3)]
        added = rng.randint(0, 3)
        ids = [*ids, *range(fresh, fresh + added)]
        fresh += added
        prompt = max(1, len(ids) * CHUNK - rng.choice([0, 0, 16, rng.randint(0, 511), 496]))
        output = rng.choice([1, 2, 5, 40, rng.randint(1, 300)])
        if prompt + output + 40 <= config.num_gpu_blocks * config.block_size:
            job = Job(now, prompt, output, tuple(ids))
            if added and rng.random() < 0.5:
                job = _continued(job, rng)
                later.append(list(job.continued))
            else:
                prompts.append(ids)
            jobs.append(job)
    return named(jobs), config


def _continued(job: Job, rng: Random) -> Job:
    """Return the job with a response that later requests may continue."""
    missing = -(-(job.prompt_tokens + job.output_tokens) // CHUNK) - len(job.ids)
    return replace(job, continued=(*job.ids, *(rng.randint(1 << 20, 1 << 30) for _ in range(missing))))
