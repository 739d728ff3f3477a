"""Pods with data-parallel ranks: each rank is an endpoint, and the pod has one state."""

from __future__ import annotations

import pytest

from proxy.core.endpoint import RANK_LABEL, SIZE_LABEL, Endpoint, EndpointState, Freshness, Metrics
from proxy.core.ports import ManualClock
from proxy.fleet.dialects import DIALECTS
from proxy.fleet.discovery.file import parse_pods
from proxy.fleet.mirror import Mirror, MirroredFleet
from proxy.fleet.records import RANKS_IGNORED
from proxy.fleet.scrape import parse_in_steps
from proxy.fleet.settings import DataParallelSettings, PodSettings, PodSources
from tests.helpers.fleet.ranked import BLOCKS, RankedPod
from tests.unit.fleet.test_store import Calls, pod, state


def names(endpoints: object) -> list[str]:
    return [endpoint.name for endpoint in endpoints]  # type: ignore[attr-defined]


def ranked(calls: Calls, size: int = 3, name: str = "a") -> Endpoint:
    return calls.ready(name, "m", data_parallel=DataParallelSettings(size))


def test_each_rank_of_a_pod_is_a_candidate() -> None:
    calls = Calls()
    first_rank = ranked(calls)
    assert names(calls.fleet.endpoints_for("m")) == ["a/0", "a/1", "a/2"]
    assert [endpoint.rank for endpoint in calls.fleet.endpoints_for("m")] == [0, 1, 2]
    assert {endpoint.first_rank for endpoint in calls.fleet.endpoints} == {first_rank}
    assert {endpoint.url for endpoint in calls.fleet.endpoints} == {"http://a"}
    assert {endpoint.pod_name for endpoint in calls.fleet.endpoints} == {"a"}
    assert calls.events == [("ready", "a/0"), ("ready", "a/1"), ("ready", "a/2")]


def test_a_pod_without_ranks_is_one_endpoint() -> None:
    calls = Calls()
    plain = calls.ready("a")
    assert (plain.name, plain.rank, plain.first_rank, plain.ranks, plain.pod_name) == ("a", None, plain, (plain,), "a")


def test_ranks_have_separate_load_and_metrics() -> None:
    calls = Calls()
    first_rank = ranked(calls)
    first_rank.ranks[1].charge(2, 30)
    first_rank.ranks[2].publish(Metrics(waiting=4, freshness=Freshness.FRESH), 0)
    assert [each.load.requests for each in first_rank.ranks] == [0, 2, 0]
    assert [each.view.waiting for each in first_rank.ranks] == [0, 0, 4]


def test_a_drain_of_a_pod_or_rank_covers_all_ranks() -> None:
    calls = Calls()
    first_rank = ranked(calls)
    calls.fleet.drain("a")
    assert {state(each) for each in first_rank.ranks} == {EndpointState.DRAINING}
    assert set(calls.fleet.draining) == set(first_rank.ranks)
    calls.fleet.undrain("a/2")
    assert names(calls.fleet.endpoints_for("m")) == ["a/0", "a/1", "a/2"]


def test_a_rank_that_fails_ejects_the_pod_and_the_panic_threshold_counts_pods() -> None:
    calls = Calls()
    first_rank = ranked(calls, 8)
    calls.ready("b", "m")
    calls.ready("c", "m")
    calls.fleet.eject(first_rank.ranks[5], "ill")
    assert names(calls.fleet.endpoints_for("m")) == ["b", "c"], "one of three pods, eight of ten endpoints"
    assert calls.fleet.ejection_reasons(first_rank) == ["ill"]
    calls.fleet.uneject(first_rank, "ill")
    assert len(calls.fleet.endpoints_for("m")) == 10


def test_a_removed_pod_waits_for_the_requests_of_all_ranks() -> None:
    calls = Calls()
    first_rank = ranked(calls)
    first_rank.ranks[2].charge(1, 0)
    calls.fleet.remove("a")
    assert calls.fleet.get("a/2") is first_rank.ranks[2]
    first_rank.ranks[2].charge(-1, 0)
    calls.fleet.sweep()
    assert calls.fleet.endpoints == []
    assert {state(each) for each in first_rank.ranks} == {EndpointState.GONE}
    assert calls.events[-3:] == [("removed", "a/0"), ("removed", "a/1"), ("removed", "a/2")]


def test_a_pod_and_a_rank_are_found_by_their_names() -> None:
    calls = Calls()
    first_rank = ranked(calls)
    assert calls.fleet.get("a") is first_rank
    assert calls.fleet.get("a/1") is first_rank.ranks[1]
    assert calls.fleet.get("a/3") is None
    with pytest.raises(KeyError):
        calls.fleet.drain("a/3")


def test_ranks_are_detected_at_the_first_scrape_unless_configured_otherwise() -> None:
    calls = Calls()
    found, forbidden = calls.fleet.add(pod("a")), calls.fleet.add(pod("b", data_parallel=DataParallelSettings(1)))
    assert names(calls.fleet.ranks_seen(found, 2)) == ["a/0", "a/1"]
    assert names(calls.fleet.ranks_seen(forbidden, 2)) == ["b"]
    assert state(found) is EndpointState.GONE
    assert calls.events == [("removed", "a")]


