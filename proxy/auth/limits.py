"""Rate limits and quotas of keys and tenants."""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import islice
from typing import final

from proxy.auth.meter import Amounts, Bucket, ExhaustedLimit, UsageMeter
from proxy.auth.settings import ANY_OTHER, Limits
from proxy.core.attempt import NOT_YET, Attempt, Ending, Stage, Usage
from proxy.core.errors import RateLimited
from proxy.core.ports import CHARGED, IDENTITY, Admission, Clock, Identity
from proxy.core.request import DataKey, InferenceRequest, client_limit_has_passed
from proxy.telemetry.metrics import OTHER, Catalogue
from proxy.telemetry.observer import is_label

NOTHING = Usage(0, 0)

MOST_METERS = 10_000
"""Meters; beyond that idle ones are forgotten, because an issuer of tokens can name any number of subjects."""

MOST_OF_PEERS = 100_000
"""Meters beyond which none is made for the usage that another process reports."""

Who = tuple[str, str, str]
"""Kind and name of a meter, and the name of its limits."""

Pairs = list[tuple[str, str]]


Limited = Callable[[str, str, bool], None]
"""Counts a request over a limit: kind and name of the meter, and whether the limit is a shadow."""


class RateLimiter(Admission):
    """Applies limits. `limits` are by name; `tenants` maps a tenant to the name of its limits."""

    def __init__(
        self, limits: Mapping[str, Limits], tenants: Mapping[str, str], clock: Clock, limited: Limited
    ) -> None:
        self.limits = limits
        self.tenants = tenants
        """Both may change; the usage so far still counts."""
        self.clock = clock
        self._limited = limited
        self._meters: OrderedDict[tuple[str, str], UsageMeter] = OrderedDict()
        """By kind and name, least recently used first."""
        self.on_spent: Callable[[Who, int, Sequence[float]], None] | None = None
        """Called with every charge: the meter, its running requests and the amounts."""
        self.shares: RoundGrants | HostGrants | None = None
        """Shares of a limit between the workers of this host, or between all processes of a deployment."""
        self._workers, self._seat, self._host_delay = 1, 0, 0.0

    def admit(self, request: InferenceRequest) -> MeteredRequest:
        identity = request.state.read(IDENTITY)
        return MeteredRequest(self, request, () if identity is None else self.meters(identity))

    def attempt_started(self, attempt: Attempt) -> None:
        """Note the attempt whose usage is charged at the end, and add OpenAI's headers with the remaining limits to its
        response."""
        stay = attempt.request.state.read(METERED)
        if stay is None:
            return
        if not attempt.for_client:
            stay.stages.append(attempt)
            return
        stay.attempts.append(attempt)
        attempt.response_headers.extend(self.headers(stay.meters))

    def counts_tokens(self, identity: Identity) -> bool:
        """Whether pods should be asked for usage."""
        return any(meter.counts_tokens for meter in self.meters(identity))

    def meters(self, identity: Identity) -> Sequence[UsageMeter]:
        """Return the meter of the key, if it has limits, then that of its tenant."""
        limits, tenants, found = self.limits, self.tenants, []
        if identity.limits in limits:
            found.append(self._meter("key", identity.name, identity.limits))
        of = tenants[identity.tenant] if identity.tenant in tenants else tenants.get(ANY_OTHER, "")
        if of in limits:
            found.append(self._meter("tenant", identity.tenant, of))
        return found

    def refuse(self, meter: UsageMeter, shortage: ExhaustedLimit, meters: Sequence[UsageMeter]) -> None:
        """Raise RateLimited, unless the limits are a shadow."""
        self._limited(meter.kind, meter.name, meter.limits.shadow)
        if not meter.limits.shadow:
            who, retry = f"the {meter.kind} '{meter.name}'", math.ceil(shortage.seconds)
            message = f"Rate limit exceeded for {who}: {shortage.what}. Retry in {retry} s."
            raise RateLimited(message, shortage.seconds, self.headers(meters))

    async def wait_for_share(self, shares: RoundGrants | HostGrants, meters: Sequence[UsageMeter]) -> None:
        """Return when this process has a share for the request, or when the limit is exhausted."""
        until = self.clock.now() + shares.patience
        while (pause := self._pause(shares, meters)) > 0.0 and self.clock.now() < until:
            await shares.sleep(pause)

    def headers(self, meters: Sequence[UsageMeter]) -> Pairs:
        """Return OpenAI's headers for the scarcest limits that refuse requests."""
        now = self.clock.now()
        requests = tokens = None
        for meter in meters:
            if not meter.limits.shadow:
                requests = _scarcer(requests, meter.requests, now)
                tokens = _scarcer(tokens, meter.tokens, now)
        return [*_headers(_OF_REQUESTS, requests, now), *_headers(_OF_TOKENS, tokens, now)]

    def set_worker(self, workers: int, seat: int, host_delay: float) -> None:
        """Set the place of this process among the workers of its host. `host_delay`: seconds until other hosts know."""
        self._workers, self._seat, self._host_delay = workers, seat, host_delay
        self.set_hosts(1)

    def set_hosts(self, hosts: int) -> None:
        """Set the number of connected hosts that share the limits."""
        processes = hosts * self._workers
        if hosts == 1:
            self.shares = RoundGrants(processes, self._seat) if processes > 1 else None
        elif not isinstance(self.shares, HostGrants) or self.shares.processes != processes:
            self.shares = HostGrants(processes, self._host_delay)

    # reports of peers

    def peer_spent(self, peer: int, who: Who, running: int, spent: Sequence[float]) -> None:
        """Charge usage of a peer, which has `running` requests now."""
        if (meter := self._meter_of_peer(who)) is not None:
            _run_elsewhere(meter, peer, running)
            meter.admitted_at = now = self.clock.now()
            meter.charge(spent, now)

    def peer_used(self, peer: int, who: Who, running: int, used: Sequence[float]) -> None:
        """Raise usage to at least what a peer knows: reports may have been lost."""
        if (meter := self._meter_of_peer(who)) is not None:
            _run_elsewhere(meter, peer, running)
            meter.at_least(used)

    def _meter_of_peer(self, who: Who) -> UsageMeter | None:
        """Return the meter that a peer reports; None if it is not known here. During a reload the peer may have other
        limits for it than this process."""
        known = self._meters.get(who[:2])
        if who[2] in self.limits and (known is not None or len(self._meters) < MOST_OF_PEERS):
            return self._meter(*who)
        return known

    def vanished(self, peer: int) -> None:
        for meter in self._meters.values():
            meter.elsewhere.pop(peer, None)

    def known(self, since: float = -math.inf) -> list[tuple[Who, int, Sequence[float]]]:
        """Return for each meter its key, its requests that run here, and its usage. Leave out meters without
        running requests that were last charged before `since`."""
        return [
            (_who(meter), meter.running, meter.used())
            for meter in self._meters.values()
            if meter.running or meter.charged_at >= since
        ]

    def _pause(self, shares: RoundGrants | HostGrants, meters: Sequence[UsageMeter]) -> float:
        now = self.clock.now()
        left = [(meter, what, few) for meter in meters for what, few in meter.left(now)]
        if any(few < 1 for _, _, few in left):
            return 0.0
        return max(
            (shares.pause((meter.kind, meter.name, what), few, now, meter.admitted_at) for meter, what, few in left),
            default=0.0,
        )

    def _meter(self, kind: str, name: str, of: str) -> UsageMeter:
        meters, limits = self._meters, self.limits[of]
        meter = meters.get((kind, name))
        if meter is None:
            self._forget_idle()
            meter = meters[kind, name] = UsageMeter(kind, name, of, limits, self.clock)
            return meter
        meters.move_to_end((kind, name))
        if meter.limits is not limits:
            meter.limit_by(of, limits)
        return meter

    def _forget_idle(self) -> None:
        if len(self._meters) < MOST_METERS:
            return
        oldest = islice(self._meters.items(), MOST_METERS // 10)
        for key in [key for key, meter in oldest if meter.is_idle]:
            del self._meters[key]


@final
class MeteredRequest:
    """A request that is charged to meters, from admission to its end."""

    __slots__ = ("_limiter", "_request", "_reserved", "_reserved_at", "attempts", "meters", "stages")

    def __init__(self, limiter: RateLimiter, request: InferenceRequest, meters: Sequence[UsageMeter]) -> None:
        self._limiter = limiter
        self._request = request
        self.meters = meters
        self._reserved: list[Amounts] = []
        self._reserved_at = 0.0
        self.attempts: list[Attempt] = []
        """Its attempts that respond to the client. The usage of the last one is charged."""
        self.stages: list[Attempt] = []
        """Its other attempts: prefills, and hedged attempts. They are charged if no attempt of the client was sent."""

    async def __aenter__(self) -> None:
        limiter, request, meters = self._limiter, self._request, self.meters
        if not meters:
            return
        if limiter.shares is not None:
            await limiter.wait_for_share(limiter.shares, meters)
        now, reserved = limiter.clock.now(), []
        is_charged = request.state.read(CHARGED)
        for meter in meters:
            wanted = meter.estimate(request.prompt.tokens, request.max_tokens, 0.0 if is_charged else 1.0)
            shortage = meter.shortage(wanted, now)
            if shortage is not None:
                limiter.refuse(meter, shortage, meters)
            reserved.append(wanted)
        request.state.write(METERED, self)
        self._reserved, self._reserved_at = reserved, now
        for meter, wanted in zip(meters, reserved, strict=True):
            meter.start(wanted, now)
        if limiter.on_spent is not None:
            self._tell(limiter.on_spent, reserved)

    async def __aexit__(self, *_: object) -> None:
        limiter, reserved, since = self._limiter, self._reserved, self._reserved_at
        if not reserved:
            return
        now, corrections = limiter.clock.now(), []
        sent = [attempt for attempt in (*self.stages, *self.attempts) if attempt.sent_at is not None]
        was_sent = bool(sent)
        if was_sent and not self._request.state.read(CHARGED):
            self._request.state.write(CHARGED, True)
        usage = _usage(sent[-1], now) if was_sent else NOTHING
        for meter, wanted in zip(self.meters, reserved, strict=True):
            corrections.append(meter.end(wanted, usage, since, now) if was_sent else meter.undo(wanted, since, now))
        if limiter.on_spent is not None:
            self._tell(limiter.on_spent, corrections)

    def _tell(self, on_spent: Callable[[Who, int, Sequence[float]], None], amounts: Sequence[Amounts]) -> None:
        for meter, spent in zip(self.meters, amounts, strict=True):
            on_spent(_who(meter), meter.running, spent)


def _usage(attempt: Attempt, now: float) -> Usage | None:
    """Return the usage to charge. Without reported usage a chunk of a stream counts as a token; other responses have
    None. A client that leaves, or times out by its own limit, before the response is charged for the prompt."""
    request = attempt.request
    if attempt.status is None:
        is_late = attempt.ending is Ending.TIMED_OUT and client_limit_has_passed(request, now)
        left = is_late or attempt.ending is Ending.CLIENT_GONE
        return Usage(request.prompt.tokens, 0) if left else NOTHING
    if attempt.status >= 400:
        return NOTHING
    usage = attempt.usage
    if usage is None and request.stream:
        return Usage(request.prompt.tokens, attempt.chunks)
    if usage is not None and attempt.stage is Stage.DECODE:  # it reports the transferred tokens as cached
        cached = attempt.cached_to_report
        return Usage(usage.prompt_tokens, usage.completion_tokens, None if cached == NOT_YET else cached)
    return usage


def _run_elsewhere(meter: UsageMeter, peer: int, running: int) -> None:
    if running:
        meter.elsewhere[peer] = running
    else:
        meter.elsewhere.pop(peer, None)


def _who(meter: UsageMeter) -> Who:
    return meter.kind, meter.name, meter.of


def _scarcer(one: Bucket | None, other: Bucket | None, now: float) -> Bucket | None:
    if one is None or other is None:
        return other if one is None else one
    return one if one.most - one.used(now) <= other.most - other.used(now) else other


def _headers(names: tuple[str, str, str], bucket: Bucket | None, now: float) -> Pairs:
    if bucket is None:
        return []
    most, left, full = names
    return [(most, f"{bucket.most:.0f}"), (full, f"{bucket.full_in(now):.0f}s"), (left, f"{max(0.0, bucket.left):.0f}")]


_OF_REQUESTS, _OF_TOKENS = (
    (f"x-ratelimit-limit-{what}", f"x-ratelimit-remaining-{what}", f"x-ratelimit-reset-{what}")
    for what in ("requests", "tokens")
)

METERED: DataKey[MeteredRequest] = DataKey("MeteredRequest")


WORKER_DELAY = 0.02
"""Seconds after which all workers of a host know what one of them has admitted."""

LONGEST = 0.5
"""Longest wait in seconds of a request for a share of its process; then it may use all that is known to be left."""

MANY = 1000
"""Limits; beyond that unused shares are forgotten."""

Limit = tuple[str, str, str]
"""Kind and name of a meter, and the limited quantity."""

Sleep = Callable[[float], Awaitable[None]]


@final
class RoundGrants:
    """Shares of a limit between the workers of a host. Time is cut into rounds, the same for all workers. In each round
    a worker admits its share of what was left at its first read; the remainder rotates. So all workers together admit
    no more than the limit. The first half of a round waits for the reports of the round before.
    """

    patience = math.inf

    def __init__(self, workers: int, seat: int, sleep: Sleep = asyncio.sleep) -> None:
        self.sleep = sleep
        self._workers = workers
        self._seat = seat
        self._round = -1
        self._parts: dict[Limit, int] = {}
        """What may still be admitted of each limit in this round."""

    def pause(self, limit: Limit, left: int, now: float, changed_at: float) -> float:
        """Return the seconds until the next try; 0 if the request is admitted, which uses one of the share. The last
        admission anywhere was at `changed_at`."""
        stretch = int(now / WORKER_DELAY)
        number = (stretch + 1) // 2
        if number != self._round:
            self._round = number
            self._parts.clear()
        part = self._parts.get(limit)
        if part is None:
            if stretch % 2 and now - changed_at < WORKER_DELAY:
                return (stretch + 1) * WORKER_DELAY - now
            part = left // self._workers + ((number + self._seat) % self._workers < left % self._workers)
        self._parts[limit] = max(0, part - 1)
        return 0.0 if part else 2 * (number + 1) * WORKER_DELAY - now


@final
class HostGrants:
    """Shares of a limit between the processes of several hosts, which have no common clock. Each admits its share of
    what it knows to be left, at least one request, and reads again two delays of reports after it last admitted one:
    after the first delay the others count that request, and after the second one this process knows what they admitted
    before that. So of a burst all processes together admit the limit, and at most one request each beyond it. Capacity
    that a request returns in the meantime may be used again.
    """

    patience = LONGEST

    def __init__(self, processes: int, delay: float, sleep: Sleep = asyncio.sleep) -> None:
        """`delay`: seconds until reports arrive, over a healthy store."""
        self.sleep = sleep
        self.processes = processes
        self._delay = delay
        self._parts: dict[Limit, tuple[float, int]] = {}
        """End of the share, and what must be left for the others."""

    def pause(self, limit: Limit, left: int, now: float, changed_at: float) -> float:
        """See `RoundGrants.pause`."""
        until, floor = self._parts.get(limit, (now, 0))
        if now >= until:
            self._forget_old(now)
            floor = left - max(1, left // self.processes)
        elif left <= floor:
            return until - now
        self._parts[limit] = now + 2 * self._delay, floor
        return 0.0

    def _forget_old(self, now: float) -> None:
        if len(self._parts) >= MANY:
            self._parts = {limit: part for limit, part in self._parts.items() if part[0] > now}


MOST_NAMES = 200
"""Names of keys and tenants that become labels: an issuer of tokens can name any number."""


class LimitSeries:
    def __init__(self, catalogue: Catalogue) -> None:
        self._limited = catalogue.limited
        self._names: set[tuple[str, str]] = set()

    def limited(self, kind: str, name: str, shadow: bool) -> None:
        if (kind, name) not in self._names:
            if len(self._names) >= MOST_NAMES or not is_label(name):
                name = OTHER
            else:
                self._names.add((kind, name))
        self._limited.cell(kind, name, "true" if shadow else "false").add()
