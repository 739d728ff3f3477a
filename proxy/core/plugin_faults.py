"""Faults of plugins: each one is counted, and logged at most once a minute."""

from __future__ import annotations

import logging
from collections.abc import Callable

from proxy.core.ports import Clock

log = logging.getLogger(__name__)

Count = Callable[[str, str], None]
"""Called with the name of a plugin and the kind of its fault, once per faulty call."""

LOGGED_EVERY = 60.0
"""Seconds between two log lines about the same kind of fault of the same plugin."""

OUT_OF_RANGE = "out-of-range"
NOT_A_NUMBER = "nan"
WRONG_LENGTH = "wrong-length"
RAISED = "raised"
UNUSABLE = "unusable"
"""The plugin returned something else than its extension point asks for."""


def uncounted(name: str, fault: str) -> None:
    """Count nothing."""


class PluginFaults:
    """The one place that counts and logs the faults of plugins, so that all plugins share one rate limit."""

    def __init__(self, clock: Clock, count: Count = uncounted) -> None:
        self._now = clock.now
        self._count = count
        self._logged: dict[tuple[str, str], float] = {}

    def report(self, name: str, fault: str, complaint: str, error: BaseException | None = None) -> None:
        """Count a fault of the plugin `name`. `complaint` says what happened and what happens instead."""
        self._count(name, fault)
        now, key = self._now(), (name, fault)
        if now - self._logged.get(key, -LOGGED_EVERY) >= LOGGED_EVERY:
            self._logged[key] = now
            log.error("plugin %s %s (logged once a minute, counted always)", name, complaint, exc_info=error)
