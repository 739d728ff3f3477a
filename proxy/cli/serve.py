"""`kvlane serve`: run the proxy until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click
import uvloop

from proxy.app import App
from proxy.cli.configuration import NO_PODS, Misconfigured, config_option, loaded, pod_option
from proxy.collector import Collector, resident
from proxy.core.errors import ConfigError
from proxy.core.tasks import Tasks
from proxy.settings import Settings
from proxy.supervisor.crew import StartFailed
from proxy.supervisor.supervisor import Supervisor
from proxy.telemetry import logs

log = logging.getLogger("kvlane")


@click.command()
@config_option
@pod_option
@click.option("--host", help="Address of the data port.  [default: 0.0.0.0]")
@click.option("--port", type=int, help="Data port.  [default: 8000]")
@click.option("--admin-port", type=int, help="Admin port, on loopback unless configured.  [default: 9190]")
@click.option("--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Processes that serve.")
def serve(
    config: Path | None,
    pods: tuple[str, ...],
    host: str | None,
    port: int | None,
    admin_port: int | None,
    workers: int,
) -> None:
    """Run the proxy: with a YAML file, or with nothing but the URLs of some pods."""
    overrides: dict[str, dict[str, Any]] = {}
    if host is not None or port is not None:
        overrides["listen"] = {key: value for key, value in (("host", host), ("port", port)) if value is not None}
    if admin_port is not None:
        overrides["admin"] = {"port": admin_port}
    read = partial(loaded, config, pods, os.environ, overrides)
    settings = read()
    logs.set_up(settings.telemetry, sys.stderr)
    if not settings.pods.has_source:
        log.warning(NO_PODS)
    uvloop.run(_serve(settings) if workers == 1 else _supervise(settings, workers, read))


async def _serve(settings: Settings) -> None:
    stop = _told_to_stop()
    try:
        app = App(settings)
        async with Collector(lambda: not app.ledger.in_flight, lambda: resident() - app.index_bytes), app:
            log.info(
                "serving on %s:%d, admin on %s:%d", settings.listen.host, app.port, settings.admin.host, app.admin_port
            )
            await stop.wait()
            log.info("stopping: requests that run may end")
    except OSError as error:
        raise _cannot_listen(error) from None


async def _supervise(settings: Settings, workers: int, read: Callable[[], Settings]) -> None:
    stop = _told_to_stop()
    try:
        supervisor = Supervisor(settings, workers)
        async with Collector(), supervisor, Tasks() as tasks:
            asyncio.get_running_loop().add_signal_handler(
                signal.SIGHUP, lambda: tasks.start(_reload(supervisor, read), "reload")
            )
            log.info(
                "serving on %s:%d with %d workers, admin on %s:%d",
                settings.listen.host,
                supervisor.port,
                workers,
                settings.admin.host,
                supervisor.admin_port,
            )
            await stop.wait()
            log.info("stopping: requests that run may end")
    except OSError as error:
        raise _cannot_listen(error) from None
    except StartFailed as error:
        raise click.ClickException(str(error)) from None


async def _reload(supervisor: Supervisor, read: Callable[[], Settings]) -> None:
    """A configuration with faults is not for serving: what serves goes on."""
    try:
        await supervisor.reload(await asyncio.to_thread(read))
    except ConfigError as error:
        log.error("not reloaded: %s", Misconfigured(error).format_message())
    except click.ClickException as error:
        log.error("not reloaded: %s", error.format_message())


def _told_to_stop() -> asyncio.Event:
    """Set by the first SIGTERM or SIGINT. A person who presses Ctrl-C again means at once; a supervisor that repeats
    its SIGTERM does not."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def told() -> None:
        stop.set()
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told)
    return stop


def _cannot_listen(error: OSError) -> click.ClickException:
    return click.ClickException(f"cannot listen: {error.strerror or error}")
