"""Who may come in: one door after the other, as keys and issuers of tokens are configured anew."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack

from proxy import outbound
from proxy.access.door import Door, door_of
from proxy.core.ports import Clock
from proxy.http.settings import Security

ISSUER_TIMEOUT = 5.0
"""Seconds for the keys of an issuer of tokens."""

LARGEST_KEYS = 4 << 20
"""Bytes of the keys of an issuer."""


class Doors:
    """`door` is the one in use, None where nobody is asked who he is."""

    def __init__(self, settings: Security, clock: Clock) -> None:
        """Raises ConfigError."""
        self._clock = clock
        self.door: Door | None = None
        self.door = self.make(settings)
        self._followed: Door | None = None
        self._following = AsyncExitStack()

    def make(self, settings: Security) -> Door | None:
        """Return a door that keeps what the one in use knows of its issuer. Raises ConfigError."""
        return door_of(settings, self._clock, os.environ, self._get, self.door)

    async def begin(self, stack: AsyncExitStack) -> None:
        await stack.enter_async_context(self._following)
        await self.follow()

    async def follow(self) -> None:
        """The door in use sees its keys change; the one before does no longer."""
        if self.door is self._followed:
            return
        self._followed = self.door
        await self._following.aclose()
        if self.door is not None:
            await self._following.enter_async_context(self.door)

    async def _get(self, url: str) -> tuple[int, bytes]:
        response = await outbound.fetch("GET", url, ISSUER_TIMEOUT, limit=LARGEST_KEYS, allow_redirects=False)
        return response.status, response.body
