"""The other hosts of a deployment: which there are, what share of caps each has, and what they are assumed to spend."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

import orjson

from proxy.cluster.messages import FIRST_NUMBER, MOST_MEMBERS, Garbled, Kind, Packet, Say, record, records
from proxy.cluster.shared import Spent, Who, read_spent
from proxy.core.ports import Clock

ASK_PAUSE = 1.0
"""Seconds between two requests for what was missed, to one host."""

MOST_HOSTS = 1024
"""Other hosts. Packets of further ones are dropped: whoever can publish on the channel can make up any number."""

_TO_ONE = (Say.ASK, Say.ANSWER)


@dataclass(slots=True, eq=False)
class Host:
    """Another host, until it is forgotten. A host that comes back after that is a new one."""

    id: bytes
    heard_at: float
    last: int | None = None
    """Number of its last packet."""
    numbers: dict[int, int] = field(default_factory=dict)
    """The number that each of its members has here."""
    name: str = ""
    config: str = ""
    asked_at: float | None = None
    has_gap: bool = False


class Peers:
    """The other hosts that are heard. `gone(number)` is called for each of their members that is gone."""

    def __init__(self, clock: Clock, lease: float, gone: Callable[[int], None]) -> None:
        self._clock = clock
        self._lease = lease
        self._gone = gone
        self._numbers = count(FIRST_NUMBER)
        self._hosts: dict[bytes, Host] = {}
        self._by_number: dict[int, Host] = {}

    def __len__(self) -> int:
        return len(self._hosts)

    @property
    def hosts(self) -> Iterable[Host]:
        return self._hosts.values()

    def hear(self, packet: Packet) -> Host | None:
        """Return the host of a packet, or None if a later packet has overtaken this one. Raise Garbled for a host
        beyond MOST_HOSTS."""
        now = self._clock.now()
        host = self._hosts.get(packet.host)
        if host is None:
            if packet.say is Say.BYE:
                return None
            if len(self._hosts) >= MOST_HOSTS:
                raise Garbled(f"there are {MOST_HOSTS} other hosts already")
            host = self._hosts[packet.host] = Host(packet.host, now)
        elif host.last is not None and _is_old(packet, host.last):
            return None
        host.heard_at = now
        if packet.say is Say.ANSWER or (packet.say is Say.HELLO and host.last is None):
            host.has_gap = False
        elif packet.say not in _TO_ONE and packet.number != (host.last or 0) + 1:
            host.has_gap = True
        if packet.say is not Say.ASK:
            host.last = packet.number
        return host

    def number(self, host: Host, member: int) -> int:
        """Raise Garbled for a member beyond MOST_MEMBERS."""
        number = host.numbers.get(member)
        if number is None:
            if len(host.numbers) > MOST_MEMBERS:
                raise Garbled(f"the host has {MOST_MEMBERS} members already")
            number = host.numbers[member] = next(self._numbers)
            self._by_number[number] = host
        return number

    def host_of(self, number: int) -> Host | None:
        return self._by_number.get(number)

    def keep(self, host: Host, members: Iterable[int]) -> None:
        """The host has these members and no others."""
        there = {0, *members}
        for member in [member for member in host.numbers if member not in there]:
            self._end(host.numbers.pop(member))

    def should_ask(self, host: Host) -> bool:
        """Return whether a packet of the host was missed, and it was not asked for that within ASK_PAUSE."""
        now = self._clock.now()
        if not host.has_gap or (host.asked_at is not None and now - host.asked_at < ASK_PAUSE):
            return False
        host.asked_at = now
        return True

    def excuse(self, seconds: float) -> None:
        """This process read no messages for so long."""
        for host in self._hosts.values():
            host.heard_at += seconds

    def sweep(self) -> None:
        oldest = self._clock.now() - self._lease
        for host in [host for host in self._hosts.values() if host.heard_at < oldest]:
            self.forget(host)

    def forget(self, host: Host) -> None:
        self._hosts.pop(host.id, None)
        for number in host.numbers.values():
            self._end(number)
        host.numbers.clear()

    def _end(self, number: int) -> None:
        del self._by_number[number]
        self._gone(number)


def _is_old(packet: Packet, last: int) -> bool:
    return packet.number < last if packet.say in _TO_ONE else packet.number <= last


class Shares:
    """Among how many hosts caps are divided, and which of them this one is. Hosts are ordered by id, so that all that
    hear the same hosts divide alike. `changed(record)` is called with the record for the members of this host.

    Without the store the division stays as it was, or with the policy `open` each host has all. When the store is back,
    the hosts of before count for a lease, heard or not: they come back one after the other.
    """

    def __init__(
        self,
        own: bytes,
        policy: Literal["localShare", "open"],
        lease: float,
        clock: Clock,
        changed: Callable[[bytes], None],
    ) -> None:
        self._own = own
        self._policy = policy
        self._lease = lease
        self._clock = clock
        self._changed = changed
        self._hosts: frozenset[bytes] = frozenset((own,))
        self._before: frozenset[bytes] = frozenset()
        """The hosts of before the loss of the store; they count until `_until`."""
        self._until = 0.0
        self._is_up = False
        self.record = self._made()

    def found(self) -> None:
        """The store is back."""
        self._is_up = True
        self._until = self._clock.now() + self._lease
        self._update()

    def lost(self) -> None:
        self._before, self._is_up = self._hosts, False
        if self._policy == "open":
            self._hosts = frozenset((self._own,))
        self._update()

    def look(self, heard: Iterable[bytes]) -> None:
        """These other hosts are heard."""
        if not self._is_up:
            return
        if self._before and self._clock.now() >= self._until:
            self._before = frozenset()
        self._hosts = self._before.union(heard, (self._own,))
        self._update()

    def left(self, host: bytes) -> None:
        """The host said goodbye."""
        self._before -= {host}

    def _update(self) -> None:
        if (made := self._made()) != self.record:
            self.record = made
            self._changed(made)

    def _made(self) -> bytes:
        rank = sorted(self._hosts).index(self._own)
        return record(Kind.HOSTS, orjson.dumps((len(self._hosts), rank, self._is_up)))


class AssumedSpending:
    """What the other hosts are assumed to spend while they are not heard: each as much as this host. What they really
    spent is never published again, so nothing is counted twice."""

    def __init__(self, spent: Callable[[bytes], None]) -> None:
        """`spent(batch)` is called with the records of what they are assumed to spend."""
        self._spent = spent
        self._others = 0
        self._running: dict[Who, dict[int, int]] = {}
        """Running requests by member of this host."""

    def begin(self, others: int) -> None:
        self._others = others
        self._running.clear()

    def end(self) -> None:
        self._others = 0

    def take(self, member: int, batch: bytes) -> None:
        """Raises ValueError or another of UNREADABLE."""
        if not self._others:
            return
        spent = [read_spent(*one) for kind, body in records(batch) if kind is Kind.SPENT for one in orjson.loads(body)]
        if spent:
            self._spent(record(Kind.SPENT, orjson.dumps([self._times_others(member, *one) for one in spent])))

    def _times_others(self, member: int, who: Who, running: int, spent: Sequence[float]) -> Spent:
        self._running.setdefault(who, {})[member] = running
        all_running = sum(self._running[who].values())
        return who, all_running * self._others, [amount * self._others for amount in spent]
