"""Pods that nobody wants any more serve on until one that takes their place does: a cut-over leaves no gap."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from proxy.core.endpoint import Endpoint, EndpointState
from proxy.fleet.member import Member

Place = tuple[str, str]
"""Pool and role."""


class Heirs:
    """Holds members back from leaving; `leave` lets one go."""

    def __init__(self, leave: Callable[[Member], None]) -> None:
        self._leave = leave
        self._held: dict[Member, float] = {}
        """And until when."""

    def replace(self, unwanted: Collection[Member], members: Iterable[Member], until: float) -> None:
        """Of the unwanted, those leave that nobody has to be waited for: some pod of their place serves, or none is on
        its way."""
        kept = [member for member in members if member.leave_by is None and member not in unwanted]
        serving = {_place(member.endpoint) for member in kept if member.endpoint.state is EndpointState.READY}
        coming = {_place(member.endpoint) for member in kept if member.contact is EndpointState.STARTING} - serving
        for member in unwanted:
            is_needed = member.endpoint.state is EndpointState.READY and _place(member.endpoint) in coming
            if is_needed:
                self._held.setdefault(member, until)
            else:
                self._leave(member)

    def came(self, member: Member) -> None:
        """It serves: those whose place it takes may go."""
        if self._held and member not in self._held and member.endpoint.state is EndpointState.READY:
            place = _place(member.endpoint)
            for held in [held for held in self._held if _place(held.endpoint) == place]:
                self._leave(held)

    def sweep(self, now: float) -> None:
        """Nobody is waited for any longer by those whose time is over."""
        for member in [member for member, until in self._held.items() if now >= until]:
            self._leave(member)

    def forget(self, member: Member) -> None:
        """It leaves, or is wanted again."""
        self._held.pop(member, None)


def _place(endpoint: Endpoint) -> Place:
    return endpoint.pool, endpoint.role
