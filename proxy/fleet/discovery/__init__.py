"""Sources of pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from proxy.fleet.settings import PodSettings


class Source(Protocol):
    """`name` tells its pods from the pods of other sources, `interval` is seconds between two polls. It is polled
    inside of its `async with`."""

    @property
    def name(self) -> str: ...
    @property
    def interval(self) -> float: ...

    async def poll(self) -> Sequence[PodSettings] | None:
        """The pods there should be; None if that is what it was, or is unknown: faults are logged, not raised."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Most have nothing that goes on between two polls."""
        return
