"""The other processes of the deployment, the division of caps among hosts, and the assumed spending of other hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

import orjson

from proxy.cluster.messages import (
    BROKER,
    FIRST_NUMBER,
    HOST_BYTES,
    InvalidMessage,
    Packet,
    PacketKind,
    RecordKind,
    record,
    records,
)
from proxy.cluster.shared import Spent, Who, read_spent
from proxy.core.ports import Clock

MOST_HOSTS = MOST_PEERS = 1024
"""Largest number of other hosts, and of processes of one host. Packets of further ones are dropped, because a client
that can publish on the channel can invent any number."""

ASK_PAUSE = 1.0
"""Seconds between two requests for missed packets to one process."""

_NUMBERED = frozenset((PacketKind.NEWS, PacketKind.BEAT, PacketKind.HELLO))


def peer_id(host: bytes, number: int) -> bytes:
    return host + number.to_bytes(3, "little")


def peer_number(id: bytes) -> int:
    """Return the number of a process on its host."""
    return int.from_bytes(id[HOST_BYTES:], "little")


@dataclass(slots=True, eq=False)
class Peer:
    """Another process, until it is forgotten. A process that returns after that is a new peer."""

    id: bytes
    number: int
    """The number that it has here. No other process ever has it."""
    is_local: bool
    """Whether it is on the host of this process."""
    received_at: float
    last: int = 0
    """Number of its last packet to all; 0 if it sent nothing to all."""
    name: str = ""
    config: str = ""
    requested_at: float | None = None
    has_gap: bool = False
    """Whether its current state is to be requested."""
    has_missed: bool = False
    """Whether the last gap was after a packet that was received; the first packet of a process can have any number."""

    @property
    def host(self) -> bytes:
        return self.id[:HOST_BYTES]

    @property
    def is_supervisor(self) -> bool:
        return peer_number(self.id) == BROKER


class Peers:
    """The other processes that are received. `gone(number)` is called for each that has left, `changed()` when their
    set has changed."""

    def __init__(self, host: bytes, clock: Clock, lease: float, gone: Callable[[int], None]) -> None:
        self._host = host
        self._clock = clock
        self._lease = lease
        self._gone = gone
        self.changed: Callable[[], None] = lambda: None
        self._numbers = count(FIRST_NUMBER)
        self._peers: dict[bytes, Peer] = {}
        self._processes: Counter[bytes] = Counter()
        """The number of processes by host."""

    @property
    def hosts(self) -> dict[bytes, tuple[str, str]]:
        """Name and configuration of each other host; empty texts until the host has sent them."""
        found: dict[bytes, tuple[str, str]] = {}
        for peer in self._peers.values():
            if not peer.is_local and (peer.name or peer.host not in found):
                found[peer.host] = peer.name, peer.config
        return found

    @property
    def that_serve(self) -> list[bytes]:
        """The ids of the processes that are not supervisors."""
        return [peer.id for peer in self._peers.values() if not peer.is_supervisor]

    def received_at(self, number: int) -> float:
        """Return when a process of this host sent its last packet; 0 if it sent none."""
        peer = self._peers.get(peer_id(self._host, number))
        return 0.0 if peer is None else peer.received_at

    def receive(self, packet: Packet) -> Peer | None:
        """Return the sender of a packet, or None if a later packet has overtaken this one. Raise InvalidMessage for a
        host beyond MOST_HOSTS, or a process beyond MOST_PEERS."""
        now, kind = self._clock.now(), packet.kind
        peer = self._peers.get(packet.sender)
        if peer is None:
            if kind is PacketKind.BYE:
                return None
            peer = self._add(packet.sender, now)
        elif (
            packet.number <= peer.last if kind in _NUMBERED else kind is PacketKind.STATE and packet.number < peer.last
        ):
            return None  # a later packet has overtaken it
        peer.received_at = now
        if kind is PacketKind.STATE or (kind is PacketKind.HELLO and not peer.last):
            peer.has_gap = False
        elif kind in _NUMBERED and packet.number != peer.last + 1:
            peer.has_gap, peer.has_missed = True, peer.last > 0
        if kind in _NUMBERED or kind is PacketKind.STATE:
            peer.last = packet.number
        return peer

    def should_ask(self, peer: Peer) -> bool:
        """Return whether a packet of the peer was missed, and it was not asked for that within ASK_PAUSE."""
        now = self._clock.now()
        if not peer.has_gap or (peer.requested_at is not None and now - peer.requested_at < ASK_PAUSE):
            return False
        peer.requested_at = now
        return True

    def excuse(self, seconds: float) -> None:
        """Extend the leases by the time for which this process read no messages."""
        for peer in self._peers.values():
            peer.received_at += seconds

    def sweep(self) -> None:
        """Forget processes of other hosts whose lease has ended. The end of a process of this host is noticed by its
        link."""
        oldest = self._clock.now() - self._lease
        for peer in [peer for peer in self._peers.values() if peer.received_at < oldest and not peer.is_local]:
            self.forget(peer)

    def forget(self, peer: Peer) -> None:
        if self._peers.pop(peer.id, None) is not None:
            self._processes[peer.host] -= 1
            if not self._processes[peer.host]:
                del self._processes[peer.host]
            self._gone(peer.number)
            self.changed()

    def _add(self, id: bytes, now: float) -> Peer:
        is_local, host = id.startswith(self._host), id[:HOST_BYTES]
        if self._processes[host] >= MOST_PEERS or (host not in self._processes and len(self._processes) > MOST_HOSTS):
            raise InvalidMessage(f"there are {MOST_HOSTS} other hosts, or {MOST_PEERS} processes of the host, already")
        self._processes[host] += 1
        peer = self._peers[id] = Peer(id, peer_number(id) if is_local else next(self._numbers), is_local, now)
        self.changed()
        return peer


class HostDivision:
    """The number of hosts that divide the caps, and the position of this one. Hosts are ordered by id, so that all that
    know the same hosts divide alike. `changed(hosts, position, is_up)` is called when the division, or whether
    the store can be reached, changes.

    Without the store the division does not change; with the policy `open` each host has all. When the store returns,
    the hosts of the previous division count for one more lease, because they return one after the other. `policy` is
    `open` until the store was reached once, because the number of hosts is unknown until then.
    """

    def __init__(
        self,
        own: bytes,
        policy: Literal["localShare", "open"],
        lease: float,
        clock: Clock,
        changed: Callable[[int, int, bool], None],
    ) -> None:
        self._own = own
        self.policy: Literal["localShare", "open"] = "open"
        """The policy that applies while the store is lost."""
        self._wanted = policy
        self._lease = lease
        self._clock = clock
        self._changed = changed
        self._hosts: frozenset[bytes] = frozenset((own,))
        self._before: frozenset[bytes] = frozenset()
        """The hosts before the loss of the store, which count until `_until`."""
        self._until = 0.0
        self._is_up = False
        self.place = self._placed()

    def found(self) -> None:
        """Handle the return of the store."""
        self._is_up = True
        self.policy = self._wanted
        self._until = self._clock.now() + self._lease
        self._update()

    def lost(self) -> None:
        self._before, self._is_up = self._hosts, False
        if self.policy == "open":
            self._hosts = frozenset((self._own,))
        self._update()

    def divide(self, others: Iterable[bytes]) -> None:
        """Divide among this host and these others."""
        if not self._is_up:
            return
        if self._before and self._clock.now() >= self._until:
            self._before = frozenset()
        self._hosts = self._before.union(others, (self._own,))
        self._update()

    def left(self, host: bytes) -> None:
        """Remove a host that has sent its farewell."""
        self._before -= {host}

    def _update(self) -> None:
        if (place := self._placed()) != self.place:
            self.place = place
            self._changed(*place)

    def _placed(self) -> tuple[int, int, bool]:
        return len(self._hosts), sorted(self._hosts).index(self._own), self._is_up


class AssumedSpending:
    """The assumed spending of the other hosts while the store is lost: each spends as much as this host. Their actual
    charges of that time are not published one by one. Their totals follow on their return, and the larger number
    counts, so nothing is counted twice."""

    def __init__(self, spent: Callable[[bytes], None]) -> None:
        """`spent(batch)` is called with the records of the assumed spending."""
        self._spent = spent
        self._others = 0
        self._running: dict[Who, dict[bytes, int]] = {}
        """Running requests by process of this host."""
        self._assumed: dict[Who, list[float]] = {}
        """The assumed amounts since `start`. No more than these are returned: a reservation from before that is
        corrected now was not assumed for the other hosts."""

    def start(self, others: int) -> None:
        self._others = others
        self._running.clear()
        self._assumed.clear()

    def end(self) -> None:
        self._others = 0

    def add(self, peer: bytes, batch: bytes) -> None:
        """Raises ValueError or another of UNREADABLE."""
        if not self._others:
            return
        spent = [one for kind, body in records(batch) if kind is RecordKind.SPENT for one in read_spent(body)]
        if spent:
            self._spent(record(RecordKind.SPENT, orjson.dumps([self._times_others(peer, *one) for one in spent])))

    def _times_others(self, peer: bytes, who: Who, running: int, spent: Sequence[float]) -> Spent:
        self._running.setdefault(who, {})[peer] = running
        all_running = sum(self._running[who].values())
        before = self._assumed.get(who, [])
        before = before if len(before) == len(spent) else [0.0] * len(spent)
        more = [max(amount * self._others, -one) for amount, one in zip(spent, before, strict=True)]
        self._assumed[who] = [one + extra for one, extra in zip(before, more, strict=True)]
        return who, all_running * self._others, more
