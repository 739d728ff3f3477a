"""What the pods of a fleet share: the network between them and a common directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any


class Holding:
    """The KV cache of one prompt that a pod has, or will have, for another. It is gone when it was fetched, has
    expired, or was lost."""

    def __init__(self, give_back: Callable[[], None] = lambda: None) -> None:
        self.is_gone = False
        self.was_fetched = False
        self._give_back = give_back
        self._settled = asyncio.Event()
        self._ended = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None

    def computed(self) -> None:
        self._settled.set()

    async def ready(self) -> bool:
        """When it is computed; False if it never will be."""
        await self._settled.wait()
        return not self.is_gone

    def expire_in(self, seconds: float, expired: Callable[[], None]) -> None:
        self._expiry = asyncio.get_running_loop().call_later(seconds, expired)

    def fetched(self) -> None:
        self.was_fetched = True
        self.end()

    def end(self) -> None:
        """Its blocks go back to the pod."""
        if not self.is_gone:
            self.lose()
            self._give_back()

    def lose(self) -> None:
        """With the pod."""
        self.is_gone = True
        self._settled.set()
        self._ended.set()
        if self._expiry is not None:
            self._expiry.cancel()

    async def ended(self) -> bool:
        """Whether it was fetched."""
        await self._ended.wait()
        return self.was_fetched


class Fabric:
    """Lives as long as the fleet does."""

    def __init__(self) -> None:
        self.files: set[int] = set()
        """Prompts whose KV cache is in the common directory, by hash."""
        self.embeddings: set[int] = set()
        """Media whose embeddings are there."""
        self.encoders: dict[tuple[Any, Any], set[int]] = {}
        """Those that encode pods have, by host and port."""
        self._holdings: dict[str, Holding] = {}
        self._wanted: dict[str, asyncio.Event] = {}

    def announce(self, key: str, holding: Holding) -> None:
        self._holdings[key] = holding
        if (wanted := self._wanted.pop(key, None)) is not None:
            wanted.set()

    def forget(self, key: str) -> None:
        self._holdings.pop(key, None)

    def get(self, key: str) -> Holding | None:
        return self._holdings.get(key)

    async def find(self, key: str, patience: float) -> Holding | None:
        """Waits so many seconds for its announcement."""
        if key not in self._holdings and patience > 0:
            wanted = self._wanted[key] = asyncio.Event()
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        await wanted.wait()
            finally:
                self._wanted.pop(key, None)
        return self._holdings.get(key)
