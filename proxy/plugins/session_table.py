"""Which session is bound to which pod: bounded, and forgotten when it has not been used for a while."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b

from proxy.core.endpoint import Endpoint

MOST_SESSIONS = 100_000


class SessionTable:
    """Times are monotonic seconds. Ordered by last use, so that the oldest stand first."""

    def __init__(self, ttl: float, sweep_every: float, most: int = MOST_SESSIONS) -> None:
        self._ttl = ttl
        self._sweep_every = sweep_every
        self._most = most
        self._swept_at = 0.0
        self._bound: OrderedDict[bytes, tuple[Endpoint, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._bound)

    def get(self, session: str, now: float) -> Endpoint | None:
        endpoint, used_at = self._bound.get(_key(session), (None, 0.0))
        return endpoint if now - used_at < self._ttl else None

    def bind(self, session: str, endpoint: Endpoint, now: float) -> None:
        """Binds, or confirms a binding."""
        key = _key(session)
        self._bound[key] = (endpoint, now)
        self._bound.move_to_end(key)
        if len(self._bound) > self._most:
            self._bound.popitem(last=False)
        if now - self._swept_at >= self._sweep_every:
            self._sweep(now)

    def forget(self, endpoint: Endpoint) -> None:
        for key in [key for key, (bound, _) in self._bound.items() if bound is endpoint]:
            del self._bound[key]

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for key, (_, used_at) in list(self._bound.items()):
            if now - used_at < self._ttl:
                break
            del self._bound[key]


def _key(session: str) -> bytes:
    """Ids are what clients write, up to the size of a header: remembered as they are, they could fill the memory."""
    return blake2b(session.encode("utf-8", "surrogateescape"), digest_size=16).digest()
