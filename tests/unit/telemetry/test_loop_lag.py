from __future__ import annotations

import asyncio
from typing import cast

import pytest

from proxy.core.ports import ManualClock
from proxy.telemetry import process
from proxy.telemetry.metrics import Gauge


@pytest.mark.parametrize(("slept", "lag"), [(0.3, 0.3), (0.0, 0.0), (-0.1, 0.0)])
async def test_the_gauge_shows_the_delay_of_a_timer(monkeypatch: pytest.MonkeyPatch, slept: float, lag: float) -> None:
    monkeypatch.setattr(process, "PROBE_INTERVAL", 0.02)
    clock, gauge = ManualClock(), Announcing()
    probing = asyncio.get_running_loop().create_task(process.probe_loop_lag(cast(Gauge, gauge), clock))
    await asyncio.sleep(0)
    clock.advance(0.02 + slept)
    async with asyncio.timeout(5):
        await gauge.announced.wait()
    probing.cancel()
    assert gauge.values[0] == pytest.approx(lag)


class Announcing:
    """A gauge that says when it was set."""

    def __init__(self) -> None:
        self.values: list[float] = []
        self.announced = asyncio.Event()

    @property
    def value(self) -> float:
        return self.values[-1]

    @value.setter
    def value(self, value: float) -> None:
        self.values.append(value)
        self.announced.set()
