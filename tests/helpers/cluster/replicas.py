"""A replica without a proxy around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.cluster.replica import LEASE, Replica
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.telemetry.metrics import Catalogue


def bare_replica(
    id: bytes, clock: Clock, endpoints: Callable[[], Sequence[Endpoint]] = tuple, lease: float = LEASE
) -> Replica:
    """Nothing receives what its peers publish."""
    return Replica(
        id,
        clock,
        endpoints=endpoints,
        apply=lambda *_: None,
        receive=lambda *_: None,
        catalogue=Catalogue("test"),
        lease=lease,
    )
