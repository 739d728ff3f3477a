"""The autoscaler of one pool, with a fleet under it."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.autoscale.measures import KnownLoad
from proxy.core.endpoint import EndpointState
from proxy.core.errors import BadRequest
from proxy.fleet.store import AUTOSCALER
from tests.helpers.autoscale.scaled import EXEC, Rig, policy


async def test_each_role_is_sized_by_its_load() -> None:
    rig = Rig(prefill=1, decode=2)
    rig.signals.all["prefill"] = KnownLoad(backlog=4.4)
    decision = await rig.step()
    assert dict(decision.desired) == {"prefill": 3, "decode": 2}
    assert rig.scaler.result == [("prefill", 3)]


async def test_ordered_replicas_count_until_they_are_visible() -> None:
    """Else it would be ordered again, or taken back."""
    rig = Rig()
    rig.signals.all["prefill"] = KnownLoad(backlog=3.0)
    await rig.step()
    decision = await rig.step()
    assert decision.situations["prefill"].current == 2
    assert decision.situations["prefill"].ready == 1
    assert rig.scaler.result == [("prefill", 2)]
    rig.add("prefill", 1)
    decision = await rig.step()
    assert (decision.situations["prefill"].current, decision.situations["prefill"].ready) == (2, 2)


async def test_replicas_that_never_start_are_ordered_again() -> None:
    rig = Rig()
    rig.signals.all["prefill"] = KnownLoad(backlog=3.0)
    for _ in range(42):
        rig.report_all("decode")
        await rig.step()
    assert rig.scaler.result == [("prefill", 2), ("prefill", 2)]


async def test_a_pod_drains_before_it_is_removed() -> None:
    rig = Rig(decode=3)
    busy = rig.fleet.get("decode-1")
    assert busy is not None
    for name in ("decode-0", "decode-1", "decode-2"):
        if (pod := rig.fleet.get(name)) is not None:
            pod.charge(2 if pod is not busy else 1, 0)
    rig.report_all("decode", kv_usage=0.5)
    await rig.step()
    assert busy.state is EndpointState.DRAINING
    assert rig.scaler.result == []
    rig.report_all("decode", kv_usage=0.75)
    decision = await rig.step()
    assert decision.situations["decode"].draining == 1
    (drain,) = rig.pool.described(decision)["roles"]["decode"]["drain"]
    assert (drain["name"], drain["state"], drain["inflight"]) == ("decode-1", "draining", 1)
    busy.charge(-1, 0)
    await rig.step()
    assert rig.scaler.result == [("decode", 2)]
    assert rig.scaler.orders[0].victims == ("decode-1",)
    assert busy.state is EndpointState.DRAINING, "its end is under way"
    rig.fleet.remove("decode-1")
    rig.report_all("decode", kv_usage=0.8)
    decision = await rig.step()
    assert decision.situations["decode"].current == 2


async def test_the_last_pod_of_a_role_in_its_group_drains_last() -> None:
    rig = Rig(decode=0, drain={"groupLabel": "group"})
    for number, group in enumerate(("a", "b", "b")):
        rig.add("decode", number, group=group)
    rig.report_all("decode", kv_usage=0.5)
    await rig.step()
    assert [pod.name for pod in rig.fleet.draining] == ["decode-1"]


async def test_demand_that_returns_ends_a_drain() -> None:
    rig = Rig(decode=3)
    rig.report_all("decode", kv_usage=0.5)
    await rig.step(0.5)
    assert [pod.name for pod in rig.fleet.draining] == ["decode-0"]
    rig.report_all("decode", kv_usage=1.0)
    await rig.step(0.5)
    assert list(rig.fleet.draining) == []
    assert rig.scaler.result == []


async def test_a_role_without_known_pods_is_unknown() -> None:
    """A fleet of ten is not scaled to its minimum because the proxy has just been started."""
    rig = Rig(prefill=0)
    decision = await rig.step(60.0)
    assert not decision.valid
    assert "prefill" not in decision.desired
    rig.report_all("decode")
    decision = await rig.step()
    assert decision.valid
    assert decision.desired["prefill"] == 1


async def test_old_metrics_of_a_pod_are_missing() -> None:
    rig = Rig()
    rig.clock.advance(46.0)
    rig.signals.all["prefill"] = KnownLoad()
    decision = await rig.step()
    assert not decision.valid
    assert "kv_cache_utilization_sum" in decision.missing["decode"]
    assert dict(decision.desired) == {"prefill": 1, "decode": 1}


async def test_a_pool_with_unusable_metrics_holds_its_values_and_obeys_an_operator() -> None:
    rig = Rig(decode=2)
    rig.report_all("decode", kv_usage=1.5e308)  # the mean of two is too large for a float
    rig.pool.loop.override({"prefill": 3}, ttl=60.0)
    decision = await rig.step()
    assert (decision.valid, dict(decision.desired)) == (False, {"prefill": 3})
    rig.report_all("decode", kv_usage=0.8)
    assert (await rig.step()).valid


async def test_a_changed_policy_keeps_the_observations() -> None:
    rig = Rig(decode=4)
    await rig.step()
    rig.pool.settings = policy(behavior={"scaleDown": {"stabilization": "60s", "select": "none"}})
    rig.replace_hand()
    rig.report_all("decode", kv_usage=0.1)
    decision = await rig.step()
    assert (decision.id, decision.desired["decode"]) == (2, 4), "four were recommended 15 s ago"
    assert len(rig.pool.loop.history) == 2


async def test_state_of_a_removed_role_is_dropped() -> None:
    rig = Rig()
    await rig.step()
    assert {role for role, _, _ in rig.pool.decisions} == {"prefill", "decode"}
    decode = {
        "name": "decode",
        "min": 1,
        "max": 2,
        "metrics": [{"name": "requests_in_flight", "kind": "avg", "target": 1}],
    }
    rig.pool.settings = policy(roles=[decode])
    decision = await rig.step()
    assert {role for role, _, _ in rig.pool.decisions} == {"decode"}
    assert set(decision.desired) == {"decode"}


async def test_a_proxy_that_does_not_lead_decides_and_does_not_act() -> None:
    rig = Rig(decode=3)
    rig.is_leader = False
    rig.signals.all["prefill"] = KnownLoad(backlog=3.0)
    rig.report_all("decode", kv_usage=0.1)
    decision = await rig.step()
    assert decision.desired == {"prefill": 2, "decode": 1}
    assert rig.scaler.result == []
    assert list(rig.fleet.draining) == []
    assert rig.pool.described(decision)["leads"] is False


@pytest.mark.parametrize("how", ["paused", "dry_run", "no actuator", "no policy"])
async def test_pods_that_will_not_be_removed_serve_again(how: str) -> None:
    rig = Rig(decode=3)
    rig.report_all("decode", kv_usage=0.5)
    await rig.step(0.5)
    assert len(rig.fleet.draining) == 1
    if how == "paused":
        rig.pool.loop.paused = True
    elif how == "no policy":
        rig.pool.end()
    else:
        rig.pool.settings = policy(mode="dry_run") if how == "dry_run" else policy(actuator=None)
    rig.replace_hand()
    if how != "no policy":
        await rig.step(0.5)
    assert list(rig.fleet.draining) == []


async def test_a_proxy_that_loses_the_lead_ends_its_drains() -> None:
    rig = Rig(decode=3)
    rig.report_all("decode", kv_usage=0.5)
    await rig.step(0.5)
    assert len(rig.fleet.draining) == 1
    rig.is_leader = False
    await rig.step(0.5)
    assert len(rig.fleet.draining) == 0


async def test_a_pod_that_an_operator_drained_stays_drained_when_demand_returns() -> None:
    rig = Rig(decode=3)
    rig.fleet.drain("decode-1")
    rig.report_all("decode", kv_usage=0.5)
    await rig.step(0.5)
    assert [one["name"] for one in rig.pool.drains.described("decode")] == ["decode-1"], "its removal costs least"
    rig.report_all("decode", kv_usage=1.0)
    await rig.step(0.5)
    assert [pod.name for pod in rig.fleet.draining] == ["decode-1"]
    rig.fleet.undrain("decode-1")
    assert list(rig.fleet.draining) == []


async def test_an_operator_returns_a_pod_to_service_that_the_autoscaler_drained() -> None:
    rig = Rig(decode=3)
    rig.report_all("decode", kv_usage=0.5)
    await rig.step(0.5)
    rig.fleet.undrain("decode-0")
    assert list(rig.fleet.draining) == []


async def test_a_new_leader_returns_the_pods_to_service_that_a_crashed_leader_drained() -> None:
    rig = Rig(decode=3)
    rig.is_leader = False
    rig.fleet.drain("decode-0", AUTOSCALER)  # as the host of the leader has published
    rig.report_all("decode", kv_usage=1.0)
    await rig.step(0.5)
    assert [pod.name for pod in rig.fleet.draining] == ["decode-0"], "the drain is the leader's"
    rig.is_leader = True
    await rig.step(0.5)
    assert list(rig.fleet.draining) == []


async def test_a_new_leader_removes_the_pods_that_a_crashed_leader_drained() -> None:
    rig = Rig(decode=3)
    rig.fleet.drain("decode-1", AUTOSCALER)
    rig.report_all("decode", kv_usage=0.8)
    await rig.step()
    await rig.step()
    assert [order.victims for order in rig.scaler.orders] == [("decode-1",)]
    assert [pod.name for pod in rig.fleet.draining] == ["decode-1"]


async def test_marks_of_an_earlier_leader_are_cleared_once() -> None:
    rig = Rig(decode=3)
    rig.report_all("decode", kv_usage=0.5)
    await rig.step()
    await rig.step()
    assert rig.scaler.marks == [(["decode-0"], True), (["prefill-0"], False), (["decode-1", "decode-2"], False)]


async def test_an_acknowledgement_counts_as_an_order() -> None:
    rig = Rig(actuator=None)
    rig.signals.all["prefill"] = KnownLoad(backlog=3.0)
    decision = await rig.step()
    rig.pool.acknowledge(decision.id, {"prefill": 2})
    decision = await rig.step()
    assert decision.situations["prefill"].current == 2
    with pytest.raises(BadRequest):
        rig.pool.acknowledge(99, {"prefill": 2})


async def test_only_the_roles_of_the_actuator_are_scaled() -> None:
    rig = Rig(decode=1, actuator={**EXEC, "roles": ["prefill"]})
    rig.signals.all["prefill"] = KnownLoad(backlog=3.0)
    rig.report_all("decode", kv_usage=1.0)
    await rig.step()
    assert rig.scaler.result == [("prefill", 2)]
    assert rig.pool.actuations == {("prefill", "exec", "ok"): 1, ("decode", "exec", "dry_run"): 1}


def sized(name: str, metric: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": name, "min": 1, "max": 20, "metrics": [metric], **more}


async def test_a_role_is_sized_by_a_query_and_keeps_its_size_without_a_response() -> None:
    queried = {"name": "queued", "kind": "total", "target": 4, "source": "promql: sum(queued)"}
    rig = Rig(decode=2, roles=[sized("decode", queried)], actuator=None)
    assert not (await rig.step()).valid
    rig.queries["sum(queued)"] = 12.0
    assert (await rig.step()).desired == {"decode": 3}
    rig.queries.clear()
    assert (await rig.step(60.0)).valid, "it is not yet old"
    assert not (await rig.step()).valid


async def test_prefill_is_sized_by_the_tokens_that_its_pods_compute() -> None:
    metric = {"name": "prefill_load", "kind": "total", "target": 0.5}
    rig = Rig(roles=[sized("prefill", metric, prefillRate=1000)], actuator=None)
    pod = rig.fleet.endpoints[0]
    rig.report(pod, prefix_queries=50_000.0, prefix_hits=20_000.0)
    assert not (await rig.step()).valid, "one look is no rate"
    rig.report(pod, prefix_queries=95_000.0, prefix_hits=35_000.0)
    assert (await rig.step()).desired == {"prefill": 4}


async def test_a_pod_with_ranks_is_one_replica() -> None:
    rig = Rig(decode=2)
    first_rank = rig.fleet.get("decode-0")
    assert first_rank is not None
    ranks = rig.fleet.ranks_seen(first_rank, 4)
    ranks[3].charge(2, 0)
    rig.report_all("decode")
    decision = await rig.step()
    assert (decision.situations["decode"].current, decision.situations["decode"].ready) == (2, 2)
    assert [(one.name, one.inflight) for one in rig.pool.replicas("decode")] == [("decode-0", 2), ("decode-1", 0)]


async def test_a_pod_with_a_port_for_each_rank_is_one_replica_and_drains_as_one() -> None:
    rig = Rig(decode=0)
    for number in range(3):
        rig.add_ranks("decode", number, ranks=4)
    busy, *_ = [pod for pod in rig.fleet.endpoints if pod.replica_name == "decode-1"]
    for pod in rig.fleet.endpoints:
        if pod.role == "decode":
            pod.charge(1 if pod.replica_name != "decode-1" or pod is busy else 0, 0)
    rig.report_all("decode", kv_usage=0.5)
    decision = await rig.step()
    seen = decision.situations["decode"]
    assert (seen.current, seen.ready) == (3, 3)
    assert seen.metrics["kv_cache_utilization_sum"] == [0.5, 0.5, 0.5], "the mean of the ranks of each replica"
    assert decision.desired["decode"] == 2
    assert sorted(pod.name for pod in rig.fleet.draining) == [f"decode-1-rank-{rank}" for rank in range(4)]
    replicas = {one.name: one for one in rig.pool.replicas("decode")}
    assert sorted(replicas) == ["decode-0", "decode-1", "decode-2"]
    assert [replicas[name].ordinal for name in sorted(replicas)] == [0, 1, 2]
    assert [replicas[name].inflight for name in sorted(replicas)] == [4, 1, 4]
    busy.charge(-1, 0)
    rig.report_all("decode", kv_usage=0.75)
    decision = await rig.step()
    assert (decision.situations["decode"].ready, decision.situations["decode"].draining) == (2, 1)
    assert rig.scaler.result == [("decode", 2)]
    assert rig.scaler.orders[0].victims == ("decode-1",)


async def test_a_replica_serves_while_one_of_its_ranks_does_and_its_load_is_the_mean_of_ready_ranks() -> None:
    rig = Rig(decode=8)
    ejected, *ranks = rig.add_ranks("decode", 8, ranks=3)
    rig.fleet.eject(ejected, "makes no progress")
    for pod, usage in zip((ejected, *ranks), (0.0, 0.6, 0.8), strict=True):
        rig.report(pod, kv_usage=usage)
    decision = await rig.step()
    seen = decision.situations["decode"]
    assert (seen.current, seen.ready, seen.draining) == (9, 9, 0)
    assert seen.metrics["kv_cache_utilization_sum"] == [*[0.8] * 8, pytest.approx(0.7)]
    for pod in ranks:
        rig.fleet.eject(pod, "makes no progress")
    decision = await rig.step()
    assert (decision.situations["decode"].current, decision.situations["decode"].ready) == (9, 8)


async def test_a_drain_of_ranks_with_a_port_each_ends_as_one() -> None:
    rig = Rig(decode=0)
    for number in range(2):
        rig.add_ranks("decode", number, ranks=2)
    rig.report_all("decode", kv_usage=0.3)
    await rig.step(0.5)
    assert len(rig.fleet.draining) == 2
    rig.report_all("decode", kv_usage=0.9)
    await rig.step(0.5)
    assert list(rig.fleet.draining) == []
    assert rig.scaler.marks[-1] == (["decode-0"], False)
