"""The autoscaling loops of all pools, their status, and the election of a leader among several proxies."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from proxy.autoscale.actuators import ScaleOrder
from proxy.autoscale.autoscaling import Autoscaling, Leadership
from proxy.autoscale.loop import ScalingOutcome
from proxy.autoscale.measures import KnownLoad
from proxy.autoscale.policy import Cause
from proxy.autoscale.settings import AutoscaleSettings
from proxy.cluster.redis_transport import Lease
from proxy.cluster.settings import ReplicaSettings
from proxy.core.ports import ManualClock
from proxy.telemetry.metrics import Catalogue
from tests.helpers.autoscale.scaled import EXEC, Recording, Rig, policies
from tests.helpers.cluster.virtual import VirtualLoop
from tests.helpers.waiting import PATIENCE


class Shown:
    """The autoscaling of a rig's fleet, and its samples."""

    def __init__(self, rig: Rig, settings: AutoscaleSettings) -> None:
        self.catalogue = Catalogue("test")
        self.autoscaling = Autoscaling(
            settings, ReplicaSettings(), rig.fleet, rig.signals, self.catalogue, rig.clock, random.Random(1)
        )

    def samples(self) -> dict[tuple[str, ...], float]:
        self.autoscaling.read()
        return {
            (sample.name.removeprefix("kvlane_autoscale_"), *sample.labels.values()): sample.value
            for family in self.catalogue.families
            if family.name.startswith("kvlane_autoscale_")
            for metric in family.slices(1000)
            for sample in metric.samples
        }

    async def decided(self) -> None:
        async with asyncio.timeout(PATIENCE):
            while not all(pool.loop.history for pool in self.autoscaling.pools.values()):
                await asyncio.sleep(0.01)


async def test_recommendations_are_exported() -> None:
    rig = Rig(decode=2)
    shown = Shown(rig, policies(actuator=None))
    async with AsyncExitStack() as stack:
        await shown.autoscaling.start(stack)
        await shown.decided()
        samples = shown.samples()
    assert samples["desired_replicas", "default", "decode"] == 2
    assert samples["desired_ratio", "default", "prefill"] == 1
    assert samples["valid", "default"] == 1
    assert samples["signal_missing", "default", "prefill", "prefill_backlog_seconds"] == 0
    assert samples["decisions_total", "default", "decode", "none", ""] == 1


async def test_unknown_values_are_not_shown_as_zero() -> None:
    rig = Rig(prefill=0)
    shown = Shown(rig, policies(actuator=None))
    async with AsyncExitStack() as stack:
        await shown.autoscaling.start(stack)
        await shown.decided()
        samples = shown.samples()
    assert samples["valid", "default"] == 0
    assert ("desired_replicas", "default", "prefill") not in samples
    assert samples["desired_replicas", "default", "decode"] == 1


async def test_the_last_recommendation_is_exported_while_signals_are_missing() -> None:
    rig = Rig(decode=2)
    shown = Shown(rig, policies(actuator=None))
    async with AsyncExitStack() as stack:
        await shown.autoscaling.start(stack)
        await shown.decided()
        before = shown.samples()
        rig.signals.all["prefill"] = KnownLoad()
        rig.clock.advance(100.0)
        await shown.autoscaling.pools["default"].step()
        after = shown.samples()
    assert (before["valid", "default"], after["valid", "default"]) == (1, 0)
    held = {"desired_replicas", "total_recommended", "share", "reason", "band_satisfied", "panic"}
    assert {key: after.get(key) for key in before if key[0] in held} == {
        key: value for key, value in before.items() if key[0] in held
    }
    assert after["signal_missing", "default", "decode", "kv_cache_utilization_sum"] == 1


async def test_every_reason_is_exported() -> None:
    rig = Rig(decode=2)
    shown = Shown(rig, policies(actuator=None))
    async with AsyncExitStack() as stack:
        await shown.autoscaling.start(stack)
        await shown.decided()
        reasons = {key[2]: value for key, value in shown.samples().items() if key[0] == "reason"}
    assert set(reasons) == {cause.value for cause in Cause}
    assert set(reasons.values()) <= {0, 1}


async def test_series_of_a_removed_pool_end() -> None:
    rig = Rig()
    shown = Shown(rig, policies(actuator=None))
    async with AsyncExitStack() as stack:
        await shown.autoscaling.start(stack)
        await shown.decided()
        shown.autoscaling.settings = AutoscaleSettings()
        assert shown.samples() == {}
        shown.autoscaling.settings = policies(actuator=None)
        await shown.decided()
        assert shown.samples()["desired_replicas", "default", "decode"] == 1


async def test_changed_settings_keep_the_loop() -> None:
    rig = Rig()
    shown = Shown(rig, policies(actuator=None))
    async with AsyncExitStack() as stack:
        await shown.autoscaling.start(stack)
        await shown.decided()
        loop = shown.autoscaling.pools["default"].loop
        shown.autoscaling.settings = dataclasses.replace(policies(), interval=30.0)  # type: ignore[arg-type]
        assert shown.autoscaling.pools["default"].loop is loop


