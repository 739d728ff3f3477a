"""Who gets a request whose pod failed before a byte of the answer had reached the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from proxy.core.casualties import CASUALTIES, casualties_of
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
    RequestError,
    UnknownModel,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.exchange import Exchange
from proxy.core.ports import Clock, Random
from proxy.core.request import InferenceRequest
from proxy.reliability.budget import RetryBudget
from proxy.reliability.poison import SECONDS, Poison
from proxy.reliability.settings import Retries

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


Others = Callable[[Exchange, Sequence[Endpoint]], Sequence[Endpoint]]
"""Ready pods of its pool that are none of these, best first: the decision knew those only that were ready then, and had
their full share."""


def _nobody(exchange: Exchange, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
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
    ) -> None:
        """`continued` is told of legs that go on with an answer."""
        self._clock = clock
        self._random = random
        self._budget = budget
        self.is_alive = alive
        self._sleep = sleep
        self._narrow = narrow
        self._others = others
        self._continued = continued
        self.poison = Poison(clock)
        self._set(settings)

    def change(self, settings: Retries) -> None:
        """Journeys that were begun go on by them."""
        self._budget.change(settings.budget_percent)
        self._set(settings)

    def takes(self, exchange: Exchange, status: int) -> bool:
        """Whether an answer of this status is not for the client, because there is another pod, or model, to ask."""
        journey = exchange.journey or Journey()
        if status in (TOO_MANY_REQUESTS, UNAVAILABLE) and _has_fallbacks(exchange.request):
            return True
        wanted = status in (TOO_MANY_REQUESTS, NOT_FOUND) or status in self._statuses
        if not wanted or journey.counted + 1 >= self._settings.attempts or not self._budget.has_one:
            return False
        left = self._left(exchange, [*journey.tried, exchange.endpoint])
        return bool(left) if status != NOT_FOUND else any(_lists_model(endpoint, exchange) for endpoint in left)

    async def following(self, exchange: Exchange, error: UpstreamFailed, spares: bool = False) -> Exchange:
        """The leg after one that failed with `error`, when it is time for it. Raises RequestError if there is none.
        With `spares` whoever asks can do without: one other pod is tried, and none again."""
        if isinstance(error, PassedOver):
            return self._passed_over(exchange, error)
        if isinstance(error, OutOfFiles):
            raise FileLimitReached from error
        journey = exchange.journey or Journey()
        journey.tried.append(exchange.endpoint)
        if isinstance(error, UpstreamTimedOut) and self._clock.now() >= exchange.request.deadline:
            raise GatewayTimeout("The pod that took the request did not answer in time.") from error
        await self._note_deaths(exchange, error)
        if _has_fallbacks(exchange.request) and self._is_exhausted(journey, exchange, error):
            raise _gave_up(exchange, error)
        if spares and self._has_done_enough(journey, exchange, error):
            raise _gave_up(exchange, error)
        wait = self._count(journey, exchange, error)
        endpoint = self._choose(journey, exchange, error)
        if self._clock.now() + wait >= exchange.request.deadline:
            raise GatewayTimeout("No pod has answered in the time that the request has.") from error
        if wait:
            await self._sleep(wait)
            endpoint = self._choose(journey, exchange, error)  # by what is known when it is sent
        request = error.rest if isinstance(error, CutShort) else exchange.request
        leg = Exchange(request, exchange.decision, endpoint, exchange.attempt + 1, self._clock.now())
        leg.journey = journey
        if _has_begun(exchange, error):
            leg.continued = True
            self._continued()
        return leg

    def next_after(self, exchange: Exchange) -> Endpoint | None:
        """Who would be asked if that failed, of those that have not been."""
        tried = [] if exchange.journey is None else exchange.journey.tried
        left = self._left(exchange, [*tried, exchange.endpoint])
        return left[0] if left else None

    def failed_beside(self, exchange: Exchange, other: Exchange, error: UpstreamFailed) -> None:
        """The other leg of the same request did, which counts on the way of this one."""
        journey = exchange.journey = exchange.journey or Journey()
        journey.tried.append(other.endpoint)
        if not isinstance(error, ConnectFailed):
            journey.counted += 1
        if error.broke_off:
            casualties_of(exchange.request).suspect(other)

    def _passed_over(self, exchange: Exchange, error: PassedOver) -> Exchange:
        """There is nothing to decide."""
        if error.then is None:
            raise _gave_up(exchange, error)
        return Exchange(exchange.request, exchange.decision, error.then, exchange.attempt + 1, self._clock.now())

    def _set(self, settings: Retries) -> None:
        self._settings = settings
        self._statuses = frozenset(int(cause) for cause in settings.on if cause.isdigit())

    async def _note_deaths(self, exchange: Exchange, error: UpstreamFailed) -> None:
        """Raise SuspectedPoison if it is proven that pods die of the request."""
        if error.broke_off:
            casualties_of(exchange.request).suspect(exchange)
        casualties = exchange.request.state.read(CASUALTIES)
        if casualties is None or not casualties.suspected:
            return
        deaths, is_proven = casualties.deaths, False
        for endpoint in tuple(casualties.suspected):
            if not await self.is_alive(endpoint) and casualties.confirm(endpoint):
                was_alone = len(deaths) == 2 and self.poison.was_alone(casualties, endpoint)
                is_proven = is_proven or was_alone or len(deaths) > 2
        if is_proven:
            said = "request %s quarantined for %.0f s: %d pods crashed while serving it"
            log.error(said, exchange.request.id, SECONDS, len(deaths))
            raise self.poison.suspect(exchange.request) from error

    def _count(self, journey: Journey, exchange: Exchange, error: UpstreamFailed) -> float:
        """Seconds to wait; whoever has not been tried is not waited for if nobody has begun."""
        unreached = isinstance(error, ConnectFailed)
        if not isinstance(error, Declined) and _cause(error) not in self._settings.on:
            raise _gave_up(exchange, error)
        if unreached and journey.is_first_round and self._left(exchange, journey.tried):
            return 0.0
        journey.counted += 1
        if journey.counted >= self._settings.attempts or not self._budget.spend():
            raise _gave_up(exchange, error)
        backoff = self._settings.backoff
        longest = min(backoff.max, backoff.initial * 2.0 ** (journey.counted - 1))
        return longest * (1.0 + self._random.random()) / 2

    def _choose(self, journey: Journey, exchange: Exchange, error: UpstreamFailed) -> Endpoint:
        left = self._left(exchange, journey.tried)
        if not left:
            journey.tried.clear()
            journey.is_first_round = False
            left = self._left(exchange, journey.tried)
        if not left:
            raise _gave_up(exchange, error)
        if _is_without_model(error):
            left = [endpoint for endpoint in left if _lists_model(endpoint, exchange)] or left
        left = self._narrow(exchange.request, left)
        casualties = exchange.request.state.read(CASUALTIES)
        if casualties is not None and casualties.deaths:
            return min(left, key=lambda endpoint: endpoint.load.requests)
        return left[0]

    def _left(self, exchange: Exchange, tried: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """In rank order, those that are ready and not among `tried`. Where a stored response decided, nobody else is
        asked."""
        decision = exchange.decision
        left = [
            endpoint
            for endpoint in decision.candidates()
            if endpoint.state is EndpointState.READY and endpoint not in tried
        ]
        return left or (self._others(exchange, tried) if decision.profile else ())

    def _has_done_enough(self, journey: Journey, exchange: Exchange, error: UpstreamFailed) -> bool:
        """For who can do without."""
        is_second = journey.counted > 0 and not isinstance(error, ConnectFailed)
        return is_second or not self._left(exchange, journey.tried)

    def _is_exhausted(self, journey: Journey, exchange: Exchange, error: UpstreamFailed) -> bool:
        """Whether a pod has no room, and nobody else is left."""
        return isinstance(error, Declined) and not self._left(exchange, journey.tried)


def _has_fallbacks(request: InferenceRequest) -> bool:
    return request.naming is not None and bool(request.naming.fallbacks)


def _lists_model(endpoint: Endpoint, exchange: Exchange) -> bool:
    return exchange.request.model in (endpoint.models or ())


def _is_without_model(error: UpstreamFailed) -> bool:
    return isinstance(error, Declined) and error.status == NOT_FOUND


def _cause(error: UpstreamFailed) -> str:
    """Of no answer. One that does not begin in time is what a gateway before the pod would answer 504 to."""
    if isinstance(error, UpstreamTimedOut):
        return "504"
    return "connect" if isinstance(error, ConnectFailed) else "reset"


def _has_begun(exchange: Exchange, error: UpstreamFailed) -> bool:
    """Whether the client has a part of the answer."""
    return exchange.continued or isinstance(error, CutShort)


def _gave_up(exchange: Exchange, error: UpstreamFailed) -> RequestError:
    if _is_without_model(error) and not _has_begun(exchange, error):
        unknown = UnknownModel(exchange.request.model)
        unknown.__cause__ = error
        return unknown
    if isinstance(error, UpstreamTimedOut):
        late = GatewayTimeout(f"No pod answered in time; tried {exchange.attempt + 1}.")
        late.__cause__ = error
        return late
    failure: BadGateway = AllFailed(f"No pod answered; tried {exchange.attempt + 1}. Try again shortly.")
    if _has_begun(exchange, error):
        failure = BadGateway(f"No pod went on with the answer; tried {exchange.attempt + 1}.")
    failure.__cause__ = error
    return failure
