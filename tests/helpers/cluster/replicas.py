"""A replica without a proxy around it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.cluster.replica import LEASE, Replica
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.telemetry.metrics import Counter


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
        dropped=Counter(),
        garbled=Counter(),
        garbled_of_hosts=Counter(),
        lease=lease,
    )
