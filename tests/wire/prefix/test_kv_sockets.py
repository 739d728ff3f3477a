"""Over real sockets: missed events are requested, and unavailable ones clear the pod."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("zmq", reason="needs the extra: pip install 'kvlane[precise]'")

import msgpack

from proxy.core.endpoint import Endpoint
from proxy.core.ports import KvSources
from proxy.core.state import State
from proxy.prefix.kv_sockets import RankEvents
from proxy.prefix.kv_subscriptions import KvSubscriptions, Subscription, watch_nothing
from tests.helpers.ports import free_port
from tests.helpers.prefix.engine import CLEARED, ENGINES, Ear, Engine, Pods, engine, pod, removed, stored
from tests.helpers.waiting import PATIENCE, until

POD = ("pod", 0)


def block(name: int, parent: int | None = None) -> Any:
    return stored([name], [name, name], parent)


@asynccontextmanager
async def subscribed(sources: KvSources, *pods: Endpoint) -> AsyncIterator[tuple[Ear, Pods]]:
    ear, fleet = Ear(), Pods(*pods)
    async with Subscription(sources, ear, fleet.watch):
        if pods and sources.port in ENGINES:
            await ENGINES[sources.port].has_a_listener()
        yield ear, fleet


def at(ports: tuple[int, int], replay: bool = True, **more: Any) -> KvSources:
    return KvSources(port=ports[0], replay_port=ports[1] if replay else 0, **more)


async def known(ear: Ear, whole: bool = True, of: tuple[str, int] = POD) -> None:
    await until(lambda: ear.known.get(of) is whole)


async def test_events_of_a_pod_are_received_in_order() -> None:
    async with engine() as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await known(ear)
        for name in range(5):
            await it.publish(block(name, name - 1 if name else None), removed(name))
        await until(lambda: len(ear.events) == 10)
        assert ear.blocks() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
        assert ear.known == {POD: True}
        assert ear.forgotten == []


async def test_a_late_proxy_gets_everything() -> None:
    async with engine() as (it, ports):
        for name in range(3):
            await it.publish(block(name))
        async with subscribed(at(ports), pod()) as (ear, _):
            await known(ear)
            assert ear.blocks() == [0, 1, 2]
            await it.publish(block(3))
            await until(lambda: ear.blocks() == [0, 1, 2, 3])
            assert it.replays == [0]


async def test_an_engine_with_an_incomplete_buffer_is_unknown_until_it_clears_its_cache() -> None:
    async with engine(keeps=2) as (it, ports):
        for name in range(5):
            await it.publish(block(name))
        async with subscribed(at(ports), pod()) as (ear, _):
            await known(ear, False)
            assert ear.blocks() == [3, 4]
            await it.publish(CLEARED, block(9))
            await known(ear)


@pytest.mark.parametrize("frames", [3, 4])
async def test_missed_events_are_requested(frames: int) -> None:
    """Older engines respond in three frames."""
    async with engine(frames=frames) as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await known(ear)
        await it.publish(block(0))
        await until(lambda: ear.blocks() == [0])
        await it.publish(block(1), lose=True)
        await it.publish(block(2), lose=True)
        await it.publish(block(3))
        await until(lambda: ear.blocks() == [0, 1, 2, 3])
        assert it.replays[-1] == 1
        assert ear.known == {POD: True}
        assert ear.forgotten == []


async def test_a_replayed_batch_that_arrives_again_counts_once() -> None:
    async with engine() as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await known(ear)
        for name in range(3):
            await it.publish(block(name), lose=name < 2)
        await until(lambda: ear.blocks() == [0, 1, 2])
        for number, payload in it.buffer:
            await it.send(number, payload)
        await it.publish(block(3))
        await until(lambda: 3 in ear.blocks())
        assert ear.blocks() == [0, 1, 2, 3]
        assert ear.forgotten == []


async def test_events_that_are_no_longer_available_clear_the_pod() -> None:
    async with engine(keeps=1) as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await known(ear)
        await it.publish(block(0))
        await until(lambda: ear.blocks() == [0])
        await it.publish(block(1), lose=True)
        await it.publish(block(2))
        await known(ear, False)
        assert ear.forgotten == [POD]
        await until(lambda: ear.blocks() == [2])


async def test_without_a_replay_socket_a_gap_is_a_loss() -> None:
    async with engine() as (it, ports), subscribed(at(ports, replay=False), pod()) as (ear, _):
        await joined(it, ear)
        await it.publish(block(1), lose=True)
        await it.publish(block(2))
        await known(ear, False)
        assert ear.forgotten == [POD]
        assert ear.blocks() == [2]


async def test_a_silent_replay_socket_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.prefix.kv_sockets.PATIENCE", 0.05)
    async with engine(replay=False) as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await joined(it, ear)
        await it.publish(block(1), lose=True)
        await it.publish(block(2))
        await known(ear, False)
        await it.publish(block(3))
        await until(lambda: ear.blocks() == [2, 3])


@pytest.mark.parametrize("clock", [100, -100, 0])
@pytest.mark.parametrize("replay", [True, False])
async def test_a_restarted_pod_is_cleared(replay: bool, clock: int) -> None:
    """Even if its clock is behind that of before."""
    async with engine() as (it, ports), subscribed(at(ports, replay), pod()) as (ear, _):
        await joined(it, ear)
        await it.publish(block(1))
        await until(lambda: 1 in ear.blocks())
        it.close()
        await known(ear, False)
        async with engine(ports=ports, start=it.clock + clock) as (restarted, _):
            if not replay:
                await connected(restarted, ear, 7)
            await restarted.publish(block(8))
            await until(lambda: 8 in ear.blocks())
            await known(ear)
            assert 1 not in ear.blocks()
            assert ear.forgotten == [POD]


async def test_an_engine_that_replays_without_end_costs_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.prefix.kv_sockets.QUEUED", 10)

    async def replay(start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        for number in range(start, start + 1000):
            yield number, msgpack.packb([1000.0 + number, [block(number)], 0])

    rank_events = RankEvents(pod(), 0, Ear(), replay)
    await rank_events.connected()
    assert (rank_events._next, len(rank_events._replayed)) == (1000, 10)


async def test_events_count_after_the_numbers_of_a_connected_engine_go_backwards() -> None:
    async with engine() as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await known(ear)
        for name in range(3):
            await it.publish(block(name))
        await until(lambda: ear.blocks() == [0, 1, 2])
        it.number, it.clock, it.buffer = 0, it.clock - 100, []
        await it.publish(block(7))
        await it.publish(block(8))
        await until(lambda: ear.blocks()[-2:] == [7, 8])
        assert ear.forgotten == [POD]
        await known(ear)


async def test_a_broken_connection_costs_nothing() -> None:
    """The same engine on another socket: it is asked for the message that came last, and what came since."""
    async with engine() as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await known(ear)
        await it.publish(block(0))
        await until(lambda: ear.blocks() == [0])
        it.close()
        await known(ear, False)
        await it_was_busy(it)
        async with engine(ports=ports) as (same, _):
            same.buffer, same.number, same.clock = it.buffer, it.number, it.clock
            await known(ear)
            assert ear.blocks() == [0, 1]
            assert ear.forgotten == []


async def test_malformed_messages_are_skipped() -> None:
    async with engine() as (it, ports), subscribed(at(ports), pod()) as (ear, _):
        await known(ear)
        await it.send_frames(b"one frame")
        await it.send_frames(b"topic", b"short", b"x")
        await it.send(0, b"\xc1 no msgpack")
        await it.publish({"type": "BlockTeleported"}, block(0))
        await until(lambda: ear.blocks() == [0])
        assert ear.known == {POD: True}


async def test_other_topics_are_ignored() -> None:
    async with engine() as (it, ports), subscribed(at(ports, topic="kv@pod"), pod()) as (ear, _):
        await known(ear)
        await it.send(0, it.buffer[0][1] if it.buffer else b"x", topic="other")
        await it.publish(block(0), topic="kv@pod@model")
        await until(lambda: ear.blocks() == [0])


async def test_every_rank_of_a_pod_has_its_own_port() -> None:
    at_port = free_port(2)
    async with (
        engine(ports=(at_port, 0), replay=False) as (first, _),
        engine(ports=(at_port + 1, 0), replay=False) as (second, _),
    ):
        labels = {"kvlane/data-parallel-size": "2", "kvlane/kv-events-port": str(at_port)}
        async with subscribed(KvSources(port=1), pod(labels=labels)) as (ear, _):
            await connected(first, ear, 1)
            await until_received(second, ear, rank=1)
            assert set(ear.blocks(0)) == {1}
            assert set(ear.blocks(1)) == {1}


async def test_a_removed_pod_is_reported_and_unsubscribed() -> None:
    async with engine() as (it, ports), subscribed(at(ports)) as (ear, fleet):
        one = pod()
        fleet.add(one)
        await known(ear)
        fleet.remove(one)
        assert ear.left == ["pod"]
        await it.publish(block(0))
        await asyncio.sleep(0.05)
        assert ear.blocks() == []


async def test_pods_may_connect_to_the_proxy_instead() -> None:
    import zmq.asyncio

    context = zmq.asyncio.Context()
    address = f"tcp://127.0.0.1:{free_port()}"
    one, other = pod("one"), Endpoint("other", "http://10.0.0.2:8000")
    async with subscribed(KvSources(bind=address, topic="kv@"), one, other) as (ear, _):
        it = Engine(context)
        it._publisher.connect(address)
        numbers = iter(range(1000))
        while not ear.events:
            await it.publish(block(next(numbers)), topic="kv@one@model", rank=1)
            await asyncio.sleep(0.02)
        await it.publish(block(7), topic="kv@10.0.0.2:8000@model")
        await it.publish(block(8), topic="kv@nobody@model")
        await until(lambda: any(name == "other" for name, _, _ in ear.events))
        assert {(name, rank) for name, rank, _ in ear.events} == {("one", 1), ("other", 0)}
        it.close()
    context.destroy(linger=0)


def test_an_invalid_address_is_refused() -> None:
    for sources in (KvSources(endpoint="tcp://{pod}:{port}"), KvSources(endpoint="{host}"), KvSources(bind="*:5557")):
        with pytest.raises(ValueError):
            KvSubscriptions("default", watch_nothing, State().draft()).subscribe(sources, Ear())


async def joined(it: Engine, ear: Ear) -> None:
    """Heard from its first message on, which is not certain without a replay: sockets take a moment to connect."""
    await it.publish(block(0), lose=True)
    payload = it.buffer[0][1]
    while not ear.blocks():
        await it.send(0, payload)
        await asyncio.sleep(0.01)
    await known(ear)


async def connected(it: Engine, ear: Ear, name: int) -> None:
    await it.publish(block(name), lose=True)
    payload = it.buffer[0][1]
    async with asyncio.timeout(PATIENCE):
        while name not in ear.blocks():
            await it.send(0, payload)
            await asyncio.sleep(0.01)


async def until_received(it: Engine, ear: Ear, rank: int) -> None:
    await it.publish(block(1), lose=True)
    payload = it.buffer[0][1]
    async with asyncio.timeout(PATIENCE):
        while not ear.blocks(rank):
            await it.send(0, payload)
            await asyncio.sleep(0.01)


async def it_was_busy(it: Engine) -> None:
    """While no subscriber listened."""
    it.number = 1
    import msgpack

    it.clock += 1
    it.buffer.append((1, msgpack.packb([it.clock, [block(1)], 0])))
    it.number = 2


async def subscribe(state: State, fleet: Pods, sources: KvSources, *listeners: Ear) -> None:
    """As plugins do: each of these ears is of one that the configuration names."""
    draft = state.draft()
    port = KvSubscriptions("default", fleet.watch, draft)
    for ear in listeners:

        def make(ear: Ear = ear) -> Ear:
            port.subscribe(sources, ear)
            return ear

        draft.get(ear, make)
    draft.commit()
    await state.finish_commit()


async def test_a_new_listener_gets_everything_and_a_removed_one_nothing_more() -> None:
    async with engine() as (it, ports):
        before, after, fleet, state = Ear(), Ear(), Pods(pod()), State()
        await subscribe(state, fleet, at(ports), before)
        await known(before)
        await it.publish(block(1))
        await until(lambda: before.blocks() == [1])
        assert after.events == []
        await subscribe(state, fleet, at(ports), after)
        await known(after)
        await it.publish(block(2))
        await until(lambda: after.blocks() == [1, 2])
        assert before.blocks() == [1]
        await state.close()


async def test_a_listener_of_a_plugin_that_stays_continues() -> None:
    async with engine() as (it, ports):
        kept, other, fleet, state = Ear(), Ear(), Pods(pod()), State()
        await subscribe(state, fleet, at(ports), kept)
        await known(kept)
        await subscribe(state, fleet, at(ports), kept, other)
        await it.publish(block(1))
        await until(lambda: kept.blocks() == [1])
        assert kept.forgotten == []
        await state.close()


async def test_a_subscription_of_an_uncommitted_draft_requests_nothing() -> None:
    async with engine() as (it, ports):
        kept, dropped, fleet, state = Ear(), Ear(), Pods(pod()), State()
        await subscribe(state, fleet, at(ports), kept)
        KvSubscriptions("default", fleet.watch, state.draft()).subscribe(at(ports), dropped)
        await state.finish_commit()
        await known(kept)
        await it.publish(block(1))
        await until(lambda: kept.blocks() == [1])
        assert dropped.events == []
        await state.close()
