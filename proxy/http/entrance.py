"""Who comes in at the data port, where keys are asked for: decided on the head of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from proxy.core.errors import RequestError
from proxy.core.identity import Identity
from proxy.core.patterns import allows

OPEN_PATHS = ("/health", "/ping")
"""What load balancers ask, without a key."""

CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Fields that end here: what opens this door is not for a pod."""


class Door(Protocol):
    """`access.door.Door` is one."""

    def find(self, headers: Mapping[str, str]) -> Identity | None:
        """At once; None if that takes waiting. Raises Unauthorized or Forbidden."""

    async def authenticate(self, headers: Mapping[str, str]) -> Identity:
        """After waiting."""


class Visitor(Protocol):
    """Who brings a request; `raw_headers` are those that go on to a pod."""

    path: str
    headers: Mapping[str, str]
    raw_headers: tuple[tuple[bytes, bytes], ...]
    identity: Identity | None


class Entrance:
    def __init__(self, door: Door) -> None:
        self._door = door

    def is_let_in(self, call: Visitor) -> bool:
        """At once. If not, `let_in` says why, or waits."""
        try:
            identity = self._door.find(call.headers)
        except RequestError:
            return False
        if identity is not None:
            _welcome(call, identity)
        return identity is not None

    async def let_in(self, call: Visitor) -> None:
        """Raises Unauthorized or Forbidden."""
        if call.path not in OPEN_PATHS:
            _welcome(call, await self._door.authenticate(call.headers))


def shown(cards: list[dict[str, Any]], identity: Identity | None) -> list[dict[str, Any]]:
    """Of the cards of models, those that it may ask for."""
    if identity is None or identity.models is None:
        return cards
    return [card for card in cards if allows(identity.models, card["id"])]


def _welcome(call: Visitor, identity: Identity) -> None:
    call.identity = identity
    call.raw_headers = tuple(header for header in call.raw_headers if header[0].lower() not in CREDENTIALS)
