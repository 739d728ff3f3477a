"""Which other hosts there are: by number, until they have not been heard of for a lease by this host's own clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from proxy.core.ports import Clock
from proxy.replicas.packet import Packet, Say

FIRST_NUMBER = 1 << 24
"""Of members of other hosts; those of this one have smaller numbers."""

ASK_PAUSE = 1.0
"""Seconds between two questions to one host."""

_TO_ONE = (Say.ASK, Say.ANSWER)


@dataclass(slots=True, eq=False)
class Host:
    """Lives until it is forgotten; who comes back then is a new one."""

    id: bytes
    heard_at: float
    last: int | None = None
    """Number of the last packet; None until one is known."""
    numbers: dict[int, int] = field(default_factory=dict)
    """Of its members, as they are called here."""
    name: str = ""
    config: str = ""
    asked_at: float | None = None
    has_gap: bool = False


class Peers:
    """`gone(number)` is called for every member that is no more."""

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
        """Whose it is; None if it says nothing that is not known: it was on its way when its host said it anew."""
        now = self._clock.now()
        host = self._hosts.get(packet.host)
        if host is None:
            if packet.say is Say.BYE:
                return None
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
        number = host.numbers.get(member)
        if number is None:
            number = host.numbers[member] = next(self._numbers)
            self._by_number[number] = host
        return number

    def host_of(self, number: int) -> Host | None:
        return self._by_number.get(number)

    def keep(self, host: Host, members: Iterable[int]) -> None:
        """These are all that it has."""
        there = {0, *members}
        for member in [member for member in host.numbers if member not in there]:
            self._end(host.numbers.pop(member))

    def should_ask(self, host: Host) -> bool:
        """Whether something of it was missed, and it was not asked for that just now."""
        now = self._clock.now()
        if not host.has_gap or (host.asked_at is not None and now - host.asked_at < ASK_PAUSE):
            return False
        host.asked_at = now
        return True

    def excuse(self, seconds: float) -> None:
        """For so long nobody was listened to."""
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
