"""Who waits: bands by priority, in a band a flow for each tenant, in a flow the requests in their order."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from proxy.flowcontrol.band import LEAST_SERVICE, Band, Waiting
from proxy.flowcontrol.service import Attained
from proxy.flowcontrol.settings import BandSettings, FlowControlSettings

SPARE = 0.05
"""Of the queue, which those do not get that would soon have to make room for others: better refused at once."""


class Queue:
    """All that wait. `bands` are sorted, the highest first; there are as many as priorities were seen."""

    def __init__(self, settings: FlowControlSettings) -> None:
        self.attained = Attained(settings.least_service)
        self._set(settings)

    @property
    def settings(self) -> FlowControlSettings:
        """Where they change, waiting requests keep waiting, in the new order."""
        return self._settings

    @settings.setter
    def settings(self, settings: FlowControlSettings) -> None:
        before = self.bands
        self.attained.settings = settings.least_service
        self._set(settings)
        for band in before:
            self.band(band.priority).succeed(band)

    @property
    def waiting(self) -> int:
        return sum(band.waiting for band in self.bands)

    @property
    def bytes(self) -> int:
        return sum(band.bytes for band in self.bands)

    def band(self, priority: int) -> Band:
        return self._by_priority.get(priority) or self._unlisted(priority)

    def is_full_for(self, waiting: Waiting) -> bool:
        settings, count = self._settings, self.waiting
        if count >= settings.max_queued or self.bytes + len(waiting.request.body) > settings.max_queued_bytes:
            return True
        spare = int(settings.max_queued * SPARE)
        if count < settings.max_queued - spare or count == waiting.band.alike(waiting.request):
            return False
        below = sum(band.waiting for band in self.bands if band.priority < waiting.band.priority)
        return below <= spare and waiting.band.gives_way(waiting) is None

    def gives_way(self, waiting: Waiting) -> Waiting | None:
        """Who should leave for it: the last of the lowest band, if that is below its own."""
        lowest = next((band for band in reversed(self.bands) if band.waiting), waiting.band)
        return lowest.last() if lowest.priority < waiting.band.priority else waiting.band.gives_way(waiting)

    def ahead(self, waiting: Waiting) -> int:
        """Requests that go before it."""
        band = waiting.band
        return sum(other.waiting for other in self.bands if other.priority > band.priority) + band.ahead(waiting)

    def _set(self, settings: FlowControlSettings) -> None:
        self._settings = settings
        self._listed = sorted(settings.bands or (BandSettings(),), key=attrgetter("priority"), reverse=True)
        self._by_priority: dict[int, Band] = {}
        self.bands: list[Band] = []
        self.counts_service = any((listed.fairness or settings.fairness) == LEAST_SERVICE for listed in self._listed)
        for listed in self._listed:
            self._add(listed)

    def _unlisted(self, priority: int) -> Band:
        model = next((listed for listed in self._listed if listed.priority <= priority), self._listed[-1])
        return self._add(replace(model, priority=priority, name=""))

    def _add(self, settings: BandSettings) -> Band:
        band = self._by_priority[settings.priority] = Band(settings, self._settings, self.attained)
        self.bands = sorted((*self.bands, band), key=attrgetter("priority"), reverse=True)
        for place, each in enumerate(self.bands[1:], 1):
            each.depth = place / (len(self.bands) - 1)
        return band
