"""What is read off pods, and off what the proxy knows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from proxy.autoscale.measures import WINDOW, KnownLoad, Measured, Recent, RoleSamples, replicas_of_role
from proxy.core.endpoint import Endpoint, Freshness, Metrics, join_ranks
from tests.helpers.autoscale.pools import pool

NOW = 1000.0
KNOWN = (
    *("queue_depth", "requests_running", "kv_cache_utilization", "kv_cache_utilization_sum", "kv_cache_demand_sum"),
    *("prefill_backlog_seconds", "uncached_tokens", "prefill_load", "requests_in_flight", "ttft"),
)


def pod(name: str = "a", *, age: float = 0.0, requests: int = 0, tokens: int = 0, **metrics: float) -> Endpoint:
    known = {"attributes": {"steps": 4.0}, **metrics}
    found = Endpoint(name, metrics=Metrics(freshness=Freshness.FRESH, scraped_at=NOW - age, **known))  # type: ignore[arg-type]
    found.charge(requests, tokens)
    return found


def measured(*pods: Endpoint, known: KnownLoad = KnownLoad(), rate: float | None = None) -> Measured:  # noqa: B008
    return Measured([pod.ranks for pod in pods], known, NOW, 45.0, rate)


def test_each_pod_has_its_part_of_the_proxys_queue() -> None:
    seen = measured(pod(waiting=3), pod(waiting=1), known=KnownLoad(queued=4))
    assert seen.value("queue_depth") == [5.0, 3.0]
    assert seen.mean("queue_depth") == 4.0


def test_without_a_ready_pod_the_proxys_queue_remains() -> None:
    seen = measured(known=KnownLoad(queued=4))
    assert seen.value("queue_depth") == 4.0
    assert seen.value("kv_cache_utilization") is None
    assert seen.mean("queue_depth") == 4.0


def test_old_metrics_are_missing() -> None:
    seen = measured(pod(kv_usage=0.5), pod(kv_usage=0.9, age=46.0))
    assert seen.value("kv_cache_utilization") == [0.5, None]
    assert seen.mean("kv_cache_utilization") == 0.5
    assert measured(pod(age=46.0)).value("kv_cache_utilization") is None


def test_the_proxys_requests_are_known_at_once() -> None:
    seen = measured(pod(requests=2, tokens=300, age=1e6), pod(requests=1, tokens=100, age=1e6))
    assert seen.value("requests_in_flight") == [2.0, 1.0]
    assert seen.value("uncached_tokens") == 400.0


def test_the_backlog_is_predicted_or_computed() -> None:
    pods = (pod(tokens=3000), pod(tokens=1000))
    assert measured(*pods).value("prefill_backlog_seconds") is None
    assert measured(*pods, known=KnownLoad(backlog=2.5)).value("prefill_backlog_seconds") == 2.5
    assert measured(*pods, known=KnownLoad(backlog=2.5), rate=8000.0).value("prefill_backlog_seconds") == 0.5


def test_the_prefill_load_is_the_rate_and_the_queue() -> None:
    pods = (pod(tokens=30_000), pod(tokens=18_000))
    assert measured(*pods, known=KnownLoad(taken=12_000.0), rate=8000.0).value("prefill_load") == 1.5 + 0.1
    assert measured(*pods, known=KnownLoad(taken=12_000.0)).value("prefill_load") is None
    assert measured(*pods, rate=8000.0).value("prefill_load") is None


def test_a_request_waiting_for_kv_cache_counts_like_a_running_one() -> None:
    seen = measured(pod(kv_usage=0.9, running=10, waiting=4), pod(kv_usage=0.5), known=KnownLoad(queued=2))
    assert seen.value("kv_cache_demand_sum") == [pytest.approx(0.9 * 1.5), 0.5 * 2]


def test_tokens_are_counted_by_the_pods() -> None:
    taken, one, other = RoleSamples(), pod(prefix_queries=1000.0, prefix_hits=400.0), pod()
    assert taken.rate(0.0, [[one], [other]]) is None
    one.publish(replace(one.metrics, prefix_queries=4000.0, prefix_hits=1400.0), 0)
    assert taken.rate(10.0, [[one], [other]]) == 200.0
    other.publish(replace(other.metrics, prefix_queries=9000.0), 0)
    assert taken.rate(20.0, [[one], [other]]) == 100.0
    one.publish(replace(one.metrics, prefix_queries=100.0, prefix_hits=0.0), 0)
    assert taken.rate(WINDOW + 10.0, [[one]]) == 0.0
    one.publish(replace(one.metrics, prefix_queries=400.0), 0)
    assert taken.rate(WINDOW + 20.0, [[one]]) == 300.0 / WINDOW


def test_pods_without_counters_give_no_reading() -> None:
    taken = RoleSamples()
    assert [taken.rate(now, [[pod()]]) for now in (0.0, 10.0)] == [None, None]


def test_any_other_name_is_an_attribute() -> None:
    assert measured(pod()).value("steps") == [4.0]
    assert measured(pod()).value("nothing") is None


@pytest.mark.parametrize("source", KNOWN)
def test_every_documented_name_is_measured(source: str) -> None:
    seen = measured(pod(), known=KnownLoad(backlog=1.0, ttft=0.5, taken=10.0), rate=100.0)
    assert seen.value(source) is not None
    assert seen.mean(source) is not None


def test_a_pod_has_the_role_of_its_labels() -> None:
    pods = [Endpoint("a", role="prefill"), Endpoint("b", role="decode"), Endpoint("c")]
    both = pool()
    assert list(replicas_of_role(both, "prefill", pods)) == ["a"]
    metrics = [{"name": "queue_depth", "kind": "avg", "target": 1}]
    alone = pool(roles=[{"name": "vllm", "min": 1, "max": 2, "metrics": metrics}])
    assert replicas_of_role(alone, "vllm", pods) == {pod.name: [pod] for pod in pods}
    labelled = {"name": "x", "min": 1, "max": 2, "metrics": metrics, "selector": {"llm-d.ai/role": "decode"}}
    assert list(replicas_of_role(pool(roles=[labelled]), "x", pods)) == ["b"]


def test_a_percentile_drops_old_values() -> None:
    recent = Recent()
    assert recent.percentile(0.0, [(1.0, 100.0), (2.0, 100.0)]) is None
    assert recent.percentile(10.0, [(1.0, 100.0), (2.0, 110.0)]) == pytest.approx(1.9)
    assert recent.percentile(20.0, [(1.0, 120.0), (2.0, 130.0)]) == pytest.approx(1.7, abs=0.2)
    assert recent.percentile(20.0 + WINDOW, [(1.0, 120.0), (2.0, 130.0)]) is None


def test_a_reset_histogram_is_no_reading() -> None:
    recent = Recent()
    recent.percentile(0.0, [(1.0, 100.0)])
    assert recent.percentile(10.0, [(1.0, 5.0)]) is None
    assert recent.percentile(20.0, [(1.0, 15.0)]) == pytest.approx(0.9)


def test_a_pod_is_one_replica_and_its_ranks_are_the_unit_of_load() -> None:
    ranks = [pod("a", waiting=waiting, tokens=tokens, running=4) for waiting, tokens in ((1, 100), (3, 300))]
    join_ranks(ranks)
    seen = measured(ranks[0], pod("b", waiting=4, tokens=50), known=KnownLoad(queued=3))
    assert seen.value("queue_depth") == [3.0, 5.0], "the mean of two ranks, and three ranks share what waits"
    assert seen.value("requests_running") == [4.0, 0.0]
    assert seen.value("uncached_tokens") == 250.0
    taken = RoleSamples()
    taken.rate(0.0, [ranks])
    for rank in ranks:
        rank.publish(Metrics(prefix_queries=100.0, scraped_at=NOW, freshness=Freshness.FRESH), 0)
    taken.rate(1.0, [ranks])
    for rank in ranks:
        rank.publish(Metrics(prefix_queries=300.0, scraped_at=NOW, freshness=Freshness.FRESH), 0)
    assert taken.rate(2.0, [ranks]) == pytest.approx(200.0 / 2)
    taken.rate(2.5, [ranks])
    for rank in ranks:
        rank.publish(Metrics(prefix_queries=400.0, scraped_at=NOW, freshness=Freshness.FRESH), 0)
    assert taken.rate(3.0, [ranks[:1]]) == pytest.approx(300.0 / 3), "a rank that no longer serves does not count"
