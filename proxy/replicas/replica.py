"""One process among its siblings: says what it does, takes in what they do, and tells those who join."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from struct import error as StructError

import orjson

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Tally
from proxy.core.tasks import Tasks
from proxy.replicas.link import Link
from proxy.replicas.loads import Apply, OwnLoads, PeerLoads
from proxy.replicas.outbox import Outbox
from proxy.replicas.prefixes import SharedIndex
from proxy.replicas.wire import EVERYBODY, HUB, Garbled, Kind, record, records

log = logging.getLogger(__name__)

SLICE = 32 * 1024
"""Bytes of a snapshot that are sent, and taken in, at once: about a millisecond."""

Told = Callable[[Kind, bytes], None]
Bound = Callable[[str, str], None]
Bindings = Callable[[], Sequence[tuple[str, Endpoint]]]


class Replica:
    """`apply` is what peers have in flight on a pod; `told` gets what the hub says of the pods; `bound` the
    (response id, pod) of peers, of which `bindings` gives those of this process; `lost` is called when the hub is gone.
    """

    def __init__(
        self,
        *,
        endpoints: Callable[[], Sequence[Endpoint]],
        apply: Apply,
        told: Told,
        bound: Bound,
        bindings: Bindings,
        lost: Callable[[], None],
        dropped: Tally,
        garbled: Tally,
    ) -> None:
        self._endpoints = endpoints
        self._told = told
        self._bound = bound
        self._bindings = bindings
        self._lost = lost
        self._dropped = dropped
        self._garbled = garbled
        self._outbox = Outbox(self._send, self._loads)
        self._tasks = Tasks()
        self._link: Link
        self.indexes: list[SharedIndex] = []
        self.own_loads = OwnLoads(self._outbox.touch)
        self.peer_loads = PeerLoads(apply)
        self.tell = self._outbox.add

    async def connect(self, sock: socket.socket) -> None:
        """Over a connected socket whose other end is the hub's."""
        self._link = await Link.over(sock, self._received, self._lost, self._resync, self._dropped)

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

    def leaving(self) -> None:
        """This process ends what it has begun."""
        self._link.send(HUB, record(Kind.LEAVING, b""))

    def bound(self, response_id: str, endpoint: Endpoint) -> None:
        self.tell(Kind.BINDINGS, orjson.dumps([(response_id, endpoint.name)]))

    def _send(self, batch: bytes) -> None:
        self._link.send(EVERYBODY, batch)

    def _loads(self) -> bytes:
        body = self.own_loads.take_changes()
        return record(Kind.LOAD, body) if body else b""

    def _received(self, peer: int, batch: bytes) -> None:
        try:
            for kind, body in records(batch):
                self._take(peer, kind, body)
        except (Garbled, StructError, ValueError, KeyError, TypeError) as error:
            self._garbled.add()
            log.error("the bus: %s from %d: %s", type(error).__name__, peer, error)

    def _take(self, peer: int, kind: Kind, body: bytes) -> None:
        if kind is Kind.LOAD:
            self.peer_loads.take(peer, body)
        elif kind in _OF_INDEXES:
            for index in self.indexes:
                index.take(peer, kind, body)
        elif kind is Kind.BINDINGS:
            for response_id, pod in orjson.loads(body):
                self._bound(response_id, pod)
        elif kind is Kind.RESET:
            self._forget(peer)
        elif kind is Kind.VANISHED:
            self._forget(int.from_bytes(body, "little"))
        elif kind is Kind.SNAPSHOT:
            asked = orjson.loads(body)
            self._tasks.start(self._tell_all(int(asked["to"]), bool(asked["memory"])), "snapshot")
        else:
            self._told(kind, body)

    def _forget(self, peer: int) -> None:
        self.peer_loads.vanished(peer)
        for index in self.indexes:
            index.vanished(peer)

    def _resync(self) -> None:
        """Something of what this process said was lost on the way to everybody."""
        self._tasks.start(self._tell_all(EVERYBODY, memory=True), "snapshot")

    async def _tell_all(self, to: int, memory: bool) -> None:
        """What is in flight at once, what is remembered in slices. What waits is said first: a snapshot that has a
        reservation must not be followed by its announcement."""
        self._outbox.flush()
        self._link.send(to, b"".join(self._in_flight()))
        if not memory:
            return
        batch: list[bytes] = []
        size = 0
        for part in self._memory():
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
        yield record(Kind.LOAD, self.own_loads.all(self._endpoints()))
        for index in self.indexes:
            for body in index.in_flight():
                yield record(Kind.RESERVE, body)

    def _memory(self) -> Iterator[bytes]:
        for index in self.indexes:
            for body in index.memory():
                yield record(Kind.MEMORY, body)
        bound = [(response_id, endpoint.name) for response_id, endpoint in self._bindings()]
        for start in range(0, len(bound), 200):
            yield record(Kind.BINDINGS, orjson.dumps(bound[start : start + 200]))


_OF_INDEXES = frozenset({Kind.RESERVE, Kind.SETTLE, Kind.FORGET, Kind.MEMORY})
