"""Processes that lend each other shares of caps, over messages that take a while, while all have requests that wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from proxy.cluster.messages import RecordKind
from proxy.cluster.shared import SharedQueue
from proxy.core.attempt import Attempt
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState, update
from proxy.core.request import InferenceRequest, Prompt
from proxy.fleet.store import Pods
from proxy.flowcontrol.capacity import SharedCaps
from proxy.flowcontrol.controller import FlowControl
from proxy.flowcontrol.settings import FlowControlSettings
from tests.helpers.cluster.virtual import VirtualLoop
from tests.unit.flowcontrol.test_controller import Watcher

PROCESSES, CLIENTS = 4, 5
SERVICE, BATCH, DELAY, SECONDS = 0.2, 0.005, 0.005, 4.0


class Skewed:
    """The clock of a host that is ahead of others."""

    def __init__(self, loop: VirtualLoop, ahead: float) -> None:
        self.now, self._ahead = loop.time, ahead

    def wall(self) -> float:
        return self.now() + self._ahead


class Process:
    """A process before its own view of the pods. It publishes its loads and messages in batches."""

    def __init__(self, number: int, pods: int, everybody: list[Process], clock: Skewed, **caps: Any) -> None:
        self.pods = [Endpoint(f"pod-{pod}", state=EndpointState.READY) for pod in range(pods)]
        self.served = 0
        self._number, self._everybody = number, everybody
        self._loads: dict[int, list[tuple[int, int]]] = {}
        self._messages: list[bytes] = []
        self._is_due = False
        self.control = FlowControl(FlowControlSettings(**caps), cast(Pods, self), clock, Watcher())
        shared_caps = self.control.shared_caps = SharedCaps(PROCESSES, self._say, number, str(number))
        self._queue = SharedQueue("default", shared_caps, self.control.admit_soon)

    @property
    def ready(self) -> Sequence[Endpoint]:
        return self.pods

    def endpoints_for(self, model: str) -> Sequence[Endpoint]:
        return self.pods

    async def client(self, tokens: int) -> None:
        while True:
            request = InferenceRequest("r", "/", "m", Prompt((b"text" * tokens,)), b"body", {})
            async with self.control.admit(request):
                pod = min(self.control.narrow(request, self.pods), key=lambda one: one.load.requests)
                attempt = Attempt(request, Decision(pod), pod, 0, 0.0)
                attempt.charge = (tokens, 0)
                self._charge(pod, 1, tokens)
                self.control.attempt_started(attempt)
                try:
                    await asyncio.sleep(SERVICE)
                finally:
                    self._charge(pod, -1, -tokens)
            self.served += 1

    def _charge(self, pod: Endpoint, requests: int, tokens: int) -> None:
        pod.charge(requests, tokens)
        self._soon()

    def _say(self, *reported: Any) -> None:
        self._messages.append(SharedQueue.packed("default", str(self._number), *reported))
        self._soon()

    def _soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(BATCH, self._flush)

    def _flush(self) -> None:
        self._is_due = False
        loads = [
            (pod.load.requests - pod.load.remote_requests, pod.load.tokens - pod.load.remote_tokens)
            for pod in self.pods
        ]
        for other in self._everybody:
            if other is not self:
                asyncio.get_running_loop().call_later(DELAY, other._hear, self._number, loads, self._messages)
        self._messages = []

    def _hear(self, peer: int, loads: list[tuple[int, int]], messages: list[bytes]) -> None:
        self._loads[peer] = loads
        for pod, of_peers in zip(self.pods, zip(*self._loads.values(), strict=True), strict=True):
            requests, tokens = map(sum, zip(*of_peers, strict=True))
            pod.charge(requests - pod.load.remote_requests, tokens - pod.load.remote_tokens)
            update(pod.load, remote_requests=requests)
            update(pod.load, remote_tokens=tokens)
        for message in messages:
            self._queue.receive(peer, RecordKind.WAITING, message)
        self.control.admit_soon()


def served(tokens: int, pods: int = 2, skew: float = 0.0, **caps: Any) -> list[int]:
    """Return the requests that each process has served, with a few clients of each that always want one."""
    loop = VirtualLoop()
    everybody: list[Process] = []
    everybody += [Process(number, pods, everybody, Skewed(loop, number * skew), **caps) for number in range(PROCESSES)]

    async def serve() -> None:
        tasks = [asyncio.ensure_future(each.client(tokens)) for each in everybody for _ in range(CLIENTS)]
        await asyncio.sleep(SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    try:
        loop.run_until_complete(serve())
    finally:
        loop.close()
    return [each.served for each in everybody]


@pytest.mark.parametrize(
    ("at_a_time", "tokens", "caps"),
    [
        (8, 3, {"max_concurrent": 8}),
        (8, 3, {"max_concurrent": 12, "max_tokens": 24}),
        (8, 3, {"max_concurrent_per_pod": 5, "max_tokens_per_pod": 12}),
        (2, 3, {"max_concurrent": 2}),
        (2, 3, {"max_concurrent_per_pod": 1}),
        (2, 15, {"max_tokens": 40}),
        (1, 60, {"max_tokens": 40}),
        (2, 15, {"max_concurrent": 12, "max_tokens_per_pod": 20}),
    ],
    ids=str,
)
def test_all_processes_are_served_and_together_use_their_caps(
    at_a_time: int, tokens: int, caps: dict[str, int]
) -> None:
    of_each = served(tokens, **caps)
    possible = at_a_time * SECONDS / SERVICE
    assert 0.8 * possible <= sum(of_each) <= possible
    assert min(of_each) >= 0.6 * possible / PROCESSES


def test_clocks_of_hosts_that_differ_waste_no_capacity() -> None:
    of_each = served(3, skew=1.0, max_concurrent=2)
    assert sum(of_each) >= 0.8 * 2 * SECONDS / SERVICE
    assert min(of_each) > 0
