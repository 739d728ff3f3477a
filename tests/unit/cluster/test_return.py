"""How soon hosts know of each other again when their store is back, on a virtual clock."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from proxy.cluster.deployment import Deployment
from proxy.cluster.redis_transport import OPEN_TIMEOUT, StoreLost
from proxy.cluster.replica import BEATS
from proxy.cluster.settings import ReplicaSettings
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

    is_slow = False

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

    async def is_writable(self) -> None: ...

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
