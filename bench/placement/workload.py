"""What is asked of the fleet: requests with the identity of every block of their prompts, and when they come."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

CHUNK = 512
"""Tokens of a prompt that one id of a trace stands for."""

BUCKET = 3.0
"""Seconds: traces of production give arrivals in steps of it; arrivals at one moment are spread over so long."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request. `ids` name the chunks of the prompt: equal ids are equal text, the last chunk is cut at the
    prompt's end. `nodes` name the same chunks together with all text before them."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    nodes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    jobs: tuple[Job, ...]

    @property
    def rate(self) -> float:
        """Requests per second, as they come in the source."""
        first, last = self.jobs[0].arrival, self.jobs[-1].arrival
        return len(self.jobs) / (last - first) if last > first else float(len(self.jobs))

    def at_rate(self, rate: float) -> Workload:
        """The same with time scaled, from 0 on."""
        factor, first = self.rate / rate, self.jobs[0].arrival
        return replace(self, jobs=tuple(replace(job, arrival=(job.arrival - first) * factor) for job in self.jobs))

    def fitting(self, tokens: int) -> Workload:
        """Without requests that no pod could ever take: prompt and answer together have more tokens."""
        return replace(self, jobs=tuple(job for job in self.jobs if job.prompt_tokens + job.output_tokens <= tokens))

    def window(self, first: int, count: int) -> Workload:
        """`count` requests in a row, so that prefixes that are shared stay shared."""
        return replace(self, jobs=self.jobs[first : first + count])


def load_trace(path: Path, rng: Random) -> Workload:
    """Mooncake's format, a JSON object to the line, gzipped or not. Arrivals at one moment are spread over the time
    to the next bucket."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        rows = [json.loads(line) for line in lines]
    jobs = [
        Job(
            row["timestamp"] / 1000,
            int(row["input_length"]),
            max(1, int(row["output_length"])),
            tuple(row["hash_ids"]),
        )
        for row in rows
    ]
    return Workload(path.name.split(".")[0], named(_spread(jobs, rng)))


def named(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """In order of arrival, with the nodes filled in."""
    known: dict[tuple[int, int], int] = {}
    found = []
    for job in sorted(jobs, key=lambda job: job.arrival):
        node, nodes = -1, []
        for chunk in job.ids:
            node = known.setdefault((node, chunk), len(known))
            nodes.append(node)
        found.append(replace(job, nodes=tuple(nodes)))
    return tuple(found)


def reusable_share(jobs: Sequence[Job]) -> float:
    """The share of prompt tokens that one cache without limit would have when they come."""
    seen: set[int] = set()
    reused = 0
    for job in jobs:
        for at, node in enumerate(job.nodes):
            if node not in seen:
                break
            reused += min(CHUNK, job.prompt_tokens - at * CHUNK)
        seen.update(job.nodes)
    return reused / sum(job.prompt_tokens for job in jobs)


def _spread(jobs: Sequence[Job], rng: Random) -> list[Job]:
    """Only if several come at once: a trace with times of its own keeps them."""
    moments = {job.arrival for job in jobs}
    if len(moments) > len(jobs) / 2:
        return list(jobs)
    return [replace(job, arrival=job.arrival + BUCKET * rng.random()) for job in jobs]
