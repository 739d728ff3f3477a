"""The admin port's listening socket."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from proxy.core import open_files
from proxy.core.clock import SystemClock
from proxy.core.tasks import Tasks
from proxy.http.send_progress import SendProgress, reset
from proxy.http.settings import SEND_TIMEOUT, Admin
from proxy.http.sweep import Sweep
from proxy.http.tls import HANDSHAKE_TIMEOUT, server_context

log = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 1.0
"""What control calls that still run get when the process stops."""

MOST_CONNECTIONS = 256
"""Connections of the port. Each holds a descriptor, and so do requests on the data port."""

IDLE_TIMEOUT = 75.0
"""Seconds that a connection stays open without a request, or with a part of a head."""

BACKLOG = 128
"""Connections that wait for the event loop in the kernel."""


class AdminServer:
    """`async with`: inside of it the port is open."""

    def __init__(
        self,
        settings: Admin,
        application: web.Application,
        send_timeout: float = SEND_TIMEOUT,
        idle_timeout: float = IDLE_TIMEOUT,
        most_connections: int = MOST_CONNECTIONS,
    ) -> None:
        """`send_timeout`: seconds after which a connection is reset whose client reads nothing. With few descriptors
        there are fewer than `most_connections`."""
        self._settings = settings
        self._send_timeout = send_timeout
        self._sweep = Sweep(SystemClock(), send_timeout)
        self._progress: dict[Any, SendProgress] = {}
        self._tasks = Tasks()
        self._runner = web.AppRunner(
            application,
            access_log=None,
            logger=log,
            shutdown_timeout=SHUTDOWN_SECONDS,
            keepalive_timeout=idle_timeout,
        )
        self._most_connections = min(most_connections, open_files.limit() // 4)
        self._listener: asyncio.Server | None = None

    async def __aenter__(self) -> AdminServer:
        """Raises OSError if the address is taken or is none, or the certificate cannot be used."""
        await self._runner.setup()
        try:
            tls = None if self._settings.tls is None else server_context(self._settings.tls)
            self._listener = await asyncio.get_running_loop().create_server(
                self._connection,
                self._settings.host,
                self._settings.port,
                backlog=BACKLOG,
                ssl=tls,
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_TIMEOUT,
            )
        except OSError:
            await self._runner.cleanup()
            raise
        self._sweep.watched.add(self)
        self._tasks.keep(self._sweep.run, "admin-stall-sweep")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None:
            self._listener.close()
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
        assert self._listener is not None
        port: int = self._listener.sockets[0].getsockname()[1]
        return port

    def _connection(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        if server is None or len(server.connections) >= self._most_connections:
            return _TurnedAway()
        return server()


class _TurnedAway(asyncio.Protocol):
    """A connection that is closed at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()


def _is_a_fault(record: logging.LogRecord) -> bool:
    """Return False for requests that are not HTTP. aiohttp logs each with its traceback, so that anybody who reaches
    the port could fill the log."""
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


log.addFilter(_is_a_fault)
