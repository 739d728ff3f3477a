"""Hedged attempts: a late request is also sent to a second pod, and the client gets the response that starts first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import UpstreamFailed
from proxy.core.ports import Admission, AttemptScope, Clock, Race, Relay
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.reliability.failover import Failover, RetryBudget, RetryState
from proxy.reliability.settings import HedgingSettings
from proxy.telemetry.metrics import Counter

REMEMBERED = 500
"""Number of recent times to first byte that the percentile is computed of."""

ENOUGH = 50
"""Smallest number of times for a percentile."""

EVERY = 25
"""Number of new times after which the percentile is computed again."""

KINDS = 200
"""Largest number of kinds of requests. Clients may invent models."""


@dataclass(slots=True)
class FirstByteTimes:
    """Recent times to first byte of one kind of requests, in seconds."""

    late: float | None = None
    """The percentile; None while too few times are known."""
    _added: int = 0
    _seen: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))

    def add(self, seconds: float, share: float) -> None:
        self._seen.append(seconds)
        self._added += 1
        if len(self._seen) >= ENOUGH and self._added >= EVERY:
            self._added = 0
            ordered = sorted(self._seen)
            self.late = ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(eq=False)
class HedgeDelays:
    """The delay before a hedged attempt, per model, and separately for streams and responses in one piece."""

    settings: HedgingSettings
    _kinds: dict[Hashable, FirstByteTimes] = field(init=False, default_factory=dict)

    def of(self, request: InferenceRequest) -> float | None:
        """Return the seconds after sending; None if unknown."""
        if self.settings.after is not None:
            return self.settings.after
        times = self._kinds.get((request.model, request.stream))
        return None if times is None else times.late

    def record(self, request: InferenceRequest, seconds: float) -> None:
        """Record the time to the first byte, or to the end of the wait for it."""
        if self.settings.after is not None:
            return
        kind = (request.model, request.stream)
        times = self._kinds.get(kind)
        if times is None and len(self._kinds) < KINDS:
            times = self._kinds[kind] = FirstByteTimes()
        if times is not None:
            times.add(seconds, self.settings.percentile / 100)


WON, LOST, FAILED, NO_POD, NO_BUDGET = "won", "lost", "failed", "no-pod", "no-budget"
"""Outcomes of requests that were late. The first three had a hedged attempt."""

SAVED_UP = 10.0
"""Largest number of unused hedged attempts that the budget keeps."""

TWICE_STORED = "/v1/responses"
"""Pods store these responses, so a hedged attempt would store a second one."""


class HedgedPool(Protocol):
    """A pool of pods; implemented by `proxy.pool.Pool`."""

    @property
    def admissions(self) -> Sequence[Admission]: ...


ServeIn = Callable[..., Awaitable[None]]


@dataclass(eq=False)
class Hedging:
    """Creates a `Hedge` per request. There is no hedged attempt without spare capacity or beyond the budget, so hedging
    never overloads the pods."""

    settings: HedgingSettings
    failover: Failover
    clock: Clock
    delays: HedgeDelays
    budget: RetryBudget
    counted: Callable[[str], Counter]
    """Return the counter of an outcome."""

    def around(self, serve_in: ServeIn, scope_of: AttemptScope) -> ServeIn:
        """Return `serve_in` with a hedge for each request that may have one."""

        def serve_hedged(pool: HedgedPool, request: InferenceRequest, parsed: Any, relay: Relay) -> Awaitable[None]:
            return serve_in(pool, request, parsed, relay, sender=self._of(pool, request, relay, scope_of))

        return serve_hedged

    def _of(self, pool: HedgedPool, request: InferenceRequest, relay: Relay, scope_of: AttemptScope) -> Hedge | None:
        wanted = request.priority >= self.settings.priority_at_least and bool(request.body)
        return (
            Hedge(self, pool.admissions, relay, scope_of)
            if wanted and not request.path.startswith(TWICE_STORED)
            else None
        )


@dataclass(slots=True)
class Hedge:
    """The hedge of one request. Its first attempt may have a hedged attempt; retries have none."""

    shared: Hedging
    admissions: Sequence[Admission]
    relay: Relay
    scope_of: AttemptScope
    running: list[Attempt] = field(default_factory=list)
    """The attempts whose relay has not ended."""
    last_failure: UpstreamFailed | None = None
    """The failure that is not counted yet."""

    async def run(self, attempt: Attempt) -> None:
        """Relay the attempt, hedged if it is late. Raise as `Relay.relay` does."""
        shared, request = self.shared, attempt.request
        delay = None if attempt.number else shared.delays.of(request)
        race = None if delay is None else self.relay.race(self._response_started)
        try:
            if race is None:
                with self.scope_of(attempt):
                    await self.relay.relay(attempt)
            else:
                await self._run(race, attempt, delay)
        finally:
            if not attempt.number and (attempt.succeeded or attempt.ending is Ending.EVICTED):
                until = attempt.first_byte_at or shared.clock.now()
                shared.delays.record(request, until - attempt.started_at)

    async def _run(self, race: Race, first: Attempt, delay: float | None) -> None:
        second = None
        with race, ExitStack() as entered:
            async with Tasks() as tasks:
                run = {self._started(tasks, entered, race, first): first}
                await asyncio.wait(run, timeout=delay)
                if race.winner is None and not any(task.done() for task in run):
                    second = self._second(first)
                if second is not None:
                    run[self._started(tasks, entered, race, second)] = second
                errors = await _outcome(race, run)
        if second is not None:
            self.shared.counted(WON if race.winner is second else LOST if race.winner is first else FAILED).add()
        self._raise(race, errors)

    def _started(self, tasks: Tasks, entered: ExitStack, race: Race, attempt: Attempt) -> asyncio.Task[Any]:
        """Reserve the pod at once, in the event-loop tick of the decision, and release it when the relay has ended."""
        reservation = ExitStack()
        reservation.enter_context(self.scope_of(attempt))
        entered.callback(_release, reservation, attempt)
        self.running.append(attempt)
        return tasks.start(self._relayed(reservation, race, attempt), f"hedged attempt to {attempt.endpoint.name}")

    async def _relayed(self, reservation: ExitStack, race: Race, attempt: Attempt) -> Exception | None:
        """Relay the attempt and return its error, which the caller raises if it matters. A failure while the other
        attempt runs is counted at once, because it decides whether an error response of the other one is retried."""
        try:
            with reservation:
                try:
                    await race.relay(attempt)
                finally:
                    attempt.for_client = True
        except Exception as error:  # noqa: BLE001  # the caller raises it if it matters
            self.running.remove(attempt)
            if isinstance(error, UpstreamFailed):
                error.attempt = attempt
                if self.running and race.winner is None:
                    self.shared.failover.failed_in_race(attempt, error)
                else:
                    self.last_failure = error
            return error
        self.running.remove(attempt)
        return None

    def _second(self, first: Attempt) -> Attempt | None:
        shared, request = self.shared, first.request
        endpoint = shared.failover.next_after(first)
        if (
            endpoint is None
            or endpoint.view.waiting
            or not all(admission.has_spare_capacity(request, endpoint) for admission in self.admissions)
        ):
            shared.counted(NO_POD).add()
            return None
        if not shared.budget.spend():
            shared.counted(NO_BUDGET).add()
            return None
        second = Attempt(request, first.decision, endpoint, first.number, shared.clock.now())
        second.for_client = False
        second.retries = first.retries = first.retries or RetryState()
        return second

    def _response_started(self, attempt: Attempt) -> None:
        """Make the hedged attempt the one that admissions count if its response starts first."""
        if not attempt.for_client:
            attempt.for_client = True
            for admission in self.admissions:
                admission.attempt_started(attempt)

    def _raise(self, race: Race, errors: dict[Attempt, Exception | None]) -> None:
        """Raise the error of the attempt that responded; if none did, that of the attempt that failed last, because the
        other failure is counted already."""
        if (winner := race.winner) is not None:
            if (error := errors[winner]) is not None:
                others = [attempt.endpoint for attempt in errors if attempt is not winner]
                self.shared.failover.avoid(winner, others)  # they did not respond in time
                raise error
            return
        for error in errors.values():
            if error is not None and not isinstance(error, UpstreamFailed):
                raise error
        if self.last_failure is not None:
            raise self.last_failure


async def _outcome(race: Race, run: dict[asyncio.Task[Any], Attempt]) -> dict[Attempt, Exception | None]:
    """Return the error of each attempt, when all have ended or one has failed for a reason other than its pod."""
    pending = set(run)
    while pending:
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if race.winner is None and any(_is_final(task) for task in done):
            break
    return {attempt: _error(task) for task, attempt in run.items()}


def _error(task: asyncio.Task[Any]) -> Exception | None:
    error: Exception | None = task.result() if task.done() and not task.cancelled() else None
    return error


def _is_final(task: asyncio.Task[Any]) -> bool:
    error = _error(task)
    return error is not None and not isinstance(error, UpstreamFailed)


def _release(reservation: ExitStack, attempt: Attempt) -> None:
    """Release an attempt whose task was cancelled before it started."""
    attempt.ending = attempt.ending or Ending.CLIENT_GONE
    reservation.close()
