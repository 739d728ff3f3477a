"""Which faults the pods are given, and how often a request meets one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from proxy.lab.sim import Fault, FaultKind, SimPod
from proxy.lab.sim.faults import STATES

OF_REQUESTS = (
    Fault(FaultKind.REJECT, status=429),
    Fault(FaultKind.REJECT, status=500),
    Fault(FaultKind.REJECT, status=502),
    Fault(FaultKind.REJECT, status=503),
    Fault(FaultKind.HANG),
    Fault(FaultKind.HANG, events=3),
    Fault(FaultKind.RESET),
    Fault(FaultKind.RESET, events=3),
    Fault(FaultKind.FIN),
    Fault(FaultKind.FIN, events=3),
    Fault(FaultKind.DRIP),
    Fault(FaultKind.GARBAGE),
    Fault(FaultKind.CORRUPT, events=2),
    Fault(FaultKind.MISFRAME, events=3),
    Fault(FaultKind.ERROR_FIRST),
)

"""Between a pod and one request."""

OF_PODS = (
    Fault(FaultKind.REJECT, status=429, retry_after=1),
    Fault(FaultKind.REFUSE, seconds=0.15),
    Fault(FaultKind.CRASH, seconds=0.15),
    Fault(FaultKind.KILLED, seconds=0.15),
    Fault(FaultKind.FROZEN, seconds=0.2),
    Fault(FaultKind.UNHEALTHY, seconds=0.2),
    Fault(FaultKind.LOADING, seconds=0.15),
    Fault(FaultKind.SHUTTING_DOWN, seconds=0.15),
    Fault(FaultKind.SLOW_START, seconds=0.2),
)
"""What makes a pod less than well for everybody; after a Retry-After, by its own word."""


def give(pods: Iterable[SimPod], of_requests: float, of_pods: float, seed: int) -> None:
    """`of_requests` and `of_pods` are the chances of a request to meet each fault of either list. A request that meets
    one on one pod meets another, or none, on the next."""
    for number, pod in enumerate(pods):
        faults = [_with(fault, of_requests) for fault in OF_REQUESTS] + [_with(fault, of_pods) for fault in OF_PODS]
        pod.faults.set(faults, seed * 1_000 + number)


def lift(pods: Iterable[SimPod]) -> None:
    for pod in pods:
        pod.faults.set(())


def met(pods: Iterable[SimPod]) -> Counter[str]:
    """How many requests met each, or began a state that others were in, too."""
    counted: Counter[str] = Counter()
    for pod in pods:
        for fault, number in zip(pod.faults.faults, pod.faults.met, strict=True):
            counted[named(fault)] += number
    return counted


def named(fault: Fault) -> str:
    if fault.kind is FaultKind.REJECT:
        return f"reject {fault.status}" + (" with Retry-After" if fault.retry_after else "")
    if fault.kind in STATES or fault.kind in (
        FaultKind.DRIP,
        FaultKind.GARBAGE,
        FaultKind.CORRUPT,
        FaultKind.ERROR_FIRST,
    ):
        return fault.kind.value
    return fault.kind.value + (" in the middle" if fault.events else " before the head")


def _with(fault: Fault, probability: float) -> Fault:
    return replace(fault, probability=probability)
