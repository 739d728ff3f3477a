"""What the fleet keeps of each pod, and the rules that are applied to all of them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from proxy.core.endpoint import LIGHT_SLEEP, Endpoint, EndpointState
from proxy.core.ports import Clock, Random
from proxy.fleet.scrape import Card
from proxy.fleet.settings import PodSettings

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Member:
    """Lives as long as the endpoint.

    `contact` is starting, ready or ejected, whatever an operator wants; `leave_by` is set while it is being removed.
    """

    endpoint: Endpoint
    pod: PodSettings
    source: str
    contact: EndpointState = EndpointState.STARTING
    draining: bool = False
    asleep: bool = False
    leave_by: float | None = None
    cards: Sequence[Card] = ()
    doubts: dict[str, set[int]] = field(default_factory=dict)
    """Why requests should rather not be sent there, though it answers, and who says so."""
    scrape_failure: str | None = None
    """Why the last scrape came to nothing, if it did."""
    refused_at: float | None = None
    """Since when nobody listens there."""
    restarted_at: float = -math.inf

    @property
    def answers(self) -> bool:
        """It could have requests."""
        return self._is_wanted and not self.asleep and self.contact is EndpointState.READY

    @property
    def can_be_woken(self) -> bool:
        is_asleep = self.endpoint.metrics.sleep_level == LIGHT_SLEEP
        return self._is_wanted and self.contact is EndpointState.READY and is_asleep

    @property
    def takes_any(self) -> bool:
        """It names no models, and has had the opportunity."""
        return not self.endpoint.models and self.contact is not EndpointState.STARTING

    @property
    def first_names(self) -> Iterable[str]:
        """A pod that serves one model under several names says so by their `root`."""
        names: dict[str, str] = {}
        for card in self.shown_cards:
            names.setdefault(str(card.get("root") or card["id"]), card["id"])
        return names.values()

    @property
    def shown_cards(self) -> Sequence[Card]:
        """The pod's own, as far as its configuration lets it serve them, and bare ones for what it does not list."""
        configured = self.pod.models
        if not configured:
            return self.cards
        own = {card["id"]: card for card in self.cards}
        return [own.get(model) or {"id": model, "object": "model"} for model in configured]

    def doubts_of(self, who: int) -> list[str]:
        return [why for why, whose in self.doubts.items() if who in whose]

    def doubt(self, why: str, who: int) -> bool:
        """Whether nobody had said so before."""
        whose = self.doubts.setdefault(why, set())
        is_new = not whose
        whose.add(who)
        return is_new

    def trust(self, why: str, who: int) -> bool:
        """Whether nobody says so any more."""
        whose = self.doubts[why]
        whose.discard(who)
        if not whose:
            del self.doubts[why]
        return not whose

    @property
    def _is_wanted(self) -> bool:
        return not self.draining and self.leave_by is None


OURS = -1
"""Who doubts, if it is this process; siblings have numbers."""


