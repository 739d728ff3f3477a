"""Pods that come back, and how many of the requests they are candidates for."""

from __future__ import annotations

import random

import pytest

from proxy.core.endpoint import Endpoint
from proxy.core.ports import ManualClock
from proxy.fleet.records import SlowStart
from proxy.fleet.store import Fleet
from tests.unit.fleet.test_store import pod


class World:
    def __init__(self, pods: str = "abc", seconds: float = 10.0) -> None:
        self.clock = ManualClock()
        self.fleet = Fleet(self.clock, slow_start=SlowStart(seconds, self.clock, random.Random(7)))
        self.pods = [self.ready(name) for name in pods]

    def ready(self, name: str) -> Endpoint:
        endpoint = self.fleet.add(pod(name))
        self.fleet.reached(endpoint)
        return endpoint

    def share(self, endpoint: Endpoint, requests: int = 2000) -> float:
        """Of the requests for which the pod is a candidate."""
        return sum(endpoint in self.fleet.endpoints_for("m") for _ in range(requests)) / requests


def test_new_pods_are_candidates_for_all_requests_at_once() -> None:
    world = World()
    assert [world.share(endpoint, 100) for endpoint in world.pods] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("came_back_from", ["a refused connection", "a doubt"])
def test_a_returning_pod_is_a_candidate_for_a_growing_share(came_back_from: str) -> None:
    world = World()
    back, *others = world.pods
    if came_back_from == "a doubt":
        world.fleet.eject(back, "ill")
        world.fleet.uneject(back, "ill")
    else:
        world.fleet.refused(back)
        world.fleet.reached(back)
    assert world.share(back) == pytest.approx(0.1, abs=0.03)
    world.clock.advance(5.0)
    assert world.share(back) == pytest.approx(0.5, abs=0.05)
    assert [world.share(other, 100) for other in others] == [1.0, 1.0]
    world.clock.advance(5.0)
    assert world.share(back, 100) == 1.0


def test_afterwards_finding_candidates_costs_the_same() -> None:
    world = World()
    before = type(world.fleet._renew().of)
    world.fleet.eject(world.pods[0], "ill")
    world.fleet.uneject(world.pods[0], "ill")
    assert type(world.fleet._renew().of) is not before
    world.clock.advance(10.0)
    world.fleet.endpoints_for("m")
    assert type(world.fleet._renew().of) is before


def test_if_all_pods_have_returned_all_are_candidates() -> None:
    world = World("a")
    world.fleet.refused(world.pods[0])
    world.fleet.reached(world.pods[0])
    assert world.share(world.pods[0], 100) == 1.0


def test_a_pod_that_is_ejected_again_restarts_its_slow_start() -> None:
    world = World()
    back = world.pods[0]
    for _ in range(2):
        world.fleet.eject(back, "ill")
        world.fleet.uneject(back, "ill")
        world.clock.advance(4.0)
    assert world.share(back) == pytest.approx(0.4, abs=0.05)


def test_pods_used_beyond_the_panic_threshold_get_their_whole_share() -> None:
    world = World()
    for endpoint in world.pods[:2]:
        world.fleet.eject(endpoint, "ill")
    assert world.fleet.panics
    assert [world.share(endpoint, 100) for endpoint in world.pods] == [1.0, 1.0, 1.0]


def test_without_a_time_there_is_no_slow_start() -> None:
    world = World(seconds=0.0)
    world.fleet.eject(world.pods[0], "ill")
    world.fleet.uneject(world.pods[0], "ill")
    assert world.share(world.pods[0], 100) == 1.0
