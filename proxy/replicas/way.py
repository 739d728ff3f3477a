"""How a process reaches the others: the hub of its host, or the hosts of a deployment; alone, it has none."""

from __future__ import annotations

import asyncio
from typing import Protocol


class Way(Protocol):
    """`replicas.link.Link` is one, `replicas.deployment.Alone` another."""

    closed: asyncio.Event

    def tell(self, records: bytes) -> None:
        """To everybody, if all of them are for everybody. Never waits, as `send`."""

    def send(self, address: int, records: bytes) -> None: ...

    def close(self) -> None:
        """What was said still goes out; wait for `closed`."""


class Uplink(Protocol):
    """The other hosts, as a host sees them; `replicas.deployment.Deployment` is one."""

    def say(self, member: int, batch: bytes) -> None:
        """To all of them."""

    def answer(self, number: int, member: int, batch: bytes) -> None:
        """To the host of that number."""

    def joined(self, is_first: bool) -> None:
        """A member has to be told all that is in flight; the first one, what is remembered too."""

    def left(self, member: int) -> None: ...


class Local(Protocol):
    """A host, as the others see it; `replicas.hub.Hub` and `replicas.replica.Replica` are such."""

    @property
    def members(self) -> list[int]: ...

    def heard(self, number: int, batch: bytes) -> None:
        """From a member of another host."""

    def gone(self, number: int) -> None:
        """A member of another host is no more, and with it all that it had in flight."""

    def ask(self, to: int, memory: float) -> None:
        """All members tell what they have in flight; and one of them the latest part of what it remembers, 1.0: all."""
