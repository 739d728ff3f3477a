"""Several simulated pods together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType

from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.pod import SimPod
from proxy.lab.sim.requests import REMEMBERED
from proxy.lab.sim.transfer.fabric import Fabric


class SimFleet:
    """Pods on ephemeral ports, or on `port`, `port` + 1, …; one configuration for all, or one for each."""

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
        self._stack = AsyncExitStack()

    @property
    def urls(self) -> list[str]:
        return [pod.url for pod in self.pods]

    async def __aenter__(self) -> SimFleet:
        async with AsyncExitStack() as stack:
            for index, pod in enumerate(self.pods):
                await pod.start(self._host, self._port + index if self._port else 0)
                await stack.enter_async_context(pod)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()


async def serve(
    configs: Sequence[SimConfig], *, host: str, port: int, begun: Callable[[], None] = lambda: None
) -> None:
    """Run a pod for each configuration on `port`, `port` + 1, … until cancelled; `begun` is called when all listen."""
    async with SimFleet(len(configs), configs, port=port, host=host):
        begun()
        await asyncio.Event().wait()
