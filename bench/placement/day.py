"""A day of several tenants, on which nothing was tuned: crews of agents, people who ask, and documents to be read.

Written before any result of it was seen, and kept as it was. It is there to judge what the other workloads were used to
make.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from proxy.lab.workload import CHUNK, Job

Chunks = tuple[int, ...]

TENANTS = 12
CREWS, QUESTIONS = 0.65, 0.9
"""Of the requests so many come from crews; up to here they are questions; the rest are documents."""

PER_CREW = 38.0
"""The mean requests of a crew: two rounds, each of one request of the lead and 5 requests of each of 3.5 agents; and
the lead's last request."""

BEFORE = 120.0
"""Seconds before the first request in which crews begin too."""

SECONDS_PER_TOKEN = 0.02
TOOL_SECONDS = 2.0


class Context:
    """The conversation so far, which only grows."""

    def __init__(self, chunks: Callable[[int], Chunks], ids: Chunks = (), tokens: int = 0) -> None:
        self._chunks = chunks
        self.ids = ids
        self.tokens = tokens

    def branch(self) -> Context:
        return Context(self._chunks, self.ids, self.tokens)

    def add(self, tokens: int) -> None:
        self.tokens += tokens
        self.ids += self._chunks(self.tokens - len(self.ids) * CHUNK)

    def next_turn(self, at: float, tokens: int, session: str) -> Job:
        """Request now, and add it to the conversation."""
        ids, prompt = self.ids, self.tokens
        self.add(tokens)
        return Job(at, prompt, tokens, ids, continued=self.ids, session=session)


def day(requests: int, rate: float, rng: Random, chunks: Callable[[int], Chunks]) -> list[Job]:
    tools = [Context(chunks) for _ in range(TENANTS)]
    assistants = [Context(chunks) for _ in range(TENANTS)]
    for tool, assistant in zip(tools, assistants, strict=True):
        tool.add(rng.randint(2_000, 8_000))
        assistant.add(rng.randint(500, 1_500))
    popular = [1 / (rank + 1) for rank in range(TENANTS)]
    end = requests / rate
    jobs: list[Job] = []
    now = -BEFORE
    while (now := now + rng.expovariate(rate * CREWS / PER_CREW)) < end:
        jobs += _crew(now, rng.choices(tools, popular)[0], rng)
    now = 0.0
    while (now := now + rng.expovariate(rate * (1 - CREWS))) < end:
        if rng.random() < (QUESTIONS - CREWS) / (1 - CREWS):
            jobs.append(_question(now, rng.choices(assistants, popular)[0], rng))
        else:
            jobs.append(_document(now, Context(chunks), rng))
    return [job for job in jobs if 0.0 <= job.arrival <= end]


def _crew(now: float, tools: Context, rng: Random) -> list[Job]:
    """A lead thinks, starts agents that share its conversation, waits for all of them, and reads their results."""
    lead, name = tools.branch(), f"crew at {now}"
    lead.add(rng.randint(200, 2_000))
    jobs = []
    for _ in range(rng.randint(1, 3)):
        jobs.append(lead.next_turn(now, rng.randint(150, 500), name))
        now += jobs[-1].output_tokens * SECONDS_PER_TOKEN
        backs = []
        for agent in range(rng.randint(2, 5)):
            work = _agent(now, lead.branch(), f"{name}, agent {agent}", rng)
            jobs += work
            backs.append(work[-1].arrival + work[-1].output_tokens * SECONDS_PER_TOKEN)
        lead.add(len(backs) * rng.randint(100, 400))
        now = max(backs)
    jobs.append(lead.next_turn(now, rng.randint(300, 800), name))
    return jobs


def _agent(now: float, context: Context, name: str, rng: Random) -> list[Job]:
    """What tools say is mostly short, and sometimes a whole file."""
    context.add(rng.randint(50, 300))
    steps = []
    for _ in range(rng.randint(2, 8)):
        steps.append(context.next_turn(now, rng.randint(20, 200), name))
        now += steps[-1].output_tokens * SECONDS_PER_TOKEN + rng.expovariate(1 / TOOL_SECONDS)
        context.add(min(8_000, int(rng.paretovariate(1.1) * 100)))
    return steps


def _question(now: float, assistant: Context, rng: Random) -> Job:
    chat = assistant.branch()
    chat.add(min(4_000, int(rng.lognormvariate(5.5, 1.0)) + 20))
    return chat.next_turn(now, rng.randint(50, 400), f"question at {now}")


def _document(now: float, context: Context, rng: Random) -> Job:
    context.add(rng.randint(6_000, 28_000))
    return context.next_turn(now, rng.randint(200, 600), f"document at {now}")
