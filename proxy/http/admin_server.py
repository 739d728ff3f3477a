"""The admin port's listening socket."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from proxy.core.clock import SystemClock
from proxy.core.tasks import Tasks
from proxy.http.send_progress import SendProgress, reset
from proxy.http.settings import SEND_TIMEOUT, Admin
from proxy.http.sweep import Sweep
from proxy.http.tls import server_context

SHUTDOWN_SECONDS = 1.0
"""What control calls that still run get when the process stops."""


class AdminServer:
    """`async with`: inside of it the port is open."""

    def __init__(self, settings: Admin, application: web.Application, send_timeout: float = SEND_TIMEOUT) -> None:
        """`send_timeout`: seconds after which a connection is reset whose client reads nothing."""
        self._settings = settings
        self._send_timeout = send_timeout
        self._sweep = Sweep(SystemClock(), send_timeout)
        self._progress: dict[Any, SendProgress] = {}
        self._tasks = Tasks()
        self._runner = web.AppRunner(application, access_log=None, shutdown_timeout=SHUTDOWN_SECONDS)

    async def __aenter__(self) -> AdminServer:
        """Raises OSError if the address is taken or is none, or the certificate cannot be used."""
        await self._runner.setup()
        try:
            tls = None if self._settings.tls is None else server_context(self._settings.tls)
            await web.TCPSite(self._runner, self._settings.host, self._settings.port, ssl_context=tls).start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._sweep.watched.add(self)
        self._tasks.keep(self._sweep.run, "admin-stall-sweep")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._tasks.stop()

    def check(self, now: float) -> None:
        """For the sweep. A handler that closes its connection forgets the transport before the client is gone, so that
        is taken when the handler is first seen."""
        known, self._progress = self._progress, {}
        for handler in [] if self._runner.server is None else self._runner.server.connections:
            if handler in known:
                self._progress[handler] = known[handler]
            elif handler.transport is not None:
                self._progress[handler] = SendProgress(handler.transport)
        for progress in self._progress.values():
            if progress.stalled_for(now) > self._send_timeout:
                reset(progress.transport)

    @property
    def port(self) -> int:
        """The one that is open, also where the settings say 0."""
        port: int = self._runner.addresses[0][1]
        return port
