"""Workloads made up to show one thing each, at any rate. Lengths are tokens; a prompt is the beginning of a stream of
chunks, so that a continued conversation shares all of its earlier text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import count
from random import Random
from types import MappingProxyType

from bench.placement.day import day
from proxy.lab.workload import CHUNK, Job, Workload, named

Jobs = list[Job]

Chunks = tuple[int, ...]

SECONDS_PER_TOKEN = 0.02
"""Assumed seconds for the responses of a session."""

BEFORE = 300.0
"""Seconds before the first request in which sessions begin too, so that some are under way from the start on."""


def generate(name: str, requests: int, rate: float, rng: Random) -> Workload:
    """Requests per second; within a conversation people and tools take their time, whatever the rate. A name like
    8000+100 has prompts and responses of about so many tokens."""
    make = GENERATORS[name] if name in GENERATORS else _lengths(*map(int, name.split("+")))
    return Workload(name, named(make(requests, rate, rng))[:requests])


class _Text:
    """Return new chunks."""

    def __init__(self) -> None:
        self._next = count()

    def chunks(self, tokens: int) -> Chunks:
        return tuple(next(self._next) for _ in range(-(-tokens // CHUNK)))


def shared_prompt(requests: int, rate: float, rng: Random) -> Jobs:
    """200 users under one system prompt of 2,048 tokens, each with a short profile and questions of his own."""
    text = _Text()
    system = text.chunks(2_048)
    users = [text.chunks(CHUNK) for _ in range(200)]
    jobs, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(rate)
        prompt = 2_048 + rng.randint(60, 400)
        jobs.append(Job(now, prompt, rng.randint(50, 300), system + rng.choice(users)))
    return jobs


def conversations(requests: int, rate: float, rng: Random) -> Jobs:
    """Chats of up to ten turns under one of four system prompts, with some seconds to read and write in between."""
    return _sessions(_Sessions(4, 1_024, (1, 10), (30, 400), (80, 500), 10.0), requests, rate, rng)


def agents(requests: int, rate: float, rng: Random) -> Jobs:
    """Loops of 8 to 20 steps under one of five long tool prompts; each step adds what a tool said."""
    return _sessions(_Sessions(5, 4_096, (8, 20), (150, 2_000), (30, 150), 3.0), requests, rate, rng)


def documents(requests: int, rate: float, rng: Random) -> Jobs:
    """Questions about four of 60 documents of 1,024 tokens, popular ones more often, in any order: only those whose
    first documents are the same share a prefix."""
    text = _Text()
    system = text.chunks(CHUNK)
    library = [text.chunks(1_024) for _ in range(60)]
    weights = [1 / rank for rank in range(1, len(library) + 1)]
    jobs, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(rate)
        chosen: list[Chunks] = []
        while len(chosen) < 4:
            drawn = rng.choices(library, weights)[0]
            if drawn not in chosen:
                chosen.append(drawn)
        ids = (*system, *(chunk for document in chosen for chunk in document), *text.chunks(CHUNK))
        jobs.append(Job(now, len(ids) * CHUNK - rng.randint(100, 400), rng.randint(80, 400), ids))
    return jobs


def tenants(requests: int, rate: float, rng: Random) -> Jobs:
    """Batches of five questions by 80 tenants, popular ones more often, each under 8,192 tokens of its own: 655,360 in
    all. Eight pods of 100,000 tokens (`--kv-tokens 100000`) have room for all of them once and not twice, so that
    a router that sends a tenant to an idle pod evicts the prefix of another tenant."""
    text = _Text()
    prefixes = [text.chunks(8_192) for _ in range(80)]
    weights = [rank**-0.5 for rank in range(1, len(prefixes) + 1)]
    jobs, now = [], 0.0
    while len(jobs) < requests:
        now += rng.expovariate(rate / 5)
        (tenant,) = rng.choices(range(len(prefixes)), weights)
        for _ in range(5):
            added = rng.randint(500, 1_500)
            ids = prefixes[tenant] + text.chunks(added)
            start, name = now + rng.random() * 0.2, f"tenant {tenant}"
            jobs.append(Job(start, 8_192 + added, rng.randint(20, 100), ids, session=name))
    return jobs


def burst(requests: int, rate: float, rng: Random) -> Jobs:
    """After every 500 other requests, 64 within a tenth of a second about 8,192 new tokens."""
    text = _Text()
    jobs: Jobs = []
    now = 0.0
    while len(jobs) < requests:
        for _ in range(500):
            now += rng.expovariate(rate)
            prompt = rng.randint(200, 3_000)
            jobs.append(Job(now, prompt, rng.randint(50, 300), text.chunks(prompt)))
        document = text.chunks(8_192)
        for _ in range(64):
            prompt = 8_192 + rng.randint(30, 200)
            jobs.append(Job(now + rng.random() * 0.1, prompt, rng.randint(50, 300), document + text.chunks(CHUNK)))
    return jobs


def bimodal(requests: int, rate: float, rng: Random) -> Jobs:
    """Four of five are short, the fifth is as long as a book's chapter; nothing is shared."""
    text = _Text()
    jobs, now = [], 0.0
    for _ in range(requests):
        now += rng.expovariate(rate)
        is_long = rng.random() < 0.2
        prompt = rng.randint(16_000, 32_000) if is_long else rng.randint(200, 600)
        output = rng.randint(300, 600) if is_long else rng.randint(100, 200)
        jobs.append(Job(now, prompt, output, text.chunks(prompt)))
    return jobs


