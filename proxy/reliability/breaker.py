"""Circuit breakers, which eject pods that fail requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proxy.core.attempt import Attempt, Ending
from proxy.core.endpoint import GONE, Endpoint, update
from proxy.core.errors import (
    BadGateway,
    ConnectFailed,
    Declined,
    EnvoyOverflow,
    OutOfFiles,
    RankOutOfRange,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.request import client_limit_has_passed
from proxy.reliability.settings import BreakerSettings

if TYPE_CHECKING:
    from proxy.fleet.store import Fleet

OPEN, PROBED = "failed requests", "failed requests, and is being tried"
UNREACHABLE, RESTING, LEAVING = "takes no connections", "asked for a rest", "is shutting down"

NOT_FOUND = 404

UNREACHABLE_SECONDS = 1.0
"""Seconds of the ejection of a pod that accepts no connection. Its scrapes show its return too."""

MOST_REST = 30.0
"""Longest honoured Retry-After, in seconds."""

LEAVING_SECONDS = 60.0
SHUTTING_DOWN = "after shutdown"
"""A part of the 500 that vLLM sends while it drains; its /health is still 200 then."""

Later = Callable[[float, Callable[[], None]], object]
"""Call a function after a number of seconds, on the event loop."""


class BreakerPeers:
    """Other processes with breakers for the same pods: `cluster.shared.SharedBreakers`, or no process."""

    def breaker_turned(self, endpoint: Endpoint, is_open: bool) -> None:
        """Publish that a breaker opened or closed; peers call `hear`."""

    def breaker_tried(self, endpoint: Endpoint) -> None:
        """Publish that this process probes the pod; peers call `hold_off`."""

    def pause(self, endpoint: Endpoint) -> float:
        """Return the seconds for which other processes probe the pod first."""
        return 0.0


@dataclass(eq=False, slots=True)
class Circuit:
    """The breaker of one pod: closed -> open -> half-open -> closed or open. It exists while it has failures or is
    open."""

    failures: deque[float] = field(default_factory=deque)
    """Times of the failures within the window, in monotonic seconds."""
    successes: int = 0
    """Successes since the first of these failures."""
    is_open: bool = False
    is_half_open: bool = False
    probes: set[Attempt] = field(default_factory=set)
    """One; more where ejections are ignored."""
    times: int = 0
    """Number of times it opened. Only the timer of the last one counts."""


@dataclass(eq=False)
class Breakers(Listener):
    """A circuit breaker for each pod with failed requests. The ranks of a pod share one."""

    settings: BreakerSettings
    clock: Clock
    fleet: Fleet
    later: Later
    peers: BreakerPeers = field(init=False, default_factory=BreakerPeers)
    _circuits: dict[Endpoint, Circuit] = field(init=False, default_factory=dict)
    _ejected_until: dict[tuple[Endpoint, str], float] = field(init=False, default_factory=dict)
    """End of each other ejection, by pod and reason."""

    def state(self, endpoint: Endpoint) -> str:
        circuit = self._circuits.get(endpoint.first_rank)
        if circuit is None or not circuit.is_open:
            return "closed"
        return "half-open" if circuit.is_half_open else "open"

    def started_on_watched_pod(self, attempt: Attempt) -> None:
        """Let no request follow a probe of a half-open pod."""
        circuit = self._circuits.get(attempt.endpoint.first_rank)
        if circuit is not None and circuit.is_half_open:
            circuit.probes.add(attempt)
            attempt.listeners = attempt.listeners.at_first_byte(self._probe_responded)
            self.fleet.eject(attempt.endpoint, PROBED)
            self.peers.breaker_tried(attempt.endpoint.first_rank)

    def _probe_responded(self, attempt: Attempt) -> None:
        """Close the breaker at the first byte of a good response to a probe."""
        circuit = self._circuits.get(attempt.endpoint.first_rank)
        if circuit is not None and attempt in circuit.probes and attempt.status is not None and attempt.status < 500:
            self._recover(attempt.endpoint.first_rank)

    def ended_with_evidence(self, attempt: Attempt, error: BaseException | None) -> None:
        endpoint = attempt.endpoint.first_rank
        if endpoint.state is GONE:
            return
        circuit = self._circuits.get(endpoint)
        if circuit is not None and attempt in circuit.probes:
            circuit.probes.discard(attempt)
            self.fleet.uneject(endpoint, PROBED)
        if isinstance(error, OutOfFiles | EnvoyOverflow):
            return
        if isinstance(error, ConnectFailed):
            self._eject_for(endpoint, UNREACHABLE, UNREACHABLE_SECONDS)
        elif _is_failure(attempt, error, self.clock.now()):
            if isinstance(error, Declined):
                self._heed(endpoint, error)
            if not (isinstance(error, Declined) and error.status == 429):
                self._failed(endpoint)
        elif circuit is not None and attempt.ending is Ending.COMPLETE:
            self._succeeded(endpoint, circuit)

    def hear(self, endpoint: Endpoint, is_open: bool) -> None:
        """Open or close the breaker as a peer did, with a timer of its own."""
        endpoint = endpoint.first_rank
        if not is_open:
            self._close(endpoint)
            return
        circuit = self._circuit_of(endpoint)
        if circuit.is_half_open or not circuit.is_open:
            self._open(endpoint, circuit)

    def hold_off(self, endpoint: Endpoint) -> None:
        """Wait while a peer probes the pod. If it reports no result, the pod is probed here later."""
        endpoint = endpoint.first_rank
        circuit = self._circuits.get(endpoint)
        if circuit is not None and circuit.is_open and not circuit.probes:
            self._open(endpoint, circuit)

    def forget(self, endpoint: Endpoint) -> None:
        """Drop the state of a pod that was removed or whose process was replaced. A single rank may leave before its
        pod."""
        if endpoint is not endpoint.first_rank:
            return
        self._close(endpoint)
        for why in (UNREACHABLE, RESTING, LEAVING):
            self._end_ejection(endpoint, why)

    def _heed(self, endpoint: Endpoint, error: Declined) -> None:
        """Eject the pod as its response requests: for its Retry-After, or because it shuts down."""
        if error.retry_after:
            self._eject_for(endpoint, RESTING, min(MOST_REST, error.retry_after))
        if SHUTTING_DOWN in error.text:
            self._eject_for(endpoint, LEAVING, LEAVING_SECONDS)

    def _failed(self, endpoint: Endpoint) -> None:
        circuit = self._circuit_of(endpoint)
        if circuit.is_open:
            if circuit.is_half_open:
                self._trip(endpoint, circuit)
            return
        self._forget_old(circuit)
        circuit.failures.append(self.clock.now())
        if len(circuit.failures) >= self.settings.failures and len(circuit.failures) >= circuit.successes:
            self._trip(endpoint, circuit)

    def _succeeded(self, endpoint: Endpoint, circuit: Circuit) -> None:
        if circuit.is_open:
            if circuit.is_half_open:
                self._recover(endpoint)
            return
        self._forget_old(circuit)
        circuit.successes += 1
        if not circuit.failures:
            self._close(endpoint)

    def _forget_old(self, circuit: Circuit) -> None:
        oldest = self.clock.now() - self.settings.window
        while circuit.failures and circuit.failures[0] <= oldest:
            circuit.failures.popleft()
        if not circuit.failures:
            circuit.successes = 0

    def _circuit_of(self, endpoint: Endpoint) -> Circuit:
        circuit = self._circuits.get(endpoint)
        if circuit is None:
            circuit = self._circuits[endpoint] = Circuit()
            _watch(endpoint, True)
        return circuit

    def _trip(self, endpoint: Endpoint, circuit: Circuit) -> None:
        self._open(endpoint, circuit)
        self.peers.breaker_turned(endpoint, True)

    def _recover(self, endpoint: Endpoint) -> None:
        self._close(endpoint)
        self.peers.breaker_turned(endpoint, False)

    def _open(self, endpoint: Endpoint, circuit: Circuit) -> None:
        circuit.is_open, circuit.is_half_open = True, False
        self.fleet.eject(endpoint, OPEN)
        circuit.times = times = circuit.times + 1
        seconds = self.settings.open + self.peers.pause(endpoint)
        self.later(seconds, lambda: self._half_open(endpoint, circuit, times))

    def _half_open(self, endpoint: Endpoint, circuit: Circuit, times: int) -> None:
        if self._circuits.get(endpoint) is circuit and circuit.times == times:
            circuit.is_half_open = True
            self.fleet.uneject(endpoint, OPEN)

    def _close(self, endpoint: Endpoint) -> None:
        if self._circuits.pop(endpoint, None) is not None:
            _watch(endpoint, False)
            for why in (OPEN, PROBED):
                self.fleet.uneject(endpoint, why)

    def _eject_for(self, endpoint: Endpoint, why: str, seconds: float) -> None:
        until = self.clock.now() + seconds
        if until > self._ejected_until.get((endpoint, why), 0.0):
            self._ejected_until[endpoint, why] = until
            self.fleet.eject(endpoint, why)
            self.later(seconds, lambda: self._end_ejection(endpoint, why, until))

    def _end_ejection(self, endpoint: Endpoint, why: str, until: float | None = None) -> None:
        """End the ejection unless it was extended."""
        known = self._ejected_until.get((endpoint, why))
        if known is not None and until in (None, known):
            del self._ejected_until[endpoint, why]
            self.fleet.uneject(endpoint, why)


def _watch(pod: Endpoint, is_watched: bool) -> None:
    for endpoint in pod.ranks:
        update(endpoint, is_watched=is_watched)


def _is_failure(attempt: Attempt, error: BaseException | None, now: float) -> bool:
    """Return whether the pod failed. Errors of kvlane, clients that disconnect, deadlines of clients and models that
    the pod does not serve are no failures of the pod; nor are ranks that it does not have."""
    is_late = attempt.ending is Ending.TIMED_OUT or isinstance(error, UpstreamTimedOut)
    if is_late and client_limit_has_passed(attempt.request, now):
        return False
    if isinstance(error, RankOutOfRange) or (isinstance(error, Declined) and error.status == NOT_FOUND):
        return False
    if error is not None:  # a time limit that passes during a streamed upload is the cause of a GatewayTimeout
        return isinstance(error, UpstreamFailed | BadGateway) or isinstance(error.__cause__, UpstreamTimedOut)
    failed = attempt.ending is Ending.UPSTREAM_FAILED or attempt.ending is Ending.TIMED_OUT
    return failed or (attempt.status is not None and attempt.status >= 500 and not attempt.is_by_envoy)
