"""Circuit breakers: when a pod is ejected, how it is tried, and what does not count."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import (
    BadGateway,
    ConnectRefused,
    Declined,
    GatewayTimeout,
    OutOfFiles,
    RequestError,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import ManualClock
from proxy.core.request import TIME_LIMIT, InferenceRequest
from proxy.fleet.store import Fleet
from proxy.reliability.breaker import (
    LEAVING,
    OPEN,
    PROBED,
    RESTING,
    UNREACHABLE,
    BreakerPeers,
    Breakers,
)
from proxy.reliability.settings import BreakerSettings

FAILED = UpstreamFailed("nonsense")
TIMED_OUT = UpstreamTimedOut("no response within 0.1 s")
LATE_UPLOAD = GatewayTimeout("during the upload")
LATE_UPLOAD.__cause__ = TIMED_OUT


class World(BreakerPeers):
    """One pod, its breaker, and timers that go off when time passes."""

    def __init__(self, **settings: float) -> None:
        self.clock = ManualClock(now=100.0)
        self.pod = Endpoint("a")
        self.reasons: set[str] = set()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self.published: list[bool] = []
        self.tries = 0
        self.others_first = 0.0
        wanted = BreakerSettings(**settings)  # type: ignore[arg-type]
        self.breakers = Breakers(wanted, self.clock, cast(Fleet, self), self._later)
        self.breakers.peers = self

    def eject(self, endpoint: Endpoint, why: str) -> None:
        self.reasons.add(why)

    def uneject(self, endpoint: Endpoint, why: str) -> None:
        self.reasons.discard(why)

    def start(self) -> Attempt:
        attempt = Attempt(InferenceRequest("r", "/", "m"), Decision(self.pod), self.pod, 0, self.clock.now())
        if self.pod.is_watched:
            self.breakers.started_on_watched_pod(attempt)
        return attempt

    def end(
        self,
        attempt: Attempt,
        error: BaseException | None = None,
        status: int | None = 200,
        ending: Ending = Ending.COMPLETE,
    ) -> None:
        attempt.status = None if error else status
        attempt.ending = Ending.UPSTREAM_FAILED if error else ending
        self.breakers.ended_with_evidence(attempt, error)

    def fail(self, times: int = 1, error: BaseException = FAILED) -> None:
        for _ in range(times):
            self.end(self.start(), error)

    def succeed(self, times: int = 1) -> None:
        for _ in range(times):
            self.end(self.start())

    def wait(self, seconds: float) -> None:
        self.clock.advance(seconds)
        due = [timer for timer in self._timers if timer[0] <= self.clock.now()]
        self._timers = [timer for timer in self._timers if timer not in due]
        for _, call in due:
            call()

    @property
    def state(self) -> str:
        return self.breakers.state(self.pod)

    def breaker_turned(self, endpoint: Endpoint, is_open: bool) -> None:
        self.published.append(is_open)

    def breaker_tried(self, endpoint: Endpoint) -> None:
        self.tries += 1

    def pause(self, endpoint: Endpoint) -> float:
        return self.others_first

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((self.clock.now() + seconds, call))


def test_failures_within_the_window_open_it() -> None:
    world = World(failures=3)
    world.fail(2)
    assert world.reasons == set()
    world.fail()
    assert (world.state, world.reasons) == ("open", {OPEN})


def test_old_failures_do_not_count_and_the_pod_is_watched_no_more() -> None:
    world = World(failures=3, window=30)
    world.fail(2)
    assert world.pod.is_watched
    world.wait(31)
    world.fail(2)
    assert world.state == "closed"
    world.wait(31)
    world.succeed()
    assert not world.pod.is_watched


def test_a_pod_that_succeeds_more_than_it_fails_stays() -> None:
    world = World(failures=3)
    world.fail()
    world.succeed(10)
    world.fail(8)
    assert world.state == "closed"
    world.fail()
    assert world.state == "open"


@pytest.mark.parametrize("status", [400, 404, 422])
def test_client_errors_do_not_count(status: int) -> None:
    world = World(failures=1)
    world.end(world.start(), status=status)
    world.end(world.start(), ending=Ending.CLIENT_GONE)
    world.end(world.start(), ending=Ending.EVICTED)
    world.end(world.start(), RequestError("a fault of ours"))
    assert world.state == "closed"


@pytest.mark.parametrize("error", [TIMED_OUT, LATE_UPLOAD, None], ids=["silent", "during the upload", "cut"])
@pytest.mark.parametrize(
    ("limit", "state"), [({TIME_LIMIT: "100"}, "closed"), ({}, "open")], ids=["client", "operator"]
)
def test_a_deadline_of_the_client_does_not_count(limit: dict[str, str], state: str, error: Exception | None) -> None:
    world = World(failures=1)
    request = InferenceRequest("r", "/", "m", headers=limit, deadline=world.clock.now() + 0.1)
    attempt = Attempt(request, Decision(world.pod), world.pod, 0, world.clock.now())
    world.clock.advance(0.1)
    attempt.status, attempt.ending = None if error else 200, Ending.TIMED_OUT
    world.breakers.ended_with_evidence(attempt, error)
    assert world.state == state


def test_a_timeout_before_the_clients_deadline_counts() -> None:
    world = World(failures=1)
    request = InferenceRequest("r", "/", "m", headers={TIME_LIMIT: "100000"}, deadline=world.clock.now() + 100)
    attempt = Attempt(request, Decision(world.pod), world.pod, 0, world.clock.now())
    attempt.ending = Ending.TIMED_OUT
    world.breakers.ended_with_evidence(attempt, UpstreamTimedOut("no first byte within 30 s"))
    assert world.state == "open"


@pytest.mark.parametrize("error", [FAILED, Declined(503), TIMED_OUT, LATE_UPLOAD, BadGateway("during the upload")])
def test_errors_of_the_pod_count(error: Exception) -> None:
    world = World(failures=1)
    world.fail(error=error)
    assert world.state == "open"


@pytest.mark.parametrize("ending", [Ending.UPSTREAM_FAILED, Ending.TIMED_OUT])
def test_a_broken_stream_and_a_500_to_the_client_count(ending: Ending) -> None:
    world = World(failures=2)
    world.end(world.start(), ending=ending)
    world.end(world.start(), status=500)
    assert world.state == "open"


def test_after_a_while_one_trial_request_closes_it() -> None:
    world = World(failures=1, open=10)
    world.fail()
    world.wait(9)
    assert world.reasons == {OPEN}
    world.wait(1)
    assert (world.state, world.reasons) == ("half-open", set())
    probe = world.start()
    assert world.reasons == {PROBED}
    world.end(probe)
    assert (world.state, world.reasons) == ("closed", set())
    assert not world.pod.is_watched


def test_a_failed_trial_request_opens_it_again() -> None:
    world = World(failures=1, open=10)
    world.fail()
    world.wait(10)
    world.fail()
    assert (world.state, world.reasons) == ("open", {OPEN})
    world.wait(10)
    assert world.state == "half-open"


def test_trial_requests_are_limited() -> None:
    world = World(failures=1)
    world.fail()
    world.wait(10)
    assert world.reasons == set()
    first = world.start()
    assert world.reasons == {PROBED}
    world.end(first, ending=Ending.CLIENT_GONE)
    assert (world.state, world.reasons) == ("half-open", set()), "whose client left has shown nothing"


def begins(attempt: Attempt) -> None:
    """The first byte of its response arrives."""
    for listener in attempt.listeners.first_byte:
        listener(attempt)


def test_the_first_byte_of_a_trial_request_suffices() -> None:
    world = World(failures=1)
    world.fail()
    world.wait(10)
    probe = world.start()
    probe.status = 200
    begins(probe)
    assert world.state == "closed"
    world.end(probe, ending=Ending.UPSTREAM_FAILED)
    assert world.state == "open", "it counts as any other"


def test_attempts_from_before_it_opened_do_not_count() -> None:
    world = World(failures=1)
    old = world.start()
    world.fail()
    world.wait(10)
    begins(old)
    assert world.state == "half-open"


def test_a_pod_that_refuses_connections_is_avoided_for_a_second() -> None:
    world = World()
    world.fail(error=ConnectRefused("nobody"))
    assert (world.state, world.reasons) == ("closed", {UNREACHABLE})
    world.wait(0.5)
    world.fail(error=ConnectRefused("nobody"))
    world.wait(0.5)
    assert world.reasons == {UNREACHABLE}
    world.wait(0.5)
    assert world.reasons == set()


def test_a_retry_after_of_a_pod_is_respected_within_limits() -> None:
    world = World()
    world.fail(error=Declined(429))
    assert world.reasons == set()
    world.fail(error=Declined(429, retry_after=3600))
    assert world.reasons == {RESTING}
    world.wait(30)
    assert world.reasons == set()
    world.fail(error=Declined(503, retry_after=2))
    assert world.reasons == {RESTING}
    world.wait(2)
    assert world.reasons == set()


def test_a_pod_that_reports_its_shutdown_is_avoided_until_it_restarts() -> None:
    world = World()
    world.fail(error=Declined(500, text='{"error":{"message":"cannot schedule new futures after shutdown"}}'))
    assert world.reasons == {LEAVING}
    world.breakers.forget(world.pod)
    assert world.reasons == set()


def test_a_removed_pod_has_no_ejection_reasons() -> None:
    world = World(failures=1)
    world.fail()
    world.fail(error=ConnectRefused("nobody"))
    world.breakers.forget(world.pod)
    assert (world.state, world.reasons, world.pod.is_watched) == ("closed", set(), False)
    world.wait(10)
    assert world.state == "closed"


def test_a_breaker_that_opened_at_a_sibling_is_open_here_with_its_own_timer() -> None:
    world = World(open=10.0)
    world.breakers.hear(world.pod, True)
    assert (world.state, world.reasons) == ("open", {OPEN})
    world.wait(10.0)
    assert (world.state, world.reasons) == ("half-open", set())
    probe = world.start()
    assert world.reasons == {PROBED}
    world.end(probe)
    assert (world.state, world.reasons, world.published) == ("closed", set(), [False])


def test_opening_and_closing_are_published_to_siblings() -> None:
    world = World(failures=2, open=10.0)
    world.fail(2)
    assert world.published == [True]
    world.wait(10.0)
    world.fail()
    assert world.published == [True, True]
    world.wait(10.0)
    world.succeed()
    assert world.published == [True, True, False]


def test_received_changes_are_not_published_again() -> None:
    world = World()
    for is_open in (True, True, False, False):
        world.breakers.hear(world.pod, is_open)
    assert (world.state, world.reasons, world.published, world.pod.is_watched) == ("closed", set(), [], False)


def test_a_failed_trial_request_at_a_sibling_ends_the_trial_here() -> None:
    world = World(open=10.0)
    world.breakers.hear(world.pod, True)
    world.wait(10.0)
    world.breakers.hear(world.pod, True)
    assert (world.state, world.reasons) == ("open", {OPEN})
    world.wait(10.0)
    assert world.state == "half-open"


def test_if_others_may_try_first_the_trial_is_later() -> None:
    world = World(failures=1, open=10.0)
    world.others_first = 0.5
    world.fail()
    world.wait(10.2)
    assert world.state == "open"
    world.wait(0.4)
    assert world.state == "half-open"


def test_while_one_process_tries_the_others_wait() -> None:
    world = World(failures=1, open=10.0)
    world.fail()
    world.wait(9.0)
    world.breakers.hold_off(world.pod)
    world.wait(2.0)
    assert world.state == "open", "the first timer counts no more"
    world.wait(9.0)
    assert world.state == "half-open", "nothing came of it"
    world.breakers.hold_off(world.pod)
    assert world.state == "open"
    assert world.reasons == {OPEN}
    world.breakers.hear(world.pod, False)
    assert not world.reasons
    world.breakers.hold_off(world.pod)
    assert world.state == "closed"


def test_a_trial_is_published_and_not_stopped_by_a_simultaneous_one() -> None:
    world = World(failures=1, open=10.0)
    world.fail()
    world.wait(10.0)
    first = world.start()
    assert world.tries == 1
    world.breakers.hold_off(world.pod)
    assert world.state == "half-open"
    world.end(first)
    assert (world.state, world.published) == ("closed", [True, False])


def test_missing_file_descriptors_of_the_proxy_do_not_count() -> None:
    world = World(failures=2)
    world.fail(5, OutOfFiles("no connection"))
    assert (world.state, world.reasons) == ("closed", set())
