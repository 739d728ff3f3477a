"""The pods of one pool, for whoever has to do with no others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.core.endpoint import Endpoint
from proxy.fleet.datastore import Fleet, Hook


class PoolPods:
    """As the fleet has them; where there is but one pool, the fleet itself is asked instead."""

    def __init__(self, fleet: Fleet, pool: str) -> None:
        self._fleet = fleet
        self._pool = pool

    def serving(self, model: str) -> Sequence[Endpoint]:
        """The ready ones that serve the model."""
        return self._fleet.within(self._pool).of(model)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return self._fleet.within(self._pool).ready

    def watch(self, added: Hook, removed: Hook) -> Callable[[], None]:
        """See Fleet.watch."""

        def mine(hook: Hook) -> Hook:
            return lambda endpoint: hook(endpoint) if endpoint.pool == self._pool else None

        return self._fleet.watch(mine(added), mine(removed))


Pods = Fleet | PoolPods


def pods_of(fleet: Fleet, pool: str, pools: int) -> Pods:
    """Of one of so many pools."""
    return fleet if pools == 1 else PoolPods(fleet, pool)
