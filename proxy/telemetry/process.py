"""Figures of this process: CPU, memory and open files, and the lag of its event loop."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from prometheus_client import Metric

from proxy.core.ports import Clock

if TYPE_CHECKING:
    from proxy.telemetry.metrics import Gauge

FDS_AT_ONCE = 1000
"""Counted without a pause: about a millisecond."""

_FDS = "/proc/self/fd"


class ProcSeries:
    """Not prometheus_client's own collector, which lists the open files in one go: 7 ms where there are 10,000."""

    def __init__(self) -> None:
        self._started = _started_at() if os.path.exists(_FDS) else None

    def slices(self) -> Iterator[Metric]:
        """One metric each, as `Family.slices`; none where there is no /proc."""
        if self._started is None:
            return
        size, resident = map(int, Path("/proc/self/statm").read_bytes().split()[:2])
        used = resource.getrusage(resource.RUSAGE_SELF)
        page, most = resource.getpagesize(), resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        yield _gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", size * page)
        yield _gauge("process_resident_memory_bytes", "Resident memory size in bytes.", resident * page)
        yield _gauge("process_start_time_seconds", "When the process started, since the Unix epoch.", self._started)
        cpu = Metric("process_cpu_seconds", "User and system CPU time spent in seconds.", "counter")
        cpu.add_sample("process_cpu_seconds_total", {}, used.ru_utime + used.ru_stime)
        yield cpu
        yield from _open_fds()
        yield _gauge("process_max_fds", "Maximum number of open file descriptors.", most)


def counted(folder: str) -> Iterator[int]:
    """The entries so far, every FDS_AT_ONCE of them; at last all of them."""
    number = 0
    with os.scandir(folder) as entries:
        for number, _ in enumerate(entries, 1):
            if number % FDS_AT_ONCE == 0:
                yield number
    yield number


def _open_fds() -> Iterator[Metric]:
    """Linux before 6.2 does not say how many there are: they are counted in pieces, which have no sample but the
    last."""
    name, text = "process_open_fds", "Number of open file descriptors."
    number = os.stat(_FDS).st_size
    if not number:
        for so_far in counted(_FDS):
            number = so_far
            yield Metric(name, text, "gauge")
    yield _gauge(name, text, number)


def _gauge(name: str, text: str, value: float) -> Metric:
    metric = Metric(name, text, "gauge")
    metric.add_sample(name, {}, value)
    return metric


def _started_at() -> float:
    """Since the Unix epoch. proc(5): the 22nd value of `stat`, in clock ticks; the second value may hold blanks."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    booted = next(line for line in Path("/proc/stat").read_bytes().splitlines() if line.startswith(b"btime "))
    return int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


PROBE_INTERVAL = 1.0


async def probe_loop_lag(gauge: Gauge, clock: Clock) -> None:
    """One timer per second, until cancelled; the gauge holds by how much the last one was late, in seconds."""
    while True:
        due = clock.now() + PROBE_INTERVAL
        await asyncio.sleep(PROBE_INTERVAL)
        gauge.value = max(0.0, clock.now() - due)