@pytest.mark.parametrize("size", [1, 2])
def test_reasons_that_end_with_a_rank_no_longer_eject_its_pod(size: int) -> None:
    calls = Calls()
    ranks = ranked(calls, 3).ranks
    for name in "bcd":
        calls.ready(name)
    calls.fleet.on_removed = lambda endpoint: calls.fleet.uneject(endpoint, f"ill {endpoint.rank}")
    for rank in ranks:
        calls.fleet.eject(rank, f"ill {rank.rank}")
    calls.fleet.rank_refused(ranks[2], size)
    (pod,) = {endpoint.first_rank for endpoint in calls.fleet.endpoints if endpoint.pod_name == "a"}
    left = [why for why in calls.fleet.ejection_reasons(pod) if why != RANKS_IGNORED]
    assert left == (["ill 0", "ill 1"] if size == 2 else [])
    assert state(pod) is (EndpointState.EJECTED if size == 2 else EndpointState.READY)
    assert calls.fleet.is_leaving(ranks[2]), "it is gone"


def test_a_changed_number_of_ranks_keeps_the_remaining_ones() -> None:
    calls = Calls()
    first_rank = ranked(calls, 2)
    first = list(first_rank.ranks)
    more = calls.fleet.ranks_seen(first_rank, 4)
    assert list(more[:2]) == first
    assert [state(each) for each in more] == [EndpointState.READY] * 4
    assert {each.models for each in more} == {frozenset({"m"})}
    assert calls.events[-2:] == [("ready", "a/2"), ("ready", "a/3")]
    fewer = calls.fleet.ranks_seen(first_rank, 3)
    assert (list(fewer), state(more[3]), fewer[0].ranks) == (list(more[:3]), EndpointState.GONE, tuple(more[:3]))
    assert calls.events[-1] == ("removed", "a/3")


def test_a_declared_number_holds_while_metrics_do_not_distinguish_ranks() -> None:
    calls = Calls()
    first_rank = ranked(calls, 3)
    assert len(calls.fleet.ranks_seen(first_rank, 1)) == 3


def test_changed_settings_change_the_number_of_ranks() -> None:
    calls = Calls()
    ranked(calls, 3)
    calls.fleet.add(pod("a", data_parallel=DataParallelSettings(1)))
    assert names(calls.fleet.endpoints) == ["a"]
    calls.fleet.add(pod("a", data_parallel=DataParallelSettings(2)))
    assert names(calls.fleet.endpoints) == ["a/0", "a/1"]
    calls.fleet.add(pod("a"))
    assert names(calls.fleet.endpoints) == ["a/0", "a/1"], "what was found stays until a scrape shows another number"


def test_a_pod_that_ignores_ranks_is_one_endpoint_until_it_restarts() -> None:
    calls = Calls()
    first_rank = ranked(calls, 3)
    calls.fleet.ranks_ignored(first_rank.ranks[1])
    (plain,) = calls.fleet.endpoints_for("m")
    assert (plain.name, plain.rank, state(plain)) == ("a", None, EndpointState.READY)
    assert calls.fleet.ejection_reasons(plain) == [RANKS_IGNORED]
    assert names(calls.fleet.ranks_seen(plain, 3)) == ["a"]
    calls.fleet.restarted(plain)
    assert names(calls.fleet.ranks_seen(plain, 3)) == ["a/0", "a/1", "a/2"]


def test_a_rank_that_the_pod_refuses_as_out_of_range_corrects_its_size() -> None:
    calls = Calls()
    first_rank = ranked(calls, 8)
    wrong, other = first_rank.ranks[5], first_rank.ranks[6]
    calls.fleet.rank_refused(wrong, 2)
    assert names(calls.fleet.endpoints_for("m")) == ["a/0", "a/1"]
    assert calls.fleet.endpoints_for("m")[0] is first_rank
    calls.fleet.rank_refused(other, 2)
    assert names(calls.fleet.endpoints_for("m")) == ["a/0", "a/1"], "the second refusal comes late and changes nothing"
    assert names(calls.fleet.ranks_seen(first_rank, 4)) == ["a/0", "a/1", "a/2", "a/3"], (
        "a scrape that shows more is right"
    )


def test_a_pod_that_refuses_all_ranks_but_one_is_one_endpoint_until_it_restarts() -> None:
    calls = Calls()
    first_rank = ranked(calls, 3)
    calls.fleet.rank_refused(first_rank.ranks[2], 1)
    (plain,) = calls.fleet.endpoints_for("m")
    assert (plain.name, plain.rank) == ("a", None)
    assert names(calls.fleet.ranks_seen(plain, 1)) == ["a"], "the declared size would bring the refused ranks back"
    calls.fleet.restarted(plain)
    assert names(calls.fleet.ranks_seen(plain, 1)) == ["a/0", "a/1", "a/2"]


def test_a_peer_can_report_that_a_pod_ignores_ranks() -> None:
    calls = Calls()
    ranked(calls, 3)
    calls.fleet.peer_ejected(1, {"a": [RANKS_IGNORED]})
    assert names(calls.fleet.endpoints_for("m")) == ["a"]


