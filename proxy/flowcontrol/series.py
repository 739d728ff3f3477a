"""What is counted of waiting requests."""

from __future__ import annotations

from proxy.core.errors import Reason
from proxy.flowcontrol.queue import Queue
from proxy.flowcontrol.room import Room
from proxy.telemetry.catalogue import Catalogue


class FlowSeries:
    """A Watcher of the gate of a pool."""

    def __init__(self, catalogue: Catalogue, pool: str) -> None:
        self._catalogue = catalogue
        self._pool = pool

    def went_on(self, band: str, waited: float) -> None:
        self._catalogue.queue_wait.cell(self._pool, band).observe(waited)

    def refused(self, band: str, reason: Reason) -> None:
        self._catalogue.queue_refused.cell(self._pool, band, reason.value).add()

    def read(self, queue: Queue, room: Room) -> None:
        """For an exposition."""
        for band in queue.bands:
            self._catalogue.queue_length.cell(self._pool, band.name).value = band.waiting
            self._catalogue.queue_bytes.cell(self._pool, band.name).value = band.bytes
        self._catalogue.saturation.cell(self._pool).value = room.saturation()

    def end(self) -> None:
        """There is no such gate any more. What others show is read anew for every exposition."""
        for gauge in (self._catalogue.queue_length, self._catalogue.queue_bytes, self._catalogue.saturation):
            gauge.clear()
