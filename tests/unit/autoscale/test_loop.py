"""The autoscaling loop of one pool, on a manual clock."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import pytest

from proxy.autoscale import loop
from proxy.autoscale.loop import Loop, ScalingDecision, ScalingOutcome
from proxy.autoscale.policy import RoleSituation, reading, readings
from proxy.core.errors import BadRequest
from proxy.core.ports import ManualClock
from tests.helpers.autoscale.pools import BACKLOG, KV_SUM, pool


class Cluster:
    """Two roles that scale at once, and can be made unobservable."""

    def __init__(self, prefill: int = 3, decode: int = 7) -> None:
        self.replicas = {"prefill": prefill, "decode": decode}
        self.metrics: dict[str, dict[str, Any]] = {"prefill": {BACKLOG: 4.5}, "decode": {KV_SUM: 5.6}}
        self.signals: dict[str, dict[str, float]] = {"prefill": {}, "decode": {}}
        self.is_unknown = False

    def situations(self) -> Mapping[str, RoleSituation]:
        if self.is_unknown:
            return {}
        return {
            role: RoleSituation(
                count,
                count,
                metrics={name: readings(value) for name, value in self.metrics[role].items()},
                signals={
                    name: found for name, value in self.signals[role].items() if (found := reading(value)) is not None
                },
            )
            for role, count in self.replicas.items()
        }

    async def apply(self, decision: ScalingDecision, role: str) -> ScalingOutcome:
        self.replicas[role] = decision.desired[role]
        return ScalingOutcome.OK


class Stuck:
    """An actuator that never gets there."""

    def __init__(self, outcome: ScalingOutcome | None = None) -> None:
        self._outcome = outcome
        self.queried: list[tuple[int, str]] = []

    async def apply(self, decision: ScalingDecision, role: str) -> ScalingOutcome:
        self.queried.append((decision.id, role))
        if self._outcome is None:
            raise OSError("no way to get there")
        return self._outcome


class Rig:
    def __init__(self, mode: str = "active", actuator: Any = None, **changed: Any) -> None:
        self.clock = ManualClock(now=1000.0)
        self.cluster = Cluster()
        acting = actuator or self.cluster
        self.loop = Loop(
            "default",
            pool(mode=mode, **changed),
            self.clock,
            {"prefill": acting, "decode": acting},
            patience=0.02,
        )

    async def step(self, seconds: float = 15.0) -> ScalingDecision:
        decision = await self.loop.step(self.cluster.situations())
        self.clock.advance(seconds)
        return decision


async def test_the_recommendation_is_applied() -> None:
    rig = Rig()
    rig.cluster.metrics["decode"][KV_SUM] = 8.0
    decision = await rig.step()
    assert sum(decision.desired.values()) == 13
    assert rig.cluster.replicas == dict(decision.desired)
    assert set(rig.loop.outcomes.values()) == {ScalingOutcome.OK}
    rig.cluster.metrics["prefill"][BACKLOG] = 1.5 * rig.cluster.replicas["prefill"]
    rig.cluster.metrics["decode"][KV_SUM] = 0.8 * rig.cluster.replicas["decode"]
    await rig.step()
    assert rig.loop.outcomes == {}


async def test_a_dry_run_does_everything_except_acting() -> None:
    rig = Rig(mode="dry_run")
    rig.cluster.metrics["decode"][KV_SUM] = 8.0
    decision = await rig.step()
    assert sum(decision.desired.values()) == 13
    assert rig.cluster.replicas == {"prefill": 3, "decode": 7}
    assert set(rig.loop.outcomes.values()) == {ScalingOutcome.DRY_RUN}


async def test_roles_that_grow_are_first() -> None:
    stuck = Stuck(ScalingOutcome.BUSY)
    rig = Rig(actuator=stuck, gate=False)
    rig.cluster.signals = {"prefill": {"queue_depth": 32.0, "ttft": 2.0}, "decode": {"queue_depth": 0.0}}
    decision = await rig.step()
    assert decision.desired["prefill"] > 3
    assert decision.desired["decode"] < 7
    assert stuck.queried == [(1, "prefill"), (1, "decode")]


async def test_a_hanging_actuator_does_not_block_the_loop() -> None:
    class Hanging:
        async def apply(self, decision: ScalingDecision, role: str) -> ScalingOutcome:
            await asyncio.Event().wait()
            return ScalingOutcome.OK

    rig = Rig(actuator=Hanging())
    rig.cluster.metrics["decode"][KV_SUM] = 8.0
    await rig.step()
    assert set(rig.loop.outcomes.values()) == {ScalingOutcome.ERROR}


async def test_an_actuator_that_fails_is_called_again_and_breaks_nothing() -> None:
    broken = Stuck()
    rig = Rig(actuator=broken)
    rig.cluster.metrics["decode"][KV_SUM] = 8.0
    for _ in range(2):
        await rig.step()
    assert set(rig.loop.outcomes.values()) == {ScalingOutcome.ERROR}
    assert {number for number, _ in broken.queried} == {1, 2}


class TestBlind:
    @pytest.mark.parametrize("how", ["unknown", "missing", "not-a-number"])
    async def test_the_last_values_are_held_and_marked_invalid(self, how: str) -> None:
        rig = Rig(mode="dry_run")
        rig.cluster.metrics["decode"][KV_SUM] = 8.0
        seen = await rig.step()
        blind(rig.cluster, how)
        held = await rig.step()
        assert (seen.valid, held.valid) == (True, False)
        assert dict(held.desired) == dict(seen.desired)
        assert held.recommendation is None

    async def test_no_actuator_is_called(self) -> None:
        stuck = Stuck(ScalingOutcome.OK)
        rig = Rig(actuator=stuck)
        rig.cluster.metrics["decode"][KV_SUM] = 8.0
        await rig.step()
        before = len(stuck.queried)
        blind(rig.cluster, "missing")
        await rig.step()
        assert len(stuck.queried) == before
        assert before

    async def test_at_start_the_current_total_is_held_and_never_zero(self) -> None:
        rig = Rig()
        blind(rig.cluster, "missing")
        decision = await rig.step()
        assert dict(decision.desired) == {"prefill": 3, "decode": 7}
        rig = Rig()
        rig.cluster.is_unknown = True
        result = (await rig.step()).as_dict()
        assert result["roles"]["decode"]["desired"] is None

    async def test_it_resumes_when_signals_return(self) -> None:
        rig = Rig()
        rig.cluster.is_unknown = True
        assert not (await rig.step()).valid
        rig.cluster.is_unknown = False
        assert (await rig.step()).valid


def blind(cluster: Cluster, how: str) -> None:
    if how == "unknown":
        cluster.is_unknown = True
    elif how == "missing":
        cluster.metrics = {"prefill": {}, "decode": {}}
    else:
        cluster.metrics = {"prefill": {BACKLOG: float("nan")}, "decode": {KV_SUM: -1.0}}


async def test_non_finite_numbers_are_null_in_json() -> None:
    rig = Rig(mode="dry_run")
    rig.cluster.metrics["prefill"] = {BACKLOG: [1.5, float("nan"), 1.5]}
    rig.cluster.metrics["decode"] = {KV_SUM: float("inf")}
    result = json.loads(json.dumps((await rig.step()).as_dict(), allow_nan=False))
    assert result["roles"]["prefill"]["metrics"] == {BACKLOG: [1.5, None, 1.5]}
    assert result["roles"]["decode"]["metrics"] == {KV_SUM: None}


async def test_a_missing_signal_is_reported_and_the_others_still_count() -> None:
    rig = Rig(mode="dry_run")
    rig.cluster.signals = {"prefill": {"ttft": 2.0}, "decode": {"queue_depth": 1.0}}
    decision = await rig.step()
    assert decision.missing["prefill"] == ("queue_depth",)
    assert decision.as_dict()["roles"]["prefill"]["pressure"] == 1.0


class TestOperators:
    async def test_a_pause_holds_everything_until_resumed(self) -> None:
        rig = Rig()
        await rig.step()
        rig.loop.paused = True
        rig.cluster.metrics["decode"][KV_SUM] = 16.0
        paused = await rig.step()
        assert (paused.mode, dict(paused.desired)) == ("paused", {"prefill": 3, "decode": 7})
        assert paused.recommendation is not None
        assert paused.recommendation.raw == 23
        assert rig.cluster.replicas == {"prefill": 3, "decode": 7}
        rig.loop.paused = False
        await rig.step()
        assert sum(rig.cluster.replicas.values()) == 23

    async def test_a_policy_can_be_paused_from_the_start(self) -> None:
        rig = Rig(mode="paused")
        rig.cluster.metrics["decode"][KV_SUM] = 16.0
        assert dict((await rig.step()).desired) == {"prefill": 3, "decode": 7}

    async def test_an_override_holds_until_it_expires(self) -> None:
        rig = Rig()
        rig.loop.override({"decode": 12}, ttl=20.0)
        ordered = await rig.step()
        assert (ordered.desired["decode"], set(ordered.overridden)) == (12, {"decode"})
        assert rig.cluster.replicas["decode"] == 12
        await rig.step()
        after = await rig.step()
        assert not after.overridden
        assert sum(after.desired.values()) == 10

    async def test_an_override_applies_without_signals(self) -> None:
        rig = Rig()
        blind(rig.cluster, "missing")
        rig.loop.override({"decode": 12}, ttl=20.0)
        assert not (await rig.step()).valid
        assert rig.cluster.replicas == {"prefill": 3, "decode": 12}

    async def test_a_held_value_is_not_an_order(self) -> None:
        rig = Rig(mode="dry_run")
        await rig.step()
        rig.loop.override({"decode": 12}, ttl=20.0)
        await rig.step()
        blind(rig.cluster, "missing")
        rig.clock.advance(60.0)
        assert (await rig.step()).desired["decode"] == 7

    @pytest.mark.parametrize(
        ("roles", "ttl", "param"),
        [({"decode": 41}, 60.0, "roles.decode"), ({"encode": 1}, 60.0, "roles.encode"), ({"decode": 2}, 0.0, "ttl")],
    )
    async def test_an_invalid_override_is_refused(self, roles: dict[str, int], ttl: float, param: str) -> None:
        rig = Rig()
        with pytest.raises(BadRequest) as refused:
            rig.loop.override({"prefill": 2, **roles}, ttl)
        assert refused.value.param == param
        assert rig.loop.overrides() == {}

    async def test_an_acknowledgement_is_recorded_and_a_wrong_one_refused(self) -> None:
        rig = Rig(mode="dry_run")
        with pytest.raises(BadRequest):
            rig.loop.acknowledge(1, {"decode": 7})
        await rig.step()
        rig.loop.acknowledge(1, {"decode": 7})
        assert rig.loop.acknowledged is not None
        assert rig.loop.acknowledged.roles == {"decode": 7}
        with pytest.raises(BadRequest):
            rig.loop.acknowledge(1, {"encode": 7})


class TestDecisions:
    async def test_they_are_numbered_and_the_oldest_are_dropped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loop, "HISTORY", 10)
        rig = Rig()
        for _ in range(12):
            await rig.step()
        assert [decision.id for decision in rig.loop.history] == list(range(3, 13))
        assert rig.loop.latest is rig.loop.history[-1]

    async def test_their_json_has_the_inputs(self) -> None:
        rig = Rig(mode="dry_run")
        rig.cluster.signals = {"prefill": {"queue_depth": 21.0, "ttft": 1.9}, "decode": {"queue_depth": 0.0}}
        result = json.loads(json.dumps((await rig.step()).as_dict()))
        assert (result["pool"], result["decision_id"], result["valid"], result["mode"]) == (
            "default",
            1,
            True,
            "dry_run",
        )
        assert result["ts"] == rig.clock.wall() - 15.0
        assert result["total"] == {"current": 10, "raw": 10, "corrected": 10, "min": 2, "max": 60}
        assert result["coordination"]["applied"] == "preferred"
        prefill, decode = result["roles"]["prefill"], result["roles"]["decode"]
        assert (prefill["current"], prefill["ready"], prefill["min"], prefill["max"]) == (3, 3, 1, 20)
        assert prefill["signals"] == {"queue_depth": 21.0, "ttft": 1.9}
        assert prefill["metrics"] == {BACKLOG: 4.5}
        assert decode["missing"] == ["kv_cache_utilization"]
        assert prefill["share"]["baseline"] == pytest.approx(0.3)


async def test_a_changed_policy_keeps_windows_and_history() -> None:
    """Otherwise every reload would scale down at once, or wait again."""
    rig = Rig(behavior={"scaleDown": {"select": "none", "stabilization": "60s"}, "panic": {"hold": "0s"}})
    await rig.step(40.0)
    rig.cluster.metrics = {"prefill": {BACKLOG: 0.1}, "decode": {KV_SUM: 0.1}}
    changed = pool(mode="active", behavior={"scaleDown": {"select": "none", "stabilization": "50s"}})
    rig.loop.pool = changed
    assert sum((await rig.step(5.0)).desired.values()) == 10, "ten were recommended 40 s ago"
    assert sum((await rig.step(10.0)).desired.values()) == 10
    decision = await rig.step()
    assert sum(decision.desired.values()) == 2
    assert [one.id for one in rig.loop.history] == [1, 2, 3, 4]


async def test_an_order_outside_new_bounds_is_dropped() -> None:
    rig = Rig()
    rig.loop.override({"decode": 20, "prefill": 5}, 600.0)
    roles = [
        {"name": "prefill", "min": 1, "max": 20, "metrics": [{"name": BACKLOG, "kind": "total", "target": 1.5}]},
        {"name": "decode", "min": 1, "max": 10, "metrics": [{"name": KV_SUM, "kind": "total", "target": 0.8}]},
    ]
    rig.loop.pool, rig.loop.actuators = pool(mode="active", roles=roles), {}
    assert rig.loop.overrides() == {"prefill": 5}


async def test_a_removed_role_is_no_longer_reported() -> None:
    rig = Rig()
    await rig.step()
    roles = [{"name": "prefill", "min": 1, "max": 20, "metrics": [{"name": BACKLOG, "kind": "total", "target": 1.5}]}]
    rig.loop.pool, rig.loop.actuators = pool(mode="active", roles=roles), {}
    rig.cluster.is_unknown = True
    assert set((await rig.step()).desired) == {"prefill"}
