"""A pod that comes back is given its share of the requests little by little."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock, Random

LEAST = 0.1
"""Share of its share that a pod begins with: nobody learns how it is from none."""

Of = Callable[[str], Sequence[Endpoint]]


class SlowStart:
    """For so many seconds the pod is a candidate for a growing part of the requests, chosen at random, and for those
    that have no other."""

    def __init__(self, seconds: float, clock: Clock, rng: Random) -> None:
        self._seconds = seconds
        self._clock = clock
        self._rng = rng
        self._since: dict[Endpoint, float] = {}

    @property
    def seconds(self) -> float:
        return self._seconds

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._seconds = seconds
        if seconds <= 0:
            self._since.clear()

    def __bool__(self) -> bool:
        return bool(self._since)

    def began(self, endpoint: Endpoint) -> None:
        if self._seconds > 0:
            self._since[endpoint] = self._clock.now()

    def ended(self, endpoint: Endpoint) -> None:
        self._since.pop(endpoint, None)

    def thinned(self, of: Of, over: Callable[[], None]) -> Of:
        """`of`, without those that the request at hand is not for. `over` is called when there are none any more."""

        def thin(model: str) -> Sequence[Endpoint]:
            found = of(model)
            now = self._clock.now()
            kept = tuple([endpoint for endpoint in found if self._takes(endpoint, now)])
            if not self._since:
                over()
            return kept or found

        return thin

    def _takes(self, endpoint: Endpoint, now: float) -> bool:
        since = self._since.get(endpoint)
        if since is None:
            return True
        share = (now - since) / self._seconds
        if share >= 1:
            del self._since[endpoint]
            return True
        return self._rng.random() < max(LEAST, share)
