"""Free capacity of the pods under the configured caps, and this process's part of each cap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from zlib import crc32

from proxy.core.endpoint import DECODING, PREFILLING, Endpoint, Freshness
from proxy.core.ports import Clock
from proxy.fleet.store import Pods
from proxy.flowcontrol.queue import Band, QueueEntry
from proxy.flowcontrol.settings import FlowControlSettings, Saturation

REQUESTS, TOKENS = "requests ", "tokens "
"""Names of caps: of the pool as they are, of a pod with its name behind them."""

Part = Callable[[str, int], int]
"""This worker's share of a cap."""


@dataclass(eq=False)
class Capacity:
    """Free capacity of the pods, counting all requests that workers reported. `inside` are the admitted requests of
    this worker, `unsent` the admitted requests that are not sent yet.

    Requests for a model that no pod serves do not wait, except for the first ready pod with `noEndpointTimeout`.
    """

    settings: FlowControlSettings
    fleet: Pods
    inside: Collection[object]
    unsent: Collection[QueueEntry]
    clock: Clock
    _reflection: ReflectiveCeilings = field(init=False, default_factory=lambda: ReflectiveCeilings())

    def admitted(self) -> None:
        """Count an admitted request as a turn of reflective ceilings."""
        if self.settings.ceilings == "reflective":
            self._reflection.admitted(self.saturation(), self.clock.now())

    @property
    def lacks_pods(self) -> bool:
        """Whether requests wait for the first ready pod."""
        return self.settings.no_endpoint_timeout is not None and not self.fleet.ready

    def in_all(self, entry: QueueEntry) -> bool:
        """Return whether all pods together have capacity."""
        settings, ready = self.settings, self.fleet.ready
        if not self.fleet.endpoints_for(entry.request.model):
            return not self.lacks_pods
        most, tokens = settings.max_concurrent, settings.max_tokens
        if most is not None and len(self.inside) + sum(pod.load.remote_requests for pod in ready) >= most:
            return False
        if tokens is not None:
            in_flight = sum(pod.load.tokens for pod in ready) + sum(other.cost for other in self.unsent)
            if in_flight > 0 and in_flight + entry.cost > tokens:
                return False
        return settings.saturation.detector == "none" or self._is_below_ceiling(entry.band)

    def on_a_pod(self, entry: QueueEntry) -> bool:
        """Return whether a pod of its model has capacity beyond the requests that are not sent yet."""
        endpoints, settings = self.fleet.endpoints_for(entry.request.model), self.settings
        if not endpoints:
            return True
        others = sum(1 for other in self.unsent if other.request.model == entry.request.model)
        most = settings.max_concurrent_per_pod
        if most is not None and sum(max(0, most - pod.load.requests) for pod in endpoints) <= others:
            return False
        if settings.max_tokens_per_pod is None:
            return True
        return sum(1 for pod in endpoints if self.fits(pod, entry.cost)) > others

    def in_part(self, entry: QueueEntry, part: Part) -> bool:
        """Return whether this worker's share of the caps has capacity."""
        settings, endpoints = self.settings, self.fleet.endpoints_for(entry.request.model)
        if not endpoints:
            return True
        most, tokens, per_pod = settings.max_concurrent, settings.max_tokens, settings.max_concurrent_per_pod
        if most is not None and len(self.inside) >= part(REQUESTS, most):
            return False
        if tokens is not None and self._own_tokens() + min(entry.cost, tokens) > part(TOKENS, tokens):
            return False
        others = sum(1 for other in self.unsent if other.request.model == entry.request.model)
        if per_pod is not None:
            free = (part(REQUESTS + pod.name, per_pod) - _own_requests(pod) for pod in endpoints)
            if sum(max(0, left) for left in free) <= others:
                return False
        return settings.max_tokens_per_pod is None or len(self.with_part(endpoints, entry.cost, part)) > others

    def short(self, part: Part) -> Iterator[str]:
        """Yield the caps of the whole pool where this worker may need more."""
        settings = self.settings
        if settings.max_concurrent is not None and len(self.inside) >= part(REQUESTS, settings.max_concurrent):
            yield REQUESTS
        if settings.max_tokens is not None:
            yield TOKENS

    def idle(self, part: Part, wanted: Collection[str]) -> Iterator[tuple[str, int, str]]:
        """Yield unused parts of this worker's shares that are wanted: the cap, the amount, and the name under which."""
        settings, unsent = self.settings, len(self.unsent)
        if settings.max_concurrent is not None and REQUESTS in wanted:
            yield REQUESTS, part(REQUESTS, settings.max_concurrent) - len(self.inside), REQUESTS
        if settings.max_tokens is not None and TOKENS in wanted:
            yield TOKENS, part(TOKENS, settings.max_tokens) - self._own_tokens(), TOKENS
        tokens = settings.max_tokens_per_pod and sum(other.cost for other in self.unsent)
        models = [name for name in wanted if name not in (REQUESTS, TOKENS)]
        for pod, model in {pod: each for each in models for pod in self.fleet.endpoints_for(each)}.items():
            if settings.max_concurrent_per_pod is not None:
                name = REQUESTS + pod.name
                yield name, part(name, settings.max_concurrent_per_pod) - _own_requests(pod) - unsent, model
            if settings.max_tokens_per_pod is not None:
                name = TOKENS + pod.name
                yield name, part(name, settings.max_tokens_per_pod) - _own_tokens(pod) - (tokens or 0), model

    def _is_below_ceiling(self, band: Band) -> bool:
        saturation = self.saturation()
        if self.settings.ceilings == "reflective":
            return self._reflection.is_open(saturation, band.rank, self.clock.now())
        return saturation < band.ceiling

    def _own_tokens(self) -> int:
        return sum(map(_own_tokens, self.fleet.ready)) + sum(other.cost for other in self.unsent)

    def with_part(self, endpoints: Sequence[Endpoint], cost: int, part: Part) -> list[Endpoint]:
        """Return the endpoints with capacity in this worker's share."""
        most, tokens = self.settings.max_concurrent_per_pod, self.settings.max_tokens_per_pod
        return [
            pod
            for pod in endpoints
            if (most is None or _own_requests(pod) < part(REQUESTS + pod.name, most))
            and (tokens is None or _own_tokens(pod) + min(cost, tokens) <= part(TOKENS + pod.name, tokens))
        ]

    def on(self, endpoints: Sequence[Endpoint], cost: int) -> Sequence[Endpoint]:
        """Return the endpoints with capacity; all, if none has."""
        return [endpoint for endpoint in endpoints if self.fits(endpoint, cost)] or endpoints

    def saturation(self) -> float:
        """Return the mean over the ready pods, or the higher one of the means over prefill pods and over decode pods;
        1.0 and above is full."""
        endpoints = self.fleet.ready
        if self.settings.saturation.detector == "none":
            return 0.0
        return max(map(self._mean, _stages(endpoints))) if endpoints else 1.0

    def _mean(self, endpoints: Sequence[Endpoint]) -> float:
        detector, total = self.settings.saturation, 0.0
        if detector.detector != "concurrency":
            total = sum(_utilization(pod, detector) for pod in endpoints) + len(self.unsent) / detector.queue_depth
        if detector.detector != "utilization":
            load = sum(_concurrency(pod, detector) for pod in endpoints)
            total = max(total, load + len(self.unsent) / (detector.requests or 1_000_000))
        return total / len(endpoints)

    def fits(self, endpoint: Endpoint, cost: int) -> bool:
        """Return whether the pod has capacity; a prompt larger than the cap needs an idle pod."""
        most, tokens, load = self.settings.max_concurrent_per_pod, self.settings.max_tokens_per_pod, endpoint.load
        if most is not None and load.requests >= most:
            return False
        return tokens is None or load.tokens == 0 or load.tokens + cost <= tokens


