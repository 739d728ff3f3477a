"""Which pod keeps which response: `/v1/responses` is stateful, so what follows must reach the pod that has it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice

from proxy.core.attempt import Attempt
from proxy.core.endpoint import GONE, Endpoint
from proxy.core.errors import NO_POD, NoEndpoints, UnknownResponse
from proxy.core.listener import Listener
from proxy.core.ports import Clock


class Bindings(Listener):
    """Response id -> endpoint, for `ttl` seconds after the last use; at most `limit`, least recently used evicted."""

    def __init__(self, clock: Clock, limit: int = 100_000, ttl: float = 3600.0) -> None:
        self._clock = clock
        self._limit = limit
        self._ttl = ttl
        self._bound: OrderedDict[str, tuple[Endpoint, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bound)

    def bind(self, response_id: str, endpoint: Endpoint) -> None:
        now = self._clock.now()
        self._bound[response_id] = (endpoint, now + self._ttl)
        self._bound.move_to_end(response_id)
        while len(self._bound) > self._limit or self._oldest() <= now:
            self._bound.popitem(last=False)

    def response_stored(self, attempt: Attempt, error: BaseException | None) -> None:
        """Bind the response that the pod stores."""
        if attempt.response_id and attempt.endpoint.state is not GONE:
            self.bind(attempt.response_id, attempt.endpoint)

    def recent(self, most: int) -> list[tuple[str, Endpoint]]:
        """Return the most recently used ones, the latest last."""
        first = max(0, len(self._bound) - most)
        return [(key, endpoint) for key, (endpoint, _) in islice(self._bound.items(), first, None)]

    def find(self, response_id: str) -> Endpoint | None:
        """Return None for an unknown or expired id, or if its pod is gone."""
        endpoint, expires = self._bound.get(response_id, (None, 0.0))
        if endpoint is None or expires <= self._clock.now():
            return None
        self.bind(response_id, endpoint)
        return endpoint

    def pod_of(self, response_id: str, ready: Sequence[Endpoint]) -> Endpoint:
        """Return the pod that stores the response. Raise UnknownResponse, or NoEndpoints while no pod is ready."""
        endpoint = self.find(response_id)
        if endpoint is not None:
            return endpoint
        if len(ready) == 1:
            return ready[0]
        raise UnknownResponse(response_id) if ready else NoEndpoints(NO_POD)

    def forget(self, endpoint: Endpoint) -> None:
        """Drop a pod that was removed or restarted."""
        gone = [response_id for response_id, (other, _) in self._bound.items() if other is endpoint]
        for response_id in gone:
            del self._bound[response_id]

    def _oldest(self) -> float:
        """Return when the least recently used one expires. Every use moves an entry to the end, so it is the first."""
        _, expires = next(iter(self._bound.values()))
        return expires


class SharedBindings(Bindings):
    """Bindings that peers share: calls `bound` for every binding that this process creates or uses."""

    def __init__(self, clock: Clock, bound: Callable[[str, Endpoint], None]) -> None:
        super().__init__(clock)
        self._tell = bound

    def bind(self, response_id: str, endpoint: Endpoint) -> None:
        super().bind(response_id, endpoint)
        self._tell(response_id, endpoint)

    def bound_elsewhere(self, response_id: str, endpoint: Endpoint) -> None:
        super().bind(response_id, endpoint)
