"""Orders as the loop gives them."""

from __future__ import annotations

from proxy.autoscale.actuators import ScaleOrder
from proxy.autoscale.loop import ScalingDecision
from proxy.autoscale.policy import RoleSituation


def decision(desired: int, current: int = 3, *, low: int = 1, high: int = 20, number: int = 7) -> ScalingDecision:
    return ScalingDecision(
        id=number,
        at=1_790_000_000.0,
        pool="default",
        mode="active",
        recommendation=None,
        desired={"decode": desired},
        situations={"decode": RoleSituation(current, current)},
        bounds={"decode": (low, high)},
    )


def order(count: int, current: int = 3, victims: tuple[str, ...] = ()) -> ScaleOrder:
    return ScaleOrder(decision(count, current), "decode", count, victims)
