"""A circuit breaker for every pod: judges by the requests that were sent, and casts doubt on pods that fail them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from proxy.core.attempt import Attempt, Ending
from proxy.core.endpoint import GONE, Endpoint, update
from proxy.core.errors import (
    BadGateway,
    ConnectFailed,
    Declined,
    OutOfFiles,
    RankOutOfRange,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.request import is_out_of_its_own_time
from proxy.reliability.settings import BreakerSettings

OPEN, PROBED = "failed requests", "failed requests, and is being tried"
UNREACHABLE, RESTING, LEAVING = "takes no connections", "asked for a rest", "is shutting down"

NOT_FOUND = 404

PROBES = 1
"""Requests at a time that try a pod whose breaker is half-open."""

UNREACHABLE_SECONDS = 1.0
"""A pod that takes no connection is left alone for so long; whether it is back, its scrapes find out too."""

MOST_REST = 30.0
"""Seconds of a Retry-After that are honoured."""

LEAVING_SECONDS = 60.0
SHUTTING_DOWN = "after shutdown"
"""In vLLM's answer (500) to what it is sent while it drains; its /health is 200 then."""

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function so many seconds from now, on the event loop."""


class Company(Protocol):
    """Others who have breakers for the same pods; `replicas.replica.Replica` speaks to them."""

    def breaker_turned(self, endpoint: Endpoint, is_open: bool) -> None:
        """One opened here, or closed again: siblings `hear` it."""

    def breaker_tried(self, endpoint: Endpoint) -> None:
        """It gets as many probes as it may, from here: siblings `hold_off`."""

    def pause(self, endpoint: Endpoint) -> float:
        """Seconds in which it is for others to try it."""


class Nobody(Company):
    def breaker_turned(self, endpoint: Endpoint, is_open: bool) -> None:
        pass

    def breaker_tried(self, endpoint: Endpoint) -> None:
        pass

    def pause(self, endpoint: Endpoint) -> float:
        return 0.0


NOBODY = Nobody()


class Ejections(Protocol):
    """Who keeps pods from being chosen; `fleet.store.Fleet` is one."""

    def eject(self, endpoint: Endpoint, why: str) -> None: ...
    def uneject(self, endpoint: Endpoint, why: str) -> None: ...


class Circuit:
    """One pod's: closed -> open -> half-open -> closed, or open again. Exists while there is something to remember."""

    __slots__ = ("failures", "is_open", "probes", "successes", "times", "tries")

    def __init__(self) -> None:
        self.failures: deque[float] = deque()
        """When, in monotonic seconds, within the window."""
        self.successes = 0
        """Since the first of them."""
        self.is_open = False
        self.tries = False
        """Half-open: it gets probes."""
        self.probes: set[Attempt] = set()
        self.times = 0
        """That it opened; the timer of the last one counts."""


