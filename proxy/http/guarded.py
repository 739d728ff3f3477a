"""Callbacks of transports and timers: what they raise ends what they serve.

The event loop only logs such an error, or closes the one transport that it came from. The request would stay: its
client would wait, and its pod would keep its place.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar


class Breakable(Protocol):
    def broke(self, error: Exception) -> None:
        """End what is served, and log the error once with the id of the request."""


P = ParamSpec("P")
B = TypeVar("B", bound=Breakable)


def guarded(callback: Callable[Concatenate[B, P], None]) -> Callable[Concatenate[B, P], None]:
    """Give an error of the callback to `broke`. A callback that is called for each read of a stream does so itself: the
    call of a wrapper costs more than its `try`."""

    @wraps(callback)
    def call(self: B, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            callback(self, *args, **kwargs)
        except Exception as error:  # noqa: BLE001  # `broke` logs it, or gives it to the task that does
            self.broke(error)

    return call
