"""Workers that let requests in at the same moment, and hear of each other only afterwards."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.auth.limits import LONGEST, MANY, WORKER_DELAY, HostGrants, RoundGrants
from proxy.core.errors import RateLimited
from proxy.core.ports import IDENTITY
from tests.unit.auth.test_limits import World

LIMIT = ("key", "a", "requests")
LONG_AGO = -math.inf


def lets_in(shares: RoundGrants, left: int, now: float) -> bool:
    return shares.pause(LIMIT, left, now, LONG_AGO) == 0.0


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("left", [1, 2, 4, 7, 30])
def test_together_they_grant_exactly_what_is_left(workers: int, left: int) -> None:
    for number in range(workers + 1):
        seats = [RoundGrants(workers, seat) for seat in range(workers)]
        times = [(2 * number - 0.9 + 1.8 * seat / workers + 2) * WORKER_DELAY for seat in range(workers)]
        let_in = [
            [lets_in(shares, left, now) for _ in range(left + 1)].count(True)
            for shares, now in zip(seats, times, strict=True)
        ]
        assert sum(let_in) == left
        assert max(let_in) - min(let_in) <= 1


def test_the_last_place_rotates() -> None:
    shares = RoundGrants(2, 0)
    let_in = [lets_in(shares, 1, 2 * number * WORKER_DELAY) for number in range(4)]
    assert sorted(let_in[:2]) == sorted(let_in[2:]) == [False, True]


def test_a_process_that_used_its_part_waits_for_updates_of_the_others() -> None:
    shares, now = RoundGrants(2, 0), 100.25 * WORKER_DELAY
    assert lets_in(shares, 2, now)
    assert shares.pause(LIMIT, 2, now, now) == pytest.approx(1.75 * WORKER_DELAY)
    assert shares.pause(("key", "b", "requests"), 2, now, now) == 0.0
    listening = 101.5 * WORKER_DELAY
    assert shares.pause(LIMIT, 2, listening, now) == 0.0, "nothing was granted for a while: no update is due"
    assert RoundGrants(2, 0).pause(LIMIT, 1, listening, listening - WORKER_DELAY / 2) == pytest.approx(
        0.5 * WORKER_DELAY
    )


async def test_a_request_beyond_the_part_waits_and_is_granted_if_no_other_used_it() -> None:
    world, slept = World(requests_per_minute=4, concurrent_requests=10), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.clock.advance(seconds + 0.001)

    world.limiter.shares = RoundGrants(2, 0, sleep)
    for _ in range(4):
        await world.ask()
    assert slept
    waits = len(slept)
    with pytest.raises(RateLimited, match="4 requests per minute"):
        await world.ask()
    assert len(slept) == waits, "without anything left no request waits"


async def test_what_others_used_meanwhile_is_not_granted() -> None:
    world = World(concurrent_requests=2)

    async def sleep(seconds: float) -> None:
        world.limiter.peer_spent(7, ("key", "a", "own"), 1, [0.0] * 5)
        world.clock.advance(seconds + 0.001)

    world.limiter.shares = RoundGrants(2, 0, sleep)
    async with world.limiter.admit(world.request()):
        with pytest.raises(RateLimited, match="2 requests at the same time"):
            await world.ask()


HOST_DELAY = 0.1


def let_in_by(parts: HostGrants, left: int, now: float) -> int:
    """The number granted of a burst unknown to others."""
    found = 0
    while left > found and parts.pause(LIMIT, left - found, now, LONG_AGO) == 0.0:
        found += 1
    return found


@pytest.mark.parametrize("processes", [2, 3, 8])
@pytest.mark.parametrize("left", [1, 7, 8, 60])
def test_hosts_without_a_common_clock_grant_what_is_left_or_one_each(processes: int, left: int) -> None:
    """Each begins at a moment of its own, and hears of the others before it looks again."""
    seats, let_in = [HostGrants(processes, HOST_DELAY) for _ in range(processes)], 0
    for number in range(100):
        known = left - let_in
        if known < 1:
            break
        for seat, parts in enumerate(seats):
            let_in += let_in_by(parts, known, (number + 0.9 * seat / processes) * HOST_DELAY * 1.01)
    assert left <= let_in < left + processes


@pytest.mark.parametrize(
    "bursts",
    [
        [(0.0, 0, 1), (0.0995, 0, 60), (0.0995, 1, 60), (0.1, 0, 60)],
        [(0.0, 0, 1), (0.05, 0, 60), (0.05, 1, 60), (0.1, 0, 60)],
        [(0.0, 0, 1), (0.09, 0, 60), (0.0995, 1, 60), (0.19, 0, 60)],
    ],
)
def test_a_share_does_not_end_before_the_grants_of_others_are_known(bursts: list[tuple[float, int, int]]) -> None:
    """Each burst is a time, a process and a number of requests."""
    assert granted(2, 60, bursts) <= 60


@given(
    st.integers(2, 4),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 160), st.integers(0, 3), st.integers(1, 60)), max_size=30),
)
def test_hosts_exceed_a_limit_by_less_than_one_request_each(
    processes: int, left: int, bursts: list[tuple[int, int, int]]
) -> None:
    steps = [(0.05 * HOST_DELAY * step, seat % processes, size) for step, seat, size in sorted(bursts)]
    assert granted(processes, left, steps) < left + processes


def granted(processes: int, left: int, bursts: list[tuple[float, int, int]]) -> int:
    """Return how many requests the processes grant together. Each knows of the others after 0.99 HOST_DELAY."""
    seats, grants = [HostGrants(processes, HOST_DELAY) for _ in range(processes)], list[tuple[float, int]]()
    for now, seat, size in bursts:
        known = left - sum(by == seat or at + 0.99 * HOST_DELAY <= now for at, by in grants)
        for _ in range(size):
            if known < 1 or seats[seat].pause(LIMIT, known, now, LONG_AGO) > 0.0:
                break
            known -= 1
            grants.append((now, seat))
    return len(grants)


def test_a_part_is_one_until_the_others_must_have_received_the_update() -> None:
    parts = HostGrants(2, HOST_DELAY)
    assert let_in_by(parts, 4, 0.0) == 2
    assert parts.pause(LIMIT, 2, 0.25 * HOST_DELAY, 0.0) == pytest.approx(1.75 * HOST_DELAY)
    assert parts.pause(("key", "b", "requests"), 2, 0.25 * HOST_DELAY, 0.0) == 0.0
    assert parts.pause(LIMIT, 2, 2 * HOST_DELAY, 0.0) == 0.0


def test_limits_without_recent_requests_use_no_memory() -> None:
    parts = HostGrants(2, HOST_DELAY)
    for number in range(3 * MANY):
        parts.pause(("key", str(number), "requests"), 9, number * HOST_DELAY, LONG_AGO)
    assert len(parts._parts) <= MANY


def wait_with_hosts(hosts: int, world: World) -> list[float]:
    """Return the list that collects how long requests wait for their shares."""
    slept = list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.clock.advance(seconds)

    world.limiter.set_worker(1, 0, HOST_DELAY)
    world.limiter.set_hosts(hosts)
    assert isinstance(world.limiter.shares, HostGrants)
    world.limiter.shares.sleep = sleep
    return slept


async def test_with_very_many_hosts_waits_are_short() -> None:
    """Each time that it is this process's turn another request of it is quicker."""
    world = World(requests_per_minute=60)
    slept = wait_with_hosts(1000, world)
    parts, alone = world.limiter.shares, world.limiter.shares.sleep  # type: ignore[union-attr]
    assert isinstance(parts, HostGrants)

    async def sleep(seconds: float) -> None:
        await alone(seconds)
        (meter,) = world.limiter.meters(world.request().state.read(IDENTITY))  # type: ignore[arg-type]
        (left,) = [few for _, few in meter.left(world.clock.now())]
        parts.pause(LIMIT, left, world.clock.now(), LONG_AGO)
        world.limiter.peer_spent(7, ("key", "a", "own"), 0, [1.0, 0.0, 0.0, 0.0, 0.0])

    parts.sleep = sleep
    await world.ask()
    assert not slept
    await world.ask()
    assert LONGEST <= sum(slept) < LONGEST + 2 * HOST_DELAY


async def test_without_competition_no_request_waits() -> None:
    world = World(concurrent_requests=4)
    slept = wait_with_hosts(4, world)
    for _ in range(10):
        async with world.limiter.admit(world.request()):
            world.clock.advance(0.01)
    assert not slept


def test_limits_are_divided_while_other_processes_are_known() -> None:
    limiter, kinds = World(requests_per_minute=4).limiter, list[tuple[type, int]]()
    limiter.set_worker(2, 0, HOST_DELAY)
    for hosts in (1, 3, 2, 1):
        limiter.set_hosts(hosts)
        kinds.append((type(limiter.shares), getattr(limiter.shares, "processes", 0)))
    assert kinds == [(RoundGrants, 0), (HostGrants, 6), (HostGrants, 4), (RoundGrants, 0)]
    limiter.set_worker(1, 0, HOST_DELAY)
    assert limiter.shares is None