def test_a_mirror_has_the_ranks_of_the_origin_and_their_metrics() -> None:
    clock = ManualClock()
    mirror = Mirror(clock)
    origin = MirroredFleet(clock, mirror.apply)
    first_rank = origin.ranks_seen(origin.add(pod("a")), 3)[0]
    first_rank.ranks[1].publish(Metrics(waiting=4, freshness=Freshness.FRESH, scraped_at=clock.now()), 0)
    origin.refreshed(first_rank.ranks[1])
    origin.reached(first_rank)
    assert names(mirror.endpoints_for("m")) == ["a/0", "a/1", "a/2"]
    assert [each.view.waiting for each in mirror.endpoints_for("m")] == [0, 4, 0]
    late = Mirror(clock)
    for kind, message in origin.messages():
        late.apply(kind, message)
    assert [(each.name, each.view.waiting) for each in late.endpoints] == [("a/0", 0), ("a/1", 4), ("a/2", 0)]
    origin.ranks_seen(first_rank, 2)
    assert names(mirror.endpoints) == ["a/0", "a/1"]


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_one_exposition_has_the_metrics_of_every_rank(engine: str) -> None:
    engine_pod = RankedPod(3, engine=engine)
    engine_pod.running, engine_pod.prompt_tokens = [1, 5, 2], [10, 20, 30]
    scrape = await parse_in_steps(engine_pod.exposition().encode(), DIALECTS[engine])
    assert scrape.total.running == 8
    assert [metrics.running for metrics in scrape.ranks] == [1, 5, 2]
    assert [metrics.prompt_tokens for metrics in scrape.ranks] == [10, 20, 30]
    assert {(metrics.block_size, metrics.process_started) for metrics in scrape.ranks} == {
        (16 if engine == "vllm" else 0, 1000.0)
    }


async def test_ranks_of_a_later_node_are_numbered_from_0() -> None:
    engine_pod = RankedPod(2, first=8)
    engine_pod.running = [3, 4]
    scrape = await parse_in_steps(engine_pod.exposition().encode(), DIALECTS["vllm"])
    assert [metrics.running for metrics in scrape.ranks] == [3, 4]
    assert scrape.ranks[0].blocks == BLOCKS


async def test_a_pod_that_has_one_rank_of_several_is_one_endpoint() -> None:
    scrape = await parse_in_steps(RankedPod(1, first=3).exposition().encode(), DIALECTS["vllm"])
    assert not scrape.ranks


async def test_ranks_without_separate_metrics_have_equal_parts() -> None:
    engine_pod = RankedPod(1)
    engine_pod.running, engine_pod.prompt_tokens = [5], [12]
    scrape = await parse_in_steps(engine_pod.exposition().encode(), DIALECTS["vllm"])
    calls = Calls()
    parts = scrape.of(ranked(calls, 3).ranks)
    assert [(metrics.running, metrics.prompt_tokens, metrics.blocks) for metrics in parts] == [
        (2, -1, BLOCKS // 3),
        (2, -1, BLOCKS // 3),
        (1, -1, BLOCKS // 3),
    ]


def test_a_range_of_ports_is_a_pod_for_each() -> None:
    sources = PodSources(static=(PodSettings(url="http://node", name="n", ports="8000-8001,9000"),))
    assert [(each.name, each.url, each.labels[RANK_LABEL]) for each in sources.static] == [
        ("n-rank-0", "http://node:8000", "0"),
        ("n-rank-1", "http://node:8001", "1"),
        ("n-rank-2", "http://node:9000", "2"),
    ]
    assert [each.name for each in PodSettings(url="http://node", ports="8000-8001").expanded()] == [
        "node-rank-0",
        "node-rank-1",
    ]


@pytest.mark.parametrize(
    ("url", "ports", "fault"),
    [
        ("http://node", "8007-8000", "no range of ports"),
        ("http://node", "8000-99999", "no range of ports"),
        ("http://node", "0-3", "no range of ports"),
        ("http://node", "eight", "is not a list of ports"),
        ("http://node", "8000,8000", "has a port twice"),
        ("http://node:8000", "8000-8001", "has a port beside ports"),
    ],
)
def test_invalid_ports_are_refused(url: str, ports: str, fault: str) -> None:
    with pytest.raises(ValueError, match=fault):
        PodSettings(url=url, ports=ports)


def test_a_file_of_pods_can_name_a_range_of_ports() -> None:
    assert [each.url for each in parse_pods("- {url: 'http://node', ports: 8000-8001}")] == [
        "http://node:8000",
        "http://node:8001",
    ]


def test_a_label_declares_the_number_of_ranks_and_a_setting_overrides_it() -> None:
    calls = Calls()
    calls.ready("a", "m", labels={SIZE_LABEL: "2"})
    calls.ready("b", "m", labels={SIZE_LABEL: "2"}, data_parallel=DataParallelSettings(1))
    calls.ready("c", "m", labels={SIZE_LABEL: "many"})
    assert names(calls.fleet.endpoints) == ["a/0", "a/1", "b", "c"]
