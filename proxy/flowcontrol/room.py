"""Whether there is room on the pods for one more request."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Protocol

from proxy.core.endpoint import Endpoint, Freshness
from proxy.flowcontrol.band import Band, Waiting
from proxy.flowcontrol.reflection import Reflection
from proxy.flowcontrol.settings import FlowControlSettings, Saturation

REQUESTS, TOKENS = "requests ", "tokens "
"""Names of caps: of the pool as they are, of a pod with its name behind them."""

Part = Callable[[str, int], int]
"""What of a cap is this worker's, where there are several."""


class Fleet(Protocol):
    def serving(self, model: str) -> Sequence[Endpoint]: ...

    @property
    def ready(self) -> Sequence[Endpoint]: ...


class Room:
    """Counts what all workers of a host have in flight, as far as they have told each other. `inside` are the requests
    that this one has let go on, `unsent` those of them that are on no pod yet.

    Where nobody serves a model nobody waits for it either.
    """

    def __init__(
        self, settings: FlowControlSettings, fleet: Fleet, inside: Collection[object], unsent: Collection[Waiting]
    ) -> None:
        self.settings = settings
        self._fleet = fleet
        self._inside = inside
        self._unsent = unsent
        self._reflection = Reflection()

    def turn(self) -> None:
        """Somebody else is looked for who may go on."""
        if self.settings.ceilings == "reflective":
            self._reflection.turn(self.saturation())

    def in_all(self, waiting: Waiting) -> bool:
        """Whether all pods together have it."""
        settings, ready = self.settings, self._fleet.ready
        if not self._fleet.serving(waiting.request.model):
            return True
        most, tokens = settings.max_concurrent, settings.max_tokens
        if most is not None and len(self._inside) + sum(pod.load.remote_requests for pod in ready) >= most:
            return False
        if tokens is not None:
            in_flight = sum(pod.load.tokens for pod in ready) + sum(other.cost for other in self._unsent)
            if in_flight > 0 and in_flight + waiting.cost > tokens:
                return False
        return settings.saturation.detector == "none" or self._is_below_ceiling(waiting.band)

    def on_a_pod(self, waiting: Waiting) -> bool:
        """Whether one of the pods that serve its model has it. Each request that is not sent yet may take it."""
        endpoints, settings = self._fleet.serving(waiting.request.model), self.settings
        if not endpoints:
            return True
        others = sum(1 for other in self._unsent if other.request.model == waiting.request.model)
        most = settings.max_concurrent_per_pod
        if most is not None and sum(max(0, most - pod.load.requests) for pod in endpoints) <= others:
            return False
        if settings.max_tokens_per_pod is None:
            return True
        return sum(1 for pod in endpoints if self.fits(pod, waiting.cost)) > others

    def in_part(self, waiting: Waiting, part: Part) -> bool:
        """Whether there is room in what of the caps is this worker's."""
        settings, endpoints = self.settings, self._fleet.serving(waiting.request.model)
        if not endpoints:
            return True
        most, tokens, per_pod = settings.max_concurrent, settings.max_tokens, settings.max_concurrent_per_pod
        if most is not None and len(self._inside) >= part(REQUESTS, most):
            return False
        if tokens is not None and self._own_tokens() + min(waiting.cost, tokens) > part(TOKENS, tokens):
            return False
        others = sum(1 for other in self._unsent if other.request.model == waiting.request.model)
        if per_pod is not None:
            free = (part(REQUESTS + pod.name, per_pod) - _own_requests(pod) for pod in endpoints)
            if sum(max(0, left) for left in free) <= others:
                return False
        return settings.max_tokens_per_pod is None or len(self._with_part(endpoints, waiting.cost, part)) > others

    def on_in_part(self, endpoints: Sequence[Endpoint], cost: int, part: Part) -> Sequence[Endpoint]:
        """Those with room in what is this worker's; all of them, if none has."""
        return self._with_part(endpoints, cost, part) or endpoints

    def short(self, part: Part) -> Iterator[str]:
        """Caps of the whole pool of which this worker may need more."""
        settings = self.settings
        if settings.max_concurrent is not None and len(self._inside) >= part(REQUESTS, settings.max_concurrent):
            yield REQUESTS
        if settings.max_tokens is not None:
            yield TOKENS

    def idle(self, part: Part, wanted: Collection[str]) -> Iterator[tuple[str, int, str]]:
        """What of this worker's is not in use, of what is wanted: the cap, how much, and what it is wanted as."""
        settings, unsent = self.settings, len(self._unsent)
        if settings.max_concurrent is not None and REQUESTS in wanted:
            yield REQUESTS, part(REQUESTS, settings.max_concurrent) - len(self._inside), REQUESTS
        if settings.max_tokens is not None and TOKENS in wanted:
            yield TOKENS, part(TOKENS, settings.max_tokens) - self._own_tokens(), TOKENS
        tokens = settings.max_tokens_per_pod and sum(other.cost for other in self._unsent)
        models = [name for name in wanted if name not in (REQUESTS, TOKENS)]
        for pod, model in {pod: each for each in models for pod in self._fleet.serving(each)}.items():
            if settings.max_concurrent_per_pod is not None:
                name = REQUESTS + pod.name
                yield name, part(name, settings.max_concurrent_per_pod) - _own_requests(pod) - unsent, model
            if settings.max_tokens_per_pod is not None:
                name = TOKENS + pod.name
                yield name, part(name, settings.max_tokens_per_pod) - _own_tokens(pod) - (tokens or 0), model

    def _is_below_ceiling(self, band: Band) -> bool:
        saturation = self.saturation()
        if self.settings.ceilings == "reflective":
            return self._reflection.is_open(saturation, band.depth)
        return saturation < band.ceiling

    def _own_tokens(self) -> int:
        return sum(map(_own_tokens, self._fleet.ready)) + sum(other.cost for other in self._unsent)

    def _with_part(self, endpoints: Sequence[Endpoint], cost: int, part: Part) -> list[Endpoint]:
        most, tokens = self.settings.max_concurrent_per_pod, self.settings.max_tokens_per_pod
        return [
            pod
            for pod in endpoints
            if (most is None or _own_requests(pod) < part(REQUESTS + pod.name, most))
            and (tokens is None or _own_tokens(pod) + min(cost, tokens) <= part(TOKENS + pod.name, tokens))
        ]

    def on(self, endpoints: Sequence[Endpoint], cost: int) -> Sequence[Endpoint]:
        """Those with room; all of them, if none has."""
        return [endpoint for endpoint in endpoints if self.fits(endpoint, cost)] or endpoints

    def saturation(self) -> float:
        """Mean over the ready pods; 1.0 and above is full."""
        detector, endpoints = self.settings.saturation, self._fleet.ready
        if detector.detector == "none":
            return 0.0
        if not endpoints:
            return 1.0
        if detector.detector == "utilization":
            total, step = sum(_utilization(pod, detector) for pod in endpoints), 1 / detector.queue_depth
        else:
            total, step = sum(_concurrency(pod, detector) for pod in endpoints), 1 / (detector.requests or 1_000_000)
        return (total + step * len(self._unsent)) / len(endpoints)

    def fits(self, endpoint: Endpoint, cost: int) -> bool:
        """A prompt that is larger than the cap has a pod for itself."""
        most, tokens, load = self.settings.max_concurrent_per_pod, self.settings.max_tokens_per_pod, endpoint.load
        if most is not None and load.requests >= most:
            return False
        return tokens is None or load.tokens == 0 or load.tokens + cost <= tokens


def _own_requests(endpoint: Endpoint) -> int:
    """Of this worker."""
    return endpoint.load.requests - endpoint.load.remote_requests


def _own_tokens(endpoint: Endpoint) -> int:
    return endpoint.load.tokens - endpoint.load.remote_tokens


def _utilization(endpoint: Endpoint, detector: Saturation) -> float:
    """What was sent since the scrape counts as waiting: a pod that says of none that it waits would take any number
    until it is asked again."""
    metrics = endpoint.metrics
    if metrics.freshness is Freshness.STALE:
        return 1.0
    sent = max(0, endpoint.load.requests - endpoint.in_flight_at_scrape)
    return max((metrics.waiting + sent) / detector.queue_depth, metrics.kv_usage / detector.kv_usage)


def _concurrency(endpoint: Endpoint, detector: Saturation) -> float:
    load, requests, tokens = endpoint.load, detector.requests, detector.tokens
    return max(load.requests / requests if requests else 0.0, load.tokens / tokens if tokens else 0.0)
