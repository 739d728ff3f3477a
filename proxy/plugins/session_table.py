"""Which session is bound to which pod: bounded, and forgotten when it has not been used for a while."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from hashlib import blake2b
from itertools import islice

from proxy.core.endpoint import Endpoint

MOST_SESSIONS = 100_000


def _nobody(key: bytes, endpoint: Endpoint) -> None:
    pass


class SessionTable:
    """Times are monotonic seconds. Ordered by last use, so that the oldest stand first.

    `on_bind(key, endpoint)` is called for every binding that is made or confirmed here; `take` is what it is for.
    """

    def __init__(self, ttl: float, sweep_every: float, most: int = MOST_SESSIONS) -> None:
        self.ttl = ttl
        self.sweep_every = sweep_every
        self._most = most
        self._swept_at = 0.0
        self._bound: OrderedDict[bytes, tuple[Endpoint, float]] = OrderedDict()
        self.on_bind: Callable[[bytes, Endpoint], None] = _nobody

    def __len__(self) -> int:
        return len(self._bound)

    def get(self, session: str, now: float) -> Endpoint | None:
        endpoint, used_at = self._bound.get(_key(session), (None, 0.0))
        return endpoint if now - used_at < self.ttl else None

    def bind(self, session: str, endpoint: Endpoint, now: float) -> None:
        """Binds, or confirms a binding."""
        key = _key(session)
        self._put(key, endpoint, now)
        if now - self._swept_at >= self.sweep_every:
            self._sweep(now)
        self.on_bind(key, endpoint)

    def take(self, key: bytes, endpoint: Endpoint, used_at: float) -> None:
        """A binding that somebody else made, unless a later one is known."""
        if used_at >= self._bound.get(key, (None, used_at))[1]:
            self._put(key, endpoint, used_at)

    def recent(self, most: int) -> Iterator[tuple[bytes, Endpoint, float]]:
        """Those used last, the very last at the end; of the moment of the call."""
        first = max(0, len(self._bound) - most)
        return iter([(key, endpoint, at) for key, (endpoint, at) in islice(self._bound.items(), first, None)])

    def forget(self, endpoint: Endpoint) -> None:
        for key in [key for key, (bound, _) in self._bound.items() if bound is endpoint]:
            del self._bound[key]

    def hand_over(self, endpoint: Endpoint, heir: Endpoint) -> None:
        """What is bound to one pod is bound to the other."""
        for key, (bound, used_at) in self._bound.items():
            if bound is endpoint:
                self._bound[key] = (heir, used_at)

    def _put(self, key: bytes, endpoint: Endpoint, used_at: float) -> None:
        self._bound[key] = (endpoint, used_at)
        self._bound.move_to_end(key)
        if len(self._bound) > self._most:
            self._bound.popitem(last=False)

    def _sweep(self, now: float) -> None:
        self._swept_at = now
        for key, (_, used_at) in list(self._bound.items()):
            if now - used_at < self.ttl:
                break
            del self._bound[key]


def _key(session: str) -> bytes:
    """Ids are what clients write, up to the size of a header: remembered as they are, they could fill the memory."""
    return blake2b(session.encode("utf-8", "surrogateescape"), digest_size=16).digest()
