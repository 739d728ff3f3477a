"""Several expositions as one."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.telemetry.exposition import SUPERVISOR, Merger, SampleReader
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import expose

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


async def exposition(requests: int = 0, ttft: tuple[float, ...] = (), lag: float = 0.0, running: int = 0) -> bytes:
    catalogue = Catalogue("1")
    if requests:
        catalogue.requests.cell("m", "chat", "complete", "2xx").add(requests)
    for seconds in ttft:
        catalogue.ttft.cell("m", "true").observe(seconds)
    catalogue.loop_lag.cell().value = lag
    catalogue.running.cell("a").value = running
    body, _ = await expose(catalogue, "")
    return body


async def merged(*expositions: tuple[bytes, str], gone: bytes = b"") -> Values:
    found = Merger()
    for body, worker in expositions:
        await found.add(body, worker)
    await found.add(gone, SUPERVISOR)
    text = (await found.render()).decode()
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


REQUESTS = (
    "kvlane_requests_total",
    (("model", "m"), ("outcome", "complete"), ("path", "chat"), ("status", "2xx")),
)


async def test_counters_and_histograms_are_added_up() -> None:
    values = await merged(
        (await exposition(3, (0.1, 0.3)), "0"), (await exposition(4, (0.1,)), "1"), (await exposition(), SUPERVISOR)
    )
    assert values[REQUESTS] == 7
    labels = (("model", "m"), ("stream", "true"))
    assert values["kvlane_time_to_first_token_seconds_count", labels] == 3
    assert values["kvlane_time_to_first_token_seconds_sum", labels] == 0.5
    bucket = (("le", "0.1"), *labels)
    assert values["kvlane_time_to_first_token_seconds_bucket", bucket] == 2


async def test_gauges_of_processes_are_told_apart() -> None:
    values = await merged((await exposition(lag=0.5), "0"), (await exposition(lag=0.25), "1"))
    assert values["kvlane_event_loop_lag_seconds", (("worker", "0"),)] == 0.5
    assert values["kvlane_event_loop_lag_seconds", (("worker", "1"),)] == 0.25


async def test_gauges_of_the_fleet_are_those_of_the_supervisor() -> None:
    values = await merged(
        (await exposition(running=9), "0"),
        (await exposition(running=8), "1"),
        (await exposition(running=7), SUPERVISOR),
    )
    running = {key: value for key, value in values.items() if key[0] == "kvlane_endpoint_running_requests"}
    assert running == {("kvlane_endpoint_running_requests", (("endpoint", "a"),)): 7}


async def test_counts_of_workers_that_ended_stay_in_the_sums() -> None:
    first = Merger.counts_of(b"", await exposition(3, (0.1,), lag=1.0))
    gone = Merger.counts_of(first, await exposition(2))
    values = await merged((await exposition(4), "0"), gone=gone)
    assert values[REQUESTS] == 9
    assert values["kvlane_time_to_first_token_seconds_count", (("model", "m"), ("stream", "true"))] == 1
    assert b"\nkvlane_event_loop_lag_seconds " not in gone


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x1c", "\r", "\x0c", "\n", '"', "\\", " ", "{", "}"])
async def test_label_values_may_contain_any_separator_of_lines(character: str) -> None:
    catalogue = Catalogue("1")
    catalogue.requests.cell(f"a{character}b", "chat", "complete", "2xx").add(1)
    body, _ = await expose(catalogue, "")
    merger = Merger()
    await merger.add(body, "0")
    await merger.add(body, "1")
    name = "kvlane_requests_total"
    (sample,) = SampleReader([name]).read(await merger.render())[name]
    assert (sample.value, sample.labels["model"]) == (2.0, f"a{character}b")
