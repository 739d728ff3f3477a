"""Replicas change their role where a role lacks them, a limited number at a time, and with surge one by one."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.autoscale.policy import RoleSituation
from proxy.autoscale.recommender import Recommendation, Recommender, stepped
from tests.helpers.autoscale.pools import BACKLOG, KV_SUM, pool, seen

PRESSED = {"queue_depth": 64.0, "ttft": 4.0}
HELD = {
    "scaleUp": {"select": "none"},
    "scaleDown": {"select": "none", "stabilization": "300s"},
    "panic": {"hold": "0s"},
}


def queried(received: Recommender, situations: dict[str, RoleSituation], at: float = 0.0) -> Recommendation:
    found = received.recommend(at, situations)
    assert found is not None
    return found


def needing(prefill: int, decode: int, wants: tuple[int, int], **more: Any) -> dict[str, RoleSituation]:
    """Roles of these sizes whose metrics ask for others."""
    return seen(prefill, decode, backlog=1.5 * wants[0], kv=0.8 * wants[1], **more)


def test_spare_replicas_stay() -> None:
    """The window holds twelve; two and four are needed, and their shares of twelve would be others than what runs."""
    found = queried(Recommender(pool(behavior=HELD)), needing(6, 6, (2, 4)))
    assert found.result.replicas != {"prefill": 6, "decode": 6}
    assert found.replicas == {"prefill": 6, "decode": 6}


def test_a_short_role_gets_the_surplus_of_another() -> None:
    found = queried(Recommender(pool(behavior=HELD)), needing(8, 4, (3, 7)))
    assert found.replicas["decode"] >= 7


def test_a_role_under_pressure_gets_more_than_its_metrics_need() -> None:
    calm, hot = needing(3, 7, (3, 7)), needing(3, 7, (3, 7), prefill_signals=PRESSED)
    assert queried(Recommender(pool()), calm).replicas["prefill"] == 3
    assert queried(Recommender(pool()), hot).replicas["prefill"] > 3


def test_preferred_ratios_are_kept_although_no_role_is_short() -> None:
    bands = {"prefill": {"min": 20, "max": 40}}
    kept = pool(behavior=HELD, coordination={"mode": "preferred", "preferredRatio": bands})
    assert queried(Recommender(kept), needing(6, 4, (2, 2))).replicas == {"prefill": 4, "decode": 6}


def test_the_total_gives_each_role_its_need_within_the_ratios() -> None:
    bands = {"prefill": {"min": 25, "max": 50}}
    narrow = pool(coordination={"mode": "preferred", "alpha": 0, "preferredRatio": bands})
    found = queried(Recommender(narrow), needing(3, 3, (6, 2)))
    assert (found.raw, found.replicas) == (12, {"prefill": 6, "decode": 6})
    off = pool(coordination={"mode": "off", "preferredRatio": bands})
    assert queried(Recommender(off), needing(3, 3, (6, 2))).raw == 8


def test_behind_the_gate_a_role_that_needs_more_still_gets_it() -> None:
    starting = needing(8, 4, (3, 8), decode_ready=3)
    found = queried(Recommender(pool(behavior=HELD)), starting)
    assert found.gated
    assert found.replicas["decode"] >= 8


def test_in_panic_replicas_go_to_the_role_that_needs_them() -> None:
    panicking = pool(behavior={**HELD, "panic": {"hold": "60s"}}, coordination={"mode": "preferred", "alpha": 0})
    found = queried(Recommender(panicking), needing(2, 2, (8, 2)))
    assert found.panic
    assert found.replicas == {"prefill": 8, "decode": 2}


@pytest.mark.parametrize(("most", "after"), [(0, 5), (1, 2), (3, 4), (9, 5)])
def test_moves_per_decision_are_limited(most: int, after: int) -> None:
    limited = pool(behavior=HELD, maxMoves=most, coordination={"mode": "preferred", "alpha": 0})
    found = queried(Recommender(limited), needing(9, 1, (5, 5)))
    assert found.replicas == {"prefill": 10 - after, "decode": after}


def test_the_role_with_the_largest_deficit_is_first() -> None:
    kept, wanted = {"a": 6, "b": 1, "c": 1}, {"a": 2, "b": 4, "c": 2}
    assert stepped(kept, wanted, 2, None) == {"a": 4, "b": 3, "c": 1}
    assert stepped(kept, wanted, 0, None) == stepped(kept, wanted, 4, None) == wanted
    assert stepped(kept, wanted, 0, lambda held: held["b"] >= 2) == {"a": 5, "b": 2, "c": 1}


def test_added_replicas_go_to_the_role_that_needs_them() -> None:
    """By shares decode misses more; but it has what it asks for, and would have to give it back."""
    calm = pool(behavior=HELD, coordination={"mode": "preferred", "hysteresisPercent": 20})
    usage = {"queue_depth": 40.0, "kv_cache_utilization": 0.6}
    found = queried(Recommender(calm), needing(4, 11, (5, 11), decode_signals=usage))
    assert found.result.target["decode"] - 11 > found.result.target["prefill"] - 4
    assert found.replicas == {"prefill": 5, "decode": 11}


def test_no_more_replicas_change_their_role_than_a_role_lacks() -> None:
    """Nine are held; by shares of three and five it would be three and six."""
    calm = pool(behavior=HELD, coordination={"mode": "preferred", "alpha": 0})
    found = queried(Recommender(calm), needing(5, 4, (2, 5)))
    assert found.result.replicas == {"prefill": 3, "decode": 6}
    assert found.replicas == {"prefill": 4, "decode": 5}


class TestSurge:
    def received(self, gpus: float) -> Recommender:
        policy = {"mode": "preferred", "alpha": 0}
        behavior = {**HELD, "scaleDown": {"select": "none", "stabilization": "0s"}}
        return Recommender(pool(behavior=behavior, surge=True, gpuBudget=gpus, settle="0s", coordination=policy))

    def test_a_replica_starts_in_its_new_role_before_it_leaves_the_old_one(self) -> None:
        received = self.received(gpus=12)
        assert queried(received, needing(6, 4, (4, 6)), 0.0).replicas == {"prefill": 6, "decode": 6}
        starting = needing(6, 6, (4, 6), decode_ready=4)
        assert queried(received, starting, 60.0).replicas == {"prefill": 6, "decode": 6}
        assert queried(received, needing(6, 6, (4, 6)), 120.0).replicas == {"prefill": 4, "decode": 6}

    def test_without_spare_gpus_it_leaves_first(self) -> None:
        assert queried(self.received(gpus=11), needing(6, 4, (4, 6))).replicas == {"prefill": 4, "decode": 6}

    def test_draining_replicas_do_not_block_the_others(self) -> None:
        received = self.received(gpus=12)
        draining = needing(6, 6, (4, 6), prefill_ready=5)
        draining["prefill"] = RoleSituation(6, 5, 1, {BACKLOG: 6.0}, {})
        draining["decode"] = RoleSituation(6, 6, 0, {KV_SUM: 4.8}, {})
        assert queried(received, draining).replicas == {"prefill": 4, "decode": 6}
