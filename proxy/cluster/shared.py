"""Values that processes share: how each is published, merged and sent to a process that joins.

There are three merge rules. `Absolute`: the last value of each peer counts, and none once the peer is gone (loads,
ejection reasons, queues). `LastWriter`: of two entries with one key the later one counts (sessions, bindings, breakers,
drains). `Additive`: what each peer spends is added up (limits). Loads have an encoding of their own, as prefixes have:
they are published for every request. All others are JSON lists of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite
from struct import Struct
from struct import error as StructError
from typing import Any, ClassVar, Generic, TypeVar
from zlib import crc32

import orjson
from xxhash import xxh3_64_intdigest

from proxy.auth.limits import RateLimiter
from proxy.cluster.messages import (
    FIRST_NUMBER,
    HEAD_BYTES,
    LONGEST_NAME,
    Garbled,
    Kind,
    clamped,
    read_longs,
    read_words,
)
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.flowcontrol.capacity import MOST_CAPS, Lent, Siblings
from proxy.plugins.sessions import SessionTable
from proxy.reliability.breaker import BreakerPeers, Breakers

T = TypeVar("T")

PER_RECORD = 100
"""Entries of one record, at most."""

MOST_UNKNOWN = 20_000
"""Pods about which peers published, and that are not known here."""

MOST_SESSIONS = MOST_BINDINGS = 20_000
"""What a process that joins is sent, at most: what was used last."""

Publish = Callable[[Kind, bytes], None]
Records = Iterable[tuple[Kind, bytes]]


class Shared:
    """A value that processes share. `kinds` are those of its records."""

    kinds: ClassVar[Sequence[Kind]]

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        """Apply what a peer published. Raises Garbled, and has applied nothing then."""
        raise NotImplementedError

    def reset(self, peer: int) -> None:
        """What the peer has in flight is void. It publishes all of it again."""
        self.vanished(peer)

    def vanished(self, peer: int) -> None:
        """The peer is gone, and with it what it had in flight."""

    def in_flight(self) -> Records:
        """What a process that joins, or has missed something, is sent at once."""
        return ()

    def memory(self, share: float) -> Records:
        """The most recent part of what this process remembers."""
        return ()


class _Entries(Shared, Generic[T]):
    """A value whose records are JSON lists of entries. `_read(*entry)` returns one, and raises ValueError or TypeError
    for what is none."""

    def _read(self, *entry: Any) -> T:
        raise NotImplementedError

    def _entries(self, kind: Kind, body: bytes) -> list[T]:
        try:
            return [self._read(*entry) for entry in orjson.loads(body)]
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise Garbled(f"unreadable {kind.name}: {error}") from None


def _packed(kind: Kind, entries: Sequence[Any]) -> Records:
    for start in range(0, len(entries), PER_RECORD):
        yield kind, orjson.dumps(entries[start : start + PER_RECORD])


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > LONGEST_NAME:
        raise TypeError(f"{value!r:.80} is not a text, or too long")
    return value


# Absolute: the last value of each peer.


class Ejections(_Entries[tuple[str, list[str]]]):
    """Why processes of this host do not send requests to pods. Other hosts are not told: what this host cannot reach
    another one may."""

    kinds = (Kind.EJECTIONS,)

    def __init__(
        self,
        own: Callable[[], Mapping[str, Sequence[str]]],
        apply: Callable[[int, Mapping[str, Sequence[str]]], None],
        publish: Publish,
    ) -> None:
        """`own` returns the reasons of this process by pod; `apply(peer, reasons)` those of a peer."""
        self._own = own
        self._apply = apply
        self._publish = publish

    def changed(self) -> None:
        self._publish(Kind.EJECTIONS, orjson.dumps(list(self._own().items())))

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        self._apply(peer, dict(self._entries(kind, body)))

    def reset(self, peer: int) -> None:
        """All reasons follow in one record."""

    def vanished(self, peer: int) -> None:
        self._apply(peer, {})

    def in_flight(self) -> Records:
        yield Kind.EJECTIONS, orjson.dumps(list(self._own().items()))

    def _read(self, *entry: Any) -> tuple[str, list[str]]:
        pod, reasons = entry
        if not isinstance(reasons, list):
            raise TypeError("the reasons are not a list")
        return _text(pod), [_text(reason) for reason in reasons]


Waiting = tuple[str, str, int | None, Lent, list[str]]
"""Pool, name of the process, the highest priority that waits there, what it lent to whom, and what it needs."""


class SharedQueue(_Entries[Waiting]):
    """The highest priority that waits in a pool at each process, and what processes lent each other of the caps."""

    kinds = (Kind.WAITING,)

    def __init__(self, pool: str, siblings: Siblings, changed: Callable[[], None]) -> None:
        self.pool = pool
        self._siblings = siblings
        self._changed = changed

    @staticmethod
    def packed(pool: str, name: str, highest: int | None, given: Lent, wants: Sequence[str]) -> bytes:
        return orjson.dumps([(pool, name, highest, given, wants)])

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        for pool, name, highest, lent, wants in self._entries(kind, body):
            if pool == self.pool:
                self._siblings.receive(peer, name, highest, lent, wants)
                self._changed()

    def reset(self, peer: int) -> None:
        self._siblings.reset(peer)

    def vanished(self, peer: int) -> None:
        self._siblings.vanished(peer)
        self._changed()

    def among(self, hosts: int, rank: int, are_heard: bool) -> None:
        """Divide the caps among so many hosts. What was lent to and by hosts that are not heard does not count."""
        self._siblings.set_hosts(hosts, rank)
        if not are_heard:
            self._siblings.cut_off(FIRST_NUMBER)
        self._changed()

    def in_flight(self) -> Records:
        own = self._siblings
        yield Kind.WAITING, self.packed(self.pool, own.name, own.published, own.given, own.wants)

    def _read(self, *entry: Any) -> Waiting:
        pool, name, highest, given, wants = entry
        if not isinstance(wants, list) or len(wants) > MOST_CAPS or not isinstance(highest, int | None):
            raise TypeError("a queue needs a priority and a list")
        lent = {
            to: None if caps is None else {cap: int(amount) for cap, amount in caps.items()}
            for to, caps in given.items()
        }
        return _text(pool), _text(name), highest, lent, [_text(each) for each in wants]


@lru_cache(maxsize=1 << 16)
def pod_number(name: str) -> int:
    """Return the number that all processes have for a pod: eight bytes, however long the name is."""
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


class Roster:
    """The pods of this process by number."""

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
"""Number of pods. Their numbers follow, then the columns: requests, tokens, work added since the last record."""

_LOAD = int(Kind.LOAD)

LONG_PROMPT = 512
"""Uncached tokens from which on a prompt lengthens the pod's queue by more than a few milliseconds, so that the other
processes must know of it before they place their next request."""

Apply = Callable[[Endpoint, int, int, int], None]
"""(pod, requests and tokens of all peers together, work that was added)."""


class OwnLoads:
    """What this process has in flight on each pod. `touch` is called when there is something to publish, `touch_later`
    when there is only less in flight than before, `touch_soon` when a pod was sent a long prompt."""

    def __init__(
        self,
        touch: Callable[[], None],
        touch_later: Callable[[], None] | None = None,
        touch_soon: Callable[[], None] | None = None,
    ) -> None:
        self._touch = touch
        self._touch_soon = touch_soon or touch
        self._changed = _Changed(touch_later or touch)
        self._has_more = False
        self.eased: Callable[[Endpoint], object] = self._changed.__getitem__
        """To be called when there is less on the pod. Usually runs no Python code: it is called twice per attempt."""

    def dispatched(self, endpoint: Endpoint, work: int) -> None:
        """There is more on the pod: called once per attempt."""
        if not self._has_more:
            self._has_more = True
            self._touch()
        changed = self._changed
        changed[endpoint] = changed.get(endpoint, 0) + work
        if work >= LONG_PROMPT:
            self._touch_soon()

    def take_changes(self) -> bytes:
        """Return a record about the pods that changed; empty if there are none."""
        changed = self._changed
        if not changed:
            return b""
        found = _record(changed)
        changed.clear()
        self._has_more = False
        return found

    @staticmethod
    def all(endpoints: Iterable[Endpoint]) -> bytes:
        """Return the body of a record about all pods; empty if nothing is in flight."""
        changed = {endpoint: 0 for endpoint in endpoints if endpoint.load.requests > endpoint.load.remote_requests}
        return _record(changed)[HEAD_BYTES:] if changed else b""


class _Changed(dict[Endpoint, int]):
    """The work that was added to pods that changed. Looking up a pod marks it as changed."""

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
    """What peers have on a pod. The sums are kept: there may be a hundred peers."""

    peers: dict[int, tuple[int, int]] = field(default_factory=dict)
    requests: int = 0
    tokens: int = 0

    def put(self, peer: int, requests: int, tokens: int) -> None:
        had, held = self.peers.pop(peer, (0, 0))
        self.requests += requests - had
        self.tokens += tokens - held
        if requests or tokens:
            self.peers[peer] = (requests, tokens)


class PeerLoads(Shared):
    """What peers have in flight, in absolute numbers. A pod that is not known yet is remembered until it is."""

    kinds = (Kind.LOAD,)

    def __init__(self, find: Callable[[int], Endpoint | None], apply: Apply, own: Callable[[], bytes] = bytes) -> None:
        """`find` returns the pod of a number; `own` the body of a record about all that is in flight here, or b""."""
        self._find = find
        self._apply = apply
        self._own = own
        self._of: dict[int, _Pod] = {}

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        pods, numbers, count = _read(body) if body else ([], [], 0)
        columns = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        for number, requests, tokens, work in zip(pods, *columns, strict=True):
            pod = self._of.get(number)
            if pod is None:
                if len(self._of) >= MOST_UNKNOWN and self._find(number) is None:
                    continue
                pod = self._of[number] = _Pod()
            pod.put(peer, requests, tokens)
            self._tell(number, pod, work)

    def vanished(self, peer: int) -> None:
        for number, pod in list(self._of.items()):
            if peer in pod.peers:
                pod.put(peer, 0, 0)
                self._tell(number, pod, 0)

    def in_flight(self) -> Records:
        if own := self._own():
            yield Kind.LOAD, own

    def added(self, endpoint: Endpoint) -> None:
        """Apply what peers published about a pod before it was known here."""
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


# Last writer: of two entries with one key, the later one.


class SharedSessions(_Entries[tuple[int, bytes, float, str]]):
    """Which pod each session of a table is bound to; of two bindings the one used last counts.

    Two processes that bind one new session within milliseconds may each apply the other's binding. They agree from the
    next request on."""

    kinds = (Kind.SESSIONS,)

    def __init__(
        self,
        table: SessionTable,
        clock: Clock,
        *,
        name: str,
        publish: Publish,
        find: Callable[[str], Endpoint | None],
    ) -> None:
        """`name` is the same for one table in all processes; `find` returns the pod of a name."""
        self._table = table
        self._clock = clock
        self._tag = crc32(name.encode())
        self._publish = publish
        self._find = find
        table.on_bind = self._bound

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        """Entries of other tables are skipped."""
        now = self._clock.now()
        for tag, key, age, pod in self._entries(kind, body):
            if tag == self._tag and (endpoint := self._find(pod)) is not None:
                self._table.receive(key, endpoint, now - age)

    def memory(self, share: float) -> Records:
        now = self._clock.now()
        recent = self._table.recent(int(share * MOST_SESSIONS))
        yield from _packed(
            Kind.SESSIONS, [(self._tag, key.hex(), now - used_at, pod.name) for key, pod, used_at in recent]
        )

    def _bound(self, key: bytes, endpoint: Endpoint) -> None:
        self._publish(Kind.SESSIONS, orjson.dumps([(self._tag, key.hex(), 0.0, endpoint.name)]))

    def _read(self, *entry: Any) -> tuple[int, bytes, float, str]:
        tag, key, age, pod = entry
        if not 0.0 <= age < inf:
            raise ValueError("the age of a session is negative or infinite")
        return int(tag), bytes.fromhex(key), age, _text(pod)


class PeerBindings(_Entries[tuple[str, str]]):
    """Which pod stores which response. The entry that arrives last counts."""

    kinds = (Kind.BINDINGS,)

    def __init__(
        self,
        apply: Callable[[str, str], None],
        recent: Callable[[int], Sequence[tuple[str, Endpoint]]],
        publish: Publish,
    ) -> None:
        """`apply(response id, pod)` is called for those of peers; `recent(most)` returns those known here."""
        self._apply = apply
        self._recent = recent
        self._publish = publish

    def bound(self, response_id: str, endpoint: Endpoint) -> None:
        self._publish(Kind.BINDINGS, orjson.dumps([(response_id, endpoint.name)]))

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        for response_id, pod in self._entries(kind, body):
            self._apply(response_id, pod)

    def memory(self, share: float) -> Records:
        recent = self._recent(int(share * MOST_BINDINGS))
        yield from _packed(Kind.BINDINGS, [(response_id, endpoint.name) for response_id, endpoint in recent])

    def _read(self, *entry: Any) -> tuple[str, str]:
        response_id, pod = entry
        return _text(response_id), _text(pod)


OPENED, CLOSED, TRIED = "opened", "closed", "tried"

TURN = 0.2
"""Seconds that each host has to be the one that tests a pod's recovery: ten times as long as news take."""


