"""Values that processes share: how each is published, merged and sent to a process that joins.

There are three merge rules, and a section of this file for each. Absolute: the last value of each peer counts, until
the peer is gone (loads, ejection reasons, queues). Last writer: of two entries with one key the later one counts
(sessions, bindings, breakers, drains). Additive: each charge is added once, and a total of a peer only raises the
own one (limits), so lost charges that no total repairs stay lost. Loads and prefixes have their own encodings, because
they are published for every request. All other values are JSON lists of entries.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from math import inf, isfinite
from struct import Struct
from struct import error as StructError
from typing import Any, ClassVar
from zlib import crc32

import orjson
from xxhash import xxh3_64_intdigest

from proxy.auth.limits import RateLimiter
from proxy.cluster.messages import (
    FIRST_NUMBER,
    HEAD_BYTES,
    LONGEST_NAME,
    InvalidMessage,
    RecordKind,
    clamped,
    read_longs,
    read_words,
)
from proxy.core.endpoint import GONE, Endpoint
from proxy.core.ports import Clock
from proxy.fleet.bindings import BindingTable
from proxy.fleet.store import AUTOSCALER, OPERATOR
from proxy.flowcontrol.capacity import MOST_CAPS, Lent, SharedCaps
from proxy.latency.rates import FLEET_NUMBERS, MOST_LEARNED, POD_NUMBERS, FleetModel
from proxy.reliability.breaker import OPEN, BreakerPeers, Breakers

PER_RECORD = 100
"""Largest number of entries in one record."""

MOST_UNKNOWN = 20_000
"""Largest number of unknown pods for which values of peers are kept."""

DRAINING = OPERATOR, AUTOSCALER
"""Who drains pods."""

MOST_SESSIONS = 20_000
"""Largest number of bindings of a table that a joining process receives: the most recently used ones."""

Publish = Callable[[RecordKind, bytes], None]
Records = Iterable[tuple[RecordKind, bytes]]


class Shared:
    """A value that processes share. `kinds` are the kinds of its records."""

    kinds: ClassVar[Sequence[RecordKind]]

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        """Apply what a peer published. Raise one of UNREADABLE, and have applied nothing then."""
        raise NotImplementedError

    def reset(self, peer: int) -> None:
        """Drop the current state of the peer, which publishes all of it again."""
        self.vanished(peer)

    def vanished(self, peer: int) -> None:
        """Drop the current state of a peer that has left."""

    def current(self) -> Records:
        """Return all current state of this process, for a peer that has joined or missed a message. What does not
        outlive this process is dropped by `vanished`."""
        return ()

    def lasting(self, part: float) -> Records:
        """Return the most recent part of the lasting state of this process. Peers keep it when this process is gone."""
        return ()


def _entries(kind: RecordKind, body: bytes, *types: Any) -> list[Any]:
    """Return the entries of a record, a JSON list of lists with values of these types. Raises InvalidMessage."""
    try:
        found = orjson.loads(body)
    except ValueError as error:
        raise InvalidMessage(f"unreadable {kind.name}: {error}") from None
    for entry in found if isinstance(found, list) else (found,):
        if not isinstance(entry, list) or len(entry) != len(types) or not all(map(isinstance, entry, types)):
            raise InvalidMessage(f"{kind.name} has an entry of another shape")
        if not _are_texts(value for value in entry if isinstance(value, str)):
            raise InvalidMessage(f"{kind.name} has a name that is too long")
    return found  # type: ignore[no-any-return]


def _packed(kind: RecordKind, entries: Sequence[Any]) -> Records:
    for start in range(0, len(entries), PER_RECORD):
        yield kind, orjson.dumps(entries[start : start + PER_RECORD])


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) and len(value) <= LONGEST_NAME for value in values)


# Absolute: the last value of each peer.


@dataclass(eq=False)
class SharedEjections(Shared):
    """The ejection reasons of the processes of this host. They are not sent to other hosts, which may reach a pod that
    this host cannot reach. `own` returns the reasons of this process by pod; `apply(peer, reasons)` is called
    for the reasons of a peer."""

    own: Callable[[], Mapping[str, Sequence[str]]]
    apply: Callable[[int, Mapping[str, Sequence[str]]], None]
    publish: Publish
    kinds = (RecordKind.EJECTIONS,)

    def changed(self) -> None:
        self.publish(RecordKind.EJECTIONS, self._packed())

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        reasons = dict(_entries(kind, body, str, list))
        if not all(map(_are_texts, reasons.values())):
            raise InvalidMessage("a reason is not a text")
        self.apply(peer, reasons)

    def reset(self, peer: int) -> None:
        """Do nothing: all reasons follow in one record."""

    def vanished(self, peer: int) -> None:
        self.apply(peer, {})

    def current(self) -> Records:
        yield RecordKind.EJECTIONS, self._packed()

    def _packed(self) -> bytes:
        """Leave out open breakers: each process that receives one opens its own breaker, with its own timer."""
        return orjson.dumps([(pod, [why for why in reasons if why != OPEN]) for pod, reasons in self.own().items()])


@dataclass(eq=False)
class SharedQueue(Shared):
    """The highest priority that waits in a pool at each process, and what processes lend each other of the caps."""

    pool: str
    shared_caps: SharedCaps
    changed: Callable[[], None]
    kinds = (RecordKind.WAITING,)

    @staticmethod
    def packed(pool: str, name: str, highest: int | None, since: float, given: Lent, wants: Sequence[str]) -> bytes:
        return orjson.dumps([(pool, name, highest, since, given, wants)])

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        types = str, str, int | None, float | int, dict, list
        for pool, name, highest, since, given, wants in _entries(kind, body, *types):
            if pool == self.pool:
                lent = {
                    to: None if caps is None else {cap: int(amount) for cap, amount in caps.items()}
                    for to, caps in given.items()
                }
                if not _are_texts(wants) or len(wants) > MOST_CAPS:
                    raise InvalidMessage("too many caps, or one that is not a text")
                self.shared_caps.receive(peer, name, highest, since, lent, wants)
                self.changed()

    def reset(self, peer: int) -> None:
        self.shared_caps.reset(peer)

    def vanished(self, peer: int) -> None:
        self.shared_caps.vanished(peer)
        self.changed()

    def divide(self, hosts: int, position: int, are_reached: bool) -> None:
        """Divide the caps by hosts. Loans to and from hosts that are not reached do not count."""
        self.shared_caps.place = (hosts, position)
        if not are_reached:
            self.shared_caps.cut_off(FIRST_NUMBER)
        self.changed()

    def current(self) -> Records:
        own = self.shared_caps
        yield RecordKind.WAITING, self.packed(self.pool, own.name, own.published, own.since, own.given, own.wants)


@lru_cache(maxsize=1 << 16)
def pod_number(name: str) -> int:
    """Return the number that all processes use for a pod: eight bytes, however long the name is."""
    return xxh3_64_intdigest(name.encode("utf-8", "surrogatepass"))


class PodNumbers:
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

_LOAD = int(RecordKind.LOAD)

LONG_PROMPT = 512
"""Number of uncached tokens from which a prompt lengthens the pod's queue by more than a few milliseconds, so that the
other processes must know it before they place their next request."""

Apply = Callable[[Endpoint, int, int, int], None]
"""(pod, requests and tokens of all peers together, added work)."""


class OwnLoads:
    """The requests in flight of this process on each pod. `touch` is called when there is a change to publish,
    `touch_later` when the load only decreased, `touch_soon` when a pod was sent a long prompt."""

    def __init__(
        self,
        touch: Callable[[], None],
        touch_later: Callable[[], None] | None = None,
        touch_soon: Callable[[], None] | None = None,
        find: Callable[[int], Endpoint | None] = lambda number: None,
    ) -> None:
        """`find` returns the pod of a number."""
        self._touch = touch
        self._find = find
        self._touch_soon = touch_soon or touch
        self._changed = _Changed(touch_later or touch)
        self._has_more = False
        self.eased: Callable[[Endpoint], object] = self._changed.__getitem__
        """Record that the load of a pod decreased. It usually runs no Python code, because it is called twice per
        attempt."""

    def dispatched(self, endpoint: Endpoint, work: int) -> None:
        """Record that the load of a pod increased; called once per attempt."""
        if not self._has_more:
            self._has_more = True
            self._touch()
        changed = self._changed
        changed[endpoint] = changed.get(endpoint, 0) + work
        if work >= LONG_PROMPT:
            self._touch_soon()

    def collect_changes(self) -> bytes:
        """Return a record about the pods that changed; empty without changes."""
        changed = self._changed
        if not changed:
            return b""
        for endpoint in tuple(changed):
            if endpoint.state is GONE and (successor := self._find(pod_number(endpoint.name))) is not None:
                changed[successor] = changed.get(successor, 0) + changed.pop(endpoint)  # peers have one load for both
        found = _record(changed)
        changed.clear()
        self._has_more = False
        return found

    @staticmethod
    def all(endpoints: Iterable[Endpoint]) -> bytes:
        """Return the body of a record about all pods; empty if no request is in flight."""
        changed = {endpoint: 0 for endpoint in endpoints if endpoint.load.requests > endpoint.load.remote_requests}
        return _record(changed)[HEAD_BYTES:] if changed else b""


class _Changed(dict[Endpoint, int]):
    """The work that was added to changed pods. Looking up a pod marks it as changed."""

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
    """The load of peers on a pod. The sums are stored, because there may be a hundred peers."""

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
    """The requests in flight of peers, in absolute numbers. Loads of an unknown pod are kept until the pod is known."""

    kinds = (RecordKind.LOAD,)

    def __init__(self, find: Callable[[int], Endpoint | None], apply: Apply, own: Callable[[], bytes] = bytes) -> None:
        """`find` returns the pod of a number; `own` the body of a record about all own requests in flight, or b""."""
        self._find = find
        self._apply = apply
        self._own = own
        self._of: dict[int, _Pod] = {}

    @property
    def on_this_host(self) -> int:
        """The number of requests in flight at the peers of this host."""
        return sum(
            requests for pod in self._of.values() for peer, (requests, _) in pod.peers.items() if peer < FIRST_NUMBER
        )

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        (count,) = _COUNT.unpack_from(body) if body else (0,)
        at = _COUNT.size + 8 * count
        pods, numbers = read_longs(body, _COUNT.size, count), read_words(body, at, 3 * count)
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

    def current(self) -> Records:
        if own := self._own():
            yield RecordKind.LOAD, own

    def added(self, endpoint: Endpoint) -> None:
        """Apply the loads that peers published before the pod was known here."""
        if (pod := self._of.get(pod_number(endpoint.name))) is not None:
            self._apply(endpoint, pod.requests, pod.tokens, 0)

    def _tell(self, number: int, pod: _Pod, work: int) -> None:
        if not pod.peers:
            del self._of[number]
        if (endpoint := self._find(number)) is not None:
            self._apply(endpoint, pod.requests, pod.tokens, work)


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
    """Return the packer of a record about this many pods."""
    return Struct(f"<BII{count}Q{3 * count}I").pack


# Last writer: of two entries with one key, the later one.


@dataclass(eq=False)
class SharedSessions(Shared):
    """Which pod each session, or stored response, of a table is bound to; of two bindings the one used last counts.

    Two processes that bind one new session within milliseconds may each apply the other's binding. They agree from the
    next request on. `name` is the same for one table in all processes; `find` returns the pod of a name."""

    table: BindingTable
    clock: Clock
    name: str
    publish: Publish
    find: Callable[[str], Endpoint | None]
    kinds = (RecordKind.SESSIONS,)

    def __post_init__(self) -> None:
        self._tag = crc32(self.name.encode())
        self.table.on_bind = self._bound

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        """Entries of other tables are skipped."""
        now, entries = self.clock.now(), _entries(kind, body, int, str, float | int, str)
        keys = [bytes.fromhex(key) for _, key, _, _ in entries]
        if not all(0.0 <= age < inf for _, _, age, _ in entries):
            raise InvalidMessage("the age of a session is negative or infinite")
        for key, (tag, _, age, pod) in zip(keys, entries, strict=True):
            if tag == self._tag and (endpoint := self.find(pod)) is not None:
                self.table.receive(key, endpoint, now - age)

    def lasting(self, part: float) -> Records:
        now = self.clock.now()
        recent = self.table.recent(int(part * MOST_SESSIONS))
        yield from _packed(
            RecordKind.SESSIONS, [(self._tag, key.hex(), now - used_at, pod.name) for key, pod, used_at in recent]
        )

    def _bound(self, key: bytes, endpoint: Endpoint) -> None:
        self.publish(RecordKind.SESSIONS, orjson.dumps([(self._tag, key.hex(), 0.0, endpoint.name)]))


OPENED, CLOSED, TRIED = "opened", "closed", "tried"

TURN = 0.2
"""Seconds for which each host has the right to test a pod's recovery: ten times as long as messages take."""


