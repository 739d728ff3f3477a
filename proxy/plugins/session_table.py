"""Which session is bound to which pod: bounded, and forgotten when it has not been used for a while."""

from __future__ import annotations

from collections import OrderedDict

from proxy.core.endpoint import Endpoint

MOST_SESSIONS = 100_000


class SessionTable:
    """Times are monotonic seconds. Ordered by last use, so that the oldest stand first."""

    def __init__(self, ttl: float, sweep_every: float, most: int = MOST_SESSIONS) -> None:
        self._ttl = ttl
        self._sweep_every = sweep_every
        self._most = most
        self._swept_at = 0.0
        self._bound: OrderedDict[str, tuple[Endpoint, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bound)

    def get(self, session: str, now: float) -> Endpoint | None:
        endpoint, used_at = self._bound.get(session, (None, 0.0))
        return endpoint if now - used_at < self._ttl else None

    def bind(self, session: str, endpoint: Endpoint, now: float) -> None:
        """Binds, or confirms a binding."""
        self._bound[session] = (endpoint, now)
        self._bound.move_to_end(session)
        if len(self._bound) > self._most:
            self._bound.popitem(last=False)
        if now - self._swept_at >= self._sweep_every:
            self._sweep(now)

    def forget(self, endpoint: Endpoint) -> None:
        for session in [session for session, (bound, _) in self._bound.items() if bound is endpoint]:
            del self._bound[session]

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for session, (_, used_at) in list(self._bound.items()):
            if now - used_at < self._ttl:
                break
            del self._bound[session]