class SharedBreakers(_Entries[tuple[str, str]], BreakerPeers):
    """Pods whose circuit breakers peers opened or closed, or whose recovery a peer is testing."""

    kinds = (Kind.BREAKER,)

    def __init__(
        self,
        breakers: Callable[[], Breakers],
        find: Callable[[str], Endpoint | None],
        publish: Publish,
        place: Callable[[], tuple[int, int]] = lambda: (1, 0),
    ) -> None:
        """`place` returns the number of hosts and which of them this one is."""
        self._breakers = breakers
        self._find = find
        self._publish = publish
        self._place = place

    def breaker_turned(self, endpoint: Endpoint, is_open: bool) -> None:
        self._publish(Kind.BREAKER, self.packed(endpoint.name, is_open))

    @staticmethod
    def packed(pod: str, is_open: bool) -> bytes:
        return orjson.dumps([(pod, OPENED if is_open else CLOSED)])

    def breaker_tried(self, endpoint: Endpoint) -> None:
        self._publish(Kind.BREAKER, orjson.dumps([(endpoint.name, TRIED)]))

    def pause(self, endpoint: Endpoint) -> float:
        """Each pod has another host that may test its recovery first."""
        hosts, rank = self._place()
        return (crc32(endpoint.name.encode()) + rank) % hosts * TURN

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        breakers = self._breakers()
        for name, what in self._entries(kind, body):
            if (endpoint := self._find(name)) is None:
                continue
            if what == TRIED:
                breakers.hold_off(endpoint)
            else:
                breakers.hear(endpoint, what == OPENED)

    def _read(self, *entry: Any) -> tuple[str, str]:
        pod, what = entry
        if what not in (OPENED, CLOSED, TRIED):
            raise ValueError(f"{what!r} is not a state of a breaker")
        return _text(pod), what


