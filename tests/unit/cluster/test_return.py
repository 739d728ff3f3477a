"""How soon hosts know of each other again when their store is back, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
import pytest

from proxy.cluster.deployment import Deployment
from proxy.cluster.messages import Packet, RecordKind, records
from proxy.cluster.redis_transport import OPEN_TIMEOUT, StoreLost
from proxy.cluster.replica import BEATS
from proxy.cluster.settings import ReplicaSettings
from proxy.cluster.shared import read_spent
from proxy.telemetry.metrics import Catalogue
from tests.helpers.cluster.virtual import VirtualLoop
from tests.wire.cluster.test_bus import Member

TRIP = 0.001
"""Seconds, through the store."""

MOMENT = 0.1
"""Seconds in which all state is published."""


class MemoryStore:
    """Passes on what is published. While it is `gone` connections are refused, and while it is `mute` they hang."""

    def __init__(self) -> None:
        self.gone = self.mute = False
        self.lines: set[MemoryLine] = set()

    def line(self, settings: ReplicaSettings, channels: Sequence[str], deliver: Callable[[bytes], None]) -> MemoryLine:
        return MemoryLine(self, channels, deliver)

    def die(self) -> None:
        self.gone = True
        for line in self.lines:
            line.is_over.set()

    def pass_on(self, channel: str, message: bytes) -> None:
        if self.mute:
            return
        for line in [line for line in self.lines if channel in line.channels and not line.is_over.is_set()]:
            line.deliver(message)


class MemoryLine:
    """A `proxy.cluster.deployment.Connection`."""

    waiting = 0

    def __init__(self, store: MemoryStore, channels: Sequence[str], deliver: Callable[[bytes], None]) -> None:
        self._store = store
        self.channels = channels
        self.deliver = deliver
        self.is_over = asyncio.Event()

    async def __aenter__(self) -> MemoryLine:
        if self._store.mute:
            await asyncio.sleep(OPEN_TIMEOUT)
        if self._store.gone or self._store.mute:
            raise StoreLost("it is unreachable")
        self._store.lines.add(self)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._store.lines.discard(self)

    def publish(self, channel: str, message: bytes) -> None:
        asyncio.get_running_loop().call_later(TRIP, self._store.pass_on, channel, message)

    async def lost(self) -> None:
        await self.is_over.wait()
        raise StoreLost("it is gone")


class Host(Member):
    def __init__(self, number: int, store: MemoryStore, loop: VirtualLoop, lease: float) -> None:
        super().__init__(clock=loop, lease=lease)
        wanted = ReplicaSettings(store="redis://memory", lease=lease, name=f"host-{number}")  # type: ignore[arg-type]
        rng = random.Random(number)
        self.deployment = Deployment(
            wanted, loop, rng, Catalogue("test"), self.replica, lambda: "a", connect=store.line
        )
        self.replica.join(self.deployment)

    def spend(self) -> list[float]:
        """Charge a request to a key. Return the requests that are then assumed for the other hosts."""
        assumed = list[float]()
        receive = self.deployment._received_by

        def received(packet: Packet) -> None:
            assumed.extend(amounts[0] for _, body in records(packet.body) for _, _, amounts in read_spent(body))
            receive(packet)

        self.deployment._received_by = received
        self.replica.publish(RecordKind.SPENT, orjson.dumps([(("key", "chat", "standard"), 1, [1.0] * 5)]))
        self.replica.flush()
        self.deployment._received_by = receive
        return assumed


def run_with_hosts(scenario: Callable[[MemoryStore, Sequence[Host]], Awaitable[None]], is_gone: bool = False) -> None:
    """Run a scenario with a store and three hosts, which know each other if the store is not gone."""
    loop = VirtualLoop()

    async def run() -> None:
        store = MemoryStore()
        store.gone = is_gone
        hosts = [Host(number, store, loop, lease=5.0) for number in range(3)]
        for host in hosts:
            await host.deployment.__aenter__()
        await asyncio.sleep(MOMENT)
        assert all(len(host.replica.peers.hosts) == (0 if is_gone else 2) for host in hosts)
        await scenario(store, hosts)
        for host in hosts:
            await host.deployment.__aexit__(None, None, None)
            await host.replica.close()

    try:
        loop.run_until_complete(run())
    finally:
        loop.close()


def test_the_assumed_spending_of_repeated_outages_counts_no_missed_packets() -> None:
    async def scenario(store: MemoryStore, hosts: Sequence[Host]) -> None:
        one = hosts[0]
        for _ in range(3):
            store.die()
            await asyncio.sleep(1.0)
            missed = one.deployment.series.missed.value
            for _ in range(10):
                assert one.spend() == [2.0]
                await asyncio.sleep(1.0)
            assert one.deployment.series.missed.value == missed
            store.gone = False
            await asyncio.sleep(5.0)
            assert all(host.deployment.is_connected for host in hosts)

    run_with_hosts(scenario)


def test_the_hosts_before_an_outage_count_in_the_next_one_if_none_was_received_in_between() -> None:
    async def scenario(store: MemoryStore, hosts: Sequence[Host]) -> None:
        store.die()
        await asyncio.sleep(20.0)
        store.gone = False
        while not (connected := [host for host in hosts if host.deployment.is_connected]):
            await asyncio.sleep(TRIP / 2)
        store.die()
        await asyncio.sleep(TRIP / 2)
        first = connected[0]
        assert not first.deployment.is_connected
        assert not first.replica.peers.hosts
        assert first.spend() == [2.0]

    run_with_hosts(scenario)


def test_without_a_store_at_the_start_limits_are_open_until_it_was_reached_once() -> None:
    async def scenario(store: MemoryStore, hosts: Sequence[Host]) -> None:
        one = hosts[0]
        assert one.spend() == []
        assert one.deployment.status()["limits"] == "open"
        store.gone = False
        await asyncio.sleep(5.0)
        store.die()
        await asyncio.sleep(MOMENT)
        assert one.spend() == [2.0]
        assert one.deployment.status()["limits"] == "localShare"

    run_with_hosts(scenario, is_gone=True)


def seconds_until_right(seed: int, lease: float, upset: Callable[[MemoryStore, float], Awaitable[Any]]) -> float:
    """From the moment in which the store is back until each of three hosts knows what all have in flight."""
    loop = VirtualLoop()

    async def work() -> float:
        store, rng = MemoryStore(), random.Random(seed)
        hosts = [Host(3 * seed + number, store, loop, lease) for number in range(3)]
        for host in hosts:
            await host.deployment.__aenter__()
        for host in hosts:
            host.dispatch(4)
        await asyncio.sleep(MOMENT)
        assert all(host.pod.load.requests == 12 for host in hosts)
        await upset(store, rng.uniform(0.0, 4 * lease))
        for host in hosts:
            host.dispatch(rng.randint(-3, 3))
        began, expected = loop.time(), sum(host.pod.load.requests - host.pod.load.remote_requests for host in hosts)
        while any(host.pod.load.requests != expected for host in hosts):
            assert loop.time() < began + 10 * lease
            await asyncio.sleep(0.01)
        found = loop.time() - began
        for host in hosts:
            await host.deployment.__aexit__(None, None, None)
            await host.replica.close()
        return found

    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()


async def killed(store: MemoryStore, seconds: float) -> None:
    store.die()
    await asyncio.sleep(seconds)
    store.gone = False


async def walled(store: MemoryStore, seconds: float) -> None:
    store.mute = True
    await asyncio.sleep(seconds)
    store.mute = False


@pytest.mark.parametrize("lease", [1.0, 5.0, 60.0])
def test_after_a_restarted_store_state_is_correct_within_a_beat(lease: float) -> None:
    """However long it was away; with a long lease, within two seconds."""
    bound = min(2.0, lease / BEATS) + MOMENT
    found = [seconds_until_right(seed, lease, killed) for seed in range(30)]
    assert max(found) <= bound


@pytest.mark.parametrize("lease", [5.0, 60.0])
def test_after_a_hanging_store_recovery_takes_one_more_attempt(lease: float) -> None:
    """Peers that had not given it up notice what they missed with the next beat."""
    bound = min(2.0, lease / BEATS) + OPEN_TIMEOUT + MOMENT
    found = [seconds_until_right(seed, lease, walled) for seed in range(30)]
    assert max(found) <= max(bound, lease / BEATS + MOMENT)