async def test_a_signal_pauses_all_pools() -> None:
    rig = Rig()
    shown = Shown(rig, policies(actuator=None))
    async with AsyncExitStack() as stack:
        await shown.autoscaling.start(stack)
        shown.autoscaling.pause_all()
        assert shown.autoscaling.pools["default"].loop.paused


class OneLease(Lease):
    """A lease that another process may have."""

    seconds = 60.0

    def __init__(self) -> None:
        self.is_free, self.received = True, list[str]()

    async def acquire(self) -> bool:
        return self.is_free

    async def release(self) -> None:
        self.received.append("release")

    async def close(self) -> None:
        self.received.append("close")


async def until_it_is(lead: Leadership, ours: bool) -> None:
    async with asyncio.timeout(PATIENCE):
        while lead.is_ours is not ours:
            await asyncio.sleep(0.001)


async def test_the_holder_of_the_lease_leads() -> None:
    lead, lease = Leadership(ManualClock()), OneLease()
    assert lead.is_ours, "there is no other process"
    async with AsyncExitStack() as stack:
        await lead.share(stack, lease, every=0.001)
        for is_free in (True, False, True):
            lease.is_free = is_free
            await until_it_is(lead, is_free)
    assert lease.received == ["release", "close"]


async def test_a_proxy_without_the_lease_does_not_lead() -> None:
    lead, lease = Leadership(ManualClock()), OneLease()
    lease.is_free = False
    async with AsyncExitStack() as stack:
        await lead.share(stack, lease, every=60.0)
        assert not lead.is_ours
    assert lease.received == ["close"]


class SuspendedMachine(ManualClock):
    """Its monotonic clock stands still while the machine is suspended."""

    def suspend(self, seconds: float) -> None:
        self._wall_offset += seconds


@asynccontextmanager
async def leading(clock: ManualClock, lease: OneLease, margin: float = 0.0) -> AsyncIterator[Leadership]:
    """A process that holds the lease and does not renew it."""
    lead = Leadership(clock)
    async with AsyncExitStack() as stack:
        await lead.share(stack, lease, every=3600.0, margin=margin)
        await until_it_is(lead, True)
        yield lead


async def test_a_leader_whose_machine_was_suspended_for_longer_than_the_lease_does_not_lead() -> None:
    clock = SuspendedMachine()
    async with leading(clock, OneLease()) as lead:
        clock.suspend(59.0)
        assert lead.is_ours
        clock.suspend(2.0)
        assert not lead.is_ours


async def test_a_leader_whose_clock_is_set_back_leads_no_longer_than_the_lease() -> None:
    clock = SuspendedMachine()
    async with leading(clock, OneLease()) as lead:
        clock.suspend(-3600.0)
        clock.advance(61.0)
        assert not lead.is_ours


async def test_a_leader_starts_nothing_that_could_end_after_its_lease() -> None:
    clock = ManualClock()
    async with leading(clock, OneLease(), margin=10.0) as lead:
        clock.advance(51.0)
        assert not lead.is_ours


async def test_a_leader_that_slept_past_its_lease_must_acquire_it_again() -> None:
    clock, lease = ManualClock(), OneLease()
    async with leading(clock, lease) as lead:
        for seconds, ours in ((59.0, True), (2.0, False)):
            clock.advance(seconds)
            assert lead.is_ours is ours
    assert lease.received == ["close"], "another one may have it"


class Hanging(Recording):
    """An actuator that never ends."""

    cut_off_at = 0.0

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        await super().scale(order)
        try:
            await asyncio.Event().wait()
        finally:
            self.cut_off_at = asyncio.get_running_loop().time()
        return ScalingOutcome.OK


async def cut_off_at(loop: VirtualLoop, renewals: int) -> float:
    """Return when an order that hangs is cut off. The lease of 60 s is renewed so often, every 20 s."""
    rig, scaler, lease = Rig(), Hanging(), OneLease()
    rig.signals.all["prefill"] = KnownLoad(backlog=3.0)
    autoscaling = Shown(rig, policies(actuator={**EXEC, "timeout": "10m"})).autoscaling
    autoscaling.leadership.clock = loop
    async with AsyncExitStack() as stack:
        await autoscaling.leadership.share(stack, lease, every=20.0, margin=10.0)
        await asyncio.sleep(1.0)
        await autoscaling.start(stack)
        guard = autoscaling.pools["default"]._guard
        assert guard is not None
        guard.scaler = scaler
        await asyncio.sleep(20.0 * renewals)
        lease.is_free = False
        await asyncio.sleep(100.0)
    assert len(scaler.orders) == 1
    return scaler.cut_off_at


@pytest.mark.parametrize(("renewals", "end"), [(0, 60.0), (3, 120.0)])
def test_an_action_ends_with_the_lease_of_its_leader(renewals: int, end: float) -> None:
    loop = VirtualLoop()
    try:
        assert loop.run_until_complete(cut_off_at(loop, renewals)) == end
    finally:
        loop.close()
