"""Which faults the pods are given, and how often a request meets one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from proxy.lab.sim import Fault, Kind, SimPod
from proxy.lab.sim.faults import STATES

OF_REQUESTS = (
    Fault(Kind.REJECT, status=429),
    Fault(Kind.REJECT, status=500),
    Fault(Kind.REJECT, status=502),
    Fault(Kind.REJECT, status=503),
    Fault(Kind.HANG),
    Fault(Kind.HANG, events=3),
    Fault(Kind.RESET),
    Fault(Kind.RESET, events=3),
    Fault(Kind.FIN),
    Fault(Kind.FIN, events=3),
    Fault(Kind.DRIP),
    Fault(Kind.GARBAGE),
    Fault(Kind.CORRUPT, events=2),
    Fault(Kind.MISFRAME, events=3),
    Fault(Kind.ERROR_FIRST),
)

"""Between a pod and one request."""

OF_PODS = (
    Fault(Kind.REJECT, status=429, retry_after=1),
    Fault(Kind.REFUSE, seconds=0.15),
    Fault(Kind.CRASH, seconds=0.15),
    Fault(Kind.KILLED, seconds=0.15),
    Fault(Kind.FROZEN, seconds=0.2),
    Fault(Kind.UNHEALTHY, seconds=0.2),
    Fault(Kind.LOADING, seconds=0.15),
    Fault(Kind.SHUTTING_DOWN, seconds=0.15),
    Fault(Kind.SLOW_START, seconds=0.2),
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
    if fault.kind is Kind.REJECT:
        return f"reject {fault.status}" + (" with Retry-After" if fault.retry_after else "")
    if fault.kind in STATES or fault.kind in (Kind.DRIP, Kind.GARBAGE, Kind.CORRUPT, Kind.ERROR_FIRST):
        return fault.kind.value
    return fault.kind.value + (" in the middle" if fault.events else " before the head")


def _with(fault: Fault, probability: float) -> Fault:
    return replace(fault, probability=probability)
