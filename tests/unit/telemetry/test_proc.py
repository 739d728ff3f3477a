from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Metric, ProcessCollector

from proxy.telemetry import process
from proxy.telemetry.process import ProcSeries, counted


def values_of(metrics: list[Metric]) -> dict[str, float]:
    return {sample.name: sample.value for metric in metrics for sample in metric.samples}


def test_the_series_are_those_of_every_client_of_prometheus() -> None:
    standard = list(ProcessCollector(registry=CollectorRegistry()).collect())
    ours = list(ProcSeries().slices())
    assert {(metric.name, metric.type) for metric in ours} == {(metric.name, metric.type) for metric in standard}
    expected, seen = values_of(standard), values_of(ours)
    assert seen.keys() == expected.keys()
    for name in ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_cpu_seconds_total"):
        assert seen[name] == pytest.approx(expected[name], rel=0.2, abs=0.2)
    assert seen["process_start_time_seconds"] == pytest.approx(expected["process_start_time_seconds"], abs=0.1)
    assert seen["process_max_fds"] == expected["process_max_fds"]
    assert abs(seen["process_open_fds"] - expected["process_open_fds"]) <= 2


def test_where_files_must_be_counted_they_are_counted_in_pieces(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(process, "FDS_AT_ONCE", 10)
    for number in range(25):
        (tmp_path / str(number)).touch()
    assert list(counted(str(tmp_path))) == [10, 20, 25]
    monkeypatch.setattr(process, "_FDS", str(tmp_path))
    monkeypatch.setattr(os, "stat", lambda path: os.stat_result([0] * 10))
    pieces = [metric for metric in ProcSeries().slices() if metric.name == "process_open_fds"]
    assert [len(piece.samples) for piece in pieces] == [0, 0, 0, 1]
    assert values_of(pieces) == {"process_open_fds": 25}


def test_where_there_is_no_proc_nothing_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_FDS", str(tmp_path / "missing"))
    assert list(ProcSeries().slices()) == []
