"""How late the event loop is: everything that blocks it shows here."""

from __future__ import annotations

import asyncio

from proxy.core.ports import Clock
from proxy.telemetry.instruments import Gauge

PROBE_INTERVAL = 1.0


async def probe(gauge: Gauge, clock: Clock) -> None:
    """One timer per second, until cancelled; the gauge holds by how much the last one was late, in seconds."""
    while True:
        due = clock.now() + PROBE_INTERVAL
        await asyncio.sleep(PROBE_INTERVAL)
        gauge.value = max(0.0, clock.now() - due)
