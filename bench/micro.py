"""Microseconds of each step of the hot path, per request and per chunk, in about two seconds.

    python bench/micro.py [--pods 4] [--json] [STEP ...]

Each figure is the fastest of several batches: what the step costs when nothing disturbs it. STEPs are the beginnings of
names. A step that cannot be prepared, because a plugin is missing, is left out and named.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.decision import EVERY, Decision, DecisionRecord, DecisionSampler
from proxy.core.endpoint import DEFAULT_POOL, Endpoint, EndpointState, Freshness, Metrics
from proxy.core.errors import ConfigError
from proxy.core.ports import Clock, Random, SystemClock
from proxy.core.registry import Registry
from proxy.core.request import InferenceRequest, Prompt
from proxy.fleet.ledger import Ledger
from proxy.fleet.store import Fleet
from proxy.http.framing import CLOSED, OPENED, WholeChunks
from proxy.openai.events import usage_from
from proxy.openai.parse import Parsed, parse
from proxy.prefix.hashing import chains
from proxy.prefix.index import PrefixIndex
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read
from proxy.scheduling.explained_decision import ENTRY, EntryBuilder
from proxy.scheduling.explained_log import DecisionLog, Explained
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import Catalogue, Counter
from proxy.telemetry.observer import BATCH, Observer
from proxy.telemetry.settings import DecisionSettings

PATH = "/v1/chat/completions"
SECONDS_PER_STEP = 0.08
BATCHES = 6

Step = Callable[[], object]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--pods", type=int, default=4)
    arguments.add_argument("--json", action="store_true")
    arguments.add_argument("steps", nargs="*", metavar="STEP")
    options = arguments.parse_args()
    figures: dict[str, dict[str, float]] = {"request": {}, "chunk": {}}
    absent: dict[str, str] = {}
    for per, name, prepare in steps():
        if options.steps and not name.startswith(tuple(options.steps)):
            continue
        try:
            figures[per][name] = round(measure(prepare(Parts(options.pods))), 3)
        except ConfigError as error:
            absent[name] = str(error)
    if options.json:
        print(json.dumps({"pods": options.pods, "microseconds": figures, "absent": absent}))
    else:
        show(figures, absent)


def show(figures: dict[str, dict[str, float]], absent: dict[str, str]) -> None:
    for per, steps_of in figures.items():
        if steps_of:
            print(f"{'per ' + per:<34}{'us':>8}")
        for name, microseconds in steps_of.items():
            print(f"  {name:<32}{microseconds:>8.2f}")
    for name, reason in absent.items():
        print(f"not measured: {name}: {reason.splitlines()[0]}")


def measure(step: Step) -> float:
    """Microseconds of one call: the fastest of BATCHES."""
    step()
    started = time.perf_counter()
    step()
    once = max(time.perf_counter() - started, 1e-7)
    calls = max(1, min(100_000, int(SECONDS_PER_STEP / BATCHES / once)))
    return min(_batch(step, calls) for _ in range(BATCHES)) / calls * 1e6


def _batch(step: Step, calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        step()
    return time.perf_counter() - started


def steps() -> Iterator[tuple[str, str, Callable[[Parts], Step]]]:
    """What it is paid per, its name, and what prepares it; in the order of a request's life."""
    yield "request", "parse 1 KB", lambda parts: lambda: parse(PATH, SMALL)
    yield "request", "parse 32 KB", lambda parts: lambda: parse(PATH, LARGE)
    yield "request", "parse 128 KB", lambda parts: lambda: parse(PATH, LONG)
    yield "request", "hash 1 KB", lambda parts: _hash(parse(PATH, SMALL).prompt)
    yield "request", "hash 32 KB", lambda parts: _hash(parse(PATH, LARGE).prompt)
    yield "request", "hash 128 KB", lambda parts: _hash(parse(PATH, LONG).prompt)
    yield "request", "match 32 KB, one pod has it", lambda parts: _match(parts, LARGE)
    yield "request", "match 128 KB, one pod has it", lambda parts: _match(parts, LONG)
    yield "request", "reserve and confirm 32 KB", lambda parts: _reserve(parts, LARGE)
    yield "request", "reserve and confirm 128 KB", lambda parts: _reserve(parts, LONG)
    yield "request", "schedule 1 KB, as shipped", _schedule
    yield "request", "schedule 1 KB, untimed plugins", lambda parts: _schedule(parts, timed=False)
    yield "request", "schedule 1 KB, decision kept", lambda parts: _schedule(parts, kept=True)
    yield "request", "a kept decision's attempts and end", _kept_attempts
    yield "request", "ledger in and out", _ledger
    yield "request", "observe decided", _decided
    yield "request", "observe first byte", _first_byte
    yield "request", "observe attempt ended", _attempt_ended
    yield "request", "observe request ended, logged", lambda parts: _request_ended(parts, parts.logging_observer)
    yield "request", "observe request ended, no log", lambda parts: _request_ended(parts, parts.observer)
    yield "request", "usage from the end of a stream", lambda parts: lambda: usage_from(TAIL)
    yield "chunk", "framing of a whole chunk", _framing


