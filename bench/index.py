"""What the prefix index costs: bytes per (block, pod), and microseconds per request.

    python bench/index.py [--json] [--quick]

Memory is what tracemalloc sees, for three shapes of traffic at 8 and at 1000 pods:

- `documents`: unrelated prompts of 32 KB, each on one pod;
- `chat`: conversations that grow by 8 hashes a turn, ten turns each, on one pod, under one system prompt for all;
- `scraps`: unrelated prompts of one block each, the worst case there is.

`stated` is the index's own upper bound, the one that `maxBytes` limits. Time is the best of several rounds, for prompts
of 1, 32 and 128 KB in blocks of 64 to 512 tokens: `hash` makes the chain, `match` asks about all 8 pods at once, and
`settle` is reserve and confirm together. Cold: the index is full of other prompts. Warm: every pod has this prompt,
each up to another point.

`pauses` are the longest single calls, in milliseconds, when much has to go at once: 31250 blocks of scraps on one pod
are forgotten, lose half of their room, or outlive their ttl, and an index of 1000 pods works at its ceiling.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import sys
import timeit
import tracemalloc
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock, SystemClock
from proxy.core.request import Prompt
from proxy.prefix.hashing import Chain, chains
from proxy.prefix.index import PrefixIndex

CAPACITY = 1 << 30
PROMPT_KB = (1, 32, 128)
BLOCK_TOKENS = (64, 128, 256, 512)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--quick", action="store_true", help="a tenth of the blocks, fewer rounds")
    options = parser.parse_args()
    pairs, rounds = (20_000, 3) if options.quick else (200_000, 9)
    memory = [measure_memory(shape, pods, pairs) for pods in (8, 1000) for shape in SHAPES]
    times = [measure_time(kb, tokens, rounds) for kb in PROMPT_KB for tokens in BLOCK_TOKENS]
    pauses = measure_pauses()
    if options.json:
        print(json.dumps({"memory": memory, "microseconds": times, "pauses": pauses}))
        return
    for rows in (memory, times, [pauses]):
        show(rows)
        print()


def documents(pods: list[Endpoint]) -> Iterator[tuple[Chain, Endpoint]]:
    for number in count():
        yield fresh_chain(number, 96), pods[number % len(pods)]


def chat(pods: list[Endpoint]) -> Iterator[tuple[Chain, Endpoint]]:
    system = fresh_chain(0, 16)
    for number in count(1):
        tail = fresh_chain(number, 80)
        for turn in range(1, 11):
            yield system + tail[: turn * 8], pods[number % len(pods)]


def scraps(pods: list[Endpoint]) -> Iterator[tuple[Chain, Endpoint]]:
    for number in count():
        yield fresh_chain(number, 1), pods[number % len(pods)]


SHAPES: dict[str, Callable[[list[Endpoint]], Iterator[tuple[Chain, Endpoint]]]] = {
    "documents": documents,
    "chat": chat,
    "scraps": scraps,
}


def fresh_chain(number: int, hashes: int) -> Chain:
    generator = random.Random(number)
    return [generator.getrandbits(64) for _ in range(hashes)]


def fleet(size: int) -> list[Endpoint]:
    return [Endpoint(f"pod-{number}") for number in range(size)]


def measure_memory(shape: str, pods: int, pairs: int) -> dict[str, object]:
    endpoints = fleet(pods)
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(SystemClock(), max_siblings=16)
    for hashes, endpoint in SHAPES[shape](endpoints):
        index.confirm(index.reserve((hashes,), endpoint, CAPACITY))
        if index.pairs >= pairs:
            break
    del hashes
    gc.collect()
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return {
        "shape": shape,
        "pods": pods,
        "pairs": index.pairs,
        "bytes per pair": round(used / index.pairs, 1),
        "stated": round(index.bytes / index.pairs, 1),
    }


def measure_time(kb: int, tokens: int, rounds: int) -> dict[str, object]:
    endpoints = fleet(8)
    prompt = random.Random(kb).randbytes(kb * 1024)
    (hashes,) = chains(Prompt((prompt,)), "model", tokens, 2048)
    index = PrefixIndex(SystemClock(), max_siblings=16)
    for number in range(2000):
        index.confirm(index.reserve((fresh_chain(number, 16),), endpoints[number % 8], CAPACITY))
    result: dict[str, object] = {"KB": kb, "block": tokens, "hashes": len(hashes)}
    result["hash"] = best(lambda: chains(Prompt((prompt,)), "model", tokens, 2048), rounds)
    result["match cold"] = best(lambda: index.match(hashes), rounds)
    result["settle cold"] = best_of_fresh(index, endpoints[0], len(hashes), rounds)
    for position, endpoint in enumerate(endpoints, 1):
        part = hashes[: max(1, len(hashes) * position // 8)]
        index.confirm(index.reserve((part,), endpoint, CAPACITY))
    result["match warm"] = best(lambda: index.match(hashes), rounds)
    result["settle warm"] = best(lambda: index.confirm(index.reserve((hashes,), endpoints[7], CAPACITY)), rounds)
    return result


def measure_pauses() -> dict[str, object]:
    (pod, other) = fleet(2)

    def full_of_scraps(clock: ManualClock) -> PrefixIndex:
        index = PrefixIndex(clock, max_siblings=16, ttl=3600)
        for number in range(31250):
            index.confirm(index.reserve((fresh_chain(number, 1),), pod, CAPACITY))
        return index

    def longest(index: PrefixIndex, endpoint: Endpoint, capacity: int) -> float:
        return max(timed(lambda: index.reserve((fresh_chain(-1, 1),), endpoint, capacity)) for _ in range(20))

    clock = ManualClock()
    forgetful, shrunk, expired = (full_of_scraps(clock) for _ in range(3))
    forgetting = max(timed(lambda: forgetful.forget(pod)), longest(forgetful, other, CAPACITY))
    evicting = longest(shrunk, pod, 15_000)
    clock.advance(4000)
    expiring = longest(expired, other, CAPACITY)
    return {"forget": forgetting, "evict": evicting, "expire": expiring, "ceiling": longest_at_the_ceiling()}


def longest_at_the_ceiling() -> float:
    index, pods = PrefixIndex(SystemClock(), max_siblings=16, max_bytes=32 << 20), fleet(1000)
    pauses: list[float] = []
    for number in range(12_000):
        chain_ = fresh_chain(number, 160)
        pauses.append(timed(lambda: index.confirm(index.reserve((chain_,), pods[number % 1000], CAPACITY))))  # noqa: B023
    return max(pauses[-1000:])


def timed(step: Callable[[], object]) -> float:
    return round(timeit.timeit(step, number=1) * 1e3, 2)


def best(step: Callable[[], object], rounds: int) -> float:
    number = 200
    return round(min(timeit.repeat(step, number=number, repeat=rounds)) / number * 1e6, 2)


def best_of_fresh(index: PrefixIndex, endpoint: Endpoint, hashes: int, rounds: int) -> float:
    """Every call returns a new chain."""
    number = 100
    lap = iter(count(1_000_000))

    def round_of_calls() -> float:
        unseen = [fresh_chain(next(lap), hashes) for _ in range(number)]
        return timeit.timeit(lambda: index.confirm(index.reserve((unseen.pop(),), endpoint, CAPACITY)), number=number)

    return round(min(round_of_calls() for _ in range(rounds)) / number * 1e6, 2)


def show(rows: list[dict[str, object]]) -> None:
    names = list(rows[0])
    print("  ".join(f"{name:>14}" for name in names))
    for row in rows:
        print("  ".join(f"{row[name]:>14}" for name in names))


if __name__ == "__main__":
    main()
