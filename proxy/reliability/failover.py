"""The next pod for a request whose pod failed before a byte of the response had reached the client."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import xxhash

from proxy.core.attempt import CASUALTIES, UPSTREAM_FAILED, Attempt, Casualties, casualties_of
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import (
    AllFailed,
    BadGateway,
    ConnectFailed,
    CutShort,
    Declined,
    FileLimitReached,
    GatewayTimeout,
    OutOfFiles,
    PassedOver,
    RankOutOfRange,
    RequestError,
    SuspectedPoison,
    UnknownModel,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.listener import Listener
from proxy.core.ports import IDENTITY, Clock, Random
from proxy.core.request import InferenceRequest
from proxy.reliability.settings import Retries

PER_SECOND = 1.0
"""Retries that are always allowed, so that services with little traffic have some."""

MOST = 100.0
"""Retries that can be saved up."""


class RetryBudget:
    """A share of the legs that are sent, with a little on top; see the retry budgets of Finagle and Envoy.

    `legs` says how many were sent so far. It is asked when there is something to retry, so a request without trouble
    pays nothing.
    """

    def __init__(
        self, percent: float, clock: Clock, legs: Callable[[], int], per_second: float = PER_SECOND, most: float = MOST
    ) -> None:
        self._per_second = per_second
        self._most = most
        self._percent = percent
        self._clock = clock
        self._legs = legs
        self._seen = legs()
        self._seen_at = clock.now()
        self._left = most

    @property
    def percent(self) -> float:
        """Percent of the attempts that may be retries. What has been saved up stays when it changes."""
        return self._percent

    @percent.setter
    def percent(self, percent: float) -> None:
        self._earn()
        self._percent = percent

    @property
    def has_one(self) -> bool:
        self._earn()
        return self._left >= 1.0

    def spend(self) -> bool:
        """False if nothing is left."""
        if not self.has_one:
            return False
        self._left -= 1.0
        return True

    def _earn(self) -> None:
        legs, now = self._legs(), self._clock.now()
        earned = self._percent / 100 * (legs - self._seen) + self._per_second * (now - self._seen_at)
        self._left = min(self._most, self._left + earned)
        self._seen, self._seen_at = legs, now


QUARANTINE_SECONDS = 60.0
TOGETHER = 1.0
"""Seconds within which the connections of a pod that crashes break."""

MOST_SUSPECTS = 1000
"""Suspects; beyond that the oldest is let go."""


class Poison(Listener):
    """Identifies a request by the model that its client names and by its prompt: neither changes in a further try."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.suspects: dict[bytes, float] = {}
        """Until when each is refused. While there are none, nothing has to be hashed."""
        self._broken: deque[tuple[float, Endpoint, Casualties]] = deque()
        """Attempts that pods broke off in the last TOGETHER seconds: when, on which pod, of which request."""

    def attempt_failed(self, attempt: Attempt, error: BaseException | None) -> None:
        """Note an attempt that its pod broke off, whatever its client got."""
        if attempt.ending is not UPSTREAM_FAILED or isinstance(error, ConnectFailed):
            return
        now = self._clock.now()
        while self._broken and self._broken[0][0] < now - TOGETHER:
            self._broken.popleft()
        self._broken.append((now, attempt.endpoint.lead, casualties_of(attempt.request)))

    def was_alone(self, casualties: Casualties, endpoint: Endpoint) -> bool:
        """Return whether the pod, which has just died, had no request but that of `casualties`."""
        since = self._clock.now() - TOGETHER
        others = (at >= since and pod is endpoint and whose is not casualties for at, pod, whose in self._broken)
        return not any(rank.load.requests for rank in endpoint.ranks) and not any(others)

    def suspect(self, request: InferenceRequest) -> SuspectedPoison:
        """From now on; returns what its client is told."""
        self.suspects[_fingerprint(request)] = self._clock.now() + QUARANTINE_SECONDS
        if len(self.suspects) > MOST_SUSPECTS:
            del self.suspects[next(iter(self.suspects))]
        return SuspectedPoison(QUARANTINE_SECONDS)

    def check(self, request: InferenceRequest) -> None:
        """Raises SuspectedPoison."""
        now = self._clock.now()
        while self.suspects and next(iter(self.suspects.values())) <= now:
            del self.suspects[next(iter(self.suspects))]
        until = self.suspects.get(_fingerprint(request)) if self.suspects else None
        if until is not None:
            raise SuspectedPoison(until - now)


