"""Metrics of this process: CPU, memory and open files, and the lag of its event loop."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from proxy.core.ports import Clock

if TYPE_CHECKING:
    from proxy.telemetry.metrics import Gauge

FDS_AT_ONCE = 1000
"""Number of entries that are counted without a pause: about a millisecond."""

_FDS = "/proc/self/fd"

FIGURES = (
    ("process_virtual_memory_bytes", "gauge", "Virtual memory size in bytes."),
    ("process_resident_memory_bytes", "gauge", "Resident memory size in bytes."),
    ("process_start_time_seconds", "gauge", "When the process started, since the Unix epoch."),
    ("process_cpu_seconds", "counter", "User and system CPU time spent in seconds."),
    ("process_open_fds", "gauge", "Number of open file descriptors."),
    ("process_max_fds", "gauge", "Maximum number of open file descriptors."),
)
"""Name, kind and help of each metric. prometheus_client's own collector is not used, because it lists the open files at
once: 7 ms for 10,000."""


def has_figures() -> bool:
    return os.path.exists(_FDS)


def figures() -> Iterator[tuple[str, float] | None]:
    """Yield each metric and its value, and None where the event loop may run. Needs /proc."""
    size, resident = map(int, Path("/proc/self/statm").read_bytes().split()[:2])
    used, page = resource.getrusage(resource.RUSAGE_SELF), resource.getpagesize()
    yield "process_virtual_memory_bytes", size * page
    yield "process_resident_memory_bytes", resident * page
    yield "process_start_time_seconds", _started_at()
    yield "process_cpu_seconds", used.ru_utime + used.ru_stime
    number = os.stat(_FDS).st_size
    if not number:  # Linux before 6.2 does not know the number
        for so_far in counted(_FDS):
            number = so_far
            yield None
    yield "process_open_fds", number
    yield "process_max_fds", resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def counted(folder: str) -> Iterator[int]:
    """Yield the number of entries after every FDS_AT_ONCE entries, and at the end."""
    number = 0
    with os.scandir(folder) as entries:
        for number, _ in enumerate(entries, 1):
            if number % FDS_AT_ONCE == 0:
                yield number
    yield number


@cache
def _started_at() -> float:
    """Return the start of the process since the Unix epoch. proc(5): the 22nd value of `stat`, in clock ticks; the
    second value may contain blanks."""
    ticks = int(Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()[19])
    booted = next(line for line in Path("/proc/stat").read_bytes().splitlines() if line.startswith(b"btime "))
    return int(booted.split()[1]) + ticks / os.sysconf("SC_CLK_TCK")


PROBE_INTERVAL = 1.0


async def probe_loop_lag(gauge: Gauge, clock: Clock) -> None:
    """Set the gauge once per second to the delay of a timer, in seconds, until cancelled."""
    while True:
        due = clock.now() + PROBE_INTERVAL
        await asyncio.sleep(PROBE_INTERVAL)
        gauge.value = max(0.0, clock.now() - due)
