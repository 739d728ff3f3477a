"""How much every replica has in flight on every pod: said in absolute numbers, so nothing is ever counted twice."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from struct import Struct
from struct import error as StructError

from proxy.core.endpoint import Endpoint
from proxy.replicas.columns import longs, read_longs, read_words, words
from proxy.replicas.roster import pod_number
from proxy.replicas.wire import Garbled

_COUNT = Struct("<I")
"""Of the pods; their numbers follow, then what there is of each: requests, tokens, work since the last time."""

Apply = Callable[[Endpoint, int, int, int], None]
"""(pod, requests and tokens of all peers together, work that was added)"""


class OwnLoads:
    """What this process has in flight, for its peers; `touch` is called when there is something to say, `touch_later`
    where it is only that there is less."""

    def __init__(self, touch: Callable[[], None], touch_later: Callable[[], None] | None = None) -> None:
        self._touch = touch
        self._touch_later = touch_later or touch
        self._changed: defaultdict[Endpoint, int] = defaultdict(int)
        self._has_more = False

    def changed(self, endpoint: Endpoint, work: int) -> None:
        """On the hot path: three times per leg."""
        changed = self._changed
        if work:
            if not self._has_more:
                self._has_more = True
                self._touch()
        elif not changed:
            self._touch_later()
        changed[endpoint] += work

    def take_changes(self) -> bytes:
        """The body of a record about the pods that changed; empty if there are none."""
        body = _body(self._changed)
        self._changed.clear()
        self._has_more = False
        return body

    @staticmethod
    def all(endpoints: Iterable[Endpoint]) -> bytes:
        """The body of a record that, after a reset, says everything."""
        return _body({endpoint: 0 for endpoint in endpoints if endpoint.load.requests > endpoint.load.remote_requests})


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

    def __init__(self, find: Callable[[int], Endpoint | None], apply: Apply) -> None:
        """`find` gives the living pod of a number."""
        self._find = find
        self._apply = apply
        self._of: dict[int, _Pod] = {}

    def take(self, peer: int, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then."""
        pods, numbers, count = _read(body) if body else ([], [], 0)
        columns = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        for number, requests, tokens, work in zip(pods, *columns, strict=True):
            pod = self._of.get(number)
            if pod is None:
                pod = self._of[number] = _Pod()
            pod.put(peer, requests, tokens)
            self._tell(number, pod, work)

    def vanished(self, peer: int) -> None:
        """All that it had in flight is gone at once."""
        for number, pod in list(self._of.items()):
            if peer in pod.peers:
                pod.put(peer, 0, 0)
                self._tell(number, pod, 0)

    def added(self, endpoint: Endpoint) -> None:
        """A pod came that peers may have used already."""
        if (pod := self._of.get(pod_number(endpoint.name))) is not None:
            self._apply(endpoint, pod.requests, pod.tokens, 0)

    def _tell(self, number: int, pod: _Pod, work: int) -> None:
        if not pod.peers:
            del self._of[number]
        if (endpoint := self._find(number)) is not None:
            self._apply(endpoint, pod.requests, pod.tokens, work)


def _read(body: bytes) -> tuple[list[int], list[int], int]:
    try:
        (count,) = _COUNT.unpack_from(body)
    except StructError:
        raise Garbled("a load is cut off") from None
    at = _COUNT.size + 8 * count
    return read_longs(body, _COUNT.size, count), read_words(body, at, 3 * count), count


def _body(changed: Mapping[Endpoint, int]) -> bytes:
    if not changed:
        return b""
    pods, requests, tokens = [], [], []
    for endpoint in changed:  # mostly one: without frames for it
        load = endpoint.load
        pods.append(pod_number(endpoint.name))
        requests.append(load.requests - load.remote_requests)
        tokens.append(load.tokens - load.remote_tokens)
    return _COUNT.pack(len(pods)) + longs(pods) + words([*requests, *tokens, *changed.values()])