@dataclass
class Call:
    id: str = "0d9f2c7e5b1a4c38"
    method: str = "POST"
    path: str = PATH
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    received_at: float = 0.0
    identity: None = None


class Parts:
    """The parts of a proxy with so many pods, made when a step asks for them."""

    def __init__(self, pods: int) -> None:
        self.clock = SystemClock()
        self.catalogue = Catalogue("bench")
        draw = random.Random(1)
        self.endpoints = [_endpoint(number, draw) for number in range(pods)]
        self.pools = (DEFAULT_POOL,)

    @cached_property
    def attempt(self) -> Attempt:
        request = _request(parse(PATH, SMALL))
        attempt = Attempt(request, Decision(self.endpoints[0]), self.endpoints[0], 0, 0.0)
        attempt.status, attempt.ending, attempt.usage = 200, Ending.COMPLETE, Usage(250, 64, 128)
        attempt.first_byte_at, attempt.last_byte_at = 0.2, 2.0
        attempt.predicted_cached_tokens = 128
        return attempt

    @cached_property
    def observer(self) -> Observer:
        series = EndpointSeries(self.catalogue, cast(Fleet, self), self.clock)
        return Observer(self.catalogue, series, self.clock)

    @cached_property
    def logging_observer(self) -> Observer:
        series = EndpointSeries(self.catalogue, cast(Fleet, self), self.clock)
        return Observer(self.catalogue, series, self.clock, AccessLog(len, self.clock, Counter()))

    def scheduling(self) -> Scheduling:
        ports = {Clock: self.clock, Random: random.Random(1)}
        return build(read(None), Registry.discover(), ports)

    def keeping(self, scheduling: Scheduling) -> Explained:
        log = DecisionLog(DecisionSettings(), self.clock)
        builder = EntryBuilder(scheduling, DEFAULT_POOL, lambda: self.endpoints, self.clock)
        return Explained({DEFAULT_POOL: builder}, log, random.Random(1), lambda request: True)


def _hash(prompt: Prompt) -> Step:
    return lambda: chains(prompt, "sim", 64, 8192)


def _match(parts: Parts, body: bytes) -> Step:
    index = PrefixIndex(parts.clock, 16)
    found = chains(parse(PATH, body).prompt, "sim", 64, 8192)
    index.confirm(index.reserve(found, parts.endpoints[0], 100_000))
    return lambda: index.match(found[0])


def _reserve(parts: Parts, body: bytes) -> Step:
    index = PrefixIndex(parts.clock, 16)
    found = chains(parse(PATH, body).prompt, "sim", 64, 8192)
    return lambda: index.confirm(index.reserve(found, parts.endpoints[0], 100_000))


def _schedule(parts: Parts, timed: bool = True, kept: bool = False) -> Step:
    scheduling = parts.scheduling()
    request = _request(parse(PATH, SMALL))

    async def produce() -> None:
        for producer in scheduling.producers:
            await producer.produce(request, parts.endpoints)

    asyncio.run(produce())
    sampler, schedule = (
        DecisionSampler(parts.observer.plugin_timed, every=EVERY if timed else 0),
        scheduling.scheduler.schedule,
    )
    if not kept:
        return lambda: schedule(request, parts.endpoints, sampler.record(request, next(sampler.timed)))
    explained = parts.keeping(scheduling)

    def decide() -> None:
        record = DecisionRecord(is_wanted=True)
        decision = schedule(request, parts.endpoints, record)
        explained.decided(request, parts.endpoints, decision, 0.0, record)
        request.state.pop(ENTRY)  # each request has its own

    return decide


