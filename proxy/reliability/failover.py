"""Retries: the next endpoint after an attempt that failed before its response started, or for the rest of a stream."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash

from proxy.core.attempt import CRASHES, UPSTREAM_FAILED, Attempt, Crashes, crashes_of
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import (
    AllFailed,
    BadGateway,
    ConnectFailed,
    Declined,
    EnvoyOverflow,
    EnvoySaturated,
    FileLimitReached,
    GatewayTimeout,
    LastSaturated,
    OutOfFiles,
    RankOutOfRange,
    RequestError,
    StreamInterrupted,
    SuspectedPoison,
    TriedByEnvoy,
    UnknownModel,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.listener import Listener
from proxy.core.log_limit import LogLimit
from proxy.core.ports import IDENTITY, Clock, Random
from proxy.core.request import InferenceRequest, deadline_has_passed
from proxy.core.tasks import Tasks
from proxy.reliability.settings import Retries

log = logging.getLogger(__name__)

PER_SECOND = 1.0
"""Retries per second that are always allowed, so that services with little traffic have some."""

MOST = 100.0
"""Largest number of unused retries that the budget keeps."""


class RetryBudget:
    """A limit on retries: a percentage of the attempts plus a constant rate, as in Finagle and Envoy.

    `attempts` returns the number of attempts so far. It is called for retries only, so other requests pay nothing.
    """

    def __init__(
        self,
        percent: float,
        clock: Clock,
        attempts: Callable[[], int],
        per_second: float = PER_SECOND,
        most: float = MOST,
    ) -> None:
        self._per_second = per_second
        self._most = most
        self._percent = percent
        self._clock = clock
        self._attempts = attempts
        self._seen = attempts()
        self._seen_at = clock.now()
        self._left = most

    @property
    def percent(self) -> float:
        """Percentage of the attempts that may be retries. Unused retries remain when it changes."""
        return self._percent

    @percent.setter
    def percent(self, percent: float) -> None:
        self._earn()
        self._percent = percent

    def spend(self) -> bool:
        """Take one retry. Return False if none is left."""
        self._earn()
        if self._left < 1.0:
            return False
        self._left -= 1.0
        return True

    def _earn(self) -> None:
        attempts, now = self._attempts(), self._clock.now()
        earned = self._percent / 100 * (attempts - self._seen) + self._per_second * (now - self._seen_at)
        self._left = min(self._most, self._left + earned)
        self._seen, self._seen_at = attempts, now


QUARANTINE_SECONDS = 60.0
TOGETHER = 1.0
"""Seconds within which all connections of a crashing pod break."""

MOST_CRASHES = 3
"""Crashes of pods under one request that prove the request to be the cause. Crashes under requests with the same model
and prompt within QUARANTINE_SECONDS count together, because clients send a failed request again."""

MOST_QUARANTINED = 1000
"""Largest number of quarantined requests, and of requests with a crash; beyond it the oldest is forgotten."""

Alive = Callable[[Endpoint], Awaitable[bool]]
"""Return whether a pod accepts connections now."""


@dataclass(eq=False)
class Quarantine(Listener):
    """Quarantine of requests that crash pods. Requests are identified by model and prompt, which a retry does not
    change. `tasks` run the checks of pods whose streams were cut."""

    clock: Clock
    is_alive: Alive
    tasks: Tasks
    entries: dict[bytes, float] = field(init=False, default_factory=dict)
    """Fingerprint -> end of the quarantine. Requests are hashed only while it has entries."""
    _crashes: dict[bytes, list[float]] = field(init=False, default_factory=dict)
    """Fingerprint -> times of the crashes in the last QUARANTINE_SECONDS."""
    _broken: deque[tuple[float, Endpoint, Crashes]] = field(init=False, default_factory=deque)
    """Time, pod and request of the attempts that pods broke off, or declined with a 5xx, in the last TOGETHER
    seconds."""

    def ended_with_evidence(self, attempt: Attempt, error: BaseException | None) -> None:
        """Record an attempt that its pod broke off, whether or not the client received a part. A 5xx counts too:
        engines that die send it to their requests."""
        is_declined = isinstance(error, Declined) and not error.is_failure
        if attempt.ending is not UPSTREAM_FAILED or is_declined or isinstance(error, ConnectFailed):
            return
        now = self.clock.now()
        while self._broken and self._broken[0][0] < now - TOGETHER:
            self._broken.popleft()
        crashes = crashes_of(attempt.request)
        self._broken.append((now, attempt.endpoint.first_rank, crashes))
        # No attempt follows that could check the pod: the response has started, or the request cannot be sent again.
        if isinstance(error, BadGateway) or (error is None and attempt.status is not None):
            crashes.add_suspected(attempt)
            self.tasks.start(self.check_pods(attempt), f"check of {attempt.endpoint.name} after a cut response")

    async def check_pods(self, attempt: Attempt) -> bool:
        """Find out which pods that broke off attempts of this request have crashed. Return whether that proves the
        request to be the cause: then it is in quarantine."""
        crashes = attempt.request.state.read(CRASHES)
        if crashes is None or not crashes.suspected:
            return False
        crashes.fingerprint = crashes.fingerprint or _fingerprint(attempt.request)
        is_proven, number = False, 0
        for endpoint in tuple(crashes.suspected):
            if not await self.is_alive(endpoint) and crashes.confirm(endpoint):
                was_alone = len(crashes.crashed) == 2 and self._was_alone(crashes, endpoint)
                number = max(self._count_crash(crashes.fingerprint, attempt.started_at), len(crashes.crashed))
                is_proven = is_proven or was_alone or number >= MOST_CRASHES
        if is_proven:
            self._quarantine(crashes.fingerprint)
            message = "request %s quarantined for %.0f s: %d pods crashed while serving it"
            log.error(message, attempt.request.id, QUARANTINE_SECONDS, number)
        return is_proven

    def check(self, request: InferenceRequest) -> None:
        now = self.clock.now()
        while self.entries and next(iter(self.entries.values())) <= now:
            del self.entries[next(iter(self.entries))]
        until = self.entries.get(_fingerprint(request)) if self.entries else None
        if until is not None:
            raise SuspectedPoison(until - now)

    def _was_alone(self, crashes: Crashes, endpoint: Endpoint) -> bool:
        """Return whether the crashed pod had no request besides the one of `crashes`."""
        since = self.clock.now() - TOGETHER
        others = (at >= since and pod is endpoint and whose is not crashes for at, pod, whose in self._broken)
        return not any(rank.load.requests for rank in endpoint.ranks) and not any(others)

    def _count_crash(self, fingerprint: bytes, started_at: float) -> int:
        """Count a crash under an attempt that started at this time. Return the number within QUARANTINE_SECONDS. Equal
        requests that run at the same time prove no more than one of them: only an attempt after the last crash counts.
        """
        now = self.clock.now()
        times = [at for at in self._crashes.pop(fingerprint, ()) if at > now - QUARANTINE_SECONDS]
        if not times or started_at >= times[-1]:
            times.append(now)
        self._crashes[fingerprint] = times
        _bound(self._crashes)
        return len(times)

    def _quarantine(self, fingerprint: bytes) -> None:
        self.entries.pop(fingerprint, None)  # entries are ordered by their end
        self.entries[fingerprint] = self.clock.now() + QUARANTINE_SECONDS
        _bound(self.entries)


def _bound(entries: dict[bytes, Any]) -> None:
    if len(entries) > MOST_QUARANTINED:
        del entries[next(iter(entries))]


def _fingerprint(request: InferenceRequest) -> bytes:
    """Return a hash of model and prompt, or of the body of a request without a prompt."""
    model = request.model if request.naming is None else request.naming.requested
    digest = xxhash.xxh3_128(model.encode("utf-8", "surrogatepass"))
    for part in request.prompt.parts or (request.body,):
        digest.update(b"\0")
        digest.update(part)
    return digest.digest()


NOT_FOUND = 404
TOO_MANY_REQUESTS = 429
UNAVAILABLE = 503

Narrow = Callable[[InferenceRequest, Sequence[Endpoint]], Sequence[Endpoint]]
"""Return the pods with free capacity, in their order; all of them if none has capacity."""

Others = Callable[[Attempt, Sequence[Endpoint]], Sequence[Endpoint]]
"""Return the ready pods of the pool except the given ones, best first. The candidates of the decision lack the pods
that were not ready when it was made, and the pods in slow start that did not take part in it."""


@dataclass(slots=True)
class RetryState:
    """The failed attempts of one request."""

    tried: list[Endpoint] = field(default_factory=list)
    """Endpoints of the current round. A pod is tried again only when no other is left."""
    counted: int = 0
    """Failures that count against `retries.attempts`: all except connections that could not be established, and ranks
    that the pod does not have, while an untried pod is left."""
    is_first_round: bool = True
    is_paid: bool = False
    """Whether the next retry has been taken of the budget already."""


@dataclass(eq=False)
class Failover:
    """The choice of the next attempt. Every pod is tried once before any is tried again, within the limit of attempts,
    the retry budget and the deadline. In the first round a pod that accepts no connection counts against neither limit
    nor budget while an untried pod is left.

    A request whose pod crashed goes to the pod with the fewest requests. It is quarantined if that pod crashes too
    while it had no other request, or after a third crash. Two crashes of busy pods prove nothing, because another
    request can be the cause.
    """

    settings: Retries
    clock: Clock
    random: Random
    budget: RetryBudget
    quarantine: Quarantine
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    narrow: Narrow = lambda request, endpoints: endpoints
    others: Others = lambda attempt, tried: ()
    count_continuation: Callable[[], object] = lambda: None
    """Called for each attempt that continues a response."""

    def __post_init__(self) -> None:
        self._log_limit = LogLimit(self.clock.now)
        self._statuses = frozenset(int(cause) for cause in self.settings.on if cause.isdigit())

    def retries_instead(self, attempt: Attempt, status: int) -> bool:
        """Return whether to retry instead of relaying a response of this status. If so, the retry is taken of the
        budget now, because the response is lost: requests that fail at the same time must not take it."""
        if status in (TOO_MANY_REQUESTS, UNAVAILABLE) and _has_fallback_models(attempt.request):
            return True
        if status == NOT_FOUND and sees_some_models(attempt.request):
            return True  # the pod's own 404 may name models that the key may not see
        state = attempt.retries or RetryState()
        if not self._is_cause(status) or state.counted + 1 >= self.settings.attempts:
            return False
        left = self._left(attempt, [*state.tried, attempt.endpoint])
        if status == NOT_FOUND:
            left = [endpoint for endpoint in left if _lists_model(endpoint, attempt)]
        is_in_time = self.clock.now() + self._longest_backoff(state.counted + 1) < attempt.request.deadline
        if not left or not is_in_time or not self.budget.spend():
            return False
        state.is_paid = True
        attempt.retries = state
        return True

    async def next_attempt(self, attempt: Attempt, error: UpstreamFailed, is_optional: bool = False) -> Attempt:
        """Wait for the backoff and return the attempt after one that failed with `error`. Raise RequestError without
        one. With `is_optional` the stage can be skipped: only one other pod is tried."""
        if isinstance(error, TriedByEnvoy):  # Envoy has already moved on, at an unknown time
            if error.then is None:  # not AllFailed: Envoy sends the request to no pod of another model either
                raise BadGateway(f"No pod responded; tried {attempt.number + 1}. Try again shortly.") from error
            following = Attempt(attempt.request, attempt.decision, error.then, attempt.number + 1, attempt.started_at)
            following.sent_at = attempt.sent_at
            return following
        if isinstance(error, OutOfFiles):
            raise FileLimitReached from error
        if isinstance(error, EnvoyOverflow):
            raise EnvoySaturated from error
        if self._log_limit.allows(type(error)):
            message = "request %s: attempt %d failed on pod %s: %s"
            log.warning(message, attempt.request.id, attempt.number + 1, attempt.endpoint.name, error)
        state = attempt.retries or RetryState()
        state.tried.append(attempt.endpoint)
        if isinstance(error, UpstreamTimedOut) and deadline_has_passed(attempt.request, self.clock.now()):
            raise GatewayTimeout("The pod did not respond in time.") from error
        if error.may_have_crashed:
            crashes_of(attempt.request).add_suspected(attempt)
        if await self.quarantine.check_pods(attempt):
            raise SuspectedPoison(QUARANTINE_SECONDS) from error
        left = self._left(attempt, state.tried)
        is_second = state.counted > 0 and not isinstance(error, ConnectFailed)
        if (
            (_is_without_model(error) and not any(_lists_model(endpoint, attempt) for endpoint in left))
            or (_has_fallback_models(attempt.request) and not self._stays_with_model(attempt, error, left))
            or (is_optional and (is_second or not left))
        ):
            raise _gave_up(attempt, error)
        wait = self._count_failure(state, attempt, error, has_others=bool(left))
        endpoint = self._choose(state, attempt, error)
        if self.clock.now() + (wait or 0.0) >= attempt.request.deadline:
            raise GatewayTimeout("No pod responded before the deadline of the request.") from error
        if wait is not None and not self._spend_retry(state):
            raise _gave_up(attempt, error)
        if wait:
            await self.sleep(wait)
            endpoint = self._choose(state, attempt, error)  # by the state after the wait
        request = error.rest if isinstance(error, StreamInterrupted) else attempt.request
        next_attempt = Attempt(request, attempt.decision, endpoint, attempt.number + 1, self.clock.now())
        next_attempt.retries = state
        if _has_started(attempt, error):
            next_attempt.is_continuation = True
            next_attempt.stream_started_at = attempt.stream_started_at or attempt.first_byte_at
            self.count_continuation()
        return next_attempt

    def next_after(self, attempt: Attempt) -> Endpoint | None:
        """Return the untried endpoint that would be next if the attempt failed."""
        tried = [] if attempt.retries is None else attempt.retries.tried
        left = self._left(attempt, [*tried, attempt.endpoint])
        return left[0] if left else None

    def avoid(self, attempt: Attempt, endpoints: Sequence[Endpoint]) -> None:
        """Do not continue the response of the attempt on these endpoints while another one is left."""
        state = attempt.retries = attempt.retries or RetryState()
        if self._left(attempt, [*state.tried, *endpoints, attempt.endpoint]):
            state.tried.extend(endpoints)

    def failed_in_race(self, attempt: Attempt, error: UpstreamFailed) -> None:
        """Count the failure of an attempt while another one of the request still runs. Both have the same
        RetryState."""
        state = attempt.retries = attempt.retries or RetryState()
        state.tried.append(attempt.endpoint)
        if not isinstance(error, ConnectFailed):
            state.counted += 1
        if error.may_have_crashed:
            crashes_of(attempt.request).add_suspected(attempt)

    def _stays_with_model(self, attempt: Attempt, error: UpstreamFailed, left: Sequence[Endpoint]) -> bool:
        """Return whether another pod of the model is tried before its fallback models."""
        if not isinstance(error, Declined):
            return True
        is_retried = isinstance(error, RankOutOfRange) or _has_started(attempt, error) or self._is_cause(error.status)
        return bool(left) and is_retried

    def _is_cause(self, status: int) -> bool:
        """Return whether a response of this status is retried on another pod of the model."""
        return status in (TOO_MANY_REQUESTS, NOT_FOUND) or status in self._statuses

    def _count_failure(
        self, state: RetryState, attempt: Attempt, error: UpstreamFailed, has_others: bool
    ) -> float | None:
        """Count the failure and return the backoff in seconds. Raise RequestError if no retry is allowed. A pod that
        accepted no connection, while an untried one is left, is not counted and needs no budget: return None."""
        unreached = isinstance(error, ConnectFailed | RankOutOfRange)
        # `retries_instead` has checked the status of a `Declined`.
        if not isinstance(error, Declined) and _cause(error) not in self.settings.on:
            raise _gave_up(attempt, error)
        if unreached and state.is_first_round and has_others:
            return None
        state.counted += 1
        if state.counted >= self.settings.attempts:
            raise _gave_up(attempt, error)
        return self._longest_backoff(state.counted) * (1.0 + self.random.random()) / 2

    def _spend_retry(self, state: RetryState) -> bool:
        """Spend a retry of the budget, unless `retries_instead` has. Return False if none is left."""
        is_paid, state.is_paid = state.is_paid, False
        return is_paid or self.budget.spend()

    def _longest_backoff(self, failures: int) -> float:
        """Return the upper bound of the backoff after so many failures, in seconds."""
        backoff = self.settings.backoff
        return min(backoff.max, backoff.initial * 2.0 ** (failures - 1))

    def _choose(self, state: RetryState, attempt: Attempt, error: UpstreamFailed) -> Endpoint:
        left = self._left(attempt, state.tried)
        if not left:
            state.tried.clear()
            state.is_first_round = False
            left = self._left(attempt, state.tried)
        if not left:
            raise _gave_up(attempt, error)
        if _is_without_model(error):
            left = [endpoint for endpoint in left if _lists_model(endpoint, attempt)] or left
        left = self.narrow(attempt.request, left)
        crashes = attempt.request.state.read(CRASHES)
        if crashes is not None and crashes.crashed:
            return min(left, key=lambda endpoint: endpoint.load.requests)
        return left[0]

    def _left(self, attempt: Attempt, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Return the ready endpoints that are not in `tried`, best first; other ranks of a tried pod only if nothing
        else is left. A stored response binds its request to one pod."""
        decision = attempt.decision
        left = [
            endpoint
            for endpoint in decision.candidates()
            if endpoint.state is EndpointState.READY and endpoint not in tried
        ]
        pods = {endpoint.first_rank for endpoint in tried}
        elsewhere = [endpoint for endpoint in left if endpoint.first_rank not in pods]
        return elsewhere or (self.others(attempt, tried) if decision.profile else ()) or left


