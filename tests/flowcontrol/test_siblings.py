"""Several workers with the same pods, each with a queue of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings
from proxy.flowcontrol.siblings import Lent, Siblings
from proxy.replicas.queues import SharedQueue
from proxy.replicas.queues import said as told
from proxy.replicas.wire import Garbled
from tests.flowcontrol.test_controller import World, world

NOTHING: Lent = {}


def heard(highest: int | None, given: Lent) -> None:
    """Nobody is there to hear it."""


def test_who_has_more_than_its_part_lets_others_go_first() -> None:
    siblings = Siblings(2, heard)
    assert not siblings.go_first(0, 8, 8), "nobody else waits"
    siblings.take(1, 0, NOTHING)
    assert siblings.go_first(0, 5, 8)
    assert not siblings.go_first(0, 4, 8)
    assert not siblings.go_first(0, 3, 8)
    siblings.take(2, 0, NOTHING)
    assert siblings.go_first(0, 3, 8), "a third of eight is less"
    siblings.vanished(1)
    siblings.take(2, None, NOTHING)
    assert not siblings.go_first(0, 8, 8)


def test_who_waits_with_something_more_urgent_goes_first_whatever_it_has() -> None:
    siblings = Siblings(2, heard)
    siblings.take(1, 5, NOTHING)
    assert siblings.go_first(0, 0, 8)
    assert not siblings.go_first(9, 8, 8)


def test_only_changes_are_told() -> None:
    told: list[int | None] = []
    siblings = Siblings(2, lambda highest, given: told.append(highest))
    for highest in (None, 3, 3, 3, 0, None, None):
        siblings.say(highest)
    assert told == [3, 0, None]
    siblings.take(1, 0, NOTHING)
    siblings.lend("x", 1)
    siblings.say(None)
    assert told == [3, 0, None, None]


@given(st.integers(0, 20), st.integers(1, 5))
def test_parts_are_all_of_a_cap_and_no_more(most: int, workers: int) -> None:
    assert sum(Siblings(workers, heard, seat).part("x", most) for seat in range(workers)) == most


@given(st.data())
def test_whatever_is_given_and_however_late_it_is_heard_parts_are_no_more_than_the_cap(data: st.DataObject) -> None:
    workers, most = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 9))
    said: list[tuple[int, int, bytes]] = []

    def teller(number: int) -> Callable[[int | None, Lent], None]:
        def tell(highest: int | None, given: Lent) -> None:
            said.extend((number, to, told("p", highest, given)) for to in range(workers) if to != number)

        return tell

    all_of_them = [Siblings(workers, teller(number), number, number) for number in range(workers)]
    queues = [SharedQueue("p", one, lambda: None) for one in all_of_them]
    for _ in range(data.draw(st.integers(0, 20))):
        one = all_of_them[data.draw(st.integers(0, workers - 1))]
        if one.wait and (part := one.part("x", most)) > 0:
            one.lend("x", data.draw(st.integers(1, part)))
        one.say(data.draw(st.none() | st.integers(0, 2)))
        for _ in range(data.draw(st.integers(0, len(said)))):
            number, to, body = said.pop(0)
            queues[to].take(number, body)
        assert sum(one.part("x", most) for one in all_of_them) <= most
    for number, to, body in said:
        queues[to].take(number, body)
    assert sum(one.part("x", most) for one in all_of_them) == most


def test_what_was_given_to_one_that_is_gone_comes_back_and_what_it_gave_goes() -> None:
    siblings = Siblings(2, heard, 0, 7)
    siblings.take(8, 0, {7: {"x": 1}})
    siblings.lend("x", 3)
    assert siblings.part("x", 8) == 4 + 1 - 3
    siblings.vanished(8)
    assert siblings.part("x", 8) == 4


def test_what_is_said_to_others_is_what_they_take() -> None:
    looked: list[bool] = []
    speaker, hearer = Siblings(2, heard), Siblings(2, heard, 1, 5)
    speaker.take(5, 0, NOTHING)
    speaker.lend("requests ", 2)
    speaker.say(7)
    queue = SharedQueue("large", hearer, lambda: looked.append(True))
    queue.take(3, SharedQueue("default", speaker, lambda: None).all())
    assert not hearer.wait
    queue.take(3, SharedQueue("large", speaker, lambda: None).all())
    assert hearer.go_first(0, 0, 1)
    assert hearer.part("requests ", 4) == 4
    queue.vanished(3)
    assert not hearer.go_first(0, 1, 1)
    assert len(looked) == 2
    for body in (b'"x"', b"[1]", b"1.5", b'["large","x",{}]', b"[1,1,{}]", b'["large",1]', b'["large",1,{"a":{}}]'):
        with pytest.raises(Garbled):
            queue.take(3, body)
    with pytest.raises(Garbled):
        queue.take(3, b'["large",1,{"5":{"requests ":null}}]')


@asynccontextmanager
async def both(**caps: Any) -> AsyncIterator[tuple[World, World]]:
    """Two workers before the same pod, who hear of each other when it is `exchanged`."""
    async with AsyncExitStack() as stack:
        worlds = []
        for _ in range(2):
            pod = Endpoint("a", state=EndpointState.READY)
            worlds.append(await stack.enter_async_context(world([pod], **caps)))
        for number, one in enumerate(worlds):
            one.control.siblings = Siblings(2, heard, number, number)
        try:
            yield worlds[0], worlds[1]
        finally:
            for one in worlds:
                one.control.siblings = None
                for pod in one.pods:
                    pod.charge(-pod.load.remote_requests, -pod.load.remote_tokens)


async def exchanged(*worlds: World) -> None:
    """All that they have to say to each other, until there is no more."""
    for _ in range(6):
        for number, one in enumerate(worlds):
            for other in worlds:
                if other is one:
                    continue
                mine, its = one.control.siblings, other.control.siblings
                assert mine is not None
                assert its is not None
                for pod, copy in zip(one.pods, other.pods, strict=True):
                    requests, tokens = pod.load.requests - pod.load.remote_requests, pod.load.tokens
                    copy.charge(requests - copy.load.remote_requests, 0)
                    copy.load.remote_requests = requests
                    own = tokens - pod.load.remote_tokens
                    copy.load.tokens += own - copy.load.remote_tokens
                    copy.load.remote_tokens = own
                its.take(number, mine.told, mine.given)
                other.control.look()
            await one.settle()
            for other in worlds:
                await other.settle()


async def test_one_that_needs_more_gets_what_others_have_no_use_for() -> None:
    async with both(max_concurrent=4) as (busy, idle):
        await busy.come("a", "b", "c", "d", "e")
        assert busy.names == "ab", "its part of them at once"
        await exchanged(busy, idle)
        assert busy.names == "abcd"
        await idle.come("x")
        await exchanged(busy, idle)
        assert idle.names == "", "it has given away all"
        await busy.leave("a")
        assert busy.names == "abcd", "which is left to the one that has less"
        await exchanged(busy, idle)
        assert idle.names == "x"
        await idle.leave("x")
        await exchanged(busy, idle)
        assert busy.names == "abcde"


@pytest.mark.parametrize(
    "cap",
    [{"max_concurrent": 2}, {"max_concurrent_per_pod": 2}, {"max_tokens": 20}, {"max_tokens_per_pod": 20}],
    ids=str,
)
async def test_what_two_workers_do_without_having_heard_of_each_other_is_within_every_cap(cap: dict[str, int]) -> None:
    async with both(**cap) as (one, other):
        for name in "abcd":
            await one.come(name, tokens=10)
            await other.come(name, tokens=10)
        assert (one.names, other.names) == ("a", "a")
        for name in "abc":
            await one.leave(name)
            await exchanged(one, other)
            assert len(one.order) + len(other.order) <= 3 + "abc".index(name)
        assert one.names == "abcd"


async def test_a_prompt_larger_than_its_part_gathers_all_of_the_cap() -> None:
    async with both(max_tokens=20) as (one, other):
        await one.come("a", tokens=50)
        assert one.names == ""
        await exchanged(one, other)
        assert one.names == "a"


def test_each_has_its_part_of_the_places_to_wait() -> None:
    bands = (BandSettings(0, max_queued=10), BandSettings(-1, max_queued=0), BandSettings(-2))
    part = FlowControlSettings(max_concurrent=8, max_queued=100, bands=bands).part(3)
    assert (part.max_concurrent, part.max_queued) == (8, 34)
    assert [band.max_queued for band in part.bands] == [4, 0, None]