def _stages(endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
    """Return the prefill pods and the decode pods, as the filters of these roles keep them; all pods, if their roles do
    not differ."""
    if len({pod.role for pod in endpoints}) == 1:
        return (endpoints,)
    stages = [[pod for pod in endpoints if pod.role in roles] for roles in (PREFILLING, DECODING)]
    return [stage for stage in stages if stage] or (endpoints,)


def _own_requests(endpoint: Endpoint) -> int:
    """Return the requests of this worker."""
    return endpoint.load.requests - endpoint.load.remote_requests


def _own_tokens(endpoint: Endpoint) -> int:
    return endpoint.load.tokens - endpoint.load.remote_tokens


def _utilization(endpoint: Endpoint, detector: Saturation) -> float:
    """Requests sent since the scrape count as waiting: else a pod without a queue would get any number until the next
    scrape."""
    metrics = endpoint.metrics
    if metrics.freshness is Freshness.STALE:
        return 1.0
    sent = max(0, endpoint.load.requests - endpoint.in_flight_at_scrape)
    return max((metrics.waiting + sent) / detector.queue_depth, metrics.kv_usage / detector.kv_usage)


def _concurrency(endpoint: Endpoint, detector: Saturation) -> float:
    load, requests, tokens = endpoint.load, detector.requests, detector.tokens
    return max(load.requests / requests if requests else 0.0, load.tokens / tokens if tokens else 0.0)


TURN = 0.001
"""Seconds without an admitted request that count as a turn of reflective ceilings: the interval at which llm-d counts.
Turns of admitted requests alone would leave pods half empty, since a band at its ceiling admits none."""


@dataclass(slots=True)
class ReflectiveCeilings:
    """Ceilings that fall as the saturation rises: 1 - rank * saturation, which is 1 for the highest band, of rank 0,
    and 1 - saturation for the lowest, of rank 1. A band at its ceiling gets one turn in saturation / (1 - saturation),
    so it slows down but does not stop. Each admitted request is a turn, and each millisecond without one.

    All bands have the same turns: admission stops at the first blocked band, so with turns of its own a lower band
    might never have one together with the higher bands.
    """

    _turns: int = 0
    _turned_at: float = 0.0
    _is_open: bool = True

    def admitted(self, saturation: float, now: float) -> None:
        self._is_open = self._turn(saturation, now, 1)

    def is_open(self, saturation: float, rank: float, now: float) -> bool:
        if saturation >= 1.0:
            return False
        if rank == 0.0 or saturation < 1.0 - rank * saturation:
            return True
        if not self._is_open and now >= self._turned_at + TURN:
            self._is_open = self._turn(saturation, now, int((now - self._turned_at) / TURN))
        return self._is_open

    def _turn(self, saturation: float, now: float, count: int) -> bool:
        """Count turns. Return whether one of them is for bands at their ceilings."""
        self._turned_at = now
        if not 1.0 - saturation <= saturation < 1.0:
            return self._is_open
        period = max(1, floor(saturation / (1.0 - saturation) + 0.5))
        before = self._turns // period
        self._turns += count
        return self._turns // period > before


MOST_CAPS = 20_000
"""Caps that one peer may lend: there are two for each pod."""

Lent = Mapping[str, Mapping[str, int] | None]
"""By borrower and cap: the total ever lent; None: all loans are cancelled."""

Publish = Callable[[int | None, float, Lent, Sequence[str]], None]

LONG = 0.25
"""Seconds: a process that has waited so much longer goes first, however many requests it has in flight."""

Order = tuple[int, float, str]
"""The order in which processes that wait go first: priority, descending; since when; and name."""


@dataclass(eq=False)
class SharedCaps:
    """Shares of the caps between the processes of a deployment. No process exceeds its share, so all together never
    exceed the cap, however late reports arrive. A process that needs more waits and publishes that; the others then
    lend it unused shares, and what they have beyond the share of a waiting process. Of processes that wait, the one
    that has admitted no request for longest keeps its shares, and the others lend it theirs, so that it collects what a
    large request needs. A loan counts at the lender from its publication, and at the borrower from its arrival.

    `publish` gets the highest waiting priority here, or None; since when no waiting request was admitted; the loans
    since the last call, by borrower; and what is wanted: names of models, and of caps of the whole pool. A peer has a
    number, local to this process, and a name, common to all.
    """

    workers: int
    publish: Publish
    seat: int = 0
    """The number of this worker on its host."""
    name: str = "0"
    published: int | None = field(init=False, default=None)
    since: float = field(init=False, default=0.0)
    wants: Sequence[str] = field(init=False, default=())
    """All three as last published."""
    given: dict[str, Counter[str]] = field(init=False, default_factory=dict)
    place: tuple[int, int] = field(init=False, default=(1, 0))
    """The number of hosts and the position of this one."""
    _waiting: dict[int, tuple[int, float]] = field(init=False, default_factory=dict)
    """The highest waiting priority of each peer, and since when it has admitted no request."""
    _names: dict[int, str] = field(init=False, default_factory=dict)
    _wants: dict[int, frozenset[str]] = field(init=False, default_factory=dict)
    _got: dict[int, Counter[str]] = field(init=False, default_factory=dict)
    _beyond: Counter[str] = field(init=False, default_factory=Counter)
    """Borrowed minus lent."""
    _unpublished: dict[str, dict[str, int] | None] = field(init=False, default_factory=dict)

    @property
    def wait(self) -> bool:
        """Whether requests of peers wait."""
        return bool(self._waiting)

    def part(self, cap: str, most: int) -> int:
        """Return this process's share of a cap. The remainder goes to different hosts for different caps."""
        hosts, position = self.place
        if hosts > 1:
            most = _part(most, hosts, (position + crc32(cap.encode())) % hosts)
        return _part(most, self.workers, self.seat) + self._beyond[cap]

    @property
    def latest(self) -> float:
        """The latest time since when a peer waits, by the peer's clock; 0 if none waits."""
        return max((since for _, since in self._waiting.values()), default=0.0)

    @property
    def wanted(self) -> frozenset[str]:
        """Wants of the peers with the highest waiting priority."""
        return frozenset().union(*(self._wants[peer] for peer in self._first()))

    def lend(self, cap: str, amount: int, wants: str) -> None:
        """Lend to the peers that want this, in equal parts; `say` publishes the loans."""
        takers = self._takers(wants)
        for number, peer in enumerate(takers):
            share = amount // len(takers) + (number < amount % len(takers))
            if share:
                self._give(self._names[peer], cap, share)

    def lend_to_first(self, cap: str, amount: int, wants: str, before: Order | None = None) -> None:
        """Lend all to the first of the peers that want this, if it is before this place in the order."""
        for peer in self._takers(wants)[:1]:
            if before is None or self._order(peer) < before:
                self._give(self._names[peer], cap, amount)

    def say(self, highest: int | None, since: float = 0.0, wants: Sequence[str] = ()) -> None:
        if (highest, since, wants) != (self.published, self.since, self.wants) or self._unpublished:
            unpublished, self._unpublished = self._unpublished, {}
            self.published, self.since, self.wants = highest, since, wants
            self.publish(highest, since, unpublished, wants)

    def receive(
        self, peer: int, name: str, highest: int | None, since: float, lent: Lent, wants: Sequence[str]
    ) -> None:
        self._names[peer] = name
        self._wants[peer] = frozenset(wants)
        if self.name in lent:
            self._get(peer, lent[self.name])
        if highest is None:
            self._waiting.pop(peer, None)
        else:
            self._waiting[peer] = highest, since

    def reset(self, peer: int) -> None:
        """Forget the loans of a peer, which publishes all of them again."""
        self._waiting.pop(peer, None)
        self._get(peer, None)

    def vanished(self, peer: int) -> None:
        """Cancel the loans from and to a peer that is gone: its successor starts with a plain share. A disconnected
        peer learns of this when it is back."""
        self.reset(peer)
        name = self._names.pop(peer, "")
        if self._cancel_loans(name):
            self._unpublished[name] = None

    def cut_off(self, first: int) -> None:
        """Return to plain shares with the disconnected peers, which have this number or a larger one."""
        for peer in [peer for peer in self._names if peer >= first]:
            self.reset(peer)
            name = self._names.pop(peer)
            self._cancel_loans(name)
            self._unpublished.pop(name, None)

    def go_first(self, highest: int, since: float, own: int, in_flight: int) -> bool:
        """Return whether peers go first, given that `own` of the requests in flight are of this process."""
        rivals = self._first()
        if not rivals:
            return False
        most, waiting_since = min(map(self._waiting.__getitem__, rivals))
        if most != highest:
            return most > highest
        return waiting_since + LONG < since or own * (len(rivals) + 1) > in_flight

    def _takers(self, wants: str) -> list[int]:
        return sorted((peer for peer in self._first() if wants in self._wants[peer]), key=self._order)

    def _order(self, peer: int) -> Order:
        highest, since = self._waiting[peer]
        return -highest, since, self._names[peer]

    def _first(self) -> list[int]:
        highest = max((highest for highest, _ in self._waiting.values()), default=None)
        return [peer for peer, (priority, _) in self._waiting.items() if priority == highest]

    def _give(self, name: str, cap: str, amount: int) -> None:
        given = self.given.setdefault(name, Counter())
        given[cap] += amount
        self._beyond[cap] -= amount
        unpublished = self._unpublished.get(name) or {}
        self._unpublished[name] = {**unpublished, cap: given[cap]}

    def _get(self, peer: int, lent: Mapping[str, int] | None) -> None:
        if lent is None:
            self._beyond.subtract(self._got.pop(peer, {}))
            return
        got = self._got.setdefault(peer, Counter())
        if len(got.keys() | lent.keys()) > MOST_CAPS:
            return
        for cap, amount in lent.items():
            self._beyond[cap] += amount - got[cap]
            got[cap] = amount

    def _cancel_loans(self, name: str) -> bool:
        """Cancel what was lent to a peer. Return whether there was a loan."""
        given = self.given.pop(name, None)
        self._beyond.update(given or {})
        return given is not None


def _part(most: int, of: int, seat: int) -> int:
    return most // of + (seat < most % of)
