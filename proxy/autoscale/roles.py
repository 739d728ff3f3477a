"""Which role of a pool a pod has."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.autoscale.settings import PoolSettings, RoleSettings
from proxy.core.endpoint import Endpoint


def is_of(role: RoleSettings, pool: PoolSettings, endpoint: Endpoint) -> bool:
    if role.selector:
        return all(endpoint.labels.get(label) == value for label, value in role.selector.items())
    return len(pool.roles) == 1 or endpoint.role == role.name


def role_of(pool: PoolSettings, endpoint: Endpoint) -> str | None:
    """The first that it has."""
    return next((role.name for role in pool.roles if is_of(role, pool, endpoint)), None)


def pods_of_role(pool: PoolSettings, name: str, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
    return [endpoint for endpoint in endpoints if role_of(pool, endpoint) == name]
