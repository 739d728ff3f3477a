"""When affinity is given up: the pods that a request has a reason to go to are behind the others by more than that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.request import InferenceRequest
from proxy.latency.forecast import LATENCY


@dataclass(frozen=True, slots=True)
class Rebalance:
    """In seconds where there is a forecast, which includes what each pod has cached of the prompt; else in requests."""

    seconds: float = param(1.0, "that staying may cost more, where predicted-latency-producer predicts", at_least=0)
    requests: int = param(16, "that run and wait on the pod, more than elsewhere, where it does not", at_least=0)

    def is_behind(self, request: InferenceRequest, held: Sequence[Endpoint], others: Sequence[Endpoint]) -> bool:
        """Whether the best of those that hold what the request needs is too far behind the best of the others."""
        if not others:
            return False
        forecast = request.state.read(LATENCY)
        if forecast is not None:
            return min(forecast.costs(held)) - min(forecast.costs(others)) > self.seconds
        return _fewest(held) - _fewest(others) > self.requests


def _fewest(endpoints: Sequence[Endpoint]) -> int:
    return min(endpoint.view.waiting + endpoint.view.running for endpoint in endpoints)
