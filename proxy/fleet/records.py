"""The record of each pod, and the rules of its state: ejection, succession and slow start."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from proxy.core.endpoint import LIGHT_SLEEP, Endpoint, EndpointState
from proxy.core.ports import Clock, Random
from proxy.fleet.scrape import Card
from proxy.fleet.settings import PodSettings

log = logging.getLogger(__name__)


RANKS_IGNORED = "ignores data-parallel ranks"
"""A reason that does not eject a pod but makes it one endpoint, in all processes."""


class Contact(Enum):
    """Whether a pod has not responded yet, responds, or refuses connections. The value is the state of the pod unless
    it drains, sleeps or has an ejection reason."""

    AWAITED = EndpointState.STARTING.value
    RESPONDS = EndpointState.READY.value
    REFUSES = EndpointState.EJECTED.value


@dataclass(slots=True, eq=False)
class PodRecord:
    """A pod in the fleet. `endpoints` are its data-parallel ranks, or the single endpoint of a pod without ranks; all
    have the state of the pod. `leave_by` is set while the pod is being removed."""

    endpoints: Sequence[Endpoint]
    pod: PodSettings
    source: str
    contact: Contact = Contact.AWAITED
    drained_by: Collection[str] = frozenset()
    """Who drains it: an operator, the autoscaler, or both."""
    asleep: bool = False
    leave_by: float | None = None
    cards: Sequence[Card] = ()
    ejection_reasons: dict[str, set[int]] = field(default_factory=dict)
    """Why a pod that responds gets no requests, and the processes that say so."""
    scrape_failure: str | None = None
    """Why the last scrape failed, if it did."""
    failing_since: float | None = None
    """Since when all scrapes have failed."""
    refused_at: float | None = None
    """Since when it refuses connections."""
    restarted_at: float = -math.inf

    @property
    def endpoint(self) -> Endpoint:
        """The first rank, which represents the pod."""
        return self.endpoints[0]

    @property
    def name(self) -> str:
        return self.pod.name

    @property
    def has_ejection_reason(self) -> bool:
        """Whether a reason ejects it, which RANKS_IGNORED does not."""
        return bool(self.ejection_reasons.keys() - {RANKS_IGNORED})

    @property
    def obeys_ranks(self) -> bool:
        """False once a process saw the pod compute requests on other ranks than they name."""
        return RANKS_IGNORED not in self.ejection_reasons

    @property
    def in_flight(self) -> int:
        """Requests on all ranks."""
        return sum(endpoint.load.requests for endpoint in self.endpoints)

    def size_for(self, seen: int) -> int:
        """Return the number of endpoints of the pod if its metrics show this many ranks: 1 without ranks."""
        declared = self.pod.ranks_declared
        if declared == 1 or not self.obeys_ranks:
            return 1
        if seen > 1:
            return seen
        return declared or 1

    @property
    def can_serve(self) -> bool:
        """Whether it could have requests."""
        return self._is_wanted and not self.asleep and self.contact is Contact.RESPONDS

    @property
    def can_be_woken(self) -> bool:
        is_asleep = self.endpoint.metrics.sleep_level == LIGHT_SLEEP
        return self._is_wanted and self.contact is Contact.RESPONDS and is_asleep

    @property
    def takes_any(self) -> bool:
        """Whether it has responded and lists no models."""
        return not self.endpoint.models and self.contact is not Contact.AWAITED

    @property
    def first_names(self) -> Iterable[str]:
        """The first name of each model. A pod that serves one model under several names reports this in their
        `root`."""
        names: dict[str, str] = {}
        for card in self.shown_cards:
            names.setdefault(str(card.get("root") or card["id"]), card["id"])
        return names.values()

    @property
    def shown_cards(self) -> Sequence[Card]:
        """The pod's own cards, restricted by its configuration, and bare ones for configured models that it does not
        list."""
        configured = self.pod.models
        if not configured:
            return self.cards
        own = {card["id"]: card for card in self.cards}
        return [own.get(model) or {"id": model, "object": "model"} for model in configured]

    def reasons_of(self, who: int) -> list[str]:
        return [why for why, whose in self.ejection_reasons.items() if who in whose]

    def eject(self, why: str, who: int) -> bool:
        """Add a reason; return whether no process had it before."""
        whose = self.ejection_reasons.setdefault(why, set())
        is_new = not whose
        whose.add(who)
        return is_new

    def uneject(self, why: str, who: int) -> bool:
        """Remove a reason; return whether no process reports it any more."""
        whose = self.ejection_reasons[why]
        whose.discard(who)
        if not whose:
            del self.ejection_reasons[why]
        return not whose

    @property
    def _is_wanted(self) -> bool:
        return not self.drained_by and self.leave_by is None


OWN = -1
"""This process, among the processes that eject a pod; peers have numbers."""


class Ejections:
    """Ejection of pods that respond. `update_state` is called for each of `records` whose state may have changed.

    In a pool in which more than `panic_percent` of the pods that respond are ejected, ejections are ignored (Envoy's
    panic threshold): so many failures have another cause than the pods.
    """

    def __init__(
        self, records: Mapping[str, PodRecord], update_state: Callable[[PodRecord], None], panic_percent: float
    ) -> None:
        self._records = records
        self._update_state = update_state
        self.panic_percent = panic_percent
        self.panics: frozenset[str] = frozenset()
        """Pools in which ejections are ignored."""

    def add(self, record: PodRecord, why: str, who: int) -> None:
        if record.eject(why, who):
            if who == OWN and why != RANKS_IGNORED:
                log.warning("pod %s ejected: %s", record.name, why)
            self._review()

    def remove(self, record: PodRecord, why: str, who: int) -> None:
        if record.uneject(why, who):
            if who == OWN and why != RANKS_IGNORED:
                log.info("pod %s no longer ejected; the reason was: %s", record.name, why)
            self._review()

    def own(self) -> Mapping[str, Sequence[str]]:
        """Return the reasons of this process, by the names of the pods that it ejects."""
        own = {name: record.reasons_of(OWN) for name, record in self._records.items()}
        return {name: whys for name, whys in own.items() if whys}

    def replace_of_peer(self, peer: int, reasons: Mapping[str, Sequence[str]]) -> None:
        """Replace all reasons of a peer, which come by the pods' names."""
        for name, record in self._records.items():
            whys = reasons.get(name, ())
            for why in record.reasons_of(peer):
                if why not in whys:
                    self.remove(record, why, peer)
            for why in whys:
                self.add(record, why, peer)

    def reconsider(self) -> None:
        """Apply the panic threshold again: the number of pods that respond has changed."""
        if any(record.ejection_reasons for record in self._records.values()):
            self._review()

    def _review(self) -> None:
        answering: dict[str, list[PodRecord]] = {}
        for record in self._records.values():
            if record.can_serve:
                answering.setdefault(record.endpoint.pool, []).append(record)
        for pool, records in answering.items():
            self._review_pool(pool, records)
        self.panics &= answering.keys()

    def _review_pool(self, pool: str, records: Sequence[PodRecord]) -> None:
        ejected = sum(1 for record in records if record.has_ejection_reason)
        panics = ejected * 100 > self.panic_percent * len(records)
        if panics is not (pool in self.panics):
            self.panics ^= {pool}
            log.warning(
                "%d of %d pods ejected: above the panic threshold, requests go to all of them"
                if panics
                else "%d of %d pods ejected: below the panic threshold again",
                ejected,
                len(records),
            )
        for record in records:
            self._update_state(record)


