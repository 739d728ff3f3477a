"""Simulated pods: an engine behind a listening socket, and fleets of pods."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiohttp import web

from proxy.lab.sim import completions, control, messages, responses, tasks
from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.connectors import CONNECTORS
from proxy.lab.sim.driver import EngineDriver
from proxy.lab.sim.engine import SimEngine
from proxy.lab.sim.faults import Fault, FaultCondition, FaultKind, Faults
from proxy.lab.sim.http import REMEMBERED, RequestLog, SimService, reset
from proxy.lab.sim.kv_events import KvPublisher
from proxy.lab.sim.routes import application
from proxy.lab.sim.transfer import Embeddings, Fabric

BACKLOG = 1024


class Port:
    """The port of a pod; lives as long as the pod. While the pod does not listen, the port is reserved and refuses
    connections."""

    def __init__(self) -> None:
        self._place: tuple[str, int] = "", 0
        self._kept: socket.socket | None = None

    async def listen(self, runner: web.AppRunner, host: str, port: int) -> int:
        """Return the port; 0 chooses a free one. Raise OSError if it is in use."""
        if (host, port) != self._place:
            self.give_up()
        if self._kept is None:
            await web.TCPSite(runner, host, port, backlog=BACKLOG).start()
        else:
            await web.SockSite(runner, self._kept, backlog=BACKLOG).start()
            self._kept = None
        self._place = host, int(runner.addresses[0][1])
        return self._place[1]

    async def close(self, runner: web.AppRunner) -> None:
        for site in list(runner.sites):
            await site.stop()
        self.give_up()
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(self._place)
        except OSError:  # it has IPv6, or its loop closes sockets later, as uvloop does
            sock.close()
        else:
            self._kept = sock

    def give_up(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None


ROUTES = {**completions.ROUTES, **messages.ROUTES, **responses.ROUTES, **tasks.ROUTES, **control.ROUTES}


class SimPod:
    """A simulated pod. It serves between `start` and `stop`, or until it is killed, and can be started again with an
    empty cache."""

    def __init__(
        self,
        config: SimConfig | None = None,
        *,
        remembered: int = REMEMBERED,
        fabric: Fabric | None = None,
    ) -> None:
        """Its log keeps the last `remembered` requests; the fabric connects it to other pods."""
        self.config = config or SimConfig()
        self.requests = RequestLog(remembered)
        self.faults = Faults()
        self.condition = FaultCondition()
        self.fabric = fabric or Fabric()
        self.engines = self._make_engines()
        self.host = ""
        self.port = 0
        self._port = Port()
        self._runner: web.AppRunner | None = None
        self._driving: asyncio.Task[None] | None = None
        self._service: SimService | None = None
        self._outage: asyncio.Task[None] | None = None
        self._dead: list[web.AppRunner] = []
        """Runners of killed engines: their responses hang."""

    @property
    def engine(self) -> SimEngine:
        """Return the engine of a pod with one rank, or of its first rank."""
        return self.engines[0]

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def serve_models(self, model: str | None = None, lora_adapters: Sequence[str] = ()) -> None:
        """Serve other models from now on, as an engine that loads adapters at run time or is replaced in place. The pod
        must not share its configuration with other pods."""
        object.__setattr__(self.config, "model", model or self.config.model)
        object.__setattr__(self.config, "lora_adapters", tuple(lora_adapters))

    def _make_engines(self) -> list[SimEngine]:
        return [SimEngine(self.config, self.fabric.embeddings, rank) for rank in range(self.config.data_parallel_size)]

    def _close_events(self) -> None:
        for engine in self.engines:
            if engine.events is not None:
                engine.events.close()
                engine.events = None

    @property
    def serving(self) -> bool:
        return self._runner is not None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Start to listen. Port 0 chooses a free port; `port` then contains it."""
        self.condition.restarted()
        self.engines = self._make_engines()
        driver = EngineDriver(self.engines)
        fabric, where = self.fabric, lambda: (self.host, self.port)
        connector = CONNECTORS[self.config.connector](self.config, driver, fabric, where)
        embeddings = Embeddings(self.config, fabric, where)
        service = SimService(
            self.config,
            driver,
            connector,
            embeddings,
            self.requests,
            driver.wall(),
            self.faults,
            self.condition,
            self._go_out,
        )
        app = application(service, ROUTES)
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1, auto_decompress=False
        )
        await runner.setup()
        try:
            for rank, engine in enumerate(self.engines if self.config.kv_events_port else ()):
                engine.events = KvPublisher(self.config, rank, host)
            self.port = await self._port.listen(runner, host, port)
        except OSError:
            self._close_events()
            await runner.cleanup()
            raise
        self.host = host
        self._runner, self._service = runner, service
        self._driving = asyncio.get_running_loop().create_task(driver.run(), name=f"engine of {self.url}")

    async def stop(self, grace: float = 0.2) -> None:
        """Stop listening, let open requests end for `grace` seconds, then cut the others."""
        await self._end_outage()
        if self._runner is None:
            self._port.give_up()
            return
        await self._port.close(self._runner)
        self._port.give_up()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self.requests.idle.wait()
        if self.requests.open:
            self._cut_connections(self._runner)
        await self._close(self._runner)

    async def kill(self) -> None:
        """Crash: reset every connection. The port is reserved until the pod is stopped."""
        await self._end_outage()
        await self._crash()

    def _go_out(self, fault: Fault) -> None:
        if self._outage is None or self._outage.done():
            self._outage = asyncio.get_running_loop().create_task(self._be_out(fault), name=f"outage of {self.url}")

    async def _be_out(self, fault: Fault) -> None:
        runner, service = self._runner, self._service
        if runner is None or service is None:
            return
        if fault.kind is FaultKind.ENGINE_DEAD:
            await self._stop_driving()
            service.driver.fail_all()
        if fault.kind in (FaultKind.SHUTTING_DOWN, FaultKind.ENGINE_DEAD):
            await asyncio.sleep(fault.seconds)
            await self._crash()
            await self.start(self.host, self.port)
            return
        if fault.kind is FaultKind.CRASH:
            await self._crash()
        else:
            await self._port.close(runner)
            if runner.server is not None:
                runner.server.pre_shutdown()  # connections that are idle close
        if fault.kind is FaultKind.KILLED:
            self._runner = None
            self._dead.append(runner)
            await self._stop_driving()
        await asyncio.sleep(fault.seconds)
        if fault.kind is FaultKind.REFUSE:
            await self._port.listen(runner, self.host, self.port)
        else:
            await self.start(self.host, self.port)

    async def _end_outage(self) -> None:
        """Cancel the outage, and cut hanging responses."""
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
        await self._port.close(self._runner)
        self._cut_connections(self._runner)
        await self._close(self._runner)

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
        """Stop the engines. Caches that were kept for other pods are lost."""
        if self._service is not None:
            self._service.connector.close()
            self._service.embeddings.close()
        if self._driving is not None:
            self._driving.cancel()
            await asyncio.wait([self._driving])
        self._close_events()

    async def __aenter__(self) -> SimPod:
        if self._runner is None:
            await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()


