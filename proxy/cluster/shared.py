"""Values that processes share: loads, limits, sessions, queues and drains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite
from struct import Struct
from struct import error as StructError
from typing import Any, Protocol
from zlib import crc32

import orjson
from xxhash import xxh3_64_intdigest

from proxy.cluster.messages import FIRST_NUMBER, Garbled, Kind, clamped, read_longs, read_words
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock


@lru_cache(maxsize=1 << 16)
def pod_number(name: str) -> int:
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


class Roster:
    """The pods that this process knows, as its fleet says."""

    def __init__(self) -> None:
        self._pods: dict[int, Endpoint] = {}
        self.get = self._pods.get

    def added(self, endpoint: Endpoint) -> None:
        self._pods[pod_number(endpoint.name)] = endpoint

    def removed(self, endpoint: Endpoint) -> None:
        number = pod_number(endpoint.name)
        if self._pods.get(number) is endpoint:
            del self._pods[number]


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


PER_RECORD = 100

Who = tuple[str, str, str]
"""Kind (key or tenant), name, and the name of the limits."""

Tell = Callable[[Kind, bytes], None]


class Book(Protocol):
    """`access.gate.LimitsGate` is one. `running` are the requests that a worker has at the moment; `spent` was charged,
    and `used` is all that still counts, limit by limit."""

    on_spent: Callable[[Who, int, Sequence[float]], None] | None

    def among(self, hosts: int) -> None:
        """So many share the limits, and hear of each other."""

    def spent_elsewhere(self, peer: int, who: Who, running: int, spent: Sequence[float]) -> None: ...
    def used_elsewhere(self, peer: int, who: Who, running: int, used: Sequence[float]) -> None: ...
    def vanished(self, peer: int) -> None: ...
    def known(self) -> Iterable[tuple[Who, int, Sequence[float]]]:
        """Who was limited, the requests that run here, and what was used."""


class SharedLimits:
    """Every charge is told when it is made, so all processes count alike. Until it is known, what each may let in is
    the book's to say."""

    def __init__(self, book: Book, tell: Tell) -> None:
        self._book = book
        self._tell = tell
        book.on_spent = self._spent
        self.among = book.among

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then."""
        taken = list(entries(body))
        take = self._book.spent_elsewhere if kind is Kind.SPENT else self._book.used_elsewhere
        for who, running, numbers in taken:
            take(peer, who, running, numbers)

    def vanished(self, peer: int) -> None:
        self._book.vanished(peer)

    def in_flight(self) -> Iterator[bytes]:
        """Bodies of USED, about those who have requests here."""
        return _bodies([entry for entry in self._book.known() if entry[1]])

    def memory(self) -> Iterator[bytes]:
        """Bodies of USED."""
        return _bodies(list(self._book.known()))

    def _spent(self, who: Who, running: int, spent: Sequence[float]) -> None:
        self._tell(Kind.SPENT, orjson.dumps([(who, running, spent)]))


def _bodies(entries: Sequence[tuple[Who, int, Sequence[float]]]) -> Iterator[bytes]:
    for start in range(0, len(entries), PER_RECORD):
        yield orjson.dumps(entries[start : start + PER_RECORD])


def entries(body: bytes) -> Iterator[tuple[Who, int, Sequence[float]]]:
    try:
        for (kind, name, of), running, numbers in orjson.loads(body):
            first, second, third, fourth, fifth = map(float, numbers)
            if not isfinite(first + second + third + fourth + fifth) or running < 0:
                raise ValueError
            yield (str(kind), str(name), str(of)), int(running), (first, second, third, fourth, fifth)
    except (ValueError, TypeError, OverflowError):
        raise Garbled("limits that are none") from None


MOST_TOLD = 20_000
"""Sessions that a joining worker is told of: the ones used last."""

SESSIONS_PER_RECORD = 200

_TABLE = Struct("<I")
_BINDING = Struct("<16sfH")
"""The session's key, seconds since it was used, length of the pod's name; the name follows."""

Find = Callable[[str], Endpoint | None]


class Table(Protocol):
    """`plugins.session_table.SessionTable` is one; keys have 16 bytes."""

    on_bind: Callable[[bytes, Endpoint], None]

    def take(self, key: bytes, endpoint: Endpoint, used_at: float) -> None: ...
    def recent(self, most: int) -> Iterator[tuple[bytes, Endpoint, float]]: ...


def table_tag(name: str) -> int:
    """What workers call a table that they share: the name of the plugin that has it."""
    return crc32(name.encode())


class SharedSessions:
    """Says what is bound here, and binds here what peers say; of two bindings the one used last counts.

    Two workers that bind one new session within milliseconds may each follow the other; they agree from the next
    request on."""

    def __init__(self, table: Table, clock: Clock, *, tag: int, tell: Tell, find: Find) -> None:
        """`find` gives the living pod of a name."""
        self._table = table
        self._clock = clock
        self._head = _TABLE.pack(tag)
        self._tell = tell
        self._find = find
        table.on_bind = self._bound

    def take(self, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then. What is of another table is passed over."""
        if body.startswith(self._head):
            now = self._clock.now()
            for key, age, pod in list(_bindings(body)):
                if (endpoint := self._find(pod)) is not None:
                    self._table.take(key, endpoint, now - age)

    def memory(self, most: int = MOST_TOLD) -> Iterator[bytes]:
        """Bodies of SESSIONS, the oldest first."""
        now = self._clock.now()
        known = [_binding(key, now - used_at, endpoint) for key, endpoint, used_at in self._table.recent(most)]
        for start in range(0, len(known), SESSIONS_PER_RECORD):
            yield self._head + b"".join(known[start : start + SESSIONS_PER_RECORD])

    def _bound(self, key: bytes, endpoint: Endpoint) -> None:
        self._tell(Kind.SESSIONS, self._head + _binding(key, 0.0, endpoint))


