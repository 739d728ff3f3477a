from __future__ import annotations

from typing import Any

from proxy.core.endpoint import Endpoint, Freshness, Metrics
from proxy.core.ports import ManualClock
from proxy.dashboard.samples import INTERVAL, KEPT, Samples, Sampling, Series, Totals
from proxy.telemetry.metrics import Catalogue


class Sampled:
    """A catalogue that is looked at every five seconds."""

    def __init__(self) -> None:
        self.catalogue = Catalogue("test")
        self.samples = Samples()
        self.at = 0.0
        self.pods: list[Endpoint] = []
        self.next_read()

    def next_read(self, later: float = INTERVAL) -> dict[str, Any] | None:
        self.at += later
        return self.samples.add(Totals.of(Series(self.catalogue.families), self.at, self.pods), 1000 + self.at)

    def report(self, name: str, *, role: str = "", freshness: Freshness = Freshness.FRESH, **metrics: Any) -> None:
        """A pod reports its counters."""
        pod = next((pod for pod in self.pods if pod.name == name), None)
        if pod is None:
            pod = Endpoint(name, f"http://{name}:8000", role=role)
            self.pods.append(pod)
        pod.publish(Metrics(freshness=freshness, scraped_at=self.at, **metrics), 0)

    def tokens(self) -> dict[str, Any]:
        """What the next point says of tokens and cache hits."""
        point = self.next_read()
        assert point is not None
        return {key: point[key] for key in ("in", "out", "tokensFrom", "hits", "hitsFrom")}


def test_a_point_covers_the_time_since_the_one_before() -> None:
    sampled = Sampled()
    for seconds in (0.1, 0.1, 0.1, 4.0):
        sampled.catalogue.ttft.cell("m", "true").observe(seconds)
        sampled.catalogue.requests.cell("m", "chat", "complete", "2xx").add()
    sampled.catalogue.predicted_prompt.cell().add(200)
    sampled.catalogue.predicted_hits.cell().add(50)
    sampled.catalogue.refused.cell("rate-limited").add(3)
    point = sampled.next_read()
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
    sampled.next_read()
    point = sampled.next_read()
    assert point is not None
    assert point["good"] == 0.0
    assert point["ttft"] is None


def test_no_point_spans_a_time_without_reads() -> None:
    sampled = Sampled()
    assert sampled.next_read(later=600.0) is None
    assert sampled.next_read() is not None
    assert len(sampled.samples.points) == 1


def test_totals_that_shrink_with_a_stopped_worker_give_no_point() -> None:
    sampled = Sampled()
    sampled.catalogue.retries.cell().add(5)
    sampled.next_read()
    sampled.catalogue.retries.cell().value = 1.0
    assert sampled.next_read() is None
    assert sampled.next_read() is not None


def test_a_quarter_of_an_hour_is_kept() -> None:
    sampled = Sampled()
    for _ in range(KEPT + 5):
        sampled.next_read()
    assert len(sampled.samples.points) == KEPT
    assert KEPT * INTERVAL == 900


async def test_the_series_are_read_only_when_due() -> None:
    clock, reads = ManualClock(), list[float]()

    async def read() -> Series:
        reads.append(clock.now())
        return Series(Catalogue("test").families)

    sampling = Sampling(read, clock)
    for _ in range(11):
        await sampling.update()
        clock.advance(1.0)
    assert reads == [0.0, 5.0, 10.0]
    assert len(sampling.samples.points) == 2


def counted(prompt: float, generation: float, queries: float = 0.0, hits: float = 0.0) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt,
        "generation_tokens": generation,
        "prefix_queries": queries,
        "prefix_hits": hits,
        "running": 1,
    }


def test_tokens_and_cache_hits_are_counted_by_the_pods() -> None:
    sampled = Sampled()
    sampled.report("a", **counted(1000, 500, 1000, 0))
    sampled.report("b", **counted(70, 60, 70, 50))
    sampled.next_read()
    sampled.report("a", **counted(2000, 700, 2000, 250))
    sampled.report("b", **counted(1070, 160, 1070, 300))
    assert sampled.tokens() == {"in": 400.0, "out": 60.0, "tokensFrom": "pods", "hits": 0.25, "hitsFrom": "pods"}


def test_tokens_are_from_responses_while_a_busy_pod_does_not_count_them() -> None:
    sampled = Sampled()
    sampled.report("a", **counted(0, 0))
    sampled.report("other-engine", running=1)
    sampled.next_read()
    sampled.report("a", **counted(1000, 1000))
    sampled.catalogue.completion_tokens.cell("m").add(50)
    sampled.catalogue.prompt_tokens.cell("m").add(100)
    sampled.catalogue.actual_prompt.cell().add(100)
    sampled.catalogue.actual_hits.cell().add(10)
    expected = {"in": 20.0, "out": 10.0, "tokensFrom": "responses", "hits": 0.1, "hitsFrom": "responses"}
    assert sampled.tokens() == expected
    sampled.report("a", **counted(2000, 2000))
    sampled.report("other-engine")
    assert sampled.tokens()["tokensFrom"] == "pods"


def test_a_pod_that_joined_restarted_or_was_stale_is_counted_from_its_second_sample_on() -> None:
    sampled = Sampled()
    sampled.report("same", **counted(100, 100))
    sampled.report("restarted", **counted(9000, 9000))
    sampled.report("stale", freshness=Freshness.STALE, **counted(500, 500))
    sampled.next_read()
    sampled.report("same", **counted(110, 105))
    sampled.report("restarted", **counted(50, 50))
    sampled.report("stale", **counted(5000, 5000))
    sampled.report("joined", **counted(4000, 4000))
    tokens = sampled.tokens()
    assert (tokens["in"], tokens["out"]) == (2.0, 1.0)
    for name in ("restarted", "stale", "joined"):
        sampled.report(name, **counted(6000, 6000))
    tokens = sampled.tokens()
    assert (tokens["in"], tokens["out"]) == ((5950 + 1000 + 2000) / 5, (5950 + 1000 + 2000) / 5)


def test_tokens_of_prefill_and_decode_pods_are_counted_once() -> None:
    sampled = Sampled()
    sampled.report("p", role="prefill", **counted(0, 0))
    sampled.report("d", role="decode", **counted(0, 0))
    sampled.next_read()
    sampled.report("p", **counted(1000, 1, 1000, 400))
    sampled.report("d", **counted(1000, 200, 1000, 1000))
    assert sampled.tokens() == {"in": 200.0, "out": 40.0, "tokensFrom": "pods", "hits": 0.4, "hitsFrom": "pods"}
