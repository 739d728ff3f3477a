"""A process among its peers: it publishes what it does and applies what they publish."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from zlib import crc32

import orjson

from proxy.cluster import messages as bodies
from proxy.cluster.messages import EVERYBODY, HUB, UNREADABLE, Kind, record, records
from proxy.cluster.prefixes import JOURNAL_BYTES, SharedIndex
from proxy.cluster.shared import (
    MOST_TOLD,
    Apply,
    OwnLoads,
    PeerLoads,
    Roster,
    SharedLimits,
    SharedQueue,
    SharedSessions,
)
from proxy.cluster.transport import LATER, PATIENCE, Link, Outbox, Way
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Tally
from proxy.core.tasks import Tasks

log = logging.getLogger(__name__)

SLICE = 32 * 1024
"""Bytes of a snapshot that are sent, and taken in, at once: about a millisecond."""

ALL = 1.0

TURN = 0.2
"""Seconds that a host has to be the one who tries a pod: news take a tenth of it."""

Told = Callable[[Kind, bytes], None]
Bound = Callable[[str, str], None]
Doubts = Mapping[str, Sequence[str]]
"""Reasons by the name of the pod."""
Bindings = Callable[[], Sequence[tuple[str, Endpoint]]]


class Replica:
    """`apply` is what peers have in flight on a pod; `told` gets what the hub says of the pods; `bound` the
    (response id, pod) of peers, of which `bindings` gives those of this process; `doubted` gets the doubts of a peer,
    of which `doubts` gives those of this process; `broke` the breakers that turned at peers, and `tried` the pods that
    peers try, whose breakers are open; `lost` is called when the hub is gone.

    A `reliability.breaker.Company`.
    """

    def __init__(
        self,
        *,
        endpoints: Callable[[], Sequence[Endpoint]],
        apply: Apply,
        told: Told,
        bound: Bound,
        bindings: Bindings,
        doubts: Callable[[], Doubts],
        doubted: Callable[[int, Doubts], None],
        broke: Callable[[str, bool], None],
        tried: Callable[[str], None],
        lost: Callable[[], None],
        dropped: Tally,
        garbled: Tally,
    ) -> None:
        self._endpoints = endpoints
        self._told = told
        self._bound = bound
        self._bindings = bindings
        self._doubts = doubts
        self._doubted = doubted
        self._broke = broke
        self._tried = tried
        self._lost = lost
        self._dropped = dropped
        self._garbled = garbled
        self._outbox = Outbox(rest=self._moves)
        self._tasks = Tasks()
        self._link: Way
        self._is_alone = False
        """Whether no other process of this host is told anything."""
        self.place = (1, 0)
        """Of how many hosts this is which."""
        self._are_heard = False
        self.indexes: list[SharedIndex] = []
        self.sessions: list[SharedSessions] = []
        self.limits: list[SharedLimits] = []
        self.queues: list[SharedQueue] = []
        self.roster = Roster()
        self.own_loads = OwnLoads(self._outbox.touch, self._outbox.touch_later)
        self._outbox.urgent = self.own_loads.take_changes
        self.peer_loads = PeerLoads(self.roster.get, apply)
        self.tell = self._outbox.add
        self.touch_later, self.flush = self._outbox.touch_later, self._outbox.flush

    async def connect(self, sock: socket.socket) -> None:
        """Over a connected socket whose other end is the hub's."""
        self._link = await Link.over(sock, self.heard, self._lost, self._resync, self._dropped)
        self._outbox.send = self._link.tell

    def join(self, way: Way, interval: float) -> None:
        """Without a hub, as the only member of its host, for which nobody else gathers what is said."""
        self._link = way
        self._is_alone = True
        self._outbox.send = way.tell
        self._outbox.pace(interval, PATIENCE, LATER)

    async def close(self, last: Sequence[tuple[Kind, bytes]] = ()) -> None:
        """Says what is left, and `last`, to the hub."""
        await self._tasks.stop()
        self._outbox.flush()
        for kind, body in last:
            self._link.send(HUB, record(kind, body))
        self._link.close()
        await self._link.closed.wait()
        self._outbox.close()

    def ready(self) -> None:
        """This process serves."""
        self._link.send(HUB, record(Kind.READY, b""))

    def alive(self) -> None:
        """Tell the hub that the event loop of this process turns."""
        self._link.send(HUB, record(Kind.ALIVE, b""))

    def leaving(self) -> None:
        """This process ends what it has begun."""
        self._link.send(HUB, record(Kind.LEAVING, b""))

    def reloaded(self, number: int, is_good: bool) -> None:
        """Whether this process serves with the settings of this number."""
        self._link.send(HUB, record(Kind.RELOADED, orjson.dumps((number, is_good))))

    def read_round(self, number: int) -> None:
        """Have the hub read the models of all pods."""
        self._link.send(HUB, record(Kind.READ_ROUND, orjson.dumps(number)))

    def read_pod(self, name: str) -> None:
        """Have the hub read the models of one pod."""
        self._link.send(HUB, record(Kind.READ_POD, name.encode()))

    def added(self, endpoint: Endpoint) -> None:
        """To the pods of this process, as `removed` from them."""
        self.roster.added(endpoint)
        self.peer_loads.added(endpoint)

    def removed(self, endpoint: Endpoint) -> None:
        self.roster.removed(endpoint)

    def bound(self, response_id: str, endpoint: Endpoint) -> None:
        self.tell(Kind.BINDINGS, orjson.dumps([(response_id, endpoint.name)]))

    def doubting(self) -> None:
        """The doubts of this process have changed; those of other hosts have their own."""
        if not self._is_alone:
            self.tell(Kind.DOUBTS, orjson.dumps(self._doubts()))

    def breaker_turned(self, endpoint: Endpoint, is_open: bool) -> None:
        self.tell(Kind.BREAKER, orjson.dumps((endpoint.name, is_open)))

    def breaker_tried(self, endpoint: Endpoint) -> None:
        self.tell(Kind.TRIED, endpoint.name.encode())

    def pause(self, endpoint: Endpoint) -> float:
        """Each pod has another host that may try it first."""
        hosts, rank = self.place
        return (crc32(endpoint.name.encode()) + rank) % hosts * TURN

    def gone(self, peer: int) -> None:
        """It is no more, and with it all that it had in flight."""
        self._forget(peer)
        for queue in self.queues:
            queue.vanished(peer)
        self._doubted(peer, {})

    def ask(self, to: int, memory: float) -> None:
        """Tells somebody what is in flight here, and so much of what is remembered."""
        self._tasks.start(self._tell_all(to, memory), "snapshot")

    def _moves(self) -> bytes:
        return b"".join([index.take_changes() for index in self.indexes])

    @property
    def members(self) -> list[int]:
        """As of a host."""
        return [0]

    def heard(self, peer: int, batch: bytes) -> None:
        try:
            for kind, body in records(batch):
                self._take(peer, kind, body)
        except UNREADABLE as error:
            self._garbled.add()
            log.error("dropped a message of peer %d: %s: %s", peer, type(error).__name__, error)

    def _take(self, peer: int, kind: Kind, body: bytes) -> None:
        if kind is Kind.LOAD:
            self.peer_loads.take(peer, body)
        elif kind in _OF_INDEXES:
            for index in self.indexes:
                index.take(peer, kind, body)
        elif kind is Kind.SESSIONS:
            for table in self.sessions:
                table.take(body)
        elif kind is Kind.SPENT or kind is Kind.USED:
            for limits in self.limits:
                limits.take(peer, kind, body)
        elif kind is Kind.WAITING:
            for queue in self.queues:
                queue.take(peer, body)
        elif kind is Kind.BINDINGS:
            for response_id, pod in bodies.bindings(body):
                self._bound(response_id, pod)
        elif kind is Kind.DOUBTS:
            self._doubted(peer, bodies.doubts(body))
        elif kind is Kind.BREAKER:
            self._broke(*bodies.breaker(body))
        elif kind is Kind.TRIED:
            self._tried(bodies.pod(body))
        elif kind is Kind.RESET:
            self._forget(peer)
            for queue in self.queues:
                queue.reset(peer)
        elif kind is Kind.HOSTS:
            self._be_among(*bodies.hosts(body))
        elif kind is Kind.VANISHED:
            self.gone(int.from_bytes(body, "little"))
        elif kind is Kind.SNAPSHOT:
            self.ask(*bodies.snapshot(body))
        else:
            self._told(kind, body)

    def _forget(self, peer: int) -> None:
        self.peer_loads.vanished(peer)
        for index in self.indexes:
            index.vanished(peer)
        for limits in self.limits:
            limits.vanished(peer)

    def be_limited(self) -> None:
        """Where the others are not heard of, what they spend is the policy's to say."""
        for limits in self.limits:
            limits.among(self.place[0] if self._are_heard else 1)

    def _be_among(self, hosts: int, rank: int, are_heard: bool) -> None:
        self.place, self._are_heard = (hosts, rank), are_heard
        self.be_limited()
        for queue in self.queues:
            queue.among(hosts, rank, are_heard)

    def _resync(self) -> None:
        """Something of what this process said was lost on the way to everybody."""
        self._tasks.start(self._tell_all(EVERYBODY, ALL), "snapshot")

    async def _tell_all(self, to: int, memory: float) -> None:
        """What is in flight at once, what is remembered in slices. What waits is said first: a snapshot that has a
        reservation must not be followed by its announcement."""
        self._outbox.flush()
        for index in self.indexes:
            index.begin_anew()
        self._link.send(to, b"".join(self._in_flight()))
        if not memory:
            return
        batch: list[bytes] = []
        size = 0
        for part in self._memory(memory):
            batch.append(part)
            size += len(part)
            if size >= SLICE:
                self._link.send(to, b"".join(batch))
                batch.clear()
                size = 0
                await asyncio.sleep(0.001)
        if batch:
            self._link.send(to, b"".join(batch))

    def _in_flight(self) -> Iterator[bytes]:
        yield record(Kind.RESET, b"")
        yield self.own_loads.all(self._endpoints())
        yield record(Kind.DOUBTS, orjson.dumps(self._doubts()))
        for index in self.indexes:
            for body in index.in_flight():
                yield record(Kind.MOVES, body)
        for limits in self.limits:
            for body in limits.in_flight():
                yield record(Kind.USED, body)
        for queue in self.queues:
            yield record(Kind.WAITING, queue.all())

    def _memory(self, share: float) -> Iterator[bytes]:
        """What was used last of each."""
        for index in self.indexes:
            for body in index.memory(int(share * JOURNAL_BYTES)):
                yield record(Kind.MEMORY, body)
        for table in self.sessions:
            for body in table.memory(int(share * MOST_TOLD)):
                yield record(Kind.SESSIONS, body)
        for limits in self.limits:
            for body in limits.memory():
                yield record(Kind.USED, body)
        bindings = self._bindings()
        told = bindings[len(bindings) - int(share * len(bindings)) :]
        bound = [(response_id, endpoint.name) for response_id, endpoint in told]
        for start in range(0, len(bound), 200):
            yield record(Kind.BINDINGS, orjson.dumps(bound[start : start + 200]))


_OF_INDEXES = frozenset({Kind.MOVES, Kind.FORGET, Kind.MEMORY})
