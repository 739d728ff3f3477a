"""How much every replica has in flight on every pod: said in absolute numbers, so nothing is ever counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
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


@dataclass(slots=True)
class _Pod:
    """What peers have on it; the sums are kept, for there may be a hundred peers."""

    peers: dict[int, tuple[int, int]] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0

    def put(self, peer: int, requests: int, tokens: int) -> None:
        had, held = self.peers.pop(peer, (0, 0))
        self.requests += requests - had
        self.tokens += tokens - held
        if requests or tokens:
            self.peers[peer] = (requests, tokens)


class PeerLoads:
    """What the peers have in flight. A pod that is not known yet is remembered until it is."""

    def __init__(self, apply: Apply) -> None:
        self._apply = apply
        self._of: dict[str, _Pod] = {}

    def take(self, peer: int, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then."""
        for name, requests, tokens, work in list(_entries(body)):
            pod = self._of.get(name)
            if pod is None:
                pod = self._of[name] = _Pod()
            pod.put(peer, requests, tokens)
            self._tell(name, pod, work)

    def vanished(self, peer: int) -> None:
        """All that it had in flight is gone at once."""
        for name, pod in list(self._of.items()):
            if peer in pod.peers:
                pod.put(peer, 0, 0)
                self._tell(name, pod, 0)

    def added(self, endpoint: Endpoint) -> None:
        """A pod came that peers may have used already."""
        if (pod := self._of.get(endpoint.name)) is not None:
            self._tell(endpoint.name, pod, 0)

    def _tell(self, name: str, pod: _Pod, work: int) -> None:
        if not pod.peers:
            del self._of[name]
        self._apply(name, pod.requests, pod.tokens, work)


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
