"""One recommendation after the other for a pool: gate, budget, what is held and what is not."""

from __future__ import annotations

import pytest

from proxy.autoscale.policy import Cause
from proxy.autoscale.recommender import Recommendation, Recommender
from tests.helpers.autoscale.pools import pool, seen

HOT = {"queue_depth": 64.0, "ttft": 4.0}


def first(received: Recommender, situations: object, at: float = 0.0) -> Recommendation:
    found = received.recommend(at, situations)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_fleet_on_target_stays() -> None:
    found = first(Recommender(pool()), seen(3, 7))
    assert (found.raw, found.corrected, found.replicas) == (10, 10, {"prefill": 3, "decode": 7})


def test_metrics_set_the_total_and_signals_the_split() -> None:
    found = first(Recommender(pool()), seen(3, 7, backlog=9.0, prefill_signals=HOT))
    assert found.raw == 6 + 7
    assert found.replicas["prefill"] > 6
    calm = first(Recommender(pool()), seen(3, 7, prefill_signals=HOT))
    assert calm.raw == 10
    assert calm.replicas["prefill"] > 3


def test_without_metrics_nothing_is_recommended() -> None:
    blind = seen(3, 7, backlog=float("nan"), kv=float("nan"))
    assert Recommender(pool()).recommend(0.0, blind) is None


def test_every_role_gets_what_it_asks_for_by_default() -> None:
    found = first(Recommender(pool()), seen(3, 7, backlog=9.0, kv=4.0))
    assert found.replicas == {"prefill": 6, "decode": 5}
    anchored = first(
        Recommender(pool(coordination={"mode": "preferred", "baseline": "current"})), seen(3, 7, backlog=9.0)
    )
    assert anchored.replicas["prefill"] < 6


def test_replicas_that_were_not_removed_count_as_the_start_of_the_period() -> None:
    received = Recommender(pool(behavior={}, lookAhead="0s"))
    for tick in range(30):
        found = first(received, seen(3, 7, backlog=1.5, kv=3.2), 15.0 * tick)
    assert found.total == 5, "the removal is recommended, but all pods still drain"
    assert first(received, seen(3, 7, kv=7.2), 450.0).total == 12


def test_replicas_that_were_not_added_do_not_count_as_the_start_of_the_period() -> None:
    received = Recommender(pool(behavior={"scaleDown": {"stabilization": "0s"}, "panic": {"hold": "0s"}}))
    assert first(received, seen(3, 7, kv=24.0)).total == 20
    assert first(received, seen(3, 7, backlog=1.5, kv=0.8), 15.0).total == 5


class TestTheGate:
    def test_while_a_replica_starts_no_replica_moves(self) -> None:
        open_pool, gated = Recommender(pool(gate=False)), Recommender(pool())
        starting = seen(3, 7, decode_ready=6, prefill_signals=HOT)
        assert first(open_pool, starting).replicas["prefill"] > 3
        found = first(gated, starting)
        assert found.gated
        assert found.replicas == {"prefill": 3, "decode": 7}

    def test_while_a_replica_drains_no_replica_moves(self) -> None:
        found = first(Recommender(pool()), seen(3, 7, draining=1, prefill_signals=HOT))
        assert (found.gated, found.replicas) == (True, {"prefill": 3, "decode": 7})

    def test_replicas_added_meanwhile_go_to_the_largest_deficit(self) -> None:
        found = first(Recommender(pool()), seen(3, 7, decode_ready=6, backlog=7.5, prefill_signals=HOT))
        assert found.raw == 12
        assert found.replicas == {"prefill": 5, "decode": 7}

    def test_replicas_removed_meanwhile_come_from_the_largest_surplus(self) -> None:
        found = first(Recommender(pool()), seen(3, 7, prefill_ready=2, kv=4.0, prefill_signals=HOT))
        assert found.raw == 8
        assert found.replicas == {"prefill": 3, "decode": 5}

    def test_the_gate_opens_when_metrics_reflect_the_change(self) -> None:
        received = Recommender(pool())
        assert first(received, seen(3, 7, decode_ready=6, prefill_signals=HOT), 0.0).gated
        assert first(received, seen(3, 7, prefill_signals=HOT), 15.0).gated
        later = first(received, seen(3, 7, prefill_signals=HOT), 45.0)
        assert not later.gated
        assert later.replicas["prefill"] > 3

    def test_panic_ignores_the_gate(self) -> None:
        panicking = pool(behavior={"panic": {"hold": "60s"}})
        found = first(Recommender(panicking), seen(3, 7, decode_ready=6, backlog=30.0))
        assert (found.panic, found.gated, found.total) == (True, False, 27)
        assert found.replicas["prefill"] >= 3
        assert found.replicas["decode"] >= 7
        assert found.result.reasons == (Cause.PANIC,)