def mixed_day(requests: int, rate: float, rng: Random) -> Jobs:
    """Crews of agents that branch and come together, questions and documents of twelve tenants; see `day`."""
    return day(requests, rate, rng, _Text().chunks)


def _lengths(prompt: int, output: int) -> Callable[[int, float, Random], Jobs]:
    """Lengths vary by half; nothing is shared."""

    def make(requests: int, rate: float, rng: Random) -> Jobs:
        text = _Text()
        jobs, now = [], 0.0
        for _ in range(requests):
            now += rng.expovariate(rate)
            tokens = rng.randint(prompt // 2, prompt + prompt // 2)
            jobs.append(Job(now, tokens, rng.randint(output // 2, output + output // 2), text.chunks(tokens)))
        return jobs

    return make


GENERATORS: Mapping[str, Callable[[int, float, Random], Jobs]] = MappingProxyType(
    {
        "shared-prompt": shared_prompt,
        "conversations": conversations,
        "agents": agents,
        "documents": documents,
        "tenants": tenants,
        "burst": burst,
        "bimodal": bimodal,
        "day": mixed_day,
    }
)


@dataclass(frozen=True, slots=True)
class _Sessions:
    """System prompts, the tokens of each; of a session the turns, of a turn the added tokens and the tokens of the
    response, all from-to; the mean pause between a response and the next turn, in seconds."""

    systems: int
    system_tokens: int
    turns: tuple[int, int]
    added: tuple[int, int]
    output: tuple[int, int]
    pause: float

    def session(self, start: float, system: Chunks, text: _Text, rng: Random) -> Jobs:
        ids, tokens, now = system, self.system_tokens, start
        name = f"session at {start}"
        jobs = []
        for _ in range(rng.randint(*self.turns)):
            tokens += rng.randint(*self.added)
            ids += text.chunks(tokens - len(ids) * CHUNK)
            output = rng.randint(*self.output)
            spoken = ids + text.chunks(tokens + output - len(ids) * CHUNK)
            jobs.append(Job(now, tokens, output, ids, continued=spoken, session=name))
            ids = spoken
            tokens += output
            now += output * SECONDS_PER_TOKEN + rng.expovariate(1 / self.pause)
        return jobs


def _sessions(kind: _Sessions, requests: int, rate: float, rng: Random) -> Jobs:
    """Requests between the first second and the time in which `requests` arrive."""
    text = _Text()
    systems = [text.chunks(kind.system_tokens) for _ in range(kind.systems)]
    began = rate / (sum(kind.turns) / 2)
    jobs: Jobs = []
    now, end = -BEFORE, requests / rate
    while now < end:
        now += rng.expovariate(began)
        jobs += kind.session(now, rng.choice(systems), text, rng)
    return [job for job in jobs if 0.0 <= job.arrival <= end]
