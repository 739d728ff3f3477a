"""One of several proxies of a deployment: what a host knows of the others, and the proxy that is a host by itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

from proxy.app import App
from proxy.configurations import Configurations, Reader
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Random
from proxy.core.registry import Registry
from proxy.fleet.store import Fleet
from proxy.replicas.deployment import Alone, Deployment
from proxy.replicas.drains import SharedDrains
from proxy.replicas.redis_line import check
from proxy.replicas.series import ReplicaSeries
from proxy.replicas.settings import INTERVAL, ReplicaSettings
from proxy.replicas.way import Local
from proxy.replicas.wire import Kind, record
from proxy.settings import Settings
from proxy.sharing import SharingApp
from proxy.telemetry.catalogue import Catalogue


class Others:
    """The other hosts, and what operators told any of them about pods. Raises ConfigError if the library is missing."""

    def __init__(
        self,
        settings: ReplicaSettings,
        fleet: Fleet,
        clock: Clock,
        rng: Random,
        catalogue: Catalogue,
        configurations: Configurations,
        local: Local,
        gathers: bool = True,
    ) -> None:
        check(settings)
        self._fleet = fleet
        self.drains = SharedDrains(self._drain, lambda body: self.deployment.say(0, record(Kind.DRAINS, body)))
        self.deployment = Deployment(
            settings,
            clock,
            rng,
            ReplicaSeries(catalogue),
            local,
            config=lambda: configurations.of_deployment,
            own=lambda: record(Kind.DRAINS, self.drains.all()),
            gathers=gathers,
        )
        fleet.watch(self.drains.added, self.drains.removed)

    def _drain(self, name: str, drains: bool) -> None:
        if drains:
            self._fleet.drain(name)
        else:
            self._fleet.undrain(name)


class Replicated(SharingApp):
    """Without workers, and among other proxies."""

    def __init__(self, settings: Settings, registry: Registry | None = None, reader: Reader | None = None) -> None:
        super().__init__(settings, registry, reader)
        self.fleet.watch(self._replica.added, self._replica.removed)
        self._others = Others(
            settings.replicas,
            self.fleet,
            self._clock,
            self._random,
            self._catalogue,
            self.configurations,
            self._replica,
            gathers=False,
        )
        self._replica.join(Alone(self._others.deployment), INTERVAL)

    async def _know_the_fleet(self, stack: AsyncExitStack) -> Callable[[], Awaitable[object]]:
        """The pods first: what others say of pods that are not known is lost."""
        first_contact = await super()._know_the_fleet(stack)
        await stack.enter_async_context(self._others.deployment)
        stack.push_async_callback(self._replica.close)
        return first_contact

    def _told(self, kind: Kind, record: bytes) -> None:
        if kind is Kind.DRAINS:
            self._others.drains.take(record)

    def _drained(self, endpoint: Endpoint) -> None:
        self._others.drains.turned(endpoint, self.fleet.drains(endpoint))

    def _replicas(self) -> Mapping[str, Any]:
        return self._others.deployment.status()


def app_of(settings: Settings, reader: Reader | None = None) -> App:
    """The proxy of one process. Raises ConfigError."""
    return (Replicated if settings.replicas.is_shared else App)(settings, reader=reader)
