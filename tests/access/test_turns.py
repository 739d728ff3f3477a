"""Workers that let requests in at the same moment, and hear of each other only afterwards."""

from __future__ import annotations

import math

import pytest

from proxy.access.turns import NEWS, Turns
from proxy.core.errors import RateLimited
from tests.access.test_gate import World

LIMIT = ("key", "a", "requests")
LONG_AGO = -math.inf


def lets_in(turns: Turns, left: int, now: float) -> bool:
    return turns.pause(LIMIT, left, now, LONG_AGO) == 0.0


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("left", [1, 2, 4, 7, 30])
def test_together_they_let_in_what_is_left_and_no_more(workers: int, left: int) -> None:
    for number in range(workers + 1):
        seats = [Turns(workers, seat) for seat in range(workers)]
        times = [(2 * number - 0.9 + 1.8 * seat / workers + 2) * NEWS for seat in range(workers)]
        let_in = [
            [lets_in(turns, left, now) for _ in range(left + 1)].count(True)
            for turns, now in zip(seats, times, strict=True)
        ]
        assert sum(let_in) == left
        assert max(let_in) - min(let_in) <= 1


def test_the_last_place_is_everybodys_in_turn() -> None:
    turns = Turns(2, 0)
    let_in = [lets_in(turns, 1, 2 * number * NEWS) for number in range(4)]
    assert sorted(let_in[:2]) == sorted(let_in[2:]) == [False, True]


def test_who_has_had_its_part_waits_for_the_news_of_the_others() -> None:
    turns, now = Turns(2, 0), 100.25 * NEWS
    assert lets_in(turns, 2, now)
    assert turns.pause(LIMIT, 2, now, now) == pytest.approx(1.75 * NEWS)
    assert turns.pause(("key", "b", "requests"), 2, now, now) == 0.0
    listening = 101.5 * NEWS
    assert turns.pause(LIMIT, 2, listening, now) == 0.0, "nothing was let in for a while: there is nothing to hear"
    assert Turns(2, 0).pause(LIMIT, 1, listening, listening - NEWS / 2) == pytest.approx(0.5 * NEWS)


async def test_what_is_more_than_its_part_waits_and_is_let_in_where_nobody_else_took_it() -> None:
    world, slept = World(requests_per_minute=4, concurrent_requests=10), list[float]()

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        world.clock.advance(seconds + 0.001)

    world.gate.turns = Turns(2, 0, sleep)
    for _ in range(4):
        await world.ask()
    assert slept
    waits = len(slept)
    with pytest.raises(RateLimited, match="4 requests per minute"):
        await world.ask()
    assert len(slept) == waits, "where nothing is left nobody waits"


async def test_what_the_others_took_meanwhile_is_not_let_in() -> None:
    world = World(concurrent_requests=2)

    async def sleep(seconds: float) -> None:
        world.gate.spent_elsewhere(7, ("key", "a", "own"), 1, [0.0] * 5)
        world.clock.advance(seconds + 0.001)

    world.gate.turns = Turns(2, 0, sleep)
    async with world.gate.admit(world.request()):
        with pytest.raises(RateLimited, match="2 requests at the same time"):
            await world.ask()
