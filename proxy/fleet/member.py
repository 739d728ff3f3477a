"""A pod as the fleet keeps it: the endpoint, and what only the fleet knows of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from proxy.core.endpoint import LIGHT_SLEEP, Endpoint, EndpointState
from proxy.fleet.scrape import Card
from proxy.fleet.settings import PodSettings


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