def _has_fallback_models(request: InferenceRequest) -> bool:
    return request.naming is not None and bool(request.naming.fallbacks)


def sees_some_models(request: InferenceRequest) -> bool:
    """Return whether the key of the request is restricted to some models."""
    identity = request.state.read(IDENTITY)
    return identity is not None and identity.models is not None


def _lists_model(endpoint: Endpoint, attempt: Attempt) -> bool:
    return attempt.request.model in (endpoint.models or ())


def _is_without_model(error: UpstreamFailed) -> bool:
    return isinstance(error, Declined) and error.status == NOT_FOUND


def _cause(error: UpstreamFailed) -> str:
    """Return the name in `retries.on` of a failure without a response. The help of `Retries.on` says which time limit
    has which cause."""
    if isinstance(error, UpstreamTimedOut):
        return "504"
    return "connect" if isinstance(error, ConnectFailed) else "reset"


def _has_started(attempt: Attempt, error: UpstreamFailed) -> bool:
    """Return whether the client has received a part of the response."""
    return attempt.is_continuation or isinstance(error, StreamInterrupted)


def _gave_up(attempt: Attempt, error: UpstreamFailed) -> RequestError:
    failure: RequestError
    tried, has_started = attempt.number + 1, _has_started(attempt, error)
    if _is_without_model(error) and not has_started:
        failure = UnknownModel(attempt.request.model)
    elif isinstance(error, UpstreamTimedOut):
        failure = GatewayTimeout(f"No pod responded in time; tried {tried}.")
    elif isinstance(error, Declined) and error.status == TOO_MANY_REQUESTS and not has_started:
        failure = LastSaturated(f"The last pod that was tried has no capacity; tried {tried}. Retry shortly.")
        failure.retry_after = error.retry_after or failure.retry_after
    elif has_started:
        failure = BadGateway(f"No pod continued the response; tried {tried}.")
    else:
        failure = AllFailed(f"No pod responded; tried {tried}. Try again shortly.")
    failure.__cause__ = error
    return failure
