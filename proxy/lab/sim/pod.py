"""One simulated pod: an engine behind a listening socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from types import TracebackType

from aiohttp import web

from proxy.lab.sim.api import app
from proxy.lab.sim.api.call import Service
from proxy.lab.sim.api.spoil import reset
from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.driver import EngineDriver
from proxy.lab.sim.engine import Engine
from proxy.lab.sim.faults import Condition, Fault, Faults, Kind
from proxy.lab.sim.port import Port
from proxy.lab.sim.requests import REMEMBERED, RequestLog
from proxy.lab.sim.transfer.connector import Connector
from proxy.lab.sim.transfer.connectors import CONNECTORS
from proxy.lab.sim.transfer.embeddings import Embeddings
from proxy.lab.sim.transfer.fabric import Fabric


def epoch_seconds() -> float:
    return datetime.now(UTC).timestamp()


class SimPod:
    """Serves between `start` and `stop`, or until it is killed; may be started again, then with an empty cache.

    `wall` is the time in seconds since the epoch; everything else runs on the event loop's clock.
    """

    def __init__(
        self,
        config: SimConfig | None = None,
        *,
        wall: Callable[[], float] = epoch_seconds,
        remembered: int = REMEMBERED,
        fabric: Fabric | None = None,
    ) -> None:
        """Its log has the last `remembered` calls; by the fabric it reaches other pods."""
        self.config = config or SimConfig()
        self.requests = RequestLog(remembered)
        self.faults = Faults()
        self.condition = Condition()
        self.fabric = fabric or Fabric()
        self.engine = Engine(self.config, self.fabric.embeddings)
        self.host = ""
        self.port = 0
        self._port = Port()
        self._wall = wall
        self._runner: web.AppRunner | None = None
        self._driving: asyncio.Task[None] | None = None
        self._driver: EngineDriver | None = None
        self._connector: Connector | None = None
        self._embeddings: Embeddings | None = None
        self._outage: asyncio.Task[None] | None = None
        self._dead: list[web.AppRunner] = []
        """Of engines that were killed: their answers hang."""

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def serve_models(self, model: str | None = None, lora_adapters: Sequence[str] = ()) -> None:
        """Serve other models from now on, as an engine that loads adapters at run time, or that is replaced in place.
        The configuration of the pod must not be that of others."""
        object.__setattr__(self.config, "model", model or self.config.model)
        object.__setattr__(self.config, "lora_adapters", tuple(lora_adapters))

    def _where(self) -> tuple[str, int]:
        return self.host, self.port

    @property
    def serving(self) -> bool:
        return self._runner is not None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0 takes any free one; `port` then says which."""
        loop = asyncio.get_running_loop()
        self.condition.restarted()
        self.engine = Engine(self.config, self.fabric.embeddings)
        driver = EngineDriver(self.engine, loop.time)
        connector = CONNECTORS[self.config.connector](self.config, driver, self.fabric, self._where)
        embeddings = Embeddings(self.config, self.fabric, self._where)
        service = Service(
            self.config,
            driver,
            connector,
            embeddings,
            self.requests,
            self._wall,
            self._wall(),
            self.faults,
            self.condition,
            self._go_out,
        )
        runner = web.AppRunner(
            app.build(service), handler_cancellation=True, access_log=None, shutdown_timeout=0.1, auto_decompress=False
        )
        await runner.setup()
        try:
            self.port = await self._port.listen(runner, host, port)
        except OSError:
            await runner.cleanup()
            raise
        self.host = host
        self._runner, self._driver, self._connector, self._embeddings = runner, driver, connector, embeddings
        self._driving = loop.create_task(driver.run(), name=f"engine of {self.url}")

    async def stop(self, grace: float = 0.2) -> None:
        """Accept nobody, let open calls end for `grace` seconds, then cut what is left."""
        await self._end_outage()
        if self._runner is None:
            self._port.give_up()
            return
        await self._stop_listening(self._runner)
        self._port.give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self.requests.idle.wait()
        if self.requests.open:
            self._cut_connections(self._runner)
        await self._close(self._runner)

    async def kill(self) -> None:
        """Crash: nobody is answered any more, every connection is reset. The port is kept until the pod is stopped."""
        await self._end_outage()
        await self._crash()

    def _go_out(self, fault: Fault) -> None:
        if self._outage is None or self._outage.done():
            self._outage = asyncio.get_running_loop().create_task(self._be_out(fault), name=f"outage of {self.url}")

    async def _be_out(self, fault: Fault) -> None:
        runner = self._runner
        if runner is None:
            return
        if fault.kind is Kind.ENGINE_DEAD:
            await self._stop_driving()
            if self._driver is not None:
                self._driver.fail_all()
        if fault.kind in (Kind.SHUTTING_DOWN, Kind.ENGINE_DEAD):
            await asyncio.sleep(fault.seconds)
            await self._crash()
            await self.start(self.host, self.port)
            return
        if fault.kind is Kind.CRASH:
            await self._crash()
        else:
            await self._stop_listening(runner)
            if runner.server is not None:
                runner.server.pre_shutdown()  # connections that are idle close
        if fault.kind is Kind.KILLED:
            self._runner = None
            self._dead.append(runner)
            await self._stop_driving()
        await asyncio.sleep(fault.seconds)
        if fault.kind is Kind.REFUSE:
            await self._port.listen(runner, self.host, self.port)
        else:
            await self.start(self.host, self.port)

    async def _end_outage(self) -> None:
        """It does not come back by itself, and what hangs is cut."""
        if self._outage is not None:
            self._outage.cancel()
            await asyncio.wait([self._outage])
        while self._dead:
            runner = self._dead.pop()
            self._cut_connections(runner)
            await asyncio.sleep(0)
            await runner.cleanup()

    async def _crash(self) -> None:
        if self._runner is None:
            return
        await self._stop_listening(self._runner)
        self._cut_connections(self._runner)
        await self._close(self._runner)

    async def _stop_listening(self, runner: web.AppRunner) -> None:
        await self._port.close(runner)

    def _cut_connections(self, runner: web.AppRunner) -> None:
        for record in self.requests.open:
            record.cut = True
        for connection in runner.server.connections if runner.server else ():
            if (transport := connection.transport) is not None:
                reset(transport)

    async def _close(self, runner: web.AppRunner) -> None:
        self._runner = None
        await self._stop_driving()
        await asyncio.sleep(0)
        await runner.cleanup()

    async def _stop_driving(self) -> None:
        """What it kept for other pods is lost, what it was about to fetch is not."""
        if self._connector is not None:
            self._connector.close()
        if self._embeddings is not None:
            self._embeddings.close()
        if self._driving is not None:
            self._driving.cancel()
            await asyncio.wait([self._driving])

    async def __aenter__(self) -> SimPod:
        if self._runner is None:
            await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()
