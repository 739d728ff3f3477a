"""Metrics of several processes as one."""

from __future__ import annotations

import orjson
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.telemetry import metrics
from proxy.telemetry.exposition import SampleReader
from proxy.telemetry.metrics import SUPERVISOR, Catalogue, Dump, Merged, dump_of
from proxy.telemetry.observation import expose

Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def dump(requests: int = 0, ttft: tuple[float, ...] = (), lag: float = 0.0, running: int = 0) -> Dump:
    catalogue = Catalogue("1")
    if requests:
        catalogue.requests.cell("m", "chat", "complete", "2xx").add(requests)
    for seconds in ttft:
        catalogue.ttft.cell("m", "true").observe(seconds)
    catalogue.loop_lag.cell().value = lag
    catalogue.running.cell("a").value = running
    return sent(catalogue)


def sent(catalogue: Catalogue) -> Dump:
    """The dump as it arrives at another process."""
    found: Dump = orjson.loads(orjson.dumps(dump_of(catalogue.all_families)))
    return found


async def text_of(*dumps: tuple[Dump, str], ended: Dump | None = None) -> bytes:
    found = Merged(Catalogue("1"))
    for one, worker in dumps:
        await found.add(one, worker)
    await found.add(ended or {}, SUPERVISOR)
    body, _ = await expose(found, "")
    return body


async def merged(*dumps: tuple[Dump, str], ended: Dump | None = None) -> Values:
    families = list(text_string_to_metric_families((await text_of(*dumps, ended=ended)).decode()))
    assert len({family.name for family in families}) == len(families)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


REQUESTS = (
    "kvlane_requests_total",
    (("model", "m"), ("outcome", "complete"), ("path", "chat"), ("status", "2xx")),
)


async def test_counters_and_histograms_are_summed() -> None:
    values = await merged((dump(3, (0.1, 0.3)), "0"), (dump(4, (0.1,)), "1"), (dump(), SUPERVISOR))
    assert values[REQUESTS] == 7
    labels = (("model", "m"), ("stream", "true"))
    assert values["kvlane_time_to_first_token_seconds_count", labels] == 3
    assert values["kvlane_time_to_first_token_seconds_sum", labels] == 0.5
    bucket = (("le", "0.1"), *labels)
    assert values["kvlane_time_to_first_token_seconds_bucket", bucket] == 2


async def test_gauges_of_processes_have_a_label() -> None:
    values = await merged((dump(lag=0.5), "0"), (dump(lag=0.25), "1"))
    assert values["kvlane_event_loop_lag_seconds", (("worker", "0"),)] == 0.5
    assert values["kvlane_event_loop_lag_seconds", (("worker", "1"),)] == 0.25


async def test_gauges_of_the_fleet_come_from_the_supervisor() -> None:
    values = await merged(
        (dump(running=9), "0"),
        (dump(running=8), "1"),
        (dump(running=7), SUPERVISOR),
    )
    running = {key: value for key, value in values.items() if key[0] == "kvlane_endpoint_running_requests"}
    assert running == {("kvlane_endpoint_running_requests", (("endpoint", "a"),)): 7}


async def test_gauges_that_each_worker_learns_about_pods_have_a_label() -> None:
    learnt = Catalogue("1")
    learnt.index_error.cell("a").value = 0.25
    values = await merged((sent(learnt), "0"), (dump(), "1"), (dump(), SUPERVISOR))
    name = "kvlane_endpoint_prefix_prediction_error_ratio"
    assert {key: value for key, value in values.items() if key[0] == name} == {
        (name, (("endpoint", "a"), ("worker", "0"))): 0.25
    }


async def test_counts_of_stopped_workers_stay_in_the_sums() -> None:
    kept = Merged(Catalogue("1"))
    kept.add_counts(dump(3, (0.1,), lag=1.0))
    ended = kept.add_counts(dump(2))
    values = await merged((dump(4), "0"), ended=ended)
    assert values[REQUESTS] == 9
    assert values["kvlane_time_to_first_token_seconds_count", (("model", "m"), ("stream", "true"))] == 1
    assert "kvlane_event_loop_lag_seconds" not in ended


async def test_figures_of_processes_have_a_label_and_cpu_time_is_added_up() -> None:
    catalogue = Catalogue("1")
    await catalogue.read()
    values = await merged((sent(catalogue), "0"), (sent(catalogue), "1"))
    assert values["process_cpu_seconds_total", ()] == 2 * catalogue._of_process["process_cpu_seconds"].cell().value
    workers = {labels for name, labels in values if name == "process_open_fds"}
    assert workers == {(("worker", "0"),), (("worker", "1"),)}


def test_the_event_loop_runs_while_many_cells_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "CELLS_AT_ONCE", 10)
    catalogue = Catalogue("1")
    for number in range(95):
        catalogue.attempts.cell(f"pod-{number}", "complete").add()
    assert len(list(Merged(Catalogue("1")).steps(sent(catalogue), "0"))) == 9


@pytest.mark.parametrize("character", ["\u2028", "\x85", "\x1c", "\r", "\x0c", "\n", '"', "\\", " ", "{", "}"])
async def test_label_values_may_contain_line_separators(character: str) -> None:
    catalogue = Catalogue("1")
    catalogue.requests.cell(f"a{character}b", "chat", "complete", "2xx").add(1)
    name = "kvlane_requests_total"
    text = await text_of((sent(catalogue), "0"), (sent(catalogue), "1"))
    (sample,) = SampleReader([name]).read(text)[name]
    assert (sample.value, sample.labels["model"]) == (2.0, f"a{character}b")
