"""A rate limit for log lines that clients, pods and other processes can cause."""

from __future__ import annotations

from collections.abc import Callable

from proxy.core.ports import SystemClock

EVERY = 60.0
"""Seconds between two log lines of one kind."""


class LogLimit:
    """Allows a log line a minute of each kind. There must be few kinds: all are remembered."""

    def __init__(self, now: Callable[[], float] | None = None) -> None:
        self._now = now or SystemClock().now
        self._logged: dict[object, float] = {}

    def allows(self, kind: object = None) -> bool:
        now = self._now()
        if now - self._logged.get(kind, -EVERY) < EVERY:
            return False
        self._logged[kind] = now
        return True
