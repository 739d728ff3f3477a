"""Which rooms say how much in the log: changed while the process runs, kept until it ends."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from proxy.core.errors import BadRequest
from proxy.telemetry.logs import AUDIT
from proxy.telemetry.settings import LogLevel

log = logging.getLogger(__name__)

ROOT = "root"
"""What every room says that has no level of its own."""

_NAMES: Mapping[int, str] = {getattr(logging, level.name): level.value for level in LogLevel}


def nobody(levels: bytes) -> None:
    """For processes that are alone."""


class LogLevels:
    """One per process, as its loggers are. `tell` is handed what others are to `take`, after a change."""

    def __init__(self, configured: Callable[[], LogLevel], tell: Callable[[bytes], None] = nobody) -> None:
        self._configured = configured
        self._tell = tell
        self._given: dict[str, LogLevel] = {}

    def shown(self) -> dict[str, Any]:
        """`rooms` are all that can be given a level; a level goes for those below it too."""
        return {
            "levels": {ROOT: _said(logging.getLogger()), **{name: level.value for name, level in self._sorted()}},
            "rooms": _rooms(),
        }

    def change(self, wanted: Any) -> None:
        """By room; null takes its level back. All of them or, with BadRequest, none."""
        if not isinstance(wanted, dict) or not wanted:
            raise BadRequest('Send rooms with their levels, as {"proxy.fleet": "debug"}; null takes one back.')
        self._set({name: _level(name, level) for name, level in wanted.items()})
        self._tell(self.record)

    def take(self, record: bytes) -> None:
        """What `tell` was handed in another process."""
        told = {name: LogLevel(level) for name, level in orjson.loads(record).items()}
        self._set({**dict.fromkeys(self._given.keys() - told.keys()), **told})
        log.debug("levels as told: %s", record.decode())

    @property
    def record(self) -> bytes:
        return orjson.dumps({name: level.value for name, level in self._given.items()})

    @property
    def is_changed(self) -> bool:
        return bool(self._given)

    def _set(self, wanted: Mapping[str, LogLevel | None]) -> None:
        for name, level in wanted.items():
            if level is None:
                self._given.pop(name, None)
            else:
                self._given[name] = level
            _logger(name).setLevel(level.name if level is not None else self._otherwise(name))

    def _otherwise(self, name: str) -> str | int:
        return self._configured().name if name == ROOT else logging.NOTSET

    def _sorted(self) -> list[tuple[str, LogLevel]]:
        return sorted((name, level) for name, level in self._given.items() if name != ROOT)


def _rooms() -> list[str]:
    return sorted(name for name in logging.root.manager.loggerDict if name != AUDIT)


def _level(name: str, level: Any) -> LogLevel | None:
    """Raises BadRequest."""
    rooms = _rooms()
    if name != ROOT and name not in rooms:
        close = difflib.get_close_matches(name, rooms, 1)
        hint = f" did you mean {close[0]!r}?" if close else " GET lists them."
        raise BadRequest(f"There is no room {name!r} whose log could be changed;{hint}", param=name)
    try:
        return None if level is None else LogLevel(str(level).lower())
    except ValueError:
        levels = ", ".join(each.value for each in LogLevel)
        raise BadRequest(f"{level!r} is no level; there are {levels}.", param=name) from None


def _logger(name: str) -> logging.Logger:
    return logging.getLogger() if name == ROOT else logging.getLogger(name)


def _said(logger: logging.Logger) -> str:
    return _NAMES.get(logger.level, logging.getLevelName(logger.level).lower())
