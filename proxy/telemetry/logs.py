"""The log: its format, its levels, and changes of levels."""

from __future__ import annotations

import difflib
import io
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from proxy.core.errors import BadRequest
from proxy.telemetry.settings import LogFormat, LogLevel, Telemetry

log = logging.getLogger(__name__)

AUDIT = "kvlane.audit"
"""The logger of changes through the admin port; it logs at any log level."""

OF_A_REQUEST = "request %s"
"""Beginning of messages about a request; log collectors get its id in a separate field."""


def set_up(settings: Telemetry, stream: TextIO | io.TextIOBase) -> None:
    """Replace the handlers of the root logger with one handler."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        _Json()
        if settings.log_format is LogFormat.JSON
        else _Text("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.name)
    logging.getLogger(AUDIT).setLevel(logging.INFO)


class _Text(logging.Formatter):
    """The text format. Further lines are indented, so that text from a pod or a client cannot look like a message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return visible(super().formatMessage(record)).replace("\n", "\n  ")


def visible(text: str) -> str:
    """Return the text with control characters, which can steer terminals, as escapes; line feeds and tabs stay."""
    return text if text.isprintable() else _CONTROLS.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = {
            "time": datetime.fromtimestamp(record.created, UTC),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if isinstance(record.args, tuple) and record.args and str(record.msg).startswith(OF_A_REQUEST):
            fields["request_id"] = str(record.args[0])
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_line(fields).decode().rstrip("\n")


def json_line(fields: Mapping[str, Any]) -> bytes:
    """Return a line of JSON. Lone surrogates in headers and paths, which are invalid Unicode, are escaped."""
    try:
        return orjson.dumps(fields, option=_LINE)
    except TypeError:
        escaped = {
            name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
            for name, value in fields.items()
        }
        return orjson.dumps(escaped, option=_LINE)


_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z

ROOT = "root"
"""The level of every logger without a level of its own."""


@dataclass(eq=False)
class LogLevels:
    """The log levels of a process. `publish` receives each change for other processes to `apply`."""

    configured: Callable[[], LogLevel]
    publish: Callable[[bytes], None] = lambda record: None
    _given: dict[str, LogLevel] = field(init=False, default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """Return the levels, which also apply to the loggers below, and the loggers that can have one (`rooms`)."""
        given = {name: level.value for name, level in sorted(self._given.items()) if name != ROOT}
        return {"levels": {ROOT: logging.getLevelName(logging.root.level).lower(), **given}, "rooms": _loggers()}

    def change(self, wanted: Any) -> None:
        """Set the levels of loggers by name; null resets one. Raise BadRequest, and change nothing."""
        if not isinstance(wanted, dict) or not wanted:
            raise BadRequest('Send loggers with their levels, such as {"proxy.fleet": "debug"}; null resets one.')
        self._set({name: _level(name, level) for name, level in wanted.items()})
        self.publish(self.record)

    def reload(self, before: LogLevel) -> None:
        """Apply the configured level, unless the previous configuration had the same."""
        if (level := self.configured()) is not before:
            logging.getLogger().setLevel(level.name)

    def apply(self, record: bytes) -> None:
        """Apply a change that another process published."""
        given = {name: LogLevel(level) for name, level in orjson.loads(record).items()}
        self._set({**dict.fromkeys(self._given.keys() - given.keys()), **given})
        log.debug("log levels set to %s", record.decode())

    @property
    def record(self) -> bytes:
        return orjson.dumps({name: level.value for name, level in self._given.items()})

    def _set(self, wanted: Mapping[str, LogLevel | None]) -> None:
        for name, level in wanted.items():
            if level is None:
                self._given.pop(name, None)
            else:
                self._given[name] = level
            default = self.configured().name if name == ROOT else logging.NOTSET
            logging.getLogger(None if name == ROOT else name).setLevel(default if level is None else level.name)


def _loggers() -> list[str]:
    return sorted(name for name in logging.root.manager.loggerDict if name != AUDIT)


def _level(name: str, level: Any) -> LogLevel | None:
    """Return a level. Raise BadRequest."""
    loggers = _loggers()
    if name != ROOT and name not in loggers:
        close = difflib.get_close_matches(name, loggers, 1)
        hint = f" did you mean {close[0]!r}?" if close else " GET lists them."
        raise BadRequest(f"There is no logger {name!r};{hint}", param=name)
    try:
        return None if level is None else LogLevel(str(level).lower())
    except ValueError:
        levels = ", ".join(each.value for each in LogLevel)
        raise BadRequest(f"{level!r} is not a log level; use one of {levels}.", param=name) from None