@dataclass(eq=False)
class SharedBreakers(Shared, BreakerPeers):
    """Pods whose circuit breakers peers opened or closed, or whose recovery a peer is testing, with the checksum of the
    pod's URL: during a restart another host may know the pod of a name under its previous address. `place` returns the
    number of hosts and which of them this one is."""

    breakers: Breakers
    find: Callable[[str], Endpoint | None]
    publish: Publish
    place: Callable[[], tuple[int, int]] = lambda: (1, 0)
    kinds = (RecordKind.BREAKER,)

    def __post_init__(self) -> None:
        self.breakers.peers = self

    def breaker_turned(self, endpoint: Endpoint, is_open: bool) -> None:
        self.publish(RecordKind.BREAKER, self.packed(endpoint, OPENED if is_open else CLOSED))

    def breaker_tried(self, endpoint: Endpoint) -> None:
        self.publish(RecordKind.BREAKER, self.packed(endpoint, TRIED))

    @staticmethod
    def packed(endpoint: Endpoint, state: str) -> bytes:
        return orjson.dumps([(endpoint.name, _address(endpoint), state)])

    def pause(self, endpoint: Endpoint) -> float:
        """Return the pause before this host may test a pod: each pod has a different host that tests first."""
        hosts, position = self.place()
        return (crc32(endpoint.name.encode()) + position) % hosts * TURN

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        entries = _entries(kind, body, str, int, str)
        if not all(state in (OPENED, CLOSED, TRIED) for _, _, state in entries):
            raise InvalidMessage("not a state of a breaker")
        for name, address, state in entries:
            if (endpoint := self.find(name)) is None or address != _address(endpoint):
                continue
            if state == TRIED:
                self.breakers.hold_off(endpoint)
            else:
                self.breakers.hear(endpoint, state == OPENED)


