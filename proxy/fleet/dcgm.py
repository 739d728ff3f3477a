"""How busy a pod's GPUs are, as the DCGM exporter beside it, or on its node, says."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from proxy.core.endpoint import Endpoint
from proxy.core.errors import UpstreamFailed
from proxy.core.ports import Clock
from proxy.fleet.scrape import MOST_SAMPLES, Fetcher
from proxy.fleet.settings import DcgmSettings
from proxy.telemetry.prometheus_text import SampleReader, ScrapeError

log = logging.getLogger(__name__)

GPU_UTILIZATION = "GPUUtilization"
"""The attribute: of the pod's GPU that is busiest, from 0 to 1."""

SERIES = "DCGM_FI_DEV_GPU_UTIL"

RETRY = 5.0
"""Seconds after which an exporter is asked again that gave no answer: the pod itself must not wait for it often."""

_READER = SampleReader((SERIES,), limit=MOST_SAMPLES)


class Gpus:
    """Of one pod. `attributes` are what is known, nothing after an answer that was none."""

    def __init__(self, endpoint: Endpoint, fetcher: Fetcher, clock: Clock) -> None:
        self._endpoint = endpoint
        self._fetcher = fetcher
        self._clock = clock
        self._due = clock.now()
        self._was_told = False
        self.attributes: Mapping[str, float] = {}

    async def ask(self, settings: DcgmSettings) -> None:
        """Unless it is too early."""
        if self._clock.now() < self._due:
            return
        url = settings.url_of(self._endpoint)
        try:
            status, body = await self._fetcher.get(url, None)
            if status != 200:
                raise ScrapeError(f"status {status}")
            self.attributes = {GPU_UTILIZATION: await utilization(body, self._endpoint.name)}
            self._due, self._was_told = self._clock.now() + (settings.interval or 0.0), False
        except (UpstreamFailed, ScrapeError) as error:
            self.attributes = {}
            self._due = self._clock.now() + max(RETRY, settings.interval or 0.0)
            self._warn(url, error)

    def _warn(self, url: str, error: Exception) -> None:
        """Once, until it answers."""
        if not self._was_told:
            self._was_told = True
            log.warning("pod %s: nothing is known of its GPUs: %s: %s", self._endpoint.name, url, error)


async def utilization(text: bytes, pod: str) -> float:
    """From 0 to 1. An exporter that says which pod has which GPU is asked for those of this one. Raises ScrapeError."""
    samples = (await _READER.read_in_steps(text)).get(SERIES, ())
    values = [sample.value for sample in samples if _is_of(sample.labels.get("pod", ""), pod)]
    if not values:
        raise ScrapeError(f"it has no {SERIES} of the pod" if samples else f"it has no {SERIES}")
    return min(1.0, max(0.0, max(values) / 100))


def _is_of(named: str, pod: str) -> bool:
    """Discovery puts the namespace before a pod's name, and behind it which of several servers is meant."""
    own = pod.rpartition("/")[2]
    return named in ("", own) or own.startswith(f"{named}-rank-")
