"""Sources of pods."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from proxy.fleet.settings import PodSettings


class Source(Protocol):
    """A source of pods, polled within its `async with` context. `name` distinguishes its pods from the pods of other
    sources; `interval` is in seconds."""

    @property
    def name(self) -> str: ...
    @property
    def interval(self) -> float: ...

    async def poll(self) -> Sequence[PodSettings] | None:
        """Return the configured pods; None if they are unchanged, or unknown because of a failure, which is logged."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Do nothing: most sources have no task between two polls."""
        return
