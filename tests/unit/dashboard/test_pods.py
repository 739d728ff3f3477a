from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import orjson

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.ports import ManualClock
from proxy.dashboard.feed import FIELDS, PodRows
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import Catalogue


class Map:
    def __init__(self, *names: str) -> None:
        self.clock = ManualClock(now=50.0)
        self.fleet = Fleet(self.clock)
        self.counts = EndpointSeries(Catalogue("test"), self.fleet, self.clock)
        self.pace: tuple[float, float] | None = None
        self.rows = PodRows(
            self.fleet,
            self.clock,
            lambda pod: "closed",
            lambda pod: self.counts.of(pod).attempts,
            lambda: lambda endpoint: self.pace,
        )
        self.pods = [self.add(name) for name in names]

    def add(self, name: str) -> Endpoint:
        endpoint = self.fleet.add(PodSettings(url=f"http://{name}", name=name))
        self.fleet.reached(endpoint)
        return endpoint

    async def changes(self) -> dict[str, dict[str, Any] | None]:
        received = await self.rows.changes()
        return {
            name: None if row is None else dict(zip(FIELDS, orjson.loads(row), strict=True))
            for name, row in received.items()
        }


async def test_the_first_read_returns_all_rows_and_the_next_the_changed_rows() -> None:
    fleet = Map("a", "b", "c")
    assert set(await fleet.changes()) == {"a", "b", "c"}
    assert await fleet.changes() == {}
    fleet.pods[1].charge(2, 300)
    changed = await fleet.changes()
    assert set(changed) == {"b"}
    assert changed["b"] is not None
    assert (changed["b"]["requests"], changed["b"]["tokens"]) == (2, 300)


async def test_a_removed_pod_is_reported_once() -> None:
    fleet = Map("a", "b")
    await fleet.changes()
    fleet.fleet.remove("a")
    assert await fleet.changes() == {"a": None}
    assert await fleet.changes() == {}


async def test_a_row_has_the_findings_of_its_pod() -> None:
    fleet = Map("a")
    (pod,) = fleet.pods
    fresh = Metrics(waiting=4, running=2, kv_usage=0.5, scraped_at=40.0, freshness=Freshness.FRESH)
    pod.publish(replace(fresh, freshness=Freshness.STALE), 0)
    fleet.fleet.eject(pod, "makes no progress")
    fleet.counts.of(pod).attempts = Counter({"complete": 5, "client-gone": 1, "upstream-failed": 2, "timed-out": 1})
    fleet.pace = (0.2, 0.01)
    row = (await fleet.changes())["a"]
    assert row is not None
    assert row["doubts"] == ["makes no progress"]
    assert row["stale"]
    assert row["scrapedAt"] == 1_700_000_000 - 10
    assert (row["sent"], row["failed"]) == (9, 3)
    assert (row["prefill"], row["perToken"]) == (0.2, 0.01)


async def test_a_row_says_why_and_since_when_scrapes_fail() -> None:
    fleet = Map("a")
    (pod,) = fleet.pods
    for why in ("connection refused", "timeout"):
        fleet.fleet.missed(pod, why)
        row = (await fleet.changes())["a"]
        assert row is not None
        assert (row["scrapeFailure"], row["failingSince"]) == (why, 1_700_000_000)
        fleet.clock.advance(3.0)
    pod.publish(Metrics(scraped_at=fleet.clock.now(), freshness=Freshness.FRESH), 0)
    fleet.fleet.refreshed(pod)
    row = (await fleet.changes())["a"]
    assert row is not None
    assert (row["scrapeFailure"], row["failingSince"]) == (None, None)


async def test_a_pod_that_was_never_reached_is_shown() -> None:
    fleet = Map("a")
    (pod,) = fleet.pods
    pod.publish(replace(pod.metrics, freshness=Freshness.STALE), 0)
    row = (await fleet.changes())["a"]
    assert row is not None
    assert row["scrapedAt"] is None
    assert row["stale"]


async def test_there_is_no_age_before_the_first_scrape() -> None:
    row = (await Map("a").changes())["a"]
    assert row is not None
    assert row["scrapedAt"] is None
    assert row["prefill"] is None
