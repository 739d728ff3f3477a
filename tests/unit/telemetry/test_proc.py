from __future__ import annotations

import os
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, ProcessCollector

from proxy.telemetry import process
from proxy.telemetry.metrics import Catalogue, slices_of
from proxy.telemetry.process import counted, figures


async def test_the_series_equal_those_of_prometheus_clients() -> None:
    standard = list(ProcessCollector(registry=CollectorRegistry()).collect())
    catalogue = Catalogue("test")
    await catalogue.read()
    ours = [metric for metric in slices_of(catalogue.all_families) if metric.name.startswith("process_")]
    assert {(metric.name, metric.type) for metric in ours} == {(metric.name, metric.type) for metric in standard}
    expected, seen = (
        {sample.name: sample.value for metric in metrics for sample in metric.samples} for metrics in (standard, ours)
    )
    assert seen.keys() == expected.keys()
    for name in ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_cpu_seconds_total"):
        assert seen[name] == pytest.approx(expected[name], rel=0.2, abs=0.2)
    assert seen["process_start_time_seconds"] == pytest.approx(expected["process_start_time_seconds"], abs=0.1)
    assert seen["process_max_fds"] == expected["process_max_fds"]
    assert abs(seen["process_open_fds"] - expected["process_open_fds"]) <= 2


def test_open_files_are_counted_in_steps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "FDS_AT_ONCE", 10)
    for number in range(25):
        (tmp_path / str(number)).touch()
    assert list(counted(str(tmp_path))) == [10, 20, 25]
    monkeypatch.setattr(process, "_FDS", str(tmp_path))
    monkeypatch.setattr(os, "stat", lambda path: os.stat_result([0] * 10))
    pieces = list(figures())
    assert pieces.count(None) == 3
    assert ("process_open_fds", 25) in pieces


async def test_there_are_no_figures_without_proc(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process, "_FDS", str(tmp_path / "missing"))
    catalogue = Catalogue("test")
    await catalogue.read()
    assert not any(family.name.startswith("process_") for family in catalogue.all_families)
