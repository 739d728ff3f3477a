"""Several workers, one record."""

from __future__ import annotations

from pathlib import Path
from random import Random

from proxy.lab.record import load
from proxy.lab.sim import SimConfig
from tests.helpers.cluster.host import host


async def test_workers_write_one_record_with_one_clock_and_one_secret(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    telemetry = {"accessLog": False, "logLevel": "error", "record": {"file": str(path)}}
    async with host(2, config=SimConfig(time_scale=50), telemetry=telemetry) as h:
        for number in range(20):
            await h.chat("What all begin with. " * 40 + f"Number {number}.")
        response = {name for name, value in (await h.samples("kvlane_requests_total")).items() if value}
        assert response
    record = load([path], Random(0))
    jobs = record.workload.jobs
    assert len(jobs) == 20
    assert len({job.ids[:3] for job in jobs}) == 1
    assert 0.0 <= jobs[0].arrival < jobs[-1].arrival < 120.0
    assert path.read_bytes().count(b"kvlane_record") == 1
