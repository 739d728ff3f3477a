"""Requests under which pods have died."""

from __future__ import annotations

from collections import deque

import xxhash

from proxy.core.attempt import UPSTREAM_FAILED, Attempt
from proxy.core.casualties import Casualties, casualties_of
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConnectFailed, SuspectedPoison
from proxy.core.listener import Listener
from proxy.core.ports import Clock
from proxy.core.request import InferenceRequest

SECONDS = 60.0
TOGETHER = 1.0
"""Seconds within which the connections of a pod that crashes break."""

MOST = 1000
"""Suspects; beyond that the oldest is let go."""


class Poison(Listener):
    """Identifies a request by the model that its client names and by its prompt: neither changes in a further try."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.suspects: dict[bytes, float] = {}
        """Until when each is refused. While there are none, nothing has to be hashed."""
        self._broken: deque[tuple[float, Endpoint, Casualties]] = deque()
        """Attempts that pods broke off in the last TOGETHER seconds: when, on which pod, of which request."""

    def attempt_failed(self, attempt: Attempt, error: BaseException | None) -> None:
        """Note an attempt that its pod broke off, whatever its client got."""
        if attempt.ending is not UPSTREAM_FAILED or isinstance(error, ConnectFailed):
            return
        now = self._clock.now()
        while self._broken and self._broken[0][0] < now - TOGETHER:
            self._broken.popleft()
        self._broken.append((now, attempt.endpoint.lead, casualties_of(attempt.request)))

    def was_alone(self, casualties: Casualties, endpoint: Endpoint) -> bool:
        """Return whether the pod, which has just died, had no request but that of `casualties`."""
        since = self._clock.now() - TOGETHER
        others = (at >= since and pod is endpoint and whose is not casualties for at, pod, whose in self._broken)
        return not any(rank.load.requests for rank in endpoint.ranks) and not any(others)

    def suspect(self, request: InferenceRequest) -> SuspectedPoison:
        """From now on; returns what its client is told."""
        self.suspects[_fingerprint(request)] = self._clock.now() + SECONDS
        if len(self.suspects) > MOST:
            del self.suspects[next(iter(self.suspects))]
        return SuspectedPoison(SECONDS)

    def check(self, request: InferenceRequest) -> None:
        """Raises SuspectedPoison."""
        now = self._clock.now()
        while self.suspects and next(iter(self.suspects.values())) <= now:
            del self.suspects[next(iter(self.suspects))]
        until = self.suspects.get(_fingerprint(request)) if self.suspects else None
        if until is not None:
            raise SuspectedPoison(until - now)


def _fingerprint(request: InferenceRequest) -> bytes:
    """A request without a prompt is identified by its body."""
    model = request.model if request.naming is None else request.naming.asked
    digest = xxhash.xxh3_128(model.encode("utf-8", "surrogatepass"))
    for part in request.prompt.parts or (request.body,):
        digest.update(b"\0")
        digest.update(part)
    return digest.digest()
