"""`kvlane serve`, on a clock that runs so many times slower, as the pods' does.

    python -m bench.placement.slowed FACTOR CONFIG|- PORT ADMIN_PORT POD...

All that kvlane learns, forgets and waits for is in seconds of its clock, and a scrape comes as often per second of
the fleet as it would in front of pods in real time.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import uvloop

from proxy.app import App
from proxy.cli.options import reader
from proxy.core.params import Duration
from proxy.core.ports import SystemClock
from proxy.settings import Settings
from proxy.telemetry import logs


def main(factor: float, config: str, port: int, admin_port: int, *pods: str) -> None:
    overrides = {
        "listen": {"host": "127.0.0.1", "port": port},
        "admin": {"port": admin_port},
        "telemetry": {"accessLog": False, "logLevel": "warning"},
    }
    settings = reader(None if config == "-" else Path(config), pods, overrides).again()
    logs.set_up(settings.telemetry, sys.stderr)
    if factor != 1:
        settings = slowed(settings, factor)
        SystemClock.now = staticmethod(lambda: time.monotonic() / factor)  # type: ignore[method-assign]
    uvloop.run(_serve(settings))


def slowed(settings: Settings, factor: float) -> Settings:
    """The refresh loops sleep on the event loop, which knows of real time only."""
    refresh = settings.pods.refresh
    slow = replace(refresh, interval=Duration(refresh.interval * factor), timeout=Duration(refresh.timeout * factor))
    return replace(settings, pods=replace(settings.pods, refresh=slow))


async def _serve(settings: Settings) -> None:
    """Run until it is stopped, when no request waits."""
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with App(settings):
        await stopped.wait()


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), *sys.argv[5:])
