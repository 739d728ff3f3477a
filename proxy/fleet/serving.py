"""Which ready endpoints serve which model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from proxy.core.endpoint import Endpoint, EndpointState


class Serving:
    """The ready endpoints at one moment, by model. The fleet makes a new one after every change, so this one may
    remember its answers; it remembers those for models that exist, so what clients make up takes no memory."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self.ready = tuple(endpoint for endpoint in endpoints if endpoint.state is EndpointState.READY)
        self.of: Callable[[str], Sequence[Endpoint]] = _ByModel(self.ready).__getitem__
        """In the order of the fleet; an endpoint that names no models serves any, and any serves a request without."""
        self.pools: dict[str, Serving] = {}
        """Those of single pools that somebody has asked for."""


class _ByModel(dict[str, tuple[Endpoint, ...]]):
    """What is remembered: to find it takes no step of Python, twice per request."""

    def __init__(self, ready: tuple[Endpoint, ...]) -> None:
        super().__init__({"": ready})
        self._ready = ready
        self._any = tuple(endpoint for endpoint in ready if not endpoint.models)
        self._named = frozenset(model for endpoint in ready for model in endpoint.models or ())

    def __missing__(self, model: str) -> tuple[Endpoint, ...]:
        if model not in self._named:
            return self._any
        found = tuple(endpoint for endpoint in self._ready if not endpoint.models or model in endpoint.models)
        self[model] = found
        return found
