"""What the smaller panels show, each in JSON: queues, shadow profiles, recommendations, which configuration it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from proxy.autoscale.decision import Decision
from proxy.autoscale.loop import Loop
from proxy.dashboard.series import Series
from proxy.flowcontrol.controller import FlowControl

MOST_TENANTS = 12
"""Of a band; those with most waiting."""


class Scaled(Protocol):
    """`composition.scaled_pool.ScaledPool` is one."""

    @property
    def loop(self) -> Loop: ...
    def described(self, decision: Decision) -> dict[str, Any]: ...


def queues(flow_controls: Mapping[str, FlowControl], now: float) -> list[dict[str, Any]]:
    """By pool and band; `oldest` is in seconds."""
    return [
        {
            "pool": pool,
            "saturation": round(control.room.saturation(), 3),
            "bands": [
                {
                    "name": band.name,
                    "priority": band.priority,
                    "waiting": band.waiting,
                    "bytes": band.bytes,
                    "tenants": [
                        {"name": tenant, "waiting": waiting, "oldest": round(now - since, 1)}
                        for tenant, waiting, since in sorted(band.tenants(), key=lambda one: -one[1])[:MOST_TENANTS]
                    ],
                }
                for band in control.queue.bands
            ],
        }
        for pool, control in flow_controls.items()
    ]


def shadows(series: Series) -> list[dict[str, Any]]:
    """By profile: how often it agreed, and what the pods that it chose would have cost or saved, in seconds."""
    runs = series.by("shadow_decisions", "profile", "agrees")
    regrets = series.masses("shadow_regret_seconds", "profile", "sooner")
    nothing = (0.0, 0.0)
    return [
        {
            "profile": profile,
            "agreed": round(runs.get((profile, "true"), 0.0)),
            "differed": round(runs.get((profile, "false"), 0.0)),
            "sooner": [round(one, 3) for one in regrets.get((profile, "shadow"), nothing)],
            "later": [round(one, 3) for one in regrets.get((profile, "live"), nothing)],
        }
        for profile in sorted({profile for profile, _ in runs})
    ]


def scaling(pools: Mapping[str, Scaled]) -> list[dict[str, Any]]:
    """The latest recommendation for each pool with a policy; only its name before there is one."""
    found: list[dict[str, Any]] = []
    for name, pool in pools.items():
        latest, controls = pool.loop.latest, pool.loop.controls
        about: dict[str, Any] = {"pool": name, "paused": controls.paused}
        if latest is not None:
            about |= {key: value for key, value in pool.described(latest).items() if key not in ("decision_id", "ts")}
        found.append(about)
    return found
