"""How much every replica has in flight on every pod: said in absolute numbers, so nothing is ever counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from struct import Struct
from struct import error as StructError

from proxy.core.endpoint import Endpoint
from proxy.replicas.wire import Garbled

_ENTRY = Struct("<HiqQ")
"""Length of the pod's name, requests, tokens, work since the last time; the name follows."""

Apply = Callable[[str, int, int, int], None]
"""(pod, requests and tokens of all peers together, work that was added)"""


class OwnLoads:
    """What this process has in flight, for its peers; `touch` is called when there is something to say."""

    def __init__(self, touch: Callable[[], None]) -> None:
        self._touch = touch
        self._changed: dict[Endpoint, int] = {}

    def changed(self, endpoint: Endpoint, work: int) -> None:
        """On the hot path: three times per leg."""
        changed = self._changed
        if not changed:
            self._touch()
        changed[endpoint] = changed.get(endpoint, 0) + work

    def take_changes(self) -> bytes:
        """The body of a record about the pods that changed; empty if there are none."""
        body = b"".join([_entry(endpoint, work) for endpoint, work in self._changed.items()])
        self._changed.clear()
        return body

    @staticmethod
    def all(endpoints: Iterable[Endpoint]) -> bytes:
        """The body of a record that, after a reset, says everything."""
        return b"".join([_entry(endpoint, 0) for endpoint in endpoints if _own_requests(endpoint)])


class PeerLoads:
    """What the peers have in flight. A pod that is not known yet is remembered until it is."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._of: dict[str, dict[int, tuple[int, int]]] = {}

    def take(self, peer: int, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then."""
        for name, requests, tokens, work in list(_entries(body)):
            peers = self._of.setdefault(name, {})
            if requests or tokens:
                peers[peer] = (requests, tokens)
            else:
                peers.pop(peer, None)
            self._sum_up(name, work)

    def vanished(self, peer: int) -> None:
        """All that it had in flight is gone at once."""
        for name, peers in list(self._of.items()):
            if peers.pop(peer, None):
                self._sum_up(name, 0)

    def added(self, endpoint: Endpoint) -> None:
        """A pod came that peers may have used already."""
        if endpoint.name in self._of:
            self._sum_up(endpoint.name, 0)

    def _sum_up(self, name: str, work: int) -> None:
        peers = self._of[name]
        requests = sum(requests for requests, _ in peers.values())
        tokens = sum(tokens for _, tokens in peers.values())
        if not peers:
            del self._of[name]
        self._apply(name, requests, tokens, work)


def _own_requests(endpoint: Endpoint) -> int:
    return endpoint.load.requests - endpoint.load.remote_requests


def _entry(endpoint: Endpoint, work: int) -> bytes:
    load, name = endpoint.load, endpoint.name.encode()
    requests, tokens = load.requests - load.remote_requests, load.tokens - load.remote_tokens
    return _ENTRY.pack(len(name), requests, tokens, work) + name


def _entries(body: bytes) -> Iterable[tuple[str, int, int, int]]:
    at = 0
    while at < len(body):
        try:
            size, requests, tokens, work = _ENTRY.unpack_from(body, at)
            at += _ENTRY.size + size
            if at > len(body):
                raise Garbled("a load is cut off")
            yield body[at - size : at].decode(), requests, tokens, work
        except (StructError, UnicodeDecodeError):
            raise Garbled("a load that is none") from None