class SimFleet:
    """Pods on ephemeral ports, or on `port`, `port` + 1, …; with one configuration for all, or one for each."""

    def __init__(
        self,
        pods: int,
        config: SimConfig | Sequence[SimConfig] | None = None,
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        remembered: int = REMEMBERED,
    ) -> None:
        configs = [config or SimConfig()] * pods if config is None or isinstance(config, SimConfig) else list(config)
        if len(configs) != pods:
            raise ValueError(f"{pods} pods need {pods} configurations, not {len(configs)}")
        self.fabric = Fabric()
        self.pods = [SimPod(config, remembered=remembered, fabric=self.fabric) for config in configs]
        self._host = host
        self._port = port

    @property
    def urls(self) -> list[str]:
        return [pod.url for pod in self.pods]

    async def __aenter__(self) -> SimFleet:
        try:
            for index, pod in enumerate(self.pods):
                await pod.start(self._host, self._port + index if self._port else 0)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        for pod in reversed(self.pods):
            await pod.stop()


async def serve(
    configs: Sequence[SimConfig], *, host: str, port: int, begun: Callable[[], None] = lambda: None
) -> None:
    """Run a pod for each configuration on `port`, `port` + 1, … until cancelled; `begun` is called when all pods
    listen."""
    async with SimFleet(len(configs), configs, port=port, host=host):
        begun()
        await asyncio.Event().wait()
