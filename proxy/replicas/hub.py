"""The middle of the bus: passes on what workers say, notices those that are gone, and has those who join told."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Sequence

import orjson

from proxy.core.ports import Tally
from proxy.replicas.link import Link
from proxy.replicas.outbox import Outbox
from proxy.replicas.way import Uplink
from proxy.replicas.wire import EVERYBODY, HUB, UNREADABLE, Kind, record, records

log = logging.getLogger(__name__)

SNAPSHOT_FRAME = 4 * 1024 * 1024
"""Bytes after which a snapshot goes on in another frame."""

Take = Callable[[int, Kind, bytes], None]


class Hub:
    """`everything()` gives the records that a joining worker must have before it serves; `take(worker, kind, body)`
    gets what workers say; `vanished(worker)` is called when one is gone."""

    def __init__(
        self,
        everything: Callable[[], Iterable[tuple[Kind, bytes]]],
        take: Take,
        vanished: Callable[[int], None],
        dropped: Tally,
        garbled: Tally,
        *,
        shares: bool = True,
    ) -> None:
        """Where nothing is shared, workers hear of the pods and not of each other."""
        self._everything = everything
        self._take = take
        self._vanished = vanished
        self._dropped = dropped
        self._garbled = garbled
        self._shares = shares
        self._links: dict[int, Link] = {}
        self.uplink: Uplink | None = None
        """To the other hosts, where there are any; whoever has one sets it."""
        self._outbox = Outbox(self._to_all)
        self.tell = self._outbox.add
        """Soon, to all workers."""

    async def attach(self, worker: int, sock: socket.socket) -> None:
        """A worker that joins: no two ever have the same number."""
        link = await Link.over(
            sock,
            lambda address, batch: self._received(worker, address, batch),
            lambda: self._lost(worker),
            lambda: self._catch_up(worker),
            self._dropped,
        )
        if link.closed.is_set():
            self._vanished(worker)
            return
        self._links[worker] = link
        self._catch_up(worker)

    def close(self) -> None:
        self._outbox.close()
        for link in list(self._links.values()):
            link.abort()

    # What other hosts say.

    @property
    def members(self) -> list[int]:
        return list(self._links)

    def heard(self, number: int, batch: bytes) -> None:
        for link in self._links.values():
            link.send(number, batch)
        self._hear(number, batch)

    def gone(self, number: int) -> None:
        self.tell(Kind.VANISHED, number.to_bytes(4, "little"))
        self._outbox.flush()
        self._vanished(number)

    def ask(self, to: int, memory: float) -> None:
        self._ask(list(self._links.values()), to, memory)

    # Below: how.

    def _received(self, worker: int, address: int, batch: bytes) -> None:
        if address == EVERYBODY:
            if self._shares:
                for other, link in self._links.items():
                    if other != worker:
                        link.send(worker, batch)
            if self.uplink is not None:
                self.uplink.say(worker, batch)
            self._hear(worker, batch)
        elif address == HUB:
            self._hear(worker, batch)
        elif (to := self._links.get(address)) is not None and self._shares:
            to.send(worker, batch)
        elif self.uplink is not None:
            self.uplink.answer(address, worker, batch)

    def _hear(self, worker: int, batch: bytes) -> None:
        try:
            for kind, body in records(batch):
                self._take(worker, kind, body)
        except UNREADABLE as error:
            self._garbled.add()
            log.error("dropped a message of worker %d: %s: %s", worker, type(error).__name__, error)

    def _catch_up(self, worker: int) -> None:
        """What waits in the outbox is told first: it is older than the snapshot. One of the others is asked for what
        all of them remember, each for what it has in flight."""
        self._outbox.flush()
        self._tell_everything(self._links[worker])
        if not self._shares:
            return
        self._ask([link for other, link in self._links.items() if other != worker], worker, 1.0)
        if self.uplink is not None:
            self.uplink.joined(is_first=len(self._links) == 1)

    def _tell_everything(self, link: Link) -> None:
        """In several frames, as each has a largest size."""
        batch, size = list[bytes](), 0
        for kind, body in self._everything():
            batch.append(record(kind, body))
            size += len(body)
            if size >= SNAPSHOT_FRAME:
                link.send(HUB, b"".join(batch))
                batch, size = [], 0
        link.send(HUB, b"".join(batch))

    def _ask(self, links: Sequence[Link], to: int, memory: float) -> None:
        for position, link in enumerate(links):
            asked = {"to": to, "memory": 0.0 if position else memory}
            link.send(HUB, record(Kind.SNAPSHOT, orjson.dumps(asked)))

    def _lost(self, worker: int) -> None:
        if self._links.pop(worker, None) is None:
            return
        if self._shares:
            self.tell(Kind.VANISHED, worker.to_bytes(4, "little"))
            self._outbox.flush()
        if self.uplink is not None:
            self.uplink.left(worker)
        self._vanished(worker)

    def _to_all(self, batch: bytes) -> None:
        for link in self._links.values():
            link.send(HUB, batch)
