"""Orders as the loop gives them."""

from __future__ import annotations

from proxy.autoscale.actuators import Order
from proxy.autoscale.decision import Decision
from proxy.autoscale.policy import Situation


def decision(desired: int, current: int = 3, *, low: int = 1, high: int = 20, number: int = 7) -> Decision:
    return Decision(
        id=number,
        at=1_790_000_000.0,
        pool="default",
        mode="active",
        recommendation=None,
        desired={"decode": desired},
        situations={"decode": Situation(current, current)},
        bounds={"decode": (low, high)},
    )


def order(count: int, current: int = 3, victims: tuple[str, ...] = ()) -> Order:
    return Order(decision(count, current), "decode", current, count, victims)
