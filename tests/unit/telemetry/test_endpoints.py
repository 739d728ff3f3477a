from __future__ import annotations

import math
from dataclasses import dataclass
from typing import cast

import pytest

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Metrics, update
from proxy.plugins.producers.predicted_latency import PredictedLatencyProducer
from tests.helpers.telemetry.fakes import World


def test_a_pod_shows_its_scrape_load_and_state() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a", waiting=3, running=7, kv_usage=0.25)
    endpoint.charge(4, 900)
    world.series.scrape_failed(endpoint)
    world.clock.advance(2.5)
    seen = world.scrape()
    assert seen["kvlane_endpoint_waiting_requests"] == {("pod-a",): 3}
    assert seen["kvlane_endpoint_running_requests"] == {("pod-a",): 7}
    assert seen["kvlane_endpoint_kv_cache_usage_ratio"] == {("pod-a",): 0.25}
    assert seen["kvlane_endpoint_in_flight_requests"] == {("pod-a",): 4}
    assert seen["kvlane_endpoint_in_flight_tokens"] == {("pod-a",): 900}
    assert seen["kvlane_endpoint_scrape_age_seconds"] == {("pod-a",): 2.5}
    assert seen["kvlane_endpoint_scrape_failures_total"] == {("pod-a",): 1}
    assert seen["kvlane_endpoint_state"] == {("pod-a", "ready"): 1}


def test_a_former_state_is_not_shown() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a")
    world.scrape()
    update(endpoint, state=EndpointState.DRAINING)
    assert world.scrape()["kvlane_endpoint_state"] == {("pod-a", "draining"): 1}


def test_a_pod_that_was_never_scraped_shows_no_measurements() -> None:
    world = World()
    world.fleet.endpoints.append(Endpoint("pod-a"))
    seen = world.scrape()
    assert seen["kvlane_endpoint_waiting_requests"] == {}
    assert seen["kvlane_endpoint_scrape_age_seconds"] == {}
    assert seen["kvlane_endpoint_in_flight_requests"] == {("pod-a",): 0}


def test_all_series_of_a_pod_end_with_it() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a")
    world.decided(world.attempt_of(endpoint))
    world.observer.attempt_ended(world.attempt_of(endpoint))
    assert '"pod-a"' in world.scrape().text
    world.fleet.endpoints.clear()
    assert '"pod-a"' not in world.scrape().text


def test_an_attempt_that_outlives_its_pod_brings_no_series_back() -> None:
    world = World()
    endpoint = world.fleet.add("pod-a")
    world.scrape()
    world.fleet.endpoints.clear()
    world.observer.attempt_ended(world.attempt_of(endpoint))
    assert '"pod-a"' not in world.scrape().text


def test_a_pod_that_returns_under_its_name_counts_from_zero() -> None:
    world = World()
    world.observer.attempt_ended(world.attempt_of(world.fleet.add("pod-a")))
    world.observer.flush()
    world.fleet.endpoints.clear()
    world.fleet.add("pod-a")
    seen = world.scrape()
    assert seen["kvlane_attempts_total"] == {}
    assert seen["kvlane_scheduling_decisions_total"] == {("pod-a",): 0}


def test_removed_pods_are_forgotten_without_scrapes() -> None:
    world = World()
    for number in range(50):
        world.fleet.endpoints.clear()
        world.observer.attempt_ended(world.attempt_of(world.fleet.add(f"pod-{number}")))
        world.observer.flush()
    assert len(world.series._counts) == 1


def test_two_pods_of_one_name_are_one_series() -> None:
    world = World()
    for requests in (2, 3):
        world.fleet.add("pod-a", kv_usage=requests / 10).charge(requests, 0)
    seen = world.scrape()
    assert seen["kvlane_endpoint_in_flight_requests"] == {("pod-a",): 5}
    assert seen["kvlane_endpoint_kv_cache_usage_ratio"] == {("pod-a",): 0.3}
    assert seen.text.count("kvlane_endpoint_in_flight_requests{") == 1


def test_pods_beyond_the_limit_are_summed() -> None:
    world = World(limit=2)
    for number in range(5):
        endpoint = world.fleet.add(f"pod-{number}", waiting=1)
        world.decided(world.attempt_of(endpoint))
    seen = world.scrape()
    assert seen["kvlane_endpoint_waiting_requests"] == {("pod-0",): 1, ("pod-1",): 1, ("other",): 3}
    assert seen["kvlane_scheduling_decisions_total"] == {("pod-0",): 1, ("pod-1",): 1, ("other",): 3}


def test_the_pool_is_the_mean_of_its_ready_pods() -> None:
    world = World()
    world.fleet.add("pod-a", waiting=2, kv_usage=0.2)
    world.fleet.add("pod-b", waiting=4, kv_usage=0.6)
    update(world.fleet.add("pod-c", waiting=90, kv_usage=1.0), state=EndpointState.EJECTED)
    seen = world.scrape()
    assert seen["kvlane_pool_ready_endpoints"] == {("default",): 2}
    assert seen["kvlane_pool_waiting_requests_mean"] == {("default",): 3}
    assert seen["kvlane_pool_kv_cache_usage_ratio_mean"][("default",)] == pytest.approx(0.4)


def test_each_pool_has_the_mean_of_its_own_pods_and_a_removed_one_none() -> None:
    world = World()
    world.fleet.pools = ("default", "large")
    world.fleet.add("pod-a", waiting=2)
    world.fleet.add("pod-b", "large", waiting=4)
    world.fleet.add("pod-c", "large", waiting=6)
    assert world.scrape()["kvlane_pool_waiting_requests_mean"] == {("default",): 2, ("large",): 5}
    world.fleet.pools = ("default",)
    assert world.scrape()["kvlane_pool_waiting_requests_mean"] == {("default",): 2}


def test_an_empty_fleet_is_exposed_as_zeros() -> None:
    seen = World().scrape()
    assert seen["kvlane_pool_ready_endpoints"] == seen["kvlane_pool_waiting_requests_mean"] == {("default",): 0}


def test_a_stale_scrape_shows_its_age() -> None:
    world = World()
    world.fleet.add("pod-a").publish(Metrics(waiting=3, scraped_at=0.0, freshness=Freshness.STALE), 0)
    world.clock.advance(60)
    assert world.scrape()["kvlane_endpoint_scrape_age_seconds"] == {("pod-a",): 60}
    assert not any(math.isinf(value) for value in world.scrape()["kvlane_endpoint_scrape_age_seconds"].values())


def test_the_prefix_index_is_read_at_the_exposition() -> None:
    world = World()
    world.index.pairs, world.index.bytes, world.index.error = 1000, 140_000, 0.125
    world.fleet.add("pod-a")
    seen = world.scrape()
    assert seen["kvlane_prefix_index_blocks"] == {(): 1000}
    assert seen["kvlane_prefix_index_bytes"] == {(): 140_000}
    assert seen["kvlane_endpoint_prefix_prediction_error_ratio"] == {("pod-a",): 0.125}


def test_the_worst_of_several_predictors_is_shown() -> None:
    world = World()
    assert world.scrape()["kvlane_latency_prediction_error_ratio"] == {}
    predictors = [FakePredictor(0.1), FakePredictor(1.5)]
    world.series.predictors = cast(list[PredictedLatencyProducer], predictors)
    seen = world.scrape()
    assert seen["kvlane_latency_prediction_error_ratio"] == {(): 1.5}


@dataclass
class FakePredictor:
    error: float
