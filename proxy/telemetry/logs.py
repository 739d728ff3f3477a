"""How log records look: a line for people, or one JSON object per line."""

from __future__ import annotations

import io
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from proxy.telemetry.settings import LogFormat, Telemetry

AUDIT = "kvlane.audit"
"""The logger of what is changed through the admin port: it says so at any log level."""


OF_A_REQUEST = "request %s"
"""How messages begin that are about one; collectors find its id in a field of its own."""


def set_up(settings: Telemetry, stream: TextIO | io.TextIOBase) -> None:
    """Gives the root logger one handler, in place of those it has."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_Json() if settings.log_format is LogFormat.JSON else _text())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(settings.log_level.name)
    logging.getLogger(AUDIT).setLevel(logging.INFO)


def _text() -> logging.Formatter:
    return logging.Formatter("%(asctime)s.%(msecs)03d %(levelname)-7s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S")


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
    """Text from headers and paths can hold lone surrogates, which are no Unicode: they are spelt out."""
    try:
        return orjson.dumps(fields, option=_LINE)
    except TypeError:
        return orjson.dumps(spelt_out(fields), option=_LINE)


def spelt_out(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The same with every lone surrogate as its escape."""
    return {
        name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for name, value in fields.items()
    }


_LINE = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z
