"""How much every replica has in flight on every pod: said in absolute numbers, so nothing is ever counted twice."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from struct import Struct
from struct import error as StructError

from proxy.core.endpoint import Endpoint
from proxy.replicas.columns import clamped, read_longs, read_words
from proxy.replicas.roster import pod_number
from proxy.replicas.wire import Garbled, Kind

_COUNT = Struct("<I")
"""Of the pods; their numbers follow, then what there is of each: requests, tokens, work since the last time."""

_LOAD = int(Kind.LOAD)

Apply = Callable[[Endpoint, int, int, int], None]
"""(pod, requests and tokens of all peers together, work that was added)"""


class OwnLoads:
    """What this process has in flight, for its peers; `touch` is called when there is something to say, `touch_later`
    where it is only that there is less."""

    def __init__(self, touch: Callable[[], None], touch_later: Callable[[], None] | None = None) -> None:
        self._touch = touch
        self._changed = _Changed(touch_later or touch)
        self._has_more = False
        self.eased: Callable[[Endpoint], object] = self._changed.__getitem__
        """There is less on the pod than there was. No code of ours runs for it, as a rule: twice per leg."""

    def dispatched(self, endpoint: Endpoint, work: int) -> None:
        """There is more on the pod. On the hot path: once per leg."""
        if not self._has_more:
            self._has_more = True
            self._touch()
        changed = self._changed
        changed[endpoint] = changed.get(endpoint, 0) + work

    def take_changes(self) -> bytes:
        """A record about the pods that changed; empty if there are none."""
        changed = self._changed
        if not changed:
            return b""
        found = _record(changed)
        changed.clear()
        self._has_more = False
        return found

    @staticmethod
    def all(endpoints: Iterable[Endpoint]) -> bytes:
        """A record that, after a reset, says everything; empty if that is nothing."""
        changed = {endpoint: 0 for endpoint in endpoints if endpoint.load.requests > endpoint.load.remote_requests}
        return _record(changed) if changed else b""


class _Changed(dict[Endpoint, int]):
    """The work that was added to pods that have changed, 0 where there is but less on them; to look at one is to say
    that it has."""

    def __init__(self, touch: Callable[[], None]) -> None:
        super().__init__()
        self._touch = touch

    def __missing__(self, endpoint: Endpoint) -> int:
        if not self:
            self._touch()
        self[endpoint] = 0
        return 0


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


def _record(changed: Mapping[Endpoint, int]) -> bytes:
    pods, requests, tokens = [], [], []
    for endpoint in changed:  # mostly one: without frames for it
        load = endpoint.load
        pods.append(pod_number(endpoint.name))
        requests.append(load.requests - load.remote_requests)
        tokens.append(load.tokens - load.remote_tokens)
    count = len(pods)
    pack, size = _packer(count), _COUNT.size + 20 * count
    try:
        return pack(_LOAD, size, count, *pods, *requests, *tokens, *changed.values())
    except StructError:
        return pack(_LOAD, size, count, *pods, *clamped([*requests, *tokens, *changed.values()]))


@lru_cache(maxsize=256)
def _packer(count: int) -> Callable[..., bytes]:
    """Of the record about so many pods."""
    return Struct(f"<BII{count}Q{3 * count}I").pack
