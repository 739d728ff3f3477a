from __future__ import annotations

from typing import Any

from proxy.core.clock import ManualClock
from proxy.dashboard.samples import INTERVAL, KEPT, Samples, Sampling, Totals
from proxy.dashboard.series import CatalogueSeries, Series
from proxy.telemetry.catalogue import Catalogue


class Sampled:
    """A catalogue that is looked at every five seconds."""

    def __init__(self) -> None:
        self.catalogue = Catalogue("test")
        self.samples = Samples()
        self.at = 0.0
        self.look()

    def look(self, later: float = INTERVAL) -> dict[str, Any] | None:
        self.at += later
        return self.samples.take(Totals.of(CatalogueSeries(self.catalogue), self.at), 1000 + self.at)


def test_a_point_is_what_happened_since_the_one_before() -> None:
    sampled = Sampled()
    for seconds in (0.1, 0.1, 0.1, 4.0):
        sampled.catalogue.ttft.cell("m", "true").observe(seconds)
        sampled.catalogue.requests.cell("m", "chat", "complete", "2xx").add()
    sampled.catalogue.predicted_prompt.cell().add(200)
    sampled.catalogue.predicted_hits.cell().add(50)
    sampled.catalogue.refused.cell("rate-limited").add(3)
    point = sampled.look()
    assert point is not None
    assert point["good"] == 0.8
    assert point["predicted"] == 0.25
    assert point["actual"] is None
    assert point["refusals"] == {"rate-limited": 3}
    p50, p90, p99 = point["ttft"]
    assert p50 <= 0.1 < p90 == p99 == 4.0


def test_a_quiet_time_has_rates_and_no_percentiles() -> None:
    sampled = Sampled()
    sampled.catalogue.ttft.cell("m", "true").observe(1.0)
    sampled.look()
    point = sampled.look()
    assert point is not None
    assert point["good"] == 0.0
    assert point["ttft"] is None


def test_no_point_spans_a_time_in_which_nobody_looked() -> None:
    sampled = Sampled()
    assert sampled.look(later=600.0) is None
    assert sampled.look() is not None
    assert len(sampled.samples.points) == 1


def test_totals_that_shrink_with_a_worker_that_is_gone_give_no_point() -> None:
    sampled = Sampled()
    sampled.catalogue.retries.cell().add(5)
    sampled.look()
    sampled.catalogue.retries.cell().value = 1.0
    assert sampled.look() is None
    assert sampled.look() is not None


def test_a_quarter_of_an_hour_is_kept() -> None:
    sampled = Sampled()
    for _ in range(KEPT + 5):
        sampled.look()
    assert len(sampled.samples.points) == KEPT
    assert KEPT * INTERVAL == 900


async def test_the_series_are_read_when_that_is_due_and_not_before() -> None:
    clock, reads = ManualClock(), list[float]()

    async def read() -> Series:
        reads.append(clock.now())
        return CatalogueSeries(Catalogue("test"))

    sampling = Sampling(read, clock)
    for _ in range(11):
        await sampling.look()
        clock.advance(1.0)
    assert reads == [0.0, 5.0, 10.0]
    assert len(sampling.samples.points) == 2
