"""What /metrics of the admin port answers with when there are several workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from proxy import outbound
from proxy.supervisor.child import Child
from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.exposition import Exposition
from proxy.telemetry.prometheus_text import SUPERVISOR, Merger

log = logging.getLogger(__name__)

TIMEOUT = 2.0
"""Seconds for the exposition of one worker."""


class HostExposition(Exposition):
    """Asks every worker; one that does not answer counts with what it said last. What workers had counted that are
    gone stays in the sums, or these would fall, and rates be wrong."""

    def __init__(
        self,
        catalogue: Catalogue,
        endpoints: EndpointSeries,
        children: Callable[[], Sequence[Child]],
        serving: Callable[[], int],
        readers: Sequence[Callable[[], None]] = (),
    ) -> None:
        super().__init__(catalogue, endpoints, readers=readers)
        self._children = children
        self._serving = serving
        self._gone = b""
        self._merging = asyncio.Lock()

    async def render(self, accept: str) -> tuple[bytes, str]:
        async with self._merging:
            await asyncio.gather(*map(_ask, self._children()))
            self._catalogue.workers.cell().value = self._serving()
            own, _ = await super().render("")
            said = [(child.exposition, str(child.seat)) for child in self._children()]
            gone, merged = self._gone, Merger()
            await merged.add(own, SUPERVISOR)
            for exposition, worker in said:
                await merged.add(exposition, worker)
            await merged.add(gone, SUPERVISOR)
            return await merged.render(), CONTENT_TYPE_PLAIN_0_0_4

    async def of_workers(self) -> list[bytes]:
        """What each of them shows."""
        async with self._merging:
            await asyncio.gather(*map(_ask, self._children()))
            return [child.exposition for child in self._children()]

    async def counted(self) -> list[bytes]:
        """As `of_workers`, and what those had counted that are gone."""
        return [*await self.of_workers(), self._gone]

    def retire(self, child: Child) -> None:
        """A worker is gone; what it counted is not."""
        self._gone = Merger.counts_of(self._gone, child.exposition)


async def _ask(child: Child) -> None:
    if not child.ready.is_set() or child.is_silent:
        return
    try:
        response = await outbound.fetch("GET", "http://worker/metrics", TIMEOUT, socket_path=child.metrics_path)
        child.exposition = response.body
    except outbound.FAILURES as error:
        log.warning("failed to fetch metrics from worker %d: %r", child.seat, error)
