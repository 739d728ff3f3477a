"""What another policy would have said."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.autoscale.evaluation import replay, summary
from tests.helpers.autoscale.pools import BACKLOG, KV_SUM, pool
from tests.unit.autoscale.test_loop import Rig, blind

SLOW = {"scaleUp": {"instances": 1, "percent": 0}, "scaleDown": {"stabilization": "300s"}, "panic": {"hold": "0s"}}


async def recorded(steps: int = 8) -> list[dict[str, Any]]:
    """A load that rises and falls, before a pool that follows at once; blind at one moment."""
    rig = Rig()
    for step in range(steps):
        rig.cluster.metrics["decode"] = {KV_SUM: 16.0 if 2 <= step < 5 else 5.6}
        rig.cluster.metrics["prefill"] = {BACKLOG: 4.5}
        if step == 6:
            blind(rig.cluster, "missing")
        await rig.step()
    history: list[dict[str, Any]] = json.loads(json.dumps([decision.as_dict() for decision in rig.loop.history]))
    return history


async def test_the_same_policy_gives_the_same_decisions() -> None:
    history = await recorded()
    steps = replay(history, pool())
    assert [one.at for one in steps] == [decision["ts"] for decision in history]
    seen = [one for one in steps if one.replayed is not None]
    assert len(seen) == len(steps) - 1
    assert all(one.replayed is not None and one.replayed.replicas == one.recorded for one in seen)


async def test_another_policy_is_replayed_on_the_fleet_as_it_was() -> None:
    history = await recorded()
    grown = [one.replayed.total for one in replay(history, pool(behavior=SLOW)) if one.replayed is not None]
    assert grown[:3] == [10, 10, 11]
    assert sum(history[2]["roles"][role]["desired"] for role in ("prefill", "decode")) == 23


async def test_the_order_of_the_file_does_not_matter_and_other_pools_are_left_out() -> None:
    history = await recorded()
    again = replay([{"note": "no decision"}, *reversed(history)], pool())
    assert again == replay(history, pool())


def test_a_role_that_was_not_recorded_has_no_signals() -> None:
    (step,) = replay([{"ts": 1.0, "roles": {"decode": {"current": 3, "ready": 3}}}], pool())
    assert step.replayed is None


@pytest.mark.parametrize("roles", [None, 3, [], {"prefill": 3}, {"prefill": {"current": "x", "ready": -1}}])
def test_an_invalid_record_of_roles_is_ignored(roles: Any) -> None:
    (step,) = replay([{"ts": 1.0, "roles": roles}], pool())
    assert (step.replayed, dict(step.recorded)) == (None, {})


def test_moves_and_hours_are_added_up() -> None:
    points = [(0.0, {"prefill": 1, "decode": 3}), (1800.0, {"prefill": 2, "decode": 1}), (3600.0, {"prefill": 2})]
    roles = [
        {"name": "prefill", "min": 1, "max": 9, "gpus": 1, "metrics": [{"name": "a", "kind": "avg", "target": 1}]},
        {"name": "decode", "min": 1, "max": 9, "gpus": 4, "metrics": [{"name": "a", "kind": "avg", "target": 1}]},
    ]
    found = summary(pool(roles=roles), points)
    assert (found.moves, found.hours, found.gpu_hours) == (3, 3.5, 9.5)