class Doubts:
    """Those about `members`, who may change; `settle` is called for each whose state may be another one. Doubts about
    more than `panic_percent` of those of a pool that answer are ignored."""

    def __init__(self, members: Mapping[str, Member], settle: Callable[[Member], None], panic_percent: float) -> None:
        self._members = members
        self._settle = settle
        self.panic_percent = panic_percent
        self.panics: frozenset[str] = frozenset()
        """Pools in which doubts are ignored."""

    def begin(self, member: Member, why: str, who: int) -> None:
        if member.doubt(why, who):
            if who == OURS:
                log.warning("pod %s is in doubt: %s", member.endpoint.name, why)
            self._review()

    def end(self, member: Member, why: str, who: int) -> None:
        if member.trust(why, who):
            if who == OURS:
                log.info("pod %s is no longer in doubt: %s", member.endpoint.name, why)
            self._review()

    def own(self) -> Mapping[str, Sequence[str]]:
        """Those of this process, by the names of the pods about which it has any."""
        own = {name: member.doubts_of(OURS) for name, member in self._members.items()}
        return {name: whys for name, whys in own.items() if whys}

    def hear(self, sibling: int, doubts: Mapping[str, Sequence[str]]) -> None:
        """All that a sibling has, by the pods' names."""
        for name, member in self._members.items():
            whys = doubts.get(name, ())
            for why in member.doubts_of(sibling):
                if why not in whys:
                    self.end(member, why, sibling)
            for why in whys:
                self.begin(member, why, sibling)

    def reconsider(self) -> None:
        """There are more or fewer pods that those in doubt are compared with."""
        if any(member.doubts for member in self._members.values()):
            self._review()

    def _review(self) -> None:
        """After a change that concerns more than one pod."""
        answering: dict[str, list[Member]] = {}
        for member in self._members.values():
            if member.answers:
                answering.setdefault(member.endpoint.pool, []).append(member)
        for pool, members in answering.items():
            self._review_pool(pool, members)
        self.panics &= answering.keys()

    def _review_pool(self, pool: str, members: Sequence[Member]) -> None:
        doubted = sum(1 for member in members if member.doubts)
        panics = doubted * 100 > self.panic_percent * len(members)
        if panics is not (pool in self.panics):
            self.panics ^= {pool}
            log.warning(
                "%d of %d pods are in doubt: all are asked" if panics else "%d of %d pods are in doubt",
                doubted,
                len(members),
            )
        for member in members:
            self._settle(member)


Place = tuple[str, str]
"""Pool and role."""


class Heirs:
    """Holds members back from leaving; `leave` lets one go."""

    def __init__(self, leave: Callable[[Member], None]) -> None:
        self._leave = leave
        self._held: dict[Member, float] = {}
        """And until when."""

    def replace(self, unwanted: Collection[Member], members: Iterable[Member], until: float) -> None:
        """Of the unwanted, those leave that nobody has to be waited for: some pod of their place serves, or none is on
        its way."""
        kept = [member for member in members if member.leave_by is None and member not in unwanted]
        serving = {_place(member.endpoint) for member in kept if member.endpoint.state is EndpointState.READY}
        coming = {_place(member.endpoint) for member in kept if member.contact is EndpointState.STARTING} - serving
        for member in unwanted:
            is_needed = member.endpoint.state is EndpointState.READY and _place(member.endpoint) in coming
            if is_needed:
                self._held.setdefault(member, until)
            else:
                self._leave(member)

    def came(self, member: Member) -> None:
        """It serves: those whose place it takes may go."""
        if self._held and member not in self._held and member.endpoint.state is EndpointState.READY:
            place = _place(member.endpoint)
            for held in [held for held in self._held if _place(held.endpoint) == place]:
                self._leave(held)

    def sweep(self, now: float) -> None:
        """Nobody is waited for any longer by those whose time is over."""
        for member in [member for member, until in self._held.items() if now >= until]:
            self._leave(member)

    def forget(self, member: Member) -> None:
        """It leaves, or is wanted again."""
        self._held.pop(member, None)


def _place(endpoint: Endpoint) -> Place:
    return endpoint.pool, endpoint.role


LEAST = 0.1
"""Share of its share that a pod begins with: nobody learns how it is from none."""

Of = Callable[[str], Sequence[Endpoint]]


class SlowStart:
    """For so many seconds the pod is a candidate for a growing part of the requests, chosen at random, and for those
    that have no other."""

    def __init__(self, seconds: float, clock: Clock, rng: Random) -> None:
        self._seconds = seconds
        self._clock = clock
        self._rng = rng
        self._since: dict[Endpoint, float] = {}

    @property
    def seconds(self) -> float:
        return self._seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._seconds = seconds
        if seconds <= 0:
            self._since.clear()

    def __bool__(self) -> bool:
        return bool(self._since)

    def began(self, endpoint: Endpoint) -> None:
        if self._seconds > 0:
            self._since[endpoint] = self._clock.now()

    def ended(self, endpoint: Endpoint) -> None:
        self._since.pop(endpoint, None)

    def thinned(self, of: Of, over: Callable[[], None]) -> Of:
        """`of`, without those that the request at hand is not for. `over` is called when there are none any more."""

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
        share = (now - since) / self._seconds
        if share >= 1:
            del self._since[endpoint]
            return True
        return self._rng.random() < max(LEAST, share)