Place = tuple[str, str]
"""Pool and role."""


class Successors:
    """Removed pods that keep serving until a successor is ready, so that a cut-over leaves no gap. `leave` removes a
    pod."""

    def __init__(self, leave: Callable[[PodRecord], None]) -> None:
        self._leave = leave
        self._held: dict[PodRecord, float] = {}
        """Held pods with their deadlines."""

    def replace(self, unwanted: Collection[PodRecord], records: Iterable[PodRecord], until: float) -> None:
        """Let the unwanted pods go, except those whose place only pods take that have not responded yet."""
        kept = [record for record in records if record.leave_by is None and record not in unwanted]
        serving = {_place(record.endpoint) for record in kept if record.endpoint.state is EndpointState.READY}
        coming = {_place(record.endpoint) for record in kept if record.contact is Contact.AWAITED} - serving
        for record in unwanted:
            is_needed = record.endpoint.state is EndpointState.READY and _place(record.endpoint) in coming
            if is_needed:
                self._held.setdefault(record, until)
            else:
                self._leave(record)

    def came(self, record: PodRecord) -> None:
        """Remove the pods whose place the given record, which now serves, takes."""
        if self._held and record not in self._held and record.endpoint.state is EndpointState.READY:
            place = _place(record.endpoint)
            for held in [held for held in self._held if _place(held.endpoint) == place]:
                self._leave(held)

    def sweep(self, now: float) -> None:
        for record in [record for record, until in self._held.items() if now >= until]:
            self._leave(record)

    def forget(self, record: PodRecord) -> None:
        """Drop a pod that leaves or is wanted again."""
        self._held.pop(record, None)


def _place(endpoint: Endpoint) -> Place:
    return endpoint.pool, endpoint.role


LEAST = 0.1
"""Initial share of a returning pod: without requests nothing is learnt of it."""

Of = Callable[[str], Sequence[Endpoint]]


class SlowStart:
    """Slow start: for `seconds` a pod that came back is a candidate for a growing random part of the requests, and for
    the requests that have no other candidate."""

    def __init__(self, seconds: float, clock: Clock, rng: Random) -> None:
        self.seconds = seconds
        self._clock = clock
        self._rng = rng
        self._since: dict[Endpoint, float] = {}

    def __bool__(self) -> bool:
        return bool(self._since)

    def began(self, endpoint: Endpoint) -> None:
        if self.seconds > 0:
            self._since[endpoint] = self._clock.now()

    def ended(self, endpoint: Endpoint) -> None:
        self._since.pop(endpoint, None)

    def thinned(self, of: Of, over: Callable[[], None]) -> Of:
        """Return `of` without the endpoints in slow start that are left out this time. Call `over` when no slow start
        is left."""

        def thin(model: str) -> Sequence[Endpoint]:
            found = of(model)
            now = self._clock.now()
            kept = tuple([endpoint for endpoint in found if self._takes(endpoint, now)])
            if not self._since:
                over()
            return kept or found

        return thin

    def _takes(self, endpoint: Endpoint, now: float) -> bool:
        since = self._since.get(endpoint)
        if since is None:
            return True
        if now - since >= self.seconds:
            del self._since[endpoint]
            return True
        return self._rng.random() < max(LEAST, (now - since) / self.seconds)
