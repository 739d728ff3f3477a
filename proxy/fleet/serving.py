"""Which ready endpoints serve which model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.core.endpoint import Endpoint, EndpointState


class Serving:
    """The ready endpoints at one moment, by model. The fleet makes a new one after every change, so this one may
    remember its answers; it remembers those for models that exist, so what clients make up takes no memory."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self.ready = tuple(endpoint for endpoint in endpoints if endpoint.state is EndpointState.READY)
        self._any = tuple(endpoint for endpoint in self.ready if not endpoint.models)
        self._named = frozenset(model for endpoint in self.ready for model in endpoint.models or ())
        self._of: dict[str, tuple[Endpoint, ...]] = {"": self.ready}

    def of(self, model: str) -> Sequence[Endpoint]:
        """In the order of the fleet; an endpoint that names no models serves any, and any serves a request without."""
        found = self._of.get(model)
        return self._find(model) if found is None else found

    def _find(self, model: str) -> Sequence[Endpoint]:
        if model not in self._named:
            return self._any
        found = tuple(endpoint for endpoint in self.ready if not endpoint.models or model in endpoint.models)
        self._of[model] = found
        return found
