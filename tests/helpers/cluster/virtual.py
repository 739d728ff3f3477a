"""An event loop on a clock of its own: where nothing is left to do now, the moment of the next timer has come."""

from __future__ import annotations

import asyncio
import selectors
from typing import Any


class VirtualLoop(asyncio.SelectorEventLoop):
    """Also a `core.ports.Clock`."""

    def __init__(self) -> None:
        self._at = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self._at

    def jump(self, seconds: float) -> None:
        self._at += seconds

    now = wall = time


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout:
            self._loop.jump(timeout)
        return super().select(0)
