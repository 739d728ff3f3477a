"""A second pod for requests whose first one is late: the client gets the response that begins first, the other ends."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import UpstreamFailed
from proxy.core.ports import Clock, Gate, Legs, Race, Relay, Tally
from proxy.core.request import InferenceRequest
from proxy.core.tasks import Tasks
from proxy.reliability.failover import Failover, RetryBudget
from proxy.reliability.settings import HedgingSettings

REMEMBERED = 500
"""First bytes by which the next are judged."""

ENOUGH = 50
"""Of them, before anything is late."""

EVERY = 25
"""So many make a new judgement."""

KINDS = 200
"""Of requests that are told apart; clients may make up models."""


class Times:
    """Seconds to the first byte of requests of one kind."""

    __slots__ = ("_news", "_seen", "late")

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=REMEMBERED)
        self._news = 0
        self.late: float | None = None
        """None while too few are known."""

    def add(self, seconds: float, share: float) -> None:
        self._seen.append(seconds)
        self._news += 1
        if len(self._seen) >= ENOUGH and self._news >= EVERY:
            self._news = 0
            ordered = sorted(self._seen)
            self.late = ordered[min(len(ordered) - 1, int(share * len(ordered)))]


class Lateness:
    """Streams and whole answers are judged apart, and so are models: a whole one begins when all of it is there."""

    def __init__(self, settings: HedgingSettings) -> None:
        self._kinds: dict[Hashable, Times] = {}
        self.settings = settings

    def of(self, request: InferenceRequest) -> float | None:
        """Seconds from when it is sent; None if nobody knows."""
        if self.settings.after is not None:
            return self.settings.after
        times = self._kinds.get((request.model, request.stream))
        return None if times is None else times.late

    def saw(self, request: InferenceRequest, seconds: float) -> None:
        """The first byte came, or was not waited for any longer."""
        if self.settings.after is not None:
            return
        kind = (request.model, request.stream)
        times = self._kinds.get(kind)
        if times is None and len(self._kinds) < KINDS:
            times = self._kinds[kind] = Times()
        if times is not None:
            times.add(seconds, self.settings.percentile / 100)


WON, LOST, FAILED, NO_POD, NO_BUDGET = "won", "lost", "failed", "no-pod", "no-budget"
"""What came of a request that was late; the first three had a second leg."""

SAVED_UP = 10.0
"""Second legs that there may be at once after a time without any."""

TWICE_STORED = "/v1/responses"
"""Pods keep these answers, and each would keep one."""


class Placed(Protocol):
    """A pool; `proxy.pool.Pool` is one."""

    @property
    def gates(self) -> Sequence[Gate]: ...


Place = Callable[..., Awaitable[None]]


class Hedging:
    """What all hedges share. Nobody gets a second leg while its pods have no room to spare, nor beyond the budget: so
    hedges never make an overload of what is only a load."""

    def __init__(
        self,
        settings: HedgingSettings,
        failover: Failover,
        clock: Clock,
        lateness: Lateness,
        budget: RetryBudget,
        counted: Callable[[str], Tally],
    ) -> None:
        """`counted` returns the counter of an outcome of late requests."""
        self.failover = failover
        self.clock = clock
        self.counted = counted
        self.lateness = lateness
        self.budget = budget
        self._settings = settings

    def around(self, place: Place, legs: Legs) -> Place:
        """Places requests so that some may have two legs."""

        def placed(pool: Placed, request: InferenceRequest, parsed: Any, relay: Relay) -> Awaitable[None]:
            return place(pool, request, parsed, relay, by=self._of(pool, request, relay, legs))

        return placed

    def _of(self, pool: Placed, request: InferenceRequest, relay: Relay, legs: Legs) -> Hedge | None:
        wanted = request.priority >= self._settings.priority_at_least and bool(request.body)
        return Hedge(self, pool.gates, relay, legs) if wanted and not request.path.startswith(TWICE_STORED) else None


@dataclass(slots=True)
class Hedge:
    """Of one request: its first leg may have another one beside it; those after a failure have not."""

    shared: Hedging
    gates: Sequence[Gate]
    relay: Relay
    legs: Legs

    async def run(self, attempt: Attempt) -> None:
        """Raises what `Relay.relay` raises."""
        shared, request = self.shared, attempt.request
        delay = None if attempt.number else shared.lateness.of(request)
        race = None if delay is None else self.relay.race(self._begins)
        try:
            if race is None:
                with self.legs(attempt):
                    await self.relay.relay(attempt)
            else:
                await self._run(race, attempt, delay)
        finally:
            if not attempt.number and (attempt.succeeded or attempt.ending is Ending.EVICTED):
                until = attempt.first_byte_at or shared.clock.now()
                shared.lateness.saw(request, until - attempt.started_at)

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
        self._raise(race, first, second, errors)

    def _started(self, tasks: Tasks, entered: ExitStack, race: Race, attempt: Attempt) -> asyncio.Task[Any]:
        """The leg is entered at once, in the tick in which its pod was chosen, and left when its relay has ended."""
        leg = ExitStack()
        leg.enter_context(self.legs(attempt))
        entered.callback(_left, leg, attempt)
        return tasks.start(_relayed(leg, race, attempt), f"leg to {attempt.endpoint.name}")

    def _second(self, first: Attempt) -> Attempt | None:
        shared, request = self.shared, first.request
        endpoint = shared.failover.next_after(first)
        if endpoint is None or endpoint.view.waiting or not all(gate.spares(request, endpoint) for gate in self.gates):
            shared.counted(NO_POD).add()
            return None
        if not shared.budget.spend():
            shared.counted(NO_BUDGET).add()
            return None
        second = Attempt(request, first.decision, endpoint, first.number, shared.clock.now())
        second.answers = False
        return second

    def _begins(self, attempt: Attempt) -> None:
        """The client's answer does: if it is the second leg's, gates think so too from here on."""
        if not attempt.answers:
            attempt.answers = True
            for gate in self.gates:
                gate.attempt_started(attempt)

    def _raise(
        self, race: Race, first: Attempt, second: Attempt | None, errors: dict[Attempt, Exception | None]
    ) -> None:
        """What the leg that answered raised. If none has answered, what the first did; failover is told the rest."""
        if race.winner is not None:
            if (error := errors[race.winner]) is not None:
                raise error
            return
        for error in errors.values():
            if error is not None and not isinstance(error, UpstreamFailed):
                raise error
        if second is not None and isinstance(failed := errors[second], UpstreamFailed):
            self.shared.failover.failed_beside(first, second, failed)
        if (error := errors[first]) is not None:
            raise error


async def _outcome(race: Race, run: dict[asyncio.Task[Any], Attempt]) -> dict[Attempt, Exception | None]:
    """How each ended, when all have, or one has for a reason that is no fault of its pod."""
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


async def _relayed(leg: ExitStack, race: Race, attempt: Attempt) -> Exception | None:
    """What it raised; told, not raised, for it may be of no interest."""
    try:
        with leg:
            try:
                await race.relay(attempt)
            finally:
                attempt.answers = True
    except Exception as error:  # noqa: BLE001  # raised by whoever waits for it, if it matters
        return error
    return None


def _left(leg: ExitStack, attempt: Attempt) -> None:
    """Of a leg whose task was cancelled before it had begun."""
    attempt.ending = attempt.ending or Ending.CLIENT_GONE
    leg.close()