def _address(endpoint: Endpoint) -> int:
    return crc32(endpoint.url.encode("utf-8", "surrogatepass"))


@dataclass(eq=False)
class SharedDrains(Shared):
    """The pods that an operator or the autoscaler drains, on all hosts.

    The entry with more changes is the later one, so no clocks are compared. Operators and the autoscaler have separate
    entries, so that neither ends a drain of the other when their messages cross. `set_drained_by(pod, who)` is called
    for changes of other hosts; it raises KeyError for an unknown pod.
    """

    set_drained_by: Callable[[str, Collection[str]], None]
    publish: Publish
    has_pod: Callable[[str], bool] = lambda name: False
    """Return whether there is a pod of this name, also after one of its endpoints was removed."""
    known: dict[tuple[str, str], int] = field(default_factory=dict)
    """By pod and who drains it: the number of changes. It is odd while the pod is drained."""
    kinds = (RecordKind.DRAINS,)

    def turned(self, endpoint: Endpoint, drained_by: Collection[str]) -> None:
        """Publish a change on this host."""
        known = self._drained_by(endpoint.pod_name)
        for who in DRAINING:
            if (who in drained_by) is not (who in known):
                changes = self._change(endpoint.pod_name, who)
                self.publish(RecordKind.DRAINS, orjson.dumps([(endpoint.pod_name, who, changes)]))

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        for name, who, changes in _entries(kind, body, str, str, int):
            key = name, who
            if key not in self.known and len(self.known) >= MOST_UNKNOWN:
                continue
            if changes > self.known.get(key, 0):
                self._put(key, changes)
                self._apply(name)

    def current(self) -> Records:
        yield RecordKind.DRAINS, orjson.dumps([(*key, changes) for key, changes in self.known.items()])

    def added(self, endpoint: Endpoint) -> None:
        if self._drained_by(endpoint.pod_name):
            self._apply(endpoint.pod_name)

    def removed(self, endpoint: Endpoint) -> None:
        """Drop a removed pod, which all hosts notice. The next pod of this name is a new one."""
        if endpoint is endpoint.first_rank and not self.has_pod(endpoint.pod_name):
            for who in self._drained_by(endpoint.pod_name):
                self._change(endpoint.pod_name, who)

    def _drained_by(self, name: str) -> Collection[str]:
        return [who for who in DRAINING if self.known.get((name, who), 0) % 2]

    def _change(self, name: str, who: str) -> int:
        changes = self.known.get((name, who), 0) + 1
        self._put((name, who), changes)
        return changes

    def _put(self, key: tuple[str, str], changes: int) -> None:
        """Store an entry as the latest one. Forget old entries of pods that are not drained, if there are many."""
        self.known.pop(key, None)
        if len(self.known) >= MOST_UNKNOWN - 1:
            ended = [each for each, number in self.known.items() if number % 2 == 0]
            for old in ended[: 1 + MOST_UNKNOWN // 10]:
                del self.known[old]
        self.known[key] = changes

    def _apply(self, name: str) -> None:
        try:
            self.set_drained_by(name, self._drained_by(name))
        except KeyError:
            return  # `added` applies it when the pod comes


@dataclass(eq=False)
class SharedSpeeds(Shared):
    """What a process has learned of the speeds of pods, for a process that joins: it would choose worse pods until it
    has observed each. From then on each process learns by itself. `name` is the same for one model in all processes;
    `find` returns the pod of a name."""

    model: FleetModel
    name: str
    find: Callable[[str], Endpoint | None]
    kinds = (RecordKind.SPEEDS,)

    def __post_init__(self) -> None:
        self._tag = crc32(self.name.encode())

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        """Entries of other models are skipped. The values of all pods together have no pod."""
        entries = _entries(kind, body, int, str, list)
        for _, pod, learned in entries:
            if len(learned) != (POD_NUMBERS if pod else FLEET_NUMBERS):
                raise InvalidMessage("speeds with values of another number")
            if not all(isinstance(value, float | int) and 0 <= value <= MOST_LEARNED for value in learned):
                raise InvalidMessage("a speed is not a number, negative or too large")
        for tag, pod, learned in entries:
            if tag != self._tag:
                continue
            if not pod:
                self.model.inherit(learned)
            elif (endpoint := self.find(pod)) is not None:
                self.model.inherit_of_pod(endpoint, learned)

    def lasting(self, part: float) -> Records:
        """Return all for a process that joins, and nothing for others."""
        if part < 1.0 or not self.model.has_learned:
            return ()
        pods = [(self._tag, pod.name, learned) for pod, learned in self.model.learned_of_pods().items()]
        return _packed(RecordKind.SPEEDS, [(self._tag, "", self.model.learned()), *pods])


# Additive: each charge of a peer is added once; a total of a peer only raises the own one.

Who = tuple[str, str, str]
"""Kind (key or tenant), name, and the name of the limits."""

Spent = tuple[Who, int, Sequence[float]]
"""Key or tenant, its running requests at the process, and amounts, limit by limit."""


RECENT = 10.0
"""Seconds for which the total of a charged key is part of the current state, at least: a peer that missed the charge
receives the total."""


@dataclass(eq=False)
class SharedLimits(Shared):
    """The spending of keys and tenants. Each charge is published when it is made (SPENT) and added; the total spending
    (USED) is sent to processes that join or have missed a packet, and the larger number counts."""

    limiter: RateLimiter
    publish: Publish
    lease: float
    kinds = (RecordKind.SPENT, RecordKind.USED)

    def __post_init__(self) -> None:
        self._recent = max(RECENT, 2.0 * self.lease)
        """A peer notices a gap at the latest when this process sends a heartbeat, well within a lease."""
        self.limiter.on_spent = self._spent

    def receive(self, peer: int, kind: RecordKind, body: bytes) -> None:
        apply = self.limiter.peer_spent if kind is RecordKind.SPENT else self.limiter.peer_used
        for who, running, amounts in read_spent(body):
            apply(peer, who, running, amounts)

    def vanished(self, peer: int) -> None:
        self.limiter.vanished(peer)

    def current(self) -> Records:
        """Return the records of keys and tenants with running requests here, or charged in the last RECENT seconds or
        two leases: a peer may have missed the charge."""
        return _packed(RecordKind.USED, self.limiter.known(self.limiter.clock.now() - self._recent))

    def lasting(self, part: float) -> Records:
        """Return all records, because a dropped one would let its limit be spent again."""
        return _packed(RecordKind.USED, self.limiter.known())

    def _spent(self, who: Who, running: int, spent: Sequence[float]) -> None:
        self.publish(RecordKind.SPENT, orjson.dumps([(who, running, spent)]))


def read_spent(body: bytes) -> list[Spent]:
    """Raises InvalidMessage."""
    found: list[Spent] = []
    for who, running, amounts in _entries(RecordKind.SPENT, body, list, int, list):
        numbers = [amount for amount in amounts if isinstance(amount, float | int) and isfinite(amount)]
        if len(who) != 3 or not _are_texts(who) or running < 0 or len(numbers) != 5 or not isfinite(sum(numbers)):
            raise InvalidMessage("usage without a name, of infinite amounts, or of fewer than no requests")
        found.append(((who[0], who[1], who[2]), running, numbers))
    return found