def _fingerprint(request: InferenceRequest) -> bytes:
    """A request without a prompt is identified by its body."""
    model = request.model if request.naming is None else request.naming.asked
    digest = xxhash.xxh3_128(model.encode("utf-8", "surrogatepass"))
    for part in request.prompt.parts or (request.body,):
        digest.update(b"\0")
        digest.update(part)
    return digest.digest()


log = logging.getLogger(__name__)

NOT_FOUND = 404
TOO_MANY_REQUESTS = 429
UNAVAILABLE = 503

Alive = Callable[[Endpoint], Awaitable[bool]]
"""Whether a pod takes connections at this moment."""

Narrow = Callable[[InferenceRequest, Sequence[Endpoint]], Sequence[Endpoint]]
"""Which of the pods, best first, should rather have the request; never none."""


def _any(request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
    return endpoints


Others = Callable[[Attempt, Sequence[Endpoint]], Sequence[Endpoint]]
"""Ready pods of its pool that are none of these, best first: the decision knew those only that were ready then, and had
their full share."""


def _nobody(attempt: Attempt, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
    return ()


def _uncounted() -> None:
    pass


@dataclass(slots=True)
class Journey:
    """The way of one request, from its first failure on."""

    tried: list[Endpoint] = field(default_factory=list)
    """Of the present round: only when nobody else is left a pod is asked again."""
    counted: int = 0
    """Tries that came to a pod, or that were made after everybody had been tried."""
    is_first_round: bool = True


class Failover:
    """No pod is asked again while another is left, and nobody beyond the attempts, the budget and the time that the
    client gave. A pod that cannot be reached had no work with the request, and counts for none of them.

    A request whose pod died under it goes to the pod with the fewest requests. It is quarantined if it was alone on
    that pod and that dies too, or if a third pod dies: two pods that die one after the other had others in common.
    """

    def __init__(
        self,
        settings: Retries,
        clock: Clock,
        random: Random,
        budget: RetryBudget,
        alive: Alive,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        narrow: Narrow = _any,
        others: Others = _nobody,
        continued: Callable[[], object] = _uncounted,
        poison: Poison | None = None,
    ) -> None:
        """`continued` is told of attempts that continue a response; `poison` is what is known of earlier requests."""
        self._clock = clock
        self._random = random
        self._budget = budget
        self.is_alive = alive
        self._sleep = sleep
        self._narrow = narrow
        self._others = others
        self._continued = continued
        self.poison = poison or Poison(clock)
        self._settings = settings
        self._statuses = frozenset(int(cause) for cause in settings.on if cause.isdigit())

    def takes(self, attempt: Attempt, status: int) -> bool:
        """Whether an answer of this status is not for the client, because there is another pod, or model, to ask."""
        journey = attempt.journey or Journey()
        if status in (TOO_MANY_REQUESTS, UNAVAILABLE) and _has_fallbacks(attempt.request):
            return True
        if status == NOT_FOUND and _sees_some_models(attempt.request):
            return True  # pods list models in it
        wanted = status in (TOO_MANY_REQUESTS, NOT_FOUND) or status in self._statuses
        if not wanted or journey.counted + 1 >= self._settings.attempts or not self._budget.has_one:
            return False
        left = self._left(attempt, [*journey.tried, attempt.endpoint])
        return bool(left) if status != NOT_FOUND else any(_lists_model(endpoint, attempt) for endpoint in left)

    async def following(self, attempt: Attempt, error: UpstreamFailed, spares: bool = False) -> Attempt:
        """The leg after one that failed with `error`, when it is time for it. Raises RequestError if there is none.
        With `spares` whoever asks can do without: one other pod is tried, and none again."""
        if isinstance(error, PassedOver):
            return self._passed_over(attempt, error)
        if isinstance(error, OutOfFiles):
            raise FileLimitReached from error
        journey = attempt.journey or Journey()
        journey.tried.append(attempt.endpoint)
        if isinstance(error, UpstreamTimedOut) and self._clock.now() >= attempt.request.deadline:
            raise GatewayTimeout("The pod that took the request did not answer in time.") from error
        await self._note_deaths(attempt, error)
        if _is_without_model(error) and not any(
            _lists_model(endpoint, attempt) for endpoint in self._left(attempt, journey.tried)
        ):
            raise _gave_up(attempt, error)
        if _has_fallbacks(attempt.request) and self._is_exhausted(journey, attempt, error):
            raise _gave_up(attempt, error)
        if spares and self._has_done_enough(journey, attempt, error):
            raise _gave_up(attempt, error)
        wait = self._count(journey, attempt, error)
        endpoint = self._choose(journey, attempt, error)
        if self._clock.now() + wait >= attempt.request.deadline:
            raise GatewayTimeout("No pod has answered in the time that the request has.") from error
        if wait:
            await self._sleep(wait)
            endpoint = self._choose(journey, attempt, error)  # by what is known when it is sent
        request = error.rest if isinstance(error, CutShort) else attempt.request
        leg = Attempt(request, attempt.decision, endpoint, attempt.number + 1, self._clock.now())
        leg.journey = journey
        if _has_begun(attempt, error):
            leg.continued = True
            self._continued()
        return leg

    def next_after(self, attempt: Attempt) -> Endpoint | None:
        """Who would be asked if that failed, of those that have not been."""
        tried = [] if attempt.journey is None else attempt.journey.tried
        left = self._left(attempt, [*tried, attempt.endpoint])
        return left[0] if left else None

    def failed_beside(self, attempt: Attempt, other: Attempt, error: UpstreamFailed) -> None:
        """The other leg of the same request did, which counts on the way of this one."""
        journey = attempt.journey = attempt.journey or Journey()
        journey.tried.append(other.endpoint)
        if not isinstance(error, ConnectFailed):
            journey.counted += 1
        if error.broke_off:
            casualties_of(attempt.request).suspect(other)

    def _passed_over(self, attempt: Attempt, error: PassedOver) -> Attempt:
        """There is nothing to decide."""
        if error.then is None:
            raise _gave_up(attempt, error)
        return Attempt(attempt.request, attempt.decision, error.then, attempt.number + 1, self._clock.now())

    async def _note_deaths(self, attempt: Attempt, error: UpstreamFailed) -> None:
        """Raise SuspectedPoison if it is proven that pods die of the request."""
        if error.broke_off:
            casualties_of(attempt.request).suspect(attempt)
        casualties = attempt.request.state.read(CASUALTIES)
        if casualties is None or not casualties.suspected:
            return
        deaths, is_proven = casualties.deaths, False
        for endpoint in tuple(casualties.suspected):
            if not await self.is_alive(endpoint) and casualties.confirm(endpoint):
                was_alone = len(deaths) == 2 and self.poison.was_alone(casualties, endpoint)
                is_proven = is_proven or was_alone or len(deaths) > 2
        if is_proven:
            said = "request %s quarantined for %.0f s: %d pods crashed while serving it"
            log.error(said, attempt.request.id, QUARANTINE_SECONDS, len(deaths))
            raise self.poison.suspect(attempt.request) from error

    def _count(self, journey: Journey, attempt: Attempt, error: UpstreamFailed) -> float:
        """Seconds to wait; whoever has not been tried is not waited for if nobody has begun."""
        unreached = isinstance(error, ConnectFailed | RankOutOfRange)
        if not isinstance(error, Declined) and _cause(error) not in self._settings.on:
            raise _gave_up(attempt, error)
        if unreached and journey.is_first_round and self._left(attempt, journey.tried):
            return 0.0
        journey.counted += 1
        if journey.counted >= self._settings.attempts or not self._budget.spend():
            raise _gave_up(attempt, error)
        backoff = self._settings.backoff
        longest = min(backoff.max, backoff.initial * 2.0 ** (journey.counted - 1))
        return longest * (1.0 + self._random.random()) / 2

    def _choose(self, journey: Journey, attempt: Attempt, error: UpstreamFailed) -> Endpoint:
        left = self._left(attempt, journey.tried)
        if not left:
            journey.tried.clear()
            journey.is_first_round = False
            left = self._left(attempt, journey.tried)
        if not left:
            raise _gave_up(attempt, error)
        if _is_without_model(error):
            left = [endpoint for endpoint in left if _lists_model(endpoint, attempt)] or left
        left = self._narrow(attempt.request, left)
        casualties = attempt.request.state.read(CASUALTIES)
        if casualties is not None and casualties.deaths:
            return min(left, key=lambda endpoint: endpoint.load.requests)
        return left[0]

    def _left(self, attempt: Attempt, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """In rank order, those that are ready and not among `tried`; other ranks of a pod that was tried only where
        there is nothing else. Where a stored response decided, nobody else is asked."""
        decision = attempt.decision
        left = [
            endpoint
            for endpoint in decision.candidates()
            if endpoint.state is EndpointState.READY and endpoint not in tried
        ]
        pods = {endpoint.lead for endpoint in tried}
        elsewhere = [endpoint for endpoint in left if endpoint.lead not in pods]
        return elsewhere or (self._others(attempt, tried) if decision.profile else ()) or left

    def _has_done_enough(self, journey: Journey, attempt: Attempt, error: UpstreamFailed) -> bool:
        """For who can do without."""
        is_second = journey.counted > 0 and not isinstance(error, ConnectFailed)
        return is_second or not self._left(attempt, journey.tried)

    def _is_exhausted(self, journey: Journey, attempt: Attempt, error: UpstreamFailed) -> bool:
        """Whether a pod has no room, and nobody else is left."""
        return isinstance(error, Declined) and not self._left(attempt, journey.tried)


def _has_fallbacks(request: InferenceRequest) -> bool:
    return request.naming is not None and bool(request.naming.fallbacks)


def _sees_some_models(request: InferenceRequest) -> bool:
    """Return whether the key of the request may not use all models."""
    identity = request.state.read(IDENTITY)
    return identity is not None and identity.models is not None


def _lists_model(endpoint: Endpoint, attempt: Attempt) -> bool:
    return attempt.request.model in (endpoint.models or ())


def _is_without_model(error: UpstreamFailed) -> bool:
    return isinstance(error, Declined) and error.status == NOT_FOUND


def _cause(error: UpstreamFailed) -> str:
    """Of no answer. One that does not begin in time is what a gateway before the pod would answer 504 to."""
    if isinstance(error, UpstreamTimedOut):
        return "504"
    return "connect" if isinstance(error, ConnectFailed) else "reset"


def _has_begun(attempt: Attempt, error: UpstreamFailed) -> bool:
    """Whether the client has a part of the answer."""
    return attempt.continued or isinstance(error, CutShort)


def _gave_up(attempt: Attempt, error: UpstreamFailed) -> RequestError:
    if _is_without_model(error) and not _has_begun(attempt, error):
        unknown = UnknownModel(attempt.request.model)
        unknown.__cause__ = error
        return unknown
    if isinstance(error, UpstreamTimedOut):
        late = GatewayTimeout(f"No pod answered in time; tried {attempt.number + 1}.")
        late.__cause__ = error
        return late
    failure: BadGateway = AllFailed(f"No pod answered; tried {attempt.number + 1}. Try again shortly.")
    if _has_begun(attempt, error):
        failure = BadGateway(f"No pod went on with the answer; tried {attempt.number + 1}.")
    failure.__cause__ = error
    return failure
