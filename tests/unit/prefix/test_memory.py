import gc
import random
import tracemalloc
from collections.abc import Callable

import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.prefix.hashing import Chain
from proxy.prefix.index import PrefixIndex

CAPACITY = 1 << 40


def fleet(size: int) -> list[Endpoint]:
    return [Endpoint(f"pod-{number}") for number in range(size)]


def unrelated(length: int) -> Callable[[random.Random], Chain]:
    return lambda generator: [generator.getrandbits(64) for _ in range(length)]


def measured(
    pods: int, requests: int, new_chain: Callable[[random.Random], Chain], capacity: int
) -> tuple[int, int, int]:
    """Bytes seen, bytes stated and pairs, after a run in which chains also come back cut and grown."""
    generator, endpoints = random.Random(1), fleet(pods)
    gc.collect()
    tracemalloc.start()
    index = PrefixIndex(ManualClock(), max_siblings=16)
    for _ in range(requests):
        chain = new_chain(generator)
        for length in (len(chain), len(chain) // 2 + 1):
            endpoint = generator.choice(endpoints)
            index.confirm(index.reserve((chain[:length],), endpoint, capacity))
    gc.collect()
    seen = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return seen, index.bytes, index.pairs


@pytest.mark.parametrize("capacity", [CAPACITY, 60])
@pytest.mark.parametrize("pods", [8, 200])
@pytest.mark.parametrize("length", [1, 30])
def test_the_stated_bytes_are_an_upper_bound(pods: int, length: int, capacity: int) -> None:
    seen, stated, _ = measured(pods, 400, unrelated(length), capacity)
    assert seen < stated


def test_a_block_on_a_pod_of_eight_costs_less_than_150_bytes() -> None:
    seen, _, pairs = measured(8, 1500, unrelated(16), CAPACITY)
    assert seen / pairs < 150


@pytest.mark.parametrize("pods", [1, 8, 100])
@pytest.mark.parametrize("length", [1, 7, 300])
def test_the_limit_holds_with_any_requests(pods: int, length: int) -> None:
    ceiling, generator, endpoints = 200_000, random.Random(2), fleet(pods)
    index = PrefixIndex(ManualClock(), max_siblings=16, max_bytes=ceiling)
    for _ in range(700):
        chain = unrelated(length)(generator)
        index.confirm(index.reserve((chain,), generator.choice(endpoints), CAPACITY))
        assert index.bytes <= ceiling
    assert index.bytes > ceiling // 2
    assert index.match(chain), "the latest request is what the ceiling forgets last"


def test_beyond_the_limit_the_longest_unused_block_of_any_pod_is_evicted() -> None:
    clock = ManualClock()
    old, new = fleet(2)
    index = PrefixIndex(clock, max_siblings=16, max_bytes=20_000)
    index.confirm(index.reserve(([1, 2, 3],), old, CAPACITY))
    for number in range(100):
        clock.advance(1)
        index.confirm(index.reserve(([10 * number + 5],), new, CAPACITY))
        index.confirm(index.reserve(([7],), old, CAPACITY))
    assert (index.match([1, 2, 3]), index.match([7]), index.match([995])) == ({}, {old: 1}, {new: 1})


def test_requests_in_flight_exceed_the_limit_by_at_most_one() -> None:
    index = PrefixIndex(ManualClock(), max_siblings=16, max_bytes=20_000)
    generator, (pod,) = random.Random(3), fleet(1)
    for _ in range(500):
        index.reserve((unrelated(30)(generator),), pod, CAPACITY)
    assert index.bytes < 20_000 + 2000


def test_a_fleet_that_changes_constantly_leaks_nothing() -> None:
    index = PrefixIndex(ManualClock(), max_siblings=16)
    generator = random.Random(4)
    for _ in range(300):
        for endpoint in fleet(3):
            index.confirm(index.reserve((unrelated(5)(generator),), endpoint, CAPACITY))
            index.forget(endpoint)
    assert (index.pairs, index.bytes < 10_000) == (0, True)
