"""`kvlane serve`: run the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import click
import uvloop

from proxy.app import App
from proxy.cli.configuration import config_option, loaded, pod_option
from proxy.settings import Settings
from proxy.telemetry import logs

log = logging.getLogger("kvlane")


@click.command()
@config_option
@pod_option
@click.option("--host", help="Address of the data port.  [default: 0.0.0.0]")
@click.option("--port", type=int, help="Data port.  [default: 8000]")
@click.option("--admin-port", type=int, help="Admin port, on loopback unless configured.  [default: 9190]")
def serve(
    config: Path | None, pods: tuple[str, ...], host: str | None, port: int | None, admin_port: int | None
) -> None:
    """Run the proxy: with a YAML file, or with nothing but the URLs of some pods."""
    overrides: dict[str, dict[str, Any]] = {}
    if host is not None or port is not None:
        overrides["listen"] = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if admin_port is not None:
        overrides["admin"] = {"port": admin_port}
    settings = loaded(config, pods, os.environ, overrides)
    logs.set_up(settings.telemetry, sys.stderr)
    uvloop.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        async with App(settings) as app:
            log.info(
                "serving on %s:%d, admin on %s:%d", settings.listen.host, app.port, settings.admin.host, app.admin_port
            )
            await stop.wait()
            log.info("stopping: requests that run may end")
    except OSError as error:
        raise click.ClickException(f"cannot listen: {error.strerror or error}") from None