class Breakers(Listener):
    """A circuit breaker for each pod on which requests failed; the ranks of a pod share one, under its lead."""

    def __init__(
        self,
        settings: BreakerSettings,
        clock: Clock,
        fleet: Ejections,
        later: Later,
        company: Company = NOBODY,
        probes: int = PROBES,
    ) -> None:
        self.settings = settings
        self._clock = clock
        self._fleet = fleet
        self._later = later
        self._company = company
        self._probes = probes
        self._circuits: dict[Endpoint, Circuit] = {}
        self._out: dict[tuple[Endpoint, str], float] = {}
        """Until when a pod is to be left alone, by the reason."""

    def state(self, endpoint: Endpoint) -> str:
        """closed, open or half-open."""
        circuit = self._circuits.get(endpoint.lead)
        if circuit is None or not circuit.is_open:
            return "closed"
        return "half-open" if circuit.tries else "open"

    def probe_started(self, attempt: Attempt) -> None:
        """Count a probe of a half-open pod."""
        circuit = self._circuits.get(attempt.endpoint.lead)
        if circuit is not None and circuit.tries:
            circuit.probes.add(attempt)
            attempt.listeners = attempt.listeners.at_first_byte(self._probe_answered)
            if len(circuit.probes) >= self._probes:
                self._fleet.eject(attempt.endpoint, PROBED)
                self._company.breaker_tried(attempt.endpoint.lead)

    def _probe_answered(self, attempt: Attempt) -> None:
        """Close the breaker whose probe gets a good response, which need not end for that."""
        circuit = self._circuits.get(attempt.endpoint.lead)
        if circuit is not None and attempt in circuit.probes and attempt.status is not None and attempt.status < 500:
            self._recover(attempt.endpoint.lead)

    def attempt_failed(self, attempt: Attempt, error: BaseException | None) -> None:
        endpoint = attempt.endpoint.lead
        if endpoint.state is GONE:
            return
        circuit = self._circuits.get(endpoint)
        if circuit is not None and attempt in circuit.probes:
            circuit.probes.discard(attempt)
            self._fleet.uneject(endpoint, PROBED)
        if isinstance(error, OutOfFiles):
            return
        if isinstance(error, ConnectFailed):
            self._leave_alone(endpoint, UNREACHABLE, UNREACHABLE_SECONDS)
        elif _is_failure(attempt, error, self._clock.now()):
            if isinstance(error, Declined):
                self._heed(endpoint, error)
            if not (isinstance(error, Declined) and error.status == 429):
                self._failed(endpoint)
        elif circuit is not None and attempt.ending is Ending.COMPLETE:
            self._succeeded(endpoint, circuit)

    def hear(self, endpoint: Endpoint, is_open: bool) -> None:
        """The breaker of a sibling opened, or closed again: so does this one, with a timer of its own."""
        endpoint = endpoint.lead
        if not is_open:
            self._close(endpoint)
            return
        circuit = self._circuit_of(endpoint)
        if circuit.tries or not circuit.is_open:
            self._open(endpoint, circuit)

    def hold_off(self, endpoint: Endpoint) -> None:
        """A sibling tries it, and says what comes of it; if nothing does, it is to be tried here, some time later."""
        endpoint = endpoint.lead
        circuit = self._circuits.get(endpoint)
        if circuit is not None and circuit.is_open and not circuit.probes:
            self._open(endpoint, circuit)

    def forget(self, endpoint: Endpoint) -> None:
        """It is gone, or another process answers: what is known was of the one before. A rank may go alone."""
        if endpoint is not endpoint.lead:
            return
        self._close(endpoint)
        for why in (UNREACHABLE, RESTING, LEAVING):
            self._take_back(endpoint, why)

    def _heed(self, endpoint: Endpoint, error: Declined) -> None:
        """What it says of itself."""
        if error.retry_after:
            self._leave_alone(endpoint, RESTING, min(MOST_REST, error.retry_after))
        if SHUTTING_DOWN in error.text:
            self._leave_alone(endpoint, LEAVING, LEAVING_SECONDS)

    def _failed(self, endpoint: Endpoint) -> None:
        circuit = self._circuit_of(endpoint)
        if circuit.is_open:
            if circuit.tries:
                self._trip(endpoint, circuit)
            return
        self._forget_old(circuit)
        circuit.failures.append(self._clock.now())
        if len(circuit.failures) >= self.settings.failures and len(circuit.failures) >= circuit.successes:
            self._trip(endpoint, circuit)

    def _succeeded(self, endpoint: Endpoint, circuit: Circuit) -> None:
        if circuit.is_open:
            if circuit.tries:
                self._recover(endpoint)
            return
        self._forget_old(circuit)
        circuit.successes += 1
        if not circuit.failures:
            self._close(endpoint)

    def _forget_old(self, circuit: Circuit) -> None:
        oldest = self._clock.now() - self.settings.window
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
        self._company.breaker_turned(endpoint, True)

    def _recover(self, endpoint: Endpoint) -> None:
        self._close(endpoint)
        self._company.breaker_turned(endpoint, False)

    def _open(self, endpoint: Endpoint, circuit: Circuit) -> None:
        circuit.is_open, circuit.tries = True, False
        self._fleet.eject(endpoint, OPEN)
        circuit.times = times = circuit.times + 1
        seconds = self.settings.open + self._company.pause(endpoint)
        self._later(seconds, lambda: self._try(endpoint, circuit, times))

    def _try(self, endpoint: Endpoint, circuit: Circuit, times: int) -> None:
        if self._circuits.get(endpoint) is circuit and circuit.times == times:
            circuit.tries = True
            self._fleet.uneject(endpoint, OPEN)

    def _close(self, endpoint: Endpoint) -> None:
        if self._circuits.pop(endpoint, None) is not None:
            _watch(endpoint, False)
            for why in (OPEN, PROBED):
                self._fleet.uneject(endpoint, why)

    def _leave_alone(self, endpoint: Endpoint, why: str, seconds: float) -> None:
        until = self._clock.now() + seconds
        if until > self._out.get((endpoint, why), 0.0):
            self._out[endpoint, why] = until
            self._fleet.eject(endpoint, why)
            self._later(seconds, lambda: self._take_back(endpoint, why, until))

    def _take_back(self, endpoint: Endpoint, why: str, until: float | None = None) -> None:
        """Unless it was prolonged."""
        known = self._out.get((endpoint, why))
        if known is not None and until in (None, known):
            del self._out[endpoint, why]
            self._fleet.uneject(endpoint, why)


def _watch(pod: Endpoint, is_watched: bool) -> None:
    for endpoint in pod.ranks:
        update(endpoint, is_watched=is_watched)


def _is_failure(attempt: Attempt, error: BaseException | None, now: float) -> bool:
    """Of the pod. Faults of ours, clients that leave and time limits that clients set are none; nor is a pod that does
    not have the model or the rank."""
    is_late = attempt.ending is Ending.TIMED_OUT or isinstance(error, UpstreamTimedOut)
    if is_late and is_out_of_its_own_time(attempt.request, now):
        return False
    if isinstance(error, RankOutOfRange) or (isinstance(error, Declined) and error.status == NOT_FOUND):
        return False
    if error is not None:
        return isinstance(error, UpstreamFailed | BadGateway)
    failed = attempt.ending is Ending.UPSTREAM_FAILED or attempt.ending is Ending.TIMED_OUT
    return failed or (attempt.status is not None and attempt.status >= 500)
