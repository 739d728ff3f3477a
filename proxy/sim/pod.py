"""One simulated pod: an engine behind a listening socket."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType

from aiohttp import web

from proxy.sim.api import app
from proxy.sim.api.call import Service
from proxy.sim.config import SimConfig
from proxy.sim.driver import EngineDriver
from proxy.sim.engine import Engine
from proxy.sim.requests import RequestLog

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER: on, zero seconds."""


def epoch_seconds() -> float:
    return datetime.now(UTC).timestamp()


class SimPod:
    """Serves between `start` and `stop`, or until it is killed; may be started again, then with an empty cache.

    `wall` is the time in seconds since the epoch; everything else runs on the event loop's clock.
    """

    def __init__(self, config: SimConfig | None = None, *, wall: Callable[[], float] = epoch_seconds) -> None:
        self.config = config or SimConfig()
        self.requests = RequestLog()
        self.engine = Engine(self.config)
        self.host = ""
        self.port = 0
        self._wall = wall
        self._runner: web.AppRunner | None = None
        self._driving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    @property
    def serving(self) -> bool:
        return self._runner is not None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0 takes any free one; `port` then says which."""
        loop = asyncio.get_running_loop()
        self.engine = Engine(self.config)
        driver = EngineDriver(self.engine, loop.time)
        service = Service(self.config, driver, self.requests, self._wall, self._wall())
        runner = web.AppRunner(
            app.build(service), handler_cancellation=True, access_log=None, shutdown_timeout=0.1, auto_decompress=False
        )
        await runner.setup()
        try:
            await web.TCPSite(runner, host, port, backlog=1024).start()
        except OSError:
            await runner.cleanup()
            raise
        self.host, self.port = host, runner.addresses[0][1]
        self._runner = runner
        self._driving = loop.create_task(driver.run(), name=f"engine of {self.url}")

    async def stop(self, grace: float = 0.2) -> None:
        """Accept nobody, let open calls end for `grace` seconds, then cut what is left."""
        if self._runner is None:
            return
        await self._stop_listening(self._runner)
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self.requests.idle.wait()
        if self.requests.open:
            self._cut_connections(self._runner)
        await self._close(self._runner)

    async def kill(self) -> None:
        """Crash: nobody is answered any more, every connection is reset."""
        if self._runner is None:
            return
        await self._stop_listening(self._runner)
        self._cut_connections(self._runner)
        await self._close(self._runner)

    async def _stop_listening(self, runner: web.AppRunner) -> None:
        for site in list(runner.sites):
            await site.stop()

    def _cut_connections(self, runner: web.AppRunner) -> None:
        """With RST, as the kernel does for a process that died with unread data."""
        for connection in runner.server.connections if runner.server else ():
            if (transport := connection.transport) is not None:
                transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
                transport.abort()

    async def _close(self, runner: web.AppRunner) -> None:
        self._runner = None
        if self._driving is not None:
            self._driving.cancel()
            await asyncio.wait([self._driving])
        await asyncio.sleep(0)
        await runner.cleanup()

    async def __aenter__(self) -> SimPod:
        if self._runner is None:
            await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
