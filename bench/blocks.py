"""What the block size of the prefix index buys and costs: a replay for each of several sizes.

    python bench/blocks.py [TRACE] [--pods 8] [--pod-tokens 500000] [--block 64 ...] [--requests 12000] [--json]

The production scheduler with the default profile, the production hashing and index, and simulated pods on a virtual
clock: a pod prefills one prompt after the other at 10,000 tokens a second, then needs 20 ms per output token. It
caches blocks of 16 tokens, as many as `--pod-tokens` are; what was used longest ago goes first.

- `engine` is the share of the prompt tokens that the pods had cached when the prompts came: what placement achieved.
- `index` is the share that the index expected of the pod that was chosen: what it knew.
- `TTFT` is the mean, in simulated milliseconds: waiting for the prefills before, and the uncached tokens.
- `hash`, `match` and `book` (reserve and confirm) are microseconds of CPU per request. Code and prompt are hot in the
  processor's caches, since nothing but the replay runs; in a proxy that does other things in between they cost more.
  The garbage collector is off: it would fall upon one of the three by chance.
- `MiB` is the largest upper bound that the index gave of its own memory, `blocks` its (block, pod) pairs then.

Three loads. `trace` is the file: JSON lines, or gzip of them, with `timestamp` (ms), `input_length`, `output_length`
and `hash_ids`, an id for each 512 tokens; each id becomes a text of its own. It shows what sizes cost with
prompts as long as they are in production, and that small blocks win nothing where prompts share multiples of 512
tokens. It cannot show what they win: where two prompts part within 512 tokens, the trace says that all 512 differ. The
others are made for that, with random lengths throughout. `chat` are conversations under one of 40 system prompts;
`ask` are single questions about one of 4000 documents; a pod holds a fifth of them.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import heapq
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rig import say, table

from proxy.core import ports
from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics
from proxy.core.ports import ManualClock
from proxy.core.registry import Registry
from proxy.core.request import BYTES_PER_TOKEN, InferenceRequest, Prompt
from proxy.fleet.ledger import Ledger
from proxy.plugins.producers.approx_prefix_cache import ApproxPrefixCacheProducer
from proxy.prefix.hashing import Chain, chain, chains, cuts
from proxy.prefix.index import PrefixIndex
from proxy.prefix.match import PREFIX_MATCH, ChainMatch
from proxy.scheduling.build import build
from proxy.scheduling.document import read

BLOCK_TOKENS = (16, 32, 64, 128, 256, 512)
HASHED_TOKENS = 131_072
TRACE_BLOCK_TOKENS = 512
TRACE_SPREAD = 3.0
"""Seconds: arrivals of the trace come in buckets of this length."""

ENGINE_BLOCK = 16
ENGINE_DEPTHS = range(HASHED_TOKENS // ENGINE_BLOCK + 1)
ENGINE_CUTS = cuts(ENGINE_DEPTHS, ENGINE_BLOCK * BYTES_PER_TOKEN)
PREFILL_TOKENS_PER_SECOND = 10_000
SECONDS_PER_TOKEN = 0.02
UNLIMITED = 1 << 40

SYSTEM_PROMPTS = 40
TURNS = 8
THINKING_SECONDS = 40.0
CONVERSATIONS_PER_SECOND = 0.8

DOCUMENTS = 4000
QUESTIONS_PER_SECOND = 20.0

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Arrival:
    """`prompt` makes the bytes when they are needed: all of them at once would be gigabytes."""

    at: float
    prompt: Callable[[], bytes]
    output_tokens: int


@dataclass
class Row:
    load: str
    block: int
    engine: float
    index: float
    ttft_ms: float
    hash_us: float
    match_us: float
    book_us: float
    index_bytes: int
    blocks: int


def main() -> None:
    options = _options()
    gc.disable()
    loads = {"trace": traced(options.trace)[: options.requests]} if options.trace else {}
    loads |= {"chat": chat(options.requests), "ask": ask(options.requests)}
    rows, bounds = [], {}
    for name, arrivals in loads.items():
        bounds[name] = _endless_cache(arrivals)
        say(f"{name}: {len(arrivals)} requests, an endless cache would hit {bounds[name]:.1%} of the tokens")
        for block in options.block or BLOCK_TOKENS:
            rows.append(Replay(block, options.pods, options.pod_tokens).run(name, arrivals))
            gc.collect()
            say(f"{name}, {block} tokens a block: done")
    if options.json:
        print(json.dumps({"endless": bounds, "rows": [asdict(row) for row in rows]}))
    else:
        print(_as_text(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, nargs="?", metavar="TRACE", help="JSON lines with hash_ids, gzip or not")
    parser.add_argument("--pods", type=int, default=8)
    parser.add_argument("--pod-tokens", type=int, default=500_000, help="KV cache of each pod")
    parser.add_argument("--block", type=int, action="append", help="tokens per block; may be repeated")
    parser.add_argument("--requests", type=int, default=12_031, help="of each load")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def traced(path: Path) -> list[Arrival]:
    draw = Random(1)
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        entries = [json.loads(line) for line in lines]
    arrivals = [
        Arrival(
            one["timestamp"] / 1000 + draw.random() * TRACE_SPREAD,
            partial(_text, one["hash_ids"], one["input_length"]),
            one["output_length"],
        )
        for one in entries
    ]
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _text(ids: Sequence[int], tokens: int) -> bytes:
    """Every id has a text of its own; that it repeats within the block does not matter to chained hashes."""
    blocks = b"".join([b"%07x " % number * (TRACE_BLOCK_TOKENS * BYTES_PER_TOKEN // 8) for number in ids])
    return blocks[: tokens * BYTES_PER_TOKEN]


def chat(requests: int) -> list[Arrival]:
    """Lengths are log-normal, in bytes and not in tokens; a turn contains all earlier turns and their responses."""
    draw = Random(2)
    systems = [draw.randbytes(_length(draw, 300, 1.2)) for _ in range(SYSTEM_PROMPTS)]
    arrivals: list[Arrival] = []
    began = 0.0
    while len(arrivals) < requests:
        began += draw.expovariate(CONVERSATIONS_PER_SECOND)
        arrivals.extend(_conversation(draw, draw.choice(systems), began))
    return sorted(arrivals[:requests], key=lambda arrival: arrival.at)


def _conversation(draw: Random, system: bytes, began: float) -> Iterator[Arrival]:
    text, at = bytearray(system), began
    for _ in range(draw.randint(1, 2 * TURNS)):
        text += draw.randbytes(_length(draw, 60, 1.0))
        response = draw.randbytes(_length(draw, 200, 0.8))
        tokens = len(response) // BYTES_PER_TOKEN
        yield Arrival(at, partial(_beginning, text, len(text)), tokens)
        text += response
        at += tokens * SECONDS_PER_TOKEN + draw.expovariate(1 / THINKING_SECONDS)


def ask(requests: int) -> list[Arrival]:
    """Some documents are asked for far more often than others."""
    draw = Random(4)
    documents = [draw.randbytes(_length(draw, 300, 1.2)) for _ in range(DOCUMENTS)]
    chosen = draw.choices(documents, [1 / (rank + 20) for rank in range(DOCUMENTS)], k=requests)
    arrivals: list[Arrival] = []
    at = 0.0
    for document in chosen:
        at += draw.expovariate(QUESTIONS_PER_SECOND)
        text = bytearray(document + draw.randbytes(_length(draw, 30, 0.6)))
        arrivals.append(Arrival(at, partial(_beginning, text, len(text)), _length(draw, 100, 0.8) // BYTES_PER_TOKEN))
    return arrivals


def _length(draw: Random, median_tokens: float, sigma: float) -> int:
    return max(8, min(40_000, round(median_tokens * BYTES_PER_TOKEN * draw.lognormvariate(0, sigma))))


def _beginning(text: bytearray, size: int) -> bytes:
    return bytes(memoryview(text)[:size])


@dataclass
class Pod:
    """A simulated engine. `free_at` is when it has prefilled all it was given."""

    endpoint: Endpoint
    clock: ManualClock
    tokens: int
    free_at: float = 0.0
    in_use: int = 0
    cached: PrefixIndex = field(init=False)
    _starts: deque[float] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.cached = PrefixIndex(self.clock, UNLIMITED, depths=ENGINE_DEPTHS)

    def allocate(self, hashes: Chain, prompt_tokens: int) -> tuple[int, float]:
        """Tokens it had cached, and when the first token comes."""
        hit = self.cached.match(hashes).get(self.endpoint, 0) * ENGINE_BLOCK
        self.cached.confirm(self.cached.reserve((hashes,), self.endpoint, self.tokens // ENGINE_BLOCK))
        start = max(self.clock.now(), self.free_at)
        self._starts.append(start)
        self.free_at = start + (prompt_tokens - hit) / PREFILL_TOKENS_PER_SECOND
        return hit, self.free_at

    def publish(self) -> None:
        """A scrape of this very moment."""
        now, load = self.clock.now(), self.endpoint.load
        while self._starts and self._starts[0] <= now:
            self._starts.popleft()
        waiting = len(self._starts)
        metrics = Metrics(
            waiting,
            load.requests - waiting,
            min(1.0, self.in_use / self.tokens),
            block_size=ENGINE_BLOCK,
            blocks=self.tokens // ENGINE_BLOCK,
            scraped_at=now,
            freshness=Freshness.FRESH,
        )
        self.endpoint.publish(metrics, load.requests)


class Replay:
    """One block size, one load, a fresh fleet."""

    def __init__(self, block: int, pods: int, pod_tokens: int) -> None:
        self._block = block
        self._clock = ManualClock()
        self._ledger = Ledger(self._clock)
        self._pods = {
            endpoint: Pod(endpoint, self._clock, pod_tokens)
            for endpoint in (Endpoint(f"pod-{number}", state=EndpointState.READY) for number in range(pods))
        }
        self._scheduling = build(read(None), Registry.discover(), {ports.Clock: self._clock, ports.Random: Random(3)})
        (self._producer,) = (
            plugin for plugin in self._scheduling.instances.values() if isinstance(plugin, ApproxPrefixCacheProducer)
        )
        # the producer raises sizes below 64 to 64; here they are to be seen
        self._producer._block_size = block
        self._running: list[tuple[float, int, Attempt]] = []
        self._lap = count()
        self._prompt_tokens = self._engine_tokens = self._index_tokens = self._peak_bytes = self._peak_blocks = 0
        self._ttft = 0.0
        self._seconds = {"hash": 0.0, "match": 0.0, "book": 0.0}

    def run(self, name: str, arrivals: Sequence[Arrival]) -> Row:
        for arrival in arrivals:
            self._end_until(arrival.at)
            self._clock.advance(arrival.at - self._clock.now())
            self._serve(arrival)
        return Row(
            name,
            self._block,
            self._engine_tokens / self._prompt_tokens,
            self._index_tokens / self._prompt_tokens,
            self._ttft / len(arrivals) * 1e3,
            *(self._seconds[step] / len(arrivals) * 1e6 for step in ("hash", "match", "book")),
            self._peak_bytes,
            self._peak_blocks,
        )

    def _serve(self, arrival: Arrival) -> None:
        prompt = Prompt((arrival.prompt(),))
        request = InferenceRequest("replay", "/v1/completions", "m", prompt)
        index, producer, endpoints = self._producer.index, self._producer, list(self._pods)
        hashed = self._timed("hash", lambda: chains(prompt, "m", self._block, HASHED_TOKENS // self._block))
        request.state.write(PREFIX_MATCH.of(producer.name), ChainMatch(index, hashed, self._block))
        self._timed("match", lambda: index.match(hashed[0]))
        for pod in self._pods.values():
            pod.publish()
        decision = self._scheduling.scheduler.schedule(request, endpoints)
        attempt = Attempt(request, decision, decision.target, 0, self._clock.now())
        self._ledger.attempt_started(attempt)
        self._timed("book", lambda: producer.pre_request(attempt, attempt.endpoint))
        self._at_the_pod(attempt, prompt, arrival.output_tokens)

    def _at_the_pod(self, attempt: Attempt, prompt: Prompt, output_tokens: int) -> None:
        pod = self._pods[attempt.endpoint]
        hit, first_token_at = pod.allocate(_engine_chain(prompt.parts[0]), prompt.tokens)
        pod.in_use += prompt.tokens + output_tokens
        attempt.status, attempt.ending = 200, Ending.COMPLETE
        attempt.usage = Usage(prompt.tokens, output_tokens, hit)
        self._prompt_tokens += prompt.tokens
        self._engine_tokens += hit
        self._index_tokens += attempt.predicted_cached_tokens or 0
        self._ttft += first_token_at - self._clock.now()
        end = first_token_at + output_tokens * SECONDS_PER_TOKEN
        heapq.heappush(self._running, (end, next(self._lap), attempt))

    def _end_until(self, moment: float) -> None:
        while self._running and self._running[0][0] <= moment:
            at, _, attempt = heapq.heappop(self._running)
            self._clock.advance(at - self._clock.now())
            self._end(attempt)

    def _end(self, attempt: Attempt) -> None:
        index, usage = self._producer.index, attempt.usage
        assert usage is not None
        self._pods[attempt.endpoint].in_use -= usage.prompt_tokens + usage.completion_tokens
        self._ledger.attempt_ended(attempt)
        self._timed("book", lambda: self._producer.post_response(attempt, attempt.endpoint))
        if index.bytes > self._peak_bytes:
            self._peak_bytes, self._peak_blocks = index.bytes, index.pairs

    def _timed(self, step: str, work: Callable[[], T]) -> T:
        """In time of this thread, so that whatever else the machine does is left out."""
        began = time.thread_time()
        result = work()
        self._seconds[step] += time.thread_time() - began
        return result


def _engine_chain(text: bytes) -> Chain:
    """Engines hash every block, cache whole ones only, and compute the last token in any case."""
    size = ENGINE_BLOCK * BYTES_PER_TOKEN
    return chain(text[: (len(text) - 1) // size * size], 0, ENGINE_CUTS)


def _endless_cache(arrivals: Sequence[Arrival]) -> float:
    """The share of tokens that one pod without bounds would have."""
    seen: set[int] = set()
    hits = total = 0
    for arrival in arrivals:
        text = arrival.prompt()
        total += len(text) // BYTES_PER_TOKEN
        hashes = _engine_chain(text)
        known = next((at for at, one in enumerate(hashes) if one not in seen), len(hashes))
        hits += known * ENGINE_BLOCK
        seen.update(hashes)
    return hits / total


def _as_text(rows: Sequence[Row]) -> str:
    head = "load,tokens,engine,index,TTFT ms,hash us,match us,book us,all us,MiB,blocks"
    lines = [head.split(",")]
    for row in rows:
        costs = (row.hash_us, row.match_us, row.book_us, row.hash_us + row.match_us + row.book_us)
        lines.append(
            [
                row.load,
                str(row.block),
                f"{row.engine:.1%}",
                f"{row.index:.1%}",
                f"{row.ttft_ms:.0f}",
                *(f"{cost:.1f}" for cost in costs),
                f"{row.index_bytes / 2**20:.1f}",
                str(row.blocks),
            ]
        )
    return table(lines)


if __name__ == "__main__":
    main()
