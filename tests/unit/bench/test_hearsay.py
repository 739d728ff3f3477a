"""The proxies of bench/hearsay.py: what one does the others hear when its time has come, and not before."""

from __future__ import annotations

import pytest

from bench.hearsay import APART, Proxies
from proxy.core.ports import ManualClock
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import VirtualPod
from proxy.lab.workload import Job

JOB = Job(0.0, 600, 20, (1, 2), (1, 2), session="s")


def elsewhere(proxies: Proxies) -> list[int]:
    """Of each proxy: requests of others that it knows of, on all pods."""
    return [sum(pod.load.remote_requests for pod in proxy._endpoints) for proxy in proxies._proxies]


@pytest.mark.parametrize(("delay", "known"), [(0.0, [0, 1, 1]), (0.02, [0, 0, 1]), (APART, [0, 0, 0])])
def test_other_proxies_receive_a_request_after_the_delay(delay: float, known: list[int]) -> None:
    clock = ManualClock()
    pods = [VirtualPod(number, SimConfig()) for number in range(2)]
    proxies, seen = Proxies(2, delay, pods, clock, 1), []
    seen.append(sum(elsewhere(proxies)))
    assert proxies.place(0, JOB, 0.0) is not None
    for _ in range(2):
        proxies.scrape_sent(0)
        seen.append(sum(elsewhere(proxies)))
        clock.advance(0.02)
    assert seen == known
    proxies.first_byte(0, clock.now())
    proxies.ended(0, clock.now(), 0)
    clock.advance(1.0)
    proxies.scrape_sent(0)
    assert sum(elsewhere(proxies)) == 0


def test_a_turn_goes_to_the_pod_that_another_proxy_chose_before() -> None:
    clock = ManualClock()
    pods = [VirtualPod(number, SimConfig()) for number in range(8)]
    proxies = Proxies(4, 0.01, pods, clock, 3)
    placed = []
    for index in range(8):
        placed.append(proxies.place(index, JOB, clock.now()))
        clock.advance(0.1)
        proxies.first_byte(index, clock.now())
        proxies.ended(index, clock.now(), 0)
        clock.advance(1.0)
    assert len({id(proxies._of[index]) for index in range(8)}) > 1
    assert len(set(placed)) == 1
