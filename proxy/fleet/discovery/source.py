"""What the origins of pods have in common."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.fleet.settings import PodSettings


class Source(Protocol):
    """`name` tells its pods from those of others, `interval` is seconds between two polls."""

    @property
    def name(self) -> str: ...
    @property
    def interval(self) -> float: ...

    async def poll(self) -> Sequence[PodSettings] | None:
        """The pods there should be; None if that is what it was, or cannot be told: faults are logged, not raised."""
