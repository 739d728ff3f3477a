"""The command `serve`."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import uvloop

from proxy.app import App
from proxy.cli.options import config_option, pod_option, reader
from proxy.cluster.gc_tuning import Collector, resident
from proxy.config.load import ConfigReader, scheduling_files
from proxy.config.reload import Configurations
from proxy.config.warnings import NO_PODS
from proxy.core.errors import Problem, Unreadable
from proxy.core.files import WatchedFiles, raise_open_files_limit, warn_of_few_files
from proxy.core.tasks import Tasks
from proxy.fleet.settings import bracketed
from proxy.http.upstream.pool import is_address
from proxy.reliability.settings import Drain
from proxy.settings import Settings
from proxy.telemetry import logs
from proxy.telemetry.lines import flush_standard_error, guard_standard_error

if TYPE_CHECKING:
    from proxy.cluster.supervisor import Supervisor

INTERVAL = 1.0
"""Seconds between two checks of the files."""


class ConfigurationFiles:
    """A configuration file, and the files that `scheduling.file` names at the top level and in pools."""

    def __init__(self, file: Path) -> None:
        """Read the files, so that only later changes count."""
        self.file = file
        self._files = WatchedFiles([file])
        self._known: bytes | None = None
        with suppress(Unreadable):
            self._known = self._files.read(self._digest)

    async def watch(self, changed: Callable[[], Awaitable[None]], interval: float = INTERVAL) -> None:
        """Call `changed` whenever the content has changed, until cancelled."""
        while True:
            await asyncio.sleep(interval)
            try:
                found = await asyncio.to_thread(self._files.read_if_changed, self._digest)
            except Unreadable as error:
                log.warning("--watch: %s; keeping the configuration in effect", error)
                continue
            if found not in (None, self._known):
                self._known = found
                await changed()

    def _digest(self) -> bytes:
        """Return the digest of the contents, following links: an update of a ConfigMap changes a link to another
        folder. Raise Unreadable."""
        try:
            text = self.file.read_bytes()
            named = scheduling_files(text, self.file)
            self._files.paths = [self.file, *named]
            return hashlib.sha256(b"".join([text, *(path.read_bytes() for path in named)])).digest()
        except OSError as error:
            raise Unreadable([Problem(str(error.filename), f"cannot be read: {error.strerror}")]) from None


log = logging.getLogger("kvlane")


@click.command()
@config_option
@pod_option
@click.option("--host", help="Address of the data port.  [default: 0.0.0.0]")
@click.option("--port", type=int, help="Data port.  [default: 8000]")
@click.option("--admin-port", type=int, help="Admin port, on loopback unless configured.  [default: 9190]")
@click.option("--extproc-port", type=int, help="gRPC port (ext_proc) for gateways such as Envoy.  [default: none]")
@click.option("--watch", "watches", is_flag=True, help="Reload the configuration whenever its file changes.")
@click.option(
    "--workers", type=click.IntRange(1, 256), default=1, show_default=True, help="Number of worker processes."
)
@click.option("--worker-fd", type=int, hidden=True, help="Socket to the supervisor, of a worker that it starts.")
def serve(
    config: Path | None,
    pods: tuple[str, ...],
    host: str | None,
    port: int | None,
    admin_port: int | None,
    extproc_port: int | None,
    watches: bool,
    workers: int,
    worker_fd: int | None,
) -> None:
    """Run the proxy, with a YAML file or only with the URLs of pods.

    \b
    kvlane serve --pod http://vllm-0:8000 --pod http://vllm-1:8000
    kvlane serve -c kvlane.yaml --watch --workers 4

    SIGTERM stops the proxy: it serves new requests for reliability.drain.settle, so that load balancers notice, and
    lets running requests end. SIGINT (Ctrl-C) stops it without the wait for load balancers. A second signal of the same
    kind cuts the running requests, which have no line in the access log, and ends the process by that signal. SIGHUP
    reloads the file; if the file has a fault, the configuration in effect stays.

    Exit code 0: stopped by a signal. 130, 143: ended by a second SIGINT or SIGTERM, as shells report it. 1: it cannot
    start. 2: the configuration has faults.
    """
    if worker_fd is not None:
        from proxy.cluster import worker  # a proxy of one process needs no worker, and no supervisor

        worker.run(worker_fd)
        return
    overrides: dict[str, dict[str, Any]] = {}
    options = (("listen", "host", host), ("listen", "port", port), ("admin", "port", admin_port))
    for section, key, value in (*options, ("extproc", "port", extproc_port)):
        if value is not None:
            overrides.setdefault(section, {})[key] = value
    source = reader(config, pods, overrides)
    watched = None if config is None or not watches else ConfigurationFiles(config)
    settings = source.again()
    guard_standard_error()
    logs.set_up(settings.telemetry, sys.stderr)
    raise_open_files_limit()
    is_default = "maxConnections" not in (settings.given.get("listen") or {})
    warn_of_few_files(settings.listen.max_connections, logging.INFO if is_default else logging.WARNING)
    if not settings.has_pods:
        log.warning(NO_PODS)
    for remark in settings.remarks:
        log.warning("%s", remark)
    uvloop.run(_serve(settings, source, watched, workers))


async def _serve(settings: Settings, source: ConfigReader, watched: ConfigurationFiles | None, workers: int) -> None:
    signals = _Signals()
    try:
        if workers == 1:
            proxy: App | Supervisor = (app := app_of(settings, source))
            idle = Collector(lambda: not app.in_flight, lambda: resident() - app.index_bytes)
        else:
            from proxy.cluster.supervisor import Supervisor

            proxy = supervisor = Supervisor(settings, workers, reader=source)
            idle, signals.kill = Collector(), supervisor.kill
        signals.in_flight = lambda: proxy.in_flight
        proxy.autoscaling.on_first_pool = lambda: signals.on_halt(proxy.autoscaling.pause_all)
        async with idle, proxy, _reloading(proxy.configurations, signals.again, watched):
            scheme = "http" if settings.admin.tls is None else "https"
            gateways = proxy.picker_port
            log.info(
                "serving on %s:%d%s, admin on %s%s",
                settings.listen.host,
                proxy.port,
                f" with {workers} workers" if workers > 1 else "",
                f"{scheme}://{bracketed(settings.admin.host)}:{proxy.admin_port}/dashboard",
                f", for gateways on {settings.extproc.host}:{gateways}" if gateways is not None else "",
            )
            await signals.stop(proxy.wait_for_balancers, lambda: proxy.configurations.settings.reliability.drain)
        log.info("stopped")
    except OSError as error:
        raise _cannot_start(error, settings) from None


def app_of(settings: Settings, source: ConfigReader | None = None) -> App:
    """Return the proxy of one process. Raise ConfigError."""
    if not settings.replicas.is_shared:
        return App(settings, reader=source)
    from proxy.cluster.sharing import Replicated  # only if there are other hosts

    return Replicated(settings, reader=source)


@asynccontextmanager
async def _reloading(
    configurations: Configurations, again: asyncio.Event, watched: ConfigurationFiles | None
) -> AsyncIterator[None]:
    """Inside the context, reload the configuration on SIGHUP, and when a watched file has changed."""

    async def reload_on_signal() -> None:
        while True:
            await again.wait()
            again.clear()
            await configurations.read_again("SIGHUP")

    async with Tasks() as tasks:
        tasks.keep(reload_on_signal, "reloads")
        if watched is not None:
            reload = partial(configurations.read_again, "watch")
            tasks.keep(partial(watched.watch, reload), "watch", str(watched.file))
        yield


class _Signals:
    """The signals of the process. The first SIGTERM or SIGINT stops; a second one of the same kind calls `kill` and
    ends the process at once, and logs how many requests were `in_flight`. SIGHUP sets `again`."""

    def __init__(self) -> None:
        self.kill: Callable[[], None] = lambda: None
        self.in_flight: Callable[[], int] = lambda: 0
        self._signalled = asyncio.Event()
        self._by_person = False
        self.again = asyncio.Event()
        self._seen: set[signal.Signals] = set()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self._hear, number)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self.again.set)
        self.on_halt(lambda: log.warning("ignored SIGUSR1: it pauses autoscaling, and no pool has a scaling policy"))

    async def stop(self, wait_for_balancers: Callable[[], Awaitable[None]], drain: Callable[[], Drain]) -> None:
        """Wait for the signal to stop, then for `wait_for_balancers`, unless a user at a terminal stops: then no load
        balancer has to notice."""
        await self._signalled.wait()
        log.info(
            "stopping: %sthe running requests (now %d) have up to %g s to end (reliability.drain.grace); "
            "a second %s ends them",
            "" if self._by_person else f"new requests are served for {drain().settle:g} s, then ",
            self.in_flight(),
            drain().grace,
            next(iter(self._seen)).name,
        )
        if not self._by_person:
            await wait_for_balancers()

    def on_halt(self, halt: Callable[[], None]) -> None:
        """Call `halt` upon SIGUSR1."""
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, halt)

    def _hear(self, number: signal.Signals) -> None:
        if number in self._seen:
            log.warning("stopped at once by a second %s; requests cut: %d", number.name, self.in_flight())
            self.kill()
            flush_standard_error()
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        self._seen.add(number)
        self._by_person |= number is signal.SIGINT and not self._signalled.is_set()
        self._signalled.set()


_LISTEN_ADVICE = {
    errno.EADDRINUSE: "another process listens there; stop it, or choose other ports with --port, --admin-port and"
    " --extproc-port",
    errno.EACCES: "this user may not listen there; choose a port of 1024 or more with --port",
    errno.EPERM: "this user may not listen there; choose a port of 1024 or more with --port",
    errno.EADDRNOTAVAIL: "this machine has no such address; choose another one with --host, or in admin.host and"
    " extproc.host",
}


def _cannot_start(error: OSError, settings: Settings) -> click.ClickException:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE and len(taken := list(_taken(settings))) > 1:
        reason = f"{' and '.join(taken)} are in use"
    if isinstance(error, socket.gaierror):
        hosts = {"listen.host": settings.listen.host, "admin.host": settings.admin.host}
        if settings.extproc.port is not None:
            hosts["extproc.host"] = settings.extproc.host
        names = ", ".join(f"{key} {host!r}" for key, host in hosts.items() if host and not is_address(host))
        return click.ClickException(f"cannot listen: {reason}; correct {names or 'the hosts of the ports'}")
    if error.errno in _LISTEN_ADVICE:
        return click.ClickException(f"cannot listen: {reason}; {_LISTEN_ADVICE[error.errno]}")
    return click.ClickException(f"cannot start: {error}")


def _taken(settings: Settings) -> Iterator[str]:
    """Yield the ports on which another process listens."""
    for section in ("listen", "admin", "extproc"):
        own = getattr(settings, section)
        try:
            if own.port:
                family = socket.AF_INET6 if ":" in own.host else socket.AF_INET
                socket.create_server((own.host, own.port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                yield f"{section}.port {own.port}"
