"""Settings of queues that are good each by itself, and have no effect together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from proxy.flowcontrol.settings import FlowControlSettings


def cautions(settings: FlowControlSettings, path: str, request_seconds: float) -> Iterator[str]:
    """A sentence for each, beginning with its path. `path` is that of the section, and a request ends after
    `request_seconds` whatever it does."""
    if not settings.limits and replace(settings, shedding=FlowControlSettings().shedding) != FlowControlSettings():
        yield f"{path}: nobody ever waits, as there is no cap, such as maxConcurrentPerPod, and no detector."
    bands = [(f"bands[{index}].", band) for index, band in enumerate(settings.bands)]
    timeouts = [("queueTimeout", settings.queue_timeout)]
    timeouts += [(f"{at}queueTimeout", band.queue_timeout) for at, band in bands if band.queue_timeout is not None]
    for name, seconds in timeouts:
        if seconds >= request_seconds:
            yield f"{path}.{name}: {seconds:g} s never pass, as reliability.timeouts.request is {request_seconds:g} s."
    for at, band in bands:
        if band.max_queued is not None and band.max_queued > settings.max_queued:
            yield f"{path}.{at}maxQueued: {band.max_queued} never wait, as maxQueued is {settings.max_queued}."
    yield from _of_the_detector(settings, path)


def _of_the_detector(settings: FlowControlSettings, path: str) -> Iterator[str]:
    """The first band to wait does so at its ceiling."""
    saturation, cap = settings.saturation, settings.max_concurrent_per_pod
    if saturation.detector != "concurrency" or saturation.requests is None or cap is None:
        return
    lowest = min((band.ceiling for band in settings.bands), default=1.0)
    if settings.ceilings == "fixed" and saturation.requests * min(1.0, lowest) > cap:
        yield (
            f"{path}.saturation.requests: {saturation.requests} are never in flight on a pod, as maxConcurrentPerPod is"
            f" {cap}."
        )