class TestTheBudget:
    ROLES = ({"name": "prefill", "gpus": 1}, {"name": "decode", "gpus": 2})

    def budgeted(self, gpus: float, **changed: object) -> Recommender:
        metrics = {"prefill": "backlog_seconds", "decode": "kv_sum"}
        targets = {"prefill": 1.5, "decode": 0.8}
        roles = [
            {
                **role,
                "min": 1,
                "max": 40,
                "metrics": [
                    {"name": metrics[str(role["name"])], "kind": "total", "target": targets[str(role["name"])]}
                ],
            }
            for role in self.ROLES
        ]
        return Recommender(pool(roles=roles, gpuBudget=gpus, **changed))

    def test_the_total_is_the_largest_within_the_budget(self) -> None:
        wanted = seen(3, 7, kv=16.0)
        free = first(self.budgeted(1000), wanted)
        tight = first(self.budgeted(24), wanted)
        assert (free.over_budget, tight.over_budget) == (False, True)
        assert gpus(free.replicas) > 24
        assert gpus(tight.replicas) <= 24
        assert tight.corrected == free.corrected == 23

    def test_the_minima_have_precedence(self) -> None:
        found = first(self.budgeted(1), seen(3, 7))
        assert found.replicas == {"prefill": 1, "decode": 1}
        assert found.over_budget


def gpus(replicas: object) -> int:
    assert isinstance(replicas, dict)
    return int(replicas["prefill"]) + 2 * int(replicas["decode"])


class TestThePast:
    STEADY = {"scaleUp": {"select": "none"}, "scaleDown": {"select": "none", "stabilization": "300s"}}

    def test_nothing_shrinks_at_the_start(self) -> None:
        received = Recommender(pool(behavior=self.STEADY))
        assert first(received, seen(3, 7, kv=0.8), 0.0).corrected == 10
        assert first(received, seen(3, 7, kv=0.8), 299.0).corrected == 10
        assert first(received, seen(3, 7, kv=0.8), 301.0).corrected == 4

    def test_nothing_shrinks_right_after_a_long_time_without_signals(self) -> None:
        received = Recommender(pool(behavior=self.STEADY))
        for at in (0.0, 15.0):
            first(received, seen(3, 7), at)
        blind = seen(3, 7, backlog=float("nan"), kv=float("nan"))
        assert received.recommend(30.0, blind) is None
        assert first(received, seen(3, 7, kv=0.8), 1000.0).corrected == 10

    def test_a_short_time_without_signals_changes_nothing(self) -> None:
        received = Recommender(pool(behavior=self.STEADY))
        first(received, seen(3, 7), 0.0)
        assert first(received, seen(3, 7, kv=0.8), 150.0).corrected == 10
        assert first(received, seen(3, 7, kv=0.8), 301.0).corrected == 4


@pytest.mark.parametrize(("spare", "total"), [(0.0, 8), (0.75, 10)])
def test_spare_replicas_stay_with_each_role(spare: float, total: int) -> None:
    """They ask for three and five, and nothing of a replica is left then."""
    down = {"select": "none", "stabilization": "0s", "spare": spare}
    received = Recommender(pool(behavior={"scaleUp": {"select": "none"}, "scaleDown": down}))
    assert first(received, seen(7, 7, backlog=4.5, kv=4.0), 0.0).total == total


def test_all_roles_can_be_sized_together() -> None:
    joint = pool(
        total="joint",
        metrics=[{"name": "kv_sum", "kind": "total", "target": 0.8}],
    )
    assert first(Recommender(joint), seen(3, 7, kv=12.0)).raw == 15