class SharedDrains(_Entries[tuple[str, int, bool]]):
    """Which pods operators drain, known to all hosts.

    Later is the entry that counts more changes of the pod, so no two clocks are compared; of two with as many changes,
    the one that drains it. `set(pod, drains)` is called for what others did; it raises KeyError for an unknown pod.
    """

    kinds = (Kind.DRAINS,)

    def __init__(self, set_: Callable[[str, bool], None], publish: Publish) -> None:
        self._set = set_
        self._publish = publish
        self._known: dict[str, tuple[int, bool]] = {}
        """By pod, how many changes there were, and whether the last one drains it."""

    def turned(self, endpoint: Endpoint, drains: bool) -> None:
        """An operator did this here."""
        changes, known = self._known.get(endpoint.pod_name, (0, False))
        if known is not drains:
            self._known[endpoint.pod_name] = changes + 1, drains
            self._publish(Kind.DRAINS, orjson.dumps([(endpoint.pod_name, changes + 1, drains)]))

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        for name, changes, drains in self._entries(kind, body):
            if name not in self._known and len(self._known) >= MOST_UNKNOWN:
                continue
            if (changes, drains) > self._known.get(name, (0, False)):
                self._known[name] = changes, drains
                self._apply(name, drains)

    def in_flight(self) -> Records:
        yield Kind.DRAINS, orjson.dumps([(name, *known) for name, known in self._known.items()])

    def added(self, endpoint: Endpoint) -> None:
        if self._known.get(endpoint.pod_name, (0, False))[1]:
            self._apply(endpoint.pod_name, True)

    def removed(self, endpoint: Endpoint) -> None:
        """All hosts see it leave. The next pod of this name is another one."""
        changes, drains = self._known.get(endpoint.pod_name, (0, False))
        if drains and endpoint is endpoint.lead:
            self._known[endpoint.pod_name] = changes + 1, False

    def _apply(self, name: str, drains: bool) -> None:
        try:
            self._set(name, drains)
        except KeyError:
            return  # `added` applies it when the pod comes

    def _read(self, *entry: Any) -> tuple[str, int, bool]:
        name, changes, drains = entry
        return _text(name), int(changes), bool(drains)


