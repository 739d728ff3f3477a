"""Why pods are not asked though they answer: who says so, and when that is more than can be believed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from proxy.fleet.member import Member

log = logging.getLogger(__name__)

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
