"""What holds for all actuators, and how pods are emptied before they go; on a clock that the test moves."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from proxy.autoscale.actuators import CIRCUIT, GuardedActuator, ScaleOrder, Scaler
from proxy.autoscale.drains import DrainingReplica, Drains, Orders
from proxy.autoscale.loop import ScalingOutcome
from proxy.autoscale.scaled_pool import ScaledPool
from proxy.autoscale.settings import ActuatorSettings, DrainSettings
from proxy.core.ports import ManualClock
from tests.helpers.autoscale.orders import decision


class Recording(Scaler):
    def __init__(self) -> None:
        self.orders: list[ScaleOrder] = []
        self.marks: list[tuple[list[str], bool]] = []
        self.outcome = ScalingOutcome.OK
        self.breaks = self.hangs = False

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        self.orders.append(order)
        if self.breaks:
            raise OSError("no way")
        if self.hangs:
            await asyncio.Event().wait()
        return self.outcome

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        self.marks.append((list(pods), doomed))


class Suspended(Recording):
    """The process is suspended while it marks pods, and another one leads when it goes on."""

    is_leader = True

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        await super().mark(pods, doomed)
        self.is_leader = False


class Pods:
    """Three of one role, that take requests."""

    def __init__(self) -> None:
        self.all = {name: DrainingReplica(name, inflight=1 + int(name[-1])) for name in ("d-0", "d-1", "d-2")}

    def replicas(self, role: str) -> Sequence[DrainingReplica]:
        return list(self.all.values())

    def drain(self, name: str) -> None:
        self.all[name] = replace(self.all[name], draining=True, is_victim=True, ready=False)

    def undrain(self, name: str) -> None:
        self.all[name] = replace(self.all[name], draining=False, is_victim=False, ready=True)

    def end_requests(self, name: str) -> None:
        self.all[name] = replace(self.all[name], inflight=0)

    @property
    def draining(self) -> list[str]:
        return [name for name, one in self.all.items() if one.draining]


class Rig:
    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock(now=1000.0)
        self.pods, self.scaler = Pods(), Recording()
        self.drains = Drains(DrainSettings(), cast(ScaledPool, self.pods), self.clock)
        self.guard = GuardedActuator(
            ActuatorSettings(type="exec", command=("scale",), **settings),
            self.scaler,
            self.drains,
            Orders(self.clock),
            self.clock,
            random.Random(1),
        )

    async def to(self, desired: int, current: int = 3, **bounds: int) -> ScalingOutcome:
        return await self.guard.apply(decision(desired, current, **bounds), "decode")

    @property
    def counts(self) -> list[int]:
        return [order.count for order in self.scaler.orders]


async def test_a_leader_that_was_suspended_after_it_decided_scales_and_marks_nothing_more() -> None:
    rig, scaler = Rig(), Suspended()
    rig.guard.scaler, rig.guard.is_leader = scaler, lambda: scaler.is_leader
    for name in rig.pods.all:
        rig.pods.end_requests(name)
    assert await rig.to(2) is ScalingOutcome.BUSY
    assert (scaler.orders, len(scaler.marks)) == ([], 1)
    await rig.guard.cancel("decode")
    await rig.guard.mark(["d-1"], doomed=False)
    assert len(scaler.marks) == 1, "the process that leads clears the marks of the one before"
    scaler.is_leader = True
    assert await rig.to(4) is ScalingOutcome.OK


async def test_steps_up_keep_the_interval() -> None:
    rig = Rig()
    assert await rig.to(4) is ScalingOutcome.OK
    rig.clock.advance(29.0)
    assert await rig.to(5, 4) is ScalingOutcome.BUSY
    rig.clock.advance(1.0)
    assert await rig.to(5, 4) is ScalingOutcome.OK
    assert rig.counts == [4, 5]


async def test_a_step_is_bounded_by_size_and_limits() -> None:
    rig = Rig(max_step=2)
    await rig.to(20)
    assert rig.counts == [5]
    rig = Rig(max_step=0)
    await rig.to(20, high=9)
    assert rig.counts == [9]


async def test_the_last_replica_goes_only_if_two_settings_permit_it() -> None:
    assert await Rig().to(0, 1, low=0) is ScalingOutcome.REFUSED
    rig = Rig(allow_zero=True)
    rig.pods.all = {"d-0": DrainingReplica("d-0")}
    assert await rig.to(0, 1, low=0) is ScalingOutcome.BUSY
    rig.clock.advance(1.0)
    assert await rig.to(0, 1, low=0) is ScalingOutcome.OK


async def test_a_file_is_a_kill_switch(tmp_path: Path) -> None:
    rig = Rig(kill_file=str(tmp_path / "stop"))
    (tmp_path / "stop").touch()
    assert await rig.to(4) is ScalingOutcome.REFUSED
    assert not rig.scaler.orders
    (tmp_path / "stop").unlink()
    assert await rig.to(4) is ScalingOutcome.OK


async def test_the_kill_switch_undrains_pods(tmp_path: Path) -> None:
    rig = Rig(kill_file=str(tmp_path / "stop"))
    assert await rig.to(2) is ScalingOutcome.BUSY
    (tmp_path / "stop").touch()
    assert await rig.to(2) is ScalingOutcome.REFUSED
    assert rig.pods.draining == []


async def test_a_new_pod_with_an_old_name_drains_again() -> None:
    rig = Rig()
    rig.pods.end_requests("d-0")
    assert await rig.to(2) is ScalingOutcome.BUSY
    rig.clock.advance(60.0)
    rig.pods.all["d-0"] = DrainingReplica("d-0")
    assert await rig.to(2) is ScalingOutcome.BUSY
    assert rig.pods.draining == ["d-0"]
    rig.clock.advance(1.0)
    assert await rig.to(2) is ScalingOutcome.OK


async def test_failures_cause_growing_pauses() -> None:
    rig = Rig()
    rig.scaler.outcome = ScalingOutcome.ERROR
    waits = []
    for _ in range(CIRCUIT):
        assert await rig.to(4) is ScalingOutcome.ERROR
        waited = 0
        while await rig.to(4) is ScalingOutcome.BUSY and waited < 1000:
            rig.clock.advance(1.0)
            waited += 1
        waits.append(waited)
        rig.guard.roles["decode"].failures = len(waits)
        rig.guard.roles["decode"].not_before = 0.0
    assert waits[0] in range(3, 8)
    assert waits[-1] >= 225
    assert sorted(waits) == waits


async def test_an_actuator_that_raises_counts_as_a_failure() -> None:
    rig = Rig()
    rig.scaler.breaks = True
    with pytest.raises(OSError, match="no way"):
        await rig.to(4)
    rig.scaler.breaks = False
    assert await rig.to(4) is ScalingOutcome.BUSY


async def test_an_actuator_that_is_cut_off_counts_as_a_failure() -> None:
    rig = Rig()
    rig.scaler.hangs = True
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await rig.to(4)
    rig.scaler.hangs = False
    assert await rig.to(4) is ScalingOutcome.BUSY


async def test_pods_are_drained_before_they_are_removed() -> None:
    rig = Rig()
    assert await rig.to(2) is ScalingOutcome.BUSY
    assert rig.pods.draining == ["d-0"]
    assert rig.scaler.marks == [(["d-0"], True)]
    rig.clock.advance(60.0)
    assert await rig.to(2) is ScalingOutcome.BUSY
    rig.pods.end_requests("d-0")
    assert await rig.to(2) is ScalingOutcome.OK
    (order,) = rig.scaler.orders
    assert (order.count, order.victims) == (2, ("d-0",))


async def test_a_pod_that_just_started_to_drain_may_still_receive_a_request() -> None:
    rig = Rig()
    rig.pods.end_requests("d-0")
    assert await rig.to(2) is ScalingOutcome.BUSY
    rig.clock.advance(1.0)
    assert await rig.to(2) is ScalingOutcome.OK


async def test_an_endless_request_does_not_keep_a_pod_forever() -> None:
    rig = Rig()
    assert await rig.to(2) is ScalingOutcome.BUSY
    rig.clock.advance(899.0)
    assert await rig.to(2) is ScalingOutcome.BUSY
    rig.clock.advance(1.0)
    assert await rig.to(2) is ScalingOutcome.OK


async def test_returning_demand_undrains_pods() -> None:
    rig = Rig()
    await rig.to(1)
    assert rig.pods.draining == ["d-0", "d-1"]
    await rig.to(2)
    assert rig.pods.draining == ["d-0"]
    assert await rig.to(4) is ScalingOutcome.OK
    assert rig.pods.draining == []
    assert rig.scaler.marks == [(["d-0", "d-1"], True), (["d-1"], False), (["d-0"], False)]


async def test_a_pod_whose_removal_was_ordered_is_not_undrained() -> None:
    rig = Rig()
    rig.pods.end_requests("d-0")
    await rig.to(2)
    rig.clock.advance(1.0)
    assert await rig.to(2) is ScalingOutcome.OK
    await rig.guard.cancel("decode")
    assert rig.pods.draining == ["d-0"]
    rig.drains.removal_over("decode")
    await rig.guard.cancel("decode")
    assert rig.pods.draining == []


async def test_a_failed_order_undrains_its_victims() -> None:
    rig = Rig()
    rig.pods.end_requests("d-0")
    await rig.to(2)
    rig.clock.advance(1.0)
    rig.scaler.outcome = ScalingOutcome.REFUSED
    assert await rig.to(2) is ScalingOutcome.REFUSED
    await rig.guard.cancel("decode")
    assert rig.pods.draining == []


async def test_draining_pods_are_exported() -> None:
    rig = Rig()
    await rig.to(2)
    (seen,) = rig.drains.described("decode")
    assert (seen["name"], seen["inflight"], seen["state"]) == ("d-0", 1, "draining")
    rig.pods.end_requests("d-0")
    rig.clock.advance(1.0)
    (seen,) = rig.drains.described("decode")
    assert seen["state"] == "drain_ready"
    del rig.pods.all["d-0"]
    rig.drains.forget_gone("decode")
    assert rig.drains.names("decode") == []


def test_an_order_ends_when_it_is_visible_or_timed_out() -> None:
    clock = ManualClock(now=0.0)
    orders = Orders(clock, 600.0)
    assert orders.current("decode", 3) == 3
    orders.put("decode", 5)
    assert orders.current("decode", 4) == 5
    assert orders.current("decode", 5) == 5
    assert orders.current("decode", 4) == 4
    orders.put("decode", 8)
    clock.advance(600.0)
    assert orders.current("decode", 4) == 4
