"""Which request that has gone on is ended for one that waits."""

from __future__ import annotations

import math

from proxy.core.ports import Clock
from proxy.flowcontrol.band import Waiting
from proxy.flowcontrol.passage import Passage
from proxy.flowcontrol.room import Fleet
from proxy.flowcontrol.settings import FlowControlSettings

EVICTION_PAUSE = 1.0
"""Seconds until pods report what an eviction has changed."""


class Eviction:
    """`inside` are the requests that have gone on, in that order."""

    def __init__(self, settings: FlowControlSettings, fleet: Fleet, clock: Clock, inside: dict[Passage, None]) -> None:
        self.settings = settings
        self._fleet = fleet
        self._clock = clock
        self._inside = inside
        self._begins_at = -math.inf

    def make_room_for(self, waiting: Waiting, anywhere: bool) -> None:
        """Ends the least urgent request that may be ended for it, of these the one that went on last. Another follows
        when it has left and that was not enough."""
        if not self.settings.evict_sheddable or self._clock.now() < self._begins_at:
            return
        if any(passage.is_evicted for passage in self._inside):
            return
        pods = self._fleet.serving(waiting.request.model)
        sheddable = [
            one
            for one in reversed(self._inside)
            if one.request.priority < min(0, waiting.band.priority) and (anywhere or one.endpoint in pods)
        ]
        if sheddable:
            if self.settings.saturation.detector == "utilization":
                self._begins_at = self._clock.now() + EVICTION_PAUSE
            min(sheddable, key=lambda passage: passage.request.priority).evict()
