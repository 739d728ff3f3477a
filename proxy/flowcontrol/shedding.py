"""The gate that refuses requests of negative priority, so that others need not wait for them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from proxy.core.endpoint import Endpoint, Freshness
from proxy.core.errors import QueueFull, Reason
from proxy.core.ports import Gate, Random
from proxy.core.request import InferenceRequest
from proxy.flowcontrol.controller import Watcher
from proxy.flowcontrol.settings import ShedByLoad, Shedding
from proxy.latency.forecast import LATENCY, objectives

COLD = 0.02
"""Used share of the KV cache below which a pod counts as having nothing to do."""


class SheddingGate(Gate):
    """Decides on the pods that the request could have, when all that is predicted of it is there."""

    def __init__(self, settings: Shedding, random: Random, watcher: Watcher) -> None:
        self._settings = settings
        self._random = random
        self._watcher = watcher

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """All. Raises QueueFull."""
        if request.priority < 0:
            by_load = self._settings.by_load
            if by_load is not None and self._random.random() < chance(by_load, endpoints):
                raise self._refusal(request, "The pods are too busy for what may be dropped.")
            if self._settings.missed_objectives and would_miss(request, endpoints):
                raise self._refusal(request, "No pod would answer in the time that is asked for.")
        return endpoints

    def spares(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        """What may be dropped is not sent twice."""
        return request.priority >= 0

    def _refusal(self, request: InferenceRequest, message: str) -> QueueFull:
        self._watcher.refused(str(request.priority), Reason.SATURATED)
        return QueueFull(message, reason=Reason.SATURATED)


def chance(by_load: ShedByLoad, endpoints: Sequence[Endpoint]) -> float:
    """k * saturation ^ power, at most 1, where saturation is the mean of the larger of queue and KV usage by theirs."""
    full = [_fullness(by_load, endpoint) for endpoint in endpoints]
    saturation = sum(full) / len(full)
    return min(1.0, by_load.k * math.pow(saturation, by_load.power))


def would_miss(request: InferenceRequest, endpoints: Sequence[Endpoint]) -> bool:
    """Where something is predicted, and no pod has nothing to do."""
    asked, forecast = objectives(request), request.state.read(LATENCY)
    if asked is None or forecast is None:
        return False
    if any(endpoint.load.requests == 0 or endpoint.view.kv_usage < COLD for endpoint in endpoints):
        return False
    return not any(min(headrooms) >= 0.0 for headrooms in asked.headrooms(forecast, endpoints))


def _fullness(by_load: ShedByLoad, endpoint: Endpoint) -> float:
    if endpoint.metrics.freshness is Freshness.STALE:
        return 1.0
    view = endpoint.view
    return max(view.waiting / by_load.queue_depth, view.kv_usage / by_load.kv_usage)
