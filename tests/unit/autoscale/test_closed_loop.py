"""The recommender with a fleet that reacts: replicas take two minutes to start, and the load does not wait.

A fluid model: a prefill replica does one second of prefill per second, a decode replica holds one KV cache. Requests
that are not prefilled wait, prompts that do not fit into a KV cache wait too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from proxy.autoscale.policy import RoleSituation
from proxy.autoscale.recommender import Recommender
from proxy.autoscale.settings import ScalingPolicy, load
from tests.helpers.autoscale.pools import BACKLOG, KV_SUM

TICK, START = 15.0, 120.0
HOUR = int(3600 / TICK)


@dataclass
class Role:
    """Replicas that serve, and the moments at which others will."""

    ready: int
    starting: list[float] = field(default_factory=list)

    @property
    def current(self) -> int:
        return self.ready + len(self.starting)

    def tick(self, now: float) -> None:
        self.ready += sum(at <= now for at in self.starting)
        self.starting = [at for at in self.starting if at > now]

    def scale(self, wanted: int, now: float) -> None:
        self.starting += [now + START] * (wanted - self.current)
        while self.current > wanted:
            if self.starting:
                self.starting.pop()
            else:
                self.ready -= 1


class Fleet:
    def __init__(self, prefill: int, decode: int) -> None:
        self.roles = {"prefill": Role(prefill), "decode": Role(decode)}
        self.waiting = 0.0
        self.unplaced = 0.0
        self.moved = 0
        self.overloaded = 0
        self.sizes: list[tuple[int, int]] = []

    def tick(self, now: float, prefill: float, caches: float) -> dict[str, RoleSituation]:
        """`prefill` are seconds of prefill that come in a second, `caches` replicas' worth of KV cache in demand."""
        for role in self.roles.values():
            role.tick(now)
        first, second = self.roles["prefill"], self.roles["decode"]
        self.waiting = max(self.waiting + (prefill - first.ready) * TICK, 0.0)
        self.unplaced = max(caches - second.ready, 0.0)
        self.overloaded += self.waiting > 2 * first.ready or self.unplaced > 0
        busy = min(prefill / first.ready, 1.0) if first.ready else 1.0
        usage = min(caches / second.ready, 1.0) if second.ready else 1.0
        queued = self.waiting / max(first.ready, 1)
        return {
            "prefill": RoleSituation(
                first.current,
                first.ready,
                0,
                {BACKLOG: 1.5 * prefill / 0.8 + self.waiting / 30.0},
                {"queue_depth": queued * 4, "ttft": 0.2 * busy + queued},
            ),
            "decode": RoleSituation(
                second.current,
                second.ready,
                0,
                {KV_SUM: usage * second.ready + self.unplaced},
                {"queue_depth": 8 * self.unplaced, "kv_cache_utilization": usage},
            ),
        }

    def totals_of(self, recommended: Any, now: float) -> None:
        for name, role in self.roles.items():
            self.moved += abs(recommended[name] - role.current)
            role.scale(recommended[name], now)
        self.sizes.append((self.roles["prefill"].current, self.roles["decode"].current))


def run(policy: ScalingPolicy, load_of: Any, ticks: int, start: tuple[int, int] = (3, 6)) -> Fleet:
    fleet, recommender = Fleet(*start), Recommender(policy)
    for tick in range(ticks):
        now = tick * TICK
        found = recommender.recommend(now, fleet.tick(now, *load_of(now)))
        assert found is not None
        fleet.totals_of(found.replicas, now)
    return fleet


def policy(down: Mapping[str, Any] | None = None, **coordination: Any) -> ScalingPolicy:
    """As a policy is without being told otherwise, and preferring a fifth to a half of prefill. `down`: scaleDown."""
    bands = {"prefill": {"min": 20, "max": 50}, "decode": {"min": 50, "max": 80}}
    section = {
        "roles": [
            {"name": "prefill", "min": 1, "max": 30, "metrics": [{"name": BACKLOG, "kind": "total", "target": 1.5}]},
            {"name": "decode", "min": 1, "max": 30, "metrics": [{"name": KV_SUM, "kind": "total", "target": 0.8}]},
        ],
        "behavior": {"scaleDown": down or {}},
        "coordination": {"mode": "preferred", "preferredRatio": bands, **coordination},
    }
    return load({"pools": {"p": section}}).pools["p"]


def test_the_fleet_grows_with_a_doubled_load_and_then_rests() -> None:
    fleet = run(policy(), lambda now: (2.0, 4.0) if now < 900 else (4.0, 8.0), HOUR)
    assert fleet.waiting == 0
    assert fleet.unplaced == 0
    assert sum(fleet.sizes[-1]) >= 12
    assert len(set(fleet.sizes[-40:])) == 1, fleet.sizes[-40:]


def test_a_falling_load_removes_replicas_permanently() -> None:
    fleet = run(policy(), lambda now: (4.0, 8.0) if now < 900 else (2.0, 4.0), 2 * HOUR, (5, 10))
    totals = [sum(sizes) for sizes in fleet.sizes]
    before = int(900 / TICK)
    assert all(after <= one for one, after in zip(totals[before:], totals[before + 1 :], strict=False))
    assert totals[before + int(240 / TICK) - 1] == 15
    assert totals[-1] <= 9
    assert (fleet.waiting, fleet.unplaced) == (0, 0)


def test_a_shifting_mix_moves_replicas_between_roles() -> None:
    fleet = run(policy(), lambda now: (2.0, 7.0) if now < 1800 else (5.0, 4.5), 2 * HOUR, (3, 9))
    early, late = fleet.sizes[int(1800 / TICK) - 1], fleet.sizes[-1]
    assert late[0] > early[0]
    assert late[0] >= 5
    assert (fleet.waiting, fleet.unplaced) == (0, 0)


def waves(now: float) -> tuple[float, float]:
    return 3.0 + 0.2 * math.sin(now / 60), 6.0 + 0.3 * math.cos(now / 45)


@pytest.mark.parametrize("baseline", ["demand", "current", "weights"])
def test_a_steady_load_with_waves_moves_few_replicas_with_any_baseline(baseline: str) -> None:
    """Even pressure would make roles of different needs even: but each has what it asks for."""
    fleet = run(policy(baseline=baseline, alpha=0.5), waves, 4 * HOUR, (4, 8))
    assert fleet.moved <= 4
    assert fleet.overloaded == 0


def test_the_fleet_follows_a_day() -> None:
    fleet = run(policy(), lambda now: (3 + 2 * math.sin(now / 2000), 6 + 3 * math.sin(now / 2000)), 4 * HOUR, (4, 8))
    totals = [sum(sizes) for sizes in fleet.sizes]
    assert max(totals) >= 15
    assert min(totals[HOUR:]) <= 9
    assert fleet.overloaded < 0.05 * 4 * HOUR


def test_with_spare_a_window_of_a_minute_is_stable() -> None:
    """Waves that reach over a whole number now and then: without spare replicas go and come back."""
    short = {"stabilization": "60s"}

    def moved(down: Mapping[str, Any]) -> int:
        return run(policy(down), lambda now: (2.9, 6.3 + 0.25 * math.sin(now / 90)), 4 * HOUR, (5, 9)).moved

    assert moved({**short, "spare": 0.75}) < moved(short) / 4