# Additive: the sum of what all peers spend.

Who = tuple[str, str, str]
"""Kind (key or tenant), name, and the name of the limits."""

Spent = tuple[Who, int, Sequence[float]]
"""Who, the requests that run at the process, and amounts, limit by limit."""


class SharedLimits(_Entries[Spent]):
    """What keys and tenants spent of their limits. Each charge is published when it is made (SPENT) and added; what was
    spent in all (USED) is sent to processes that join, and the larger number counts."""

    kinds = (Kind.SPENT, Kind.USED)

    def __init__(self, gate: RateLimiter, publish: Publish) -> None:
        self._gate = gate
        self._publish = publish
        gate.on_spent = self._spent
        self.set_hosts = gate.set_hosts

    def take(self, peer: int, kind: Kind, body: bytes) -> None:
        take = self._gate.peer_spent if kind is Kind.SPENT else self._gate.peer_used
        for who, running, amounts in self._entries(kind, body):
            take(peer, who, running, amounts)

    def vanished(self, peer: int) -> None:
        self._gate.vanished(peer)

    def in_flight(self) -> Records:
        """Those with requests that run here."""
        return _packed(Kind.USED, [entry for entry in self._gate.known() if entry[1]])

    def memory(self, share: float) -> Records:
        """All: a limit that is forgotten could be spent again."""
        return _packed(Kind.USED, self._gate.known())

    def _spent(self, who: Who, running: int, spent: Sequence[float]) -> None:
        self._publish(Kind.SPENT, orjson.dumps([(who, running, spent)]))

    def _read(self, *entry: Any) -> Spent:
        return read_spent(*entry)


def read_spent(*entry: Any) -> Spent:
    (kind, name, of), running, amounts = entry
    first, second, third, fourth, fifth = map(float, amounts)
    if not isfinite(first + second + third + fourth + fifth) or running < 0:
        raise ValueError("amounts are not finite, or fewer than no requests run")
    return (_text(kind), _text(name), _text(of)), int(running), (first, second, third, fourth, fifth)
