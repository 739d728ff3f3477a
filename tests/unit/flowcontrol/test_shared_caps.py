"""Several workers with the same pods, each with a queue of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.cluster.messages import FIRST_NUMBER, UNREADABLE, RecordKind
from proxy.cluster.shared import SharedQueue
from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.params import Size
from proxy.flowcontrol.capacity import Lent, Publish, SharedCaps
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings
from tests.unit.flowcontrol.test_controller import World, world

NOTHING: Lent = {}


def unheard(highest: int | None, since: float, given: Lent, wants: Sequence[str]) -> None:
    """Publish to no peer."""


def test_a_worker_above_its_part_lets_others_go_first() -> None:
    shared_caps = SharedCaps(2, unheard)
    assert not shared_caps.go_first(0, 0.0, 8, 8), "no other process waits"
    shared_caps.receive(1, "1", 0, 0.0, NOTHING, ["m"])
    assert shared_caps.go_first(0, 0.0, 5, 8)
    assert not shared_caps.go_first(0, 0.0, 4, 8)
    assert not shared_caps.go_first(0, 0.0, 3, 8)
    shared_caps.receive(2, "2", 0, 0.0, NOTHING, ["m"])
    assert shared_caps.go_first(0, 0.0, 3, 8), "a third of eight is less"
    shared_caps.vanished(1)
    shared_caps.receive(2, "2", None, 0.0, NOTHING, ["m"])
    assert not shared_caps.go_first(0, 0.0, 8, 8)


def test_a_worker_with_a_more_urgent_request_goes_first() -> None:
    shared_caps = SharedCaps(2, unheard)
    shared_caps.receive(1, "1", 5, 0.0, NOTHING, ["m"])
    assert shared_caps.go_first(0, 0.0, 0, 8)
    assert not shared_caps.go_first(9, 0.0, 8, 8)


def test_only_changes_are_published() -> None:
    published: list[int | None] = []
    shared_caps = SharedCaps(2, lambda highest, *_: published.append(highest))
    for highest in (None, 3, 3, 3, 0, None, None):
        shared_caps.say(highest)
    assert published == [3, 0, None]
    shared_caps.receive(1, "1", 0, 0.0, NOTHING, ["m"])
    shared_caps.lend("x", 1, "m")
    shared_caps.say(None)
    assert published == [3, 0, None, None]


@given(st.integers(0, 20), st.integers(1, 5))
def test_the_parts_sum_up_to_the_cap(most: int, workers: int) -> None:
    assert sum(SharedCaps(workers, unheard, seat).part("x", most) for seat in range(workers)) == most


@given(st.data())
def test_parts_never_exceed_the_cap_with_any_loans_and_delays(data: st.DataObject) -> None:
    workers, most = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 9))
    published: list[tuple[int, int, bytes]] = []

    def teller(number: int) -> Publish:
        def tell(highest: int | None, since: float, given: Lent, wants: Sequence[str]) -> None:
            published.extend(
                (number, to, SharedQueue.packed("p", str(number), highest, since, given, wants))
                for to in range(workers)
                if to != number
            )

        return tell

    all_of_them = [SharedCaps(workers, teller(number), number, str(number)) for number in range(workers)]
    queues = [SharedQueue("p", one, lambda: None) for one in all_of_them]
    for _ in range(data.draw(st.integers(0, 20))):
        one = all_of_them[data.draw(st.integers(0, workers - 1))]
        if one.wait and (part := one.part("x", most)) > 0:
            one.lend("x", data.draw(st.integers(1, part)), "m")
        one.say(data.draw(st.none() | st.integers(0, 2)), 0.0, ("m",))
        for _ in range(data.draw(st.integers(0, len(published)))):
            number, to, body = published.pop(0)
            queues[to].receive(number, RecordKind.WAITING, body)
        assert sum(one.part("x", most) for one in all_of_them) <= most
    for number, to, body in published:
        queues[to].receive(number, RecordKind.WAITING, body)
    assert sum(one.part("x", most) for one in all_of_them) == most


def test_loans_to_a_stopped_worker_return_and_its_loans_end() -> None:
    shared_caps = SharedCaps(2, unheard, 0, "7")
    shared_caps.receive(8, "8", 0, 0.0, {"7": {"x": 1}}, ["m"])
    shared_caps.lend("x", 3, "m")
    assert shared_caps.part("x", 8) == 4 + 1 - 3
    shared_caps.vanished(8)
    assert shared_caps.part("x", 8) == 4


def hear(queue: SharedQueue, speaker: SharedQueue) -> None:
    for kind, body in speaker.current():
        queue.receive(3, kind, body)


def test_published_parts_equal_applied_ones() -> None:
    looked: list[bool] = []
    speaker, hearer = SharedCaps(2, unheard), SharedCaps(2, unheard, 1, "5")
    speaker.receive(5, "5", 0, 0.0, NOTHING, ["m"])
    speaker.lend("requests ", 2, "m")
    speaker.say(7, 0.0, ("m",))
    queue = SharedQueue("large", hearer, lambda: looked.append(True))
    hear(queue, SharedQueue("default", speaker, lambda: None))
    assert not hearer.wait
    hear(queue, SharedQueue("large", speaker, lambda: None))
    assert hearer.go_first(0, 0.0, 0, 1)
    assert hearer.part("requests ", 4) == 4
    queue.vanished(3)
    assert not hearer.go_first(0, 0.0, 1, 1)
    assert len(looked) == 2
    nonsense = (
        b'"x"',
        b"[1]",
        b"1.5",
        b'[["large","a","x",0,{},[]]]',
        b'[[1,"a",1,0,{},[]]]',
        b'[["large","a",1]]',
        b'[["large","a",1,0,{},1]]',
        b'[["large","a",1,"0",{},[]]]',
        b'[["large","a",1,0,{"5":{"requests ":null}},[]]]',
    )
    for body in nonsense:
        with pytest.raises(UNREADABLE):
            queue.receive(3, RecordKind.WAITING, body)


@given(st.integers(0, 20), st.lists(st.integers(1, 3), min_size=1, max_size=5), st.text(max_size=3))
def test_the_parts_of_all_hosts_sum_up_to_the_cap(most: int, workers: list[int], cap: str) -> None:
    everybody = [SharedCaps(of, unheard, seat) for of in workers for seat in range(of)]
    ranks = [rank for rank, of in enumerate(workers) for _ in range(of)]
    for one, rank in zip(everybody, ranks, strict=True):
        one.place = (len(workers), rank)
    assert sum(one.part(cap, most) for one in everybody) == most


def test_indivisible_caps_of_different_pods_go_to_different_hosts() -> None:
    hosts = [SharedCaps(1, unheard), SharedCaps(1, unheard)]
    for rank, host in enumerate(hosts):
        host.place = (2, rank)
    parts = [[host.part(f"requests pod-{number}", 1) for number in range(20)] for host in hosts]
    assert all(one + other == 1 for one, other in zip(*parts, strict=True))
    assert 5 <= sum(parts[0]) <= 15


class Hosts:
    """Proxies that say what they have to say when it is `delivered`, whole or not at all."""

    def __init__(self, count: int, most: int) -> None:
        self._most = most
        self._sent: list[tuple[int, bytes]] = []
        self.all = [SharedCaps(1, self._teller(number), 0, str(number)) for number in range(count)]
        self._queues = [SharedQueue("p", one, lambda: None) for one in self.all]
        for rank, one in enumerate(self.all):
            one.place = (count, rank)

    def _teller(self, number: int) -> Publish:
        return lambda *reported: self._sent.append((number, SharedQueue.packed("p", str(number), *reported)))

    def deliver(self, to: Sequence[int]) -> None:
        """To these; others never hear of it."""
        for number, body in self._sent:
            for other in to:
                if other != number:
                    self._queues[other].receive(peer(number), RecordKind.WAITING, body)
        self._sent.clear()

    def vanishes_for(self, one: int, other: int) -> None:
        self._queues[other].vanished(peer(one))

    def loses_the_store(self, one: int) -> None:
        self._queues[one].divide(len(self.all), one, False)

    def says_all(self, one: int, to: int) -> None:
        """A snapshot."""
        self._queues[to].reset(peer(one))
        for kind, body in self._queues[one].current():
            self._queues[to].receive(peer(one), kind, body)

    def first_lends(self, amount: int) -> None:
        """The second host wants a part of the cap, and the first one lends it."""
        one, other = self.all
        other.say(0, 0.0, ("m",))
        self.deliver([0, 1])
        one.lend("x", amount, "m")
        one.say(None)
        self.deliver([0, 1])

    @property
    def parts(self) -> int:
        return sum(one.part("x", self._most) for one in self.all)


def peer(number: int) -> int:
    return FIRST_NUMBER + number


@given(st.data())
def test_after_missed_messages_parts_equal_the_cap_when_all_have_published(data: st.DataObject) -> None:
    count, most = data.draw(st.integers(2, 4)), data.draw(st.integers(0, 9))
    hosts, numbers = Hosts(count, most), range(count)
    for _ in range(data.draw(st.integers(0, 15))):
        one, other = data.draw(st.permutations(numbers))[:2]
        what = data.draw(st.sampled_from(("lend", "lend", "lend", "vanish", "cut off", "snapshot", "say")))
        if what == "lend" and (part := hosts.all[one].part("x", most)) > 0:
            hosts.all[one].lend("x", data.draw(st.integers(1, part)), "m")
        elif what == "vanish":
            hosts.vanishes_for(one, other)
        elif what == "cut off":
            hosts.loses_the_store(one)
        elif what == "snapshot":
            hosts.says_all(one, other)
        hosts.all[one].say(data.draw(st.none() | st.integers(0, 2)), 0.0, ("m",))
        hosts.deliver(data.draw(st.sets(st.sampled_from(list(numbers))).map(sorted)))
    for one in numbers:
        for other in numbers:
            if one != other:
                hosts.says_all(one, other)
    assert hosts.parts == most


def test_a_process_without_peers_has_its_own_part_again() -> None:
    hosts = Hosts(2, 8)
    one, other = hosts.all
    hosts.first_lends(4)
    assert (one.part("x", 8), other.part("x", 8)) == (0, 8)
    hosts.loses_the_store(0)
    assert (one.part("x", 8), one.wait) == (4, False)
    hosts.loses_the_store(1)
    assert other.part("x", 8) == 4


def test_a_peer_considered_gone_learns_that_its_loans_ended() -> None:
    hosts = Hosts(2, 8)
    one, other = hosts.all
    hosts.first_lends(3)
    hosts.vanishes_for(1, 0)
    one.say(None)
    hosts.deliver([0, 1])
    assert (one.part("x", 8), other.part("x", 8)) == (4, 4)


@asynccontextmanager
async def both(**caps: Any) -> AsyncIterator[tuple[World, World]]:
    """Two workers before the same pod, who hear of each other when it is `exchanged`."""
    async with AsyncExitStack() as stack:
        worlds = []
        for _ in range(2):
            pod = Endpoint("a", state=EndpointState.READY)
            worlds.append(await stack.enter_async_context(world([pod], **caps)))
        for number, one in enumerate(worlds):
            one.control.shared_caps = SharedCaps(2, unheard, number, str(number))
        try:
            yield worlds[0], worlds[1]
        finally:
            for one in worlds:
                one.control.shared_caps = None
                for pod in one.pods:
                    pod.charge(-pod.load.remote_requests, -pod.load.remote_tokens)


async def exchanged(*worlds: World) -> None:
    """All that they have to say to each other, until there is no more."""
    for _ in range(6):
        for number, one in enumerate(worlds):
            for other in worlds:
                if other is one:
                    continue
                mine, its = one.control.shared_caps, other.control.shared_caps
                assert mine is not None
                assert its is not None
                for pod, copy in zip(one.pods, other.pods, strict=True):
                    requests, tokens = pod.load.requests - pod.load.remote_requests, pod.load.tokens
                    copy.charge(requests - copy.load.remote_requests, 0)
                    update(copy.load, remote_requests=requests)
                    own = tokens - pod.load.remote_tokens
                    update(copy.load, tokens=copy.load.tokens + own - copy.load.remote_tokens)
                    update(copy.load, remote_tokens=own)
                its.receive(number, mine.name, mine.published, mine.since, mine.given, mine.wants)
                other.control.admit_waiting()
            await one.settle()
            for other in worlds:
                await other.settle()


async def test_a_process_that_needs_more_gets_unused_parts() -> None:
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
async def test_unsynchronised_workers_stay_within_every_cap(cap: dict[str, int]) -> None:
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


async def test_nothing_is_lent_without_demand() -> None:
    async with both(max_concurrent_per_pod=4) as (one, other):
        await one.come("a")
        shared_caps = other.control.shared_caps
        assert shared_caps is not None
        shared_caps.receive(0, "0", 0, 0.0, NOTHING, ["requests "])
        other.control.admit_waiting()
        assert not shared_caps.given
        shared_caps.receive(0, "0", 0, 0.0, NOTHING, ["m"])
        other.control.admit_waiting()
        assert shared_caps.given == {"0": {"requests a": 2}}


async def test_a_prompt_larger_than_its_part_collects_the_whole_cap() -> None:
    async with both(max_tokens=20) as (one, other):
        await one.come("a", tokens=50)
        assert one.names == ""
        await exchanged(one, other)
        assert one.names == "a"


def test_each_process_has_its_part_of_the_queue() -> None:
    bands = (
        BandSettings(0, max_queued=10),
        BandSettings(-1, max_queued=0, max_queued_bytes=Size(50)),
        BandSettings(-2),
    )
    part = FlowControlSettings(max_concurrent=8, max_queued=100, max_queued_bytes=Size(200), bands=bands).part(3)
    assert (part.max_concurrent, part.max_queued, part.max_queued_bytes) == (8, 34, 67)
    assert [(band.max_queued, band.max_queued_bytes) for band in part.bands] == [(4, None), (0, 17), (None, None)]