def _kept_attempts(parts: Parts) -> Step:
    """Observers of one attempt, without plugins."""
    scheduling, attempt, call = parts.scheduling(), parts.attempt, Call()
    explained, record = parts.keeping(scheduling), DecisionRecord(is_wanted=True)
    decision = scheduling.scheduler.schedule(attempt.request, parts.endpoints, record)
    explained.decided(attempt.request, parts.endpoints, decision, 0.0, record)

    def one_attempt() -> None:
        explained.attempt_started(attempt)
        explained.attempt_ended(attempt, None)
        explained.request_ended(call, 200, Ending.COMPLETE, attempt, 0)
        attempt.request.state[ENTRY].attempts.clear()

    return one_attempt


def _ledger(parts: Parts) -> Step:
    ledger = Ledger(parts.clock)
    attempt = parts.attempt
    attempt.ending = None

    def in_and_out() -> None:
        ledger.attempt_started(attempt)
        ledger.first_byte(attempt)
        ledger.attempt_ended(attempt)

    return in_and_out


def _decided(parts: Parts) -> Step:
    attempt, observer = parts.attempt, parts.observer
    return _in_batches(observer, lambda: observer.decided(attempt.request, (), attempt.decision, 1e-5))


def _first_byte(parts: Parts) -> Step:
    return _in_batches(parts.observer, lambda: parts.observer.first_byte(parts.attempt))


def _attempt_ended(parts: Parts) -> Step:
    return _in_batches(parts.observer, lambda: parts.observer.attempt_ended(parts.attempt))


def _request_ended(parts: Parts, observer: Observer) -> Step:
    call, attempt = Call(), parts.attempt
    observer.first_byte(attempt)
    return _in_batches(observer, lambda: observer.request_ended(call, 200, Ending.COMPLETE, attempt, 0))


def _in_batches(observer: Observer, event: Step) -> Step:
    """The event, with its share of the batch in which it is counted and logged."""
    kept = 0

    def one() -> None:
        nonlocal kept
        event()
        kept += 1
        if kept == BATCH:
            observer.flush()
            kept = 0

    return one


def _framing(parts: Parts) -> Step:
    framing, chunk = WholeChunks(), b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
    bodies, marks = [EVENT], [OPENED, CLOSED]
    return lambda: framing.feed(chunk, bodies, marks)


def _endpoint(number: int, draw: random.Random) -> Endpoint:
    metrics = Metrics(waiting=draw.choice((0, 0, 1, 5)), running=draw.randrange(20), kv_usage=draw.random())
    metrics = Metrics(metrics.waiting, metrics.running, metrics.kv_usage, freshness=Freshness.FRESH)
    return Endpoint(f"pod-{number}", state=EndpointState.READY, metrics=metrics)


def _request(parsed: Parsed) -> InferenceRequest:
    return InferenceRequest("bench", PATH, "sim", parsed.prompt, parsed.body, stream=True)


def _body(size: int) -> bytes:
    words = random.Random(2).choices(WORDS, k=size)
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        {"role": "user", "content": " ".join(words)[:size]},
    ]
    return json.dumps({"model": "sim", "stream": True, "max_tokens": 64, "messages": messages}).encode()


WORDS = ("the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as")
SMALL = _body(1024)
LARGE = _body(32 * 1024)
LONG = _body(128 * 1024)
EVENT = b'data: {"id":"chatcmpl-1","choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
TAIL = (
    EVENT * 10
    + b'data: {"id":"chatcmpl-1","choices":[],"usage":{"prompt_tokens":250,"completion_tokens":64,"total_tokens":314,'
    + b'"prompt_tokens_details":{"cached_tokens":128}}}\n\ndata: [DONE]\n\n'
)

if __name__ == "__main__":
    main()
