"""A pool of a real fleet that is scaled, on a clock that the test moves."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from proxy.autoscale.actuators import ScaleOrder, Scaler
from proxy.autoscale.loop import ScalingDecision, ScalingOutcome
from proxy.autoscale.measures import KnownLoad
from proxy.autoscale.prometheus import QueryFailed
from proxy.autoscale.scaled_pool import ScaledPool
from proxy.autoscale.settings import AutoscaleSettings, ScalingPolicy, load
from proxy.autoscale.signals import SignalSource
from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.ports import ManualClock
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.telemetry.metrics import Catalogue

EXEC = {"type": "exec", "command": ["scale"], "upInterval": "0s", "downInterval": "0s"}


def policies(**changed: Any) -> AutoscaleSettings:
    """Prefill is sized by its backlog, decode by the KV cache in use; without limits."""
    section = {
        "mode": "active",
        "roles": [
            {
                "name": "prefill",
                "min": 1,
                "max": 20,
                "metrics": [{"name": "prefill_backlog_seconds", "kind": "total", "target": 1.5}],
            },
            {
                "name": "decode",
                "min": 1,
                "max": 40,
                "metrics": [{"name": "kv_cache_utilization_sum", "kind": "total", "target": 0.8}],
            },
        ],
        "behavior": {
            "scaleUp": {"select": "none"},
            "scaleDown": {"select": "none", "stabilization": "0s"},
            "panic": {"hold": "0s"},
        },
        "coordination": {"mode": "preferred", "alpha": 0, "hysteresisPercent": 0},
        "settle": "0s",
        "actuator": EXEC,
        **changed,
    }
    return load({"prometheus": {"url": "http://prometheus:9090"}, "pools": {"default": section}})


def policy(**changed: Any) -> ScalingPolicy:
    return policies(**changed).pools["default"]


class GivenSignals(SignalSource):
    """Signals that a test sets."""

    def __init__(self) -> None:
        super().__init__(Catalogue("test"))
        self.all: dict[str, KnownLoad] = {"prefill": KnownLoad(backlog=1.5), "decode": KnownLoad()}

    async def update(self) -> None:
        pass

    def known(self, pool: str, role: str, now: float) -> KnownLoad:
        return self.all[role]


class Recording(Scaler):
    def __init__(self) -> None:
        self.orders: list[ScaleOrder] = []
        self.marks: list[tuple[list[str], bool]] = []

    async def scale(self, order: ScaleOrder) -> ScalingOutcome:
        self.orders.append(order)
        return ScalingOutcome.OK

    async def mark(self, pods: Sequence[str], doomed: bool) -> None:
        self.marks.append((list(pods), doomed))

    @property
    def result(self) -> list[tuple[str, int]]:
        return [(order.role, order.count) for order in self.orders]


class Rig:
    def __init__(self, prefill: int = 1, decode: int = 1, **changed: Any) -> None:
        self.clock = ManualClock(now=1000.0)
        self.fleet = Fleet(self.clock)
        self.signals, self.scaler, self.is_leader = GivenSignals(), Recording(), True
        self.queries: dict[str, float] = {}
        """What a Prometheus says."""
        for role, count in (("prefill", prefill), ("decode", decode)):
            for number in range(count):
                self.add(role, number)
        self.pool = ScaledPool(
            "default",
            policy(**changed),
            self.fleet,
            self.signals,
            self.clock,
            random.Random(1),
            lambda: self.is_leader,
            self.ask,
        )
        self.replace_hand()

    async def ask(self, query: str) -> float:
        if query not in self.queries:
            raise QueryFailed("no series")
        return self.queries[query]

    def replace_hand(self) -> None:
        """What is ordered is recorded, and not done."""
        if self.pool._guard is not None:
            self.pool._guard.scaler = self.scaler

    def add(self, role: str, number: int, kv_usage: float = 0.8, **labels: str) -> Endpoint:
        name = f"{role}-{number}"
        pod = self.fleet.add(PodSettings(url=f"http://{name}:8000", name=name, role=role, labels=labels))
        self.fleet.reached(pod)
        self.report(pod, kv_usage=kv_usage)
        return pod

    def add_ranks(self, role: str, number: int, ranks: int) -> list[Endpoint]:
        """A pod with a port for each rank."""
        name = f"{role}-{number}"
        settings = PodSettings(url=f"http://{name}", name=name, role=role, ports=f"8000-{7999 + ranks}")
        pods = [self.fleet.add(one) for one in settings.expanded()]
        for pod in pods:
            self.fleet.reached(pod)
            self.report(pod, kv_usage=0.8)
        return pods

    def report(self, pod: Endpoint, **metrics: Any) -> None:
        now = self.clock.now()
        known = dataclasses.replace(pod.metrics, scraped_at=now, freshness=Freshness.FRESH, **metrics)
        pod.publish(known, pod.load.requests)

    def report_all(self, role: str, **metrics: Any) -> None:
        for pod in self.fleet.endpoints:
            if pod.role == role:
                self.report(pod, **metrics)

    async def step(self, seconds: float = 15.0) -> ScalingDecision:
        decision = await self.pool.step()
        self.clock.advance(seconds)
        return decision