def _binding(key: bytes, age: float, endpoint: Endpoint) -> bytes:
    name = endpoint.name.encode()
    return _BINDING.pack(key, age, len(name)) + name


def _bindings(body: bytes) -> Iterator[tuple[bytes, float, str]]:
    at = _TABLE.size
    while at < len(body):
        try:
            key, age, size = _BINDING.unpack_from(body, at)
            at += _BINDING.size + size
            if at > len(body):
                raise Garbled("a session's pod is cut off")
            if not 0.0 <= age < inf:
                raise Garbled("a session of no age")
            yield key, age, body[at - size : at].decode()
        except (StructError, UnicodeDecodeError):
            raise Garbled("a session that is none") from None


Lent = Mapping[str, Mapping[str, int] | None]
"""By name and by cap: how much one has ever given it of its part; None: nothing that counts any more."""


class Waiting(Protocol):
    """`flowcontrol.siblings.Siblings` is one. Priorities are the highest that wait at a process, None: nobody does."""

    @property
    def name(self) -> str: ...
    @property
    def told(self) -> int | None: ...
    @property
    def given(self) -> Lent: ...
    @property
    def wants(self) -> Sequence[str]: ...
    def take(self, peer: int, name: str, highest: int | None, lent: Lent, wants: Sequence[str]) -> None: ...
    def reset(self, peer: int) -> None: ...
    def vanished(self, peer: int) -> None: ...
    def among(self, hosts: int, rank: int) -> None: ...
    def cut_off(self, first: int) -> None: ...


def said(pool: str, name: str, highest: int | None, given: Lent, wants: Sequence[str]) -> bytes:
    return orjson.dumps((pool, name, highest, given, wants))


def _lent(given: Mapping[str, Any]) -> Lent:
    """Raises Garbled."""
    try:
        return {
            name: None if caps is None else {cap: int(amount) for cap, amount in caps.items()}
            for name, caps in given.items()
        }
    except (ValueError, TypeError, AttributeError, OverflowError):
        raise Garbled("parts that are none") from None


class SharedQueue:
    """One priority per process and pool, said when it changes."""

    def __init__(self, pool: str, waiting: Waiting, changed: Callable[[], None]) -> None:
        self.pool = pool
        self._waiting = waiting
        self._changed = changed

    def take(self, peer: int, body: bytes) -> None:
        """What is of another pool is passed over. Raises Garbled."""
        match orjson.loads(body):
            case [str(pool), str(name), None | int() as highest, dict(given), list(wants)]:
                lent = _lent(given)
                if pool == self.pool:
                    self._waiting.take(peer, name, highest, lent, [str(each) for each in wants])
                    self._changed()
            case _:
                raise Garbled("a priority that is none")

    def reset(self, peer: int) -> None:
        """All that it has to say follows."""
        self._waiting.reset(peer)

    def vanished(self, peer: int) -> None:
        self._waiting.vanished(peer)
        self._changed()

    def among(self, hosts: int, rank: int, are_heard: bool) -> None:
        """Between which the caps are divided; of those that are not heard nothing counts that was given or got."""
        self._waiting.among(hosts, rank)
        if not are_heard:
            self._waiting.cut_off(FIRST_NUMBER)
        self._changed()

    def all(self) -> bytes:
        """What is said to those who join."""
        waiting = self._waiting
        return said(self.pool, waiting.name, waiting.told, waiting.given, waiting.wants)


Set = Callable[[str, bool], None]


class SharedDrains:
    """Later is who knew of more changes of the pod before, so no two clocks are compared; of two who knew of the same,
    the one that drains it.

    `set(pod, drains)` is called for what others did, and for a pod that comes of which they said it; it raises
    KeyError for a pod that is not there. `tell` gets the body of DRAINS for what was done here.
    """

    def __init__(self, set_: Set, tell: Callable[[bytes], None]) -> None:
        self._set = set_
        self._tell = tell
        self._known: dict[str, tuple[int, bool]] = {}
        """How many changes there were, and what the last one made of it."""

    def turned(self, endpoint: Endpoint, drains: bool) -> None:
        """It is so here from now on."""
        changes, known = self._known.get(endpoint.pod_name, (0, False))
        if known is not drains:
            self._known[endpoint.pod_name] = changes + 1, drains
            self._tell(orjson.dumps([(endpoint.pod_name, changes + 1, drains)]))

    def take(self, body: bytes) -> None:
        """Raises Garbled, and has taken nothing then."""
        for name, changes, drains in _said(body):
            if (changes, drains) > self._known.get(name, (0, False)):
                self._known[name] = changes, drains
                self._apply(name, drains)

    def all(self) -> bytes:
        """Body of DRAINS."""
        return orjson.dumps([(name, *known) for name, known in self._known.items()])

    def added(self, endpoint: Endpoint) -> None:
        if self._known.get(endpoint.pod_name, (0, False))[1]:
            self._apply(endpoint.pod_name, True)

    def removed(self, endpoint: Endpoint) -> None:
        """Everybody sees it go: the next one of its name is another pod."""
        changes, drains = self._known.get(endpoint.pod_name, (0, False))
        if drains and endpoint is endpoint.lead:
            self._known[endpoint.pod_name] = changes + 1, False

    def _apply(self, name: str, drains: bool) -> None:
        try:
            self._set(name, drains)
        except KeyError:
            return  # it is not there yet: `added` sees to it


def _said(body: bytes) -> list[tuple[str, int, bool]]:
    try:
        return [(str(name), int(changes), bool(drains)) for name, changes, drains in orjson.loads(body)]
    except (ValueError, TypeError, OverflowError):
        raise Garbled("drains that are none") from None
