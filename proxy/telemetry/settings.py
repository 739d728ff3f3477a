"""The `telemetry` section."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from proxy.core.params import param


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class Telemetry:
    log_level: LogLevel = param(LogLevel.INFO, "debug, info, warning or error")
    log_format: LogFormat = param(LogFormat.TEXT, "text for people, json for collectors: one object per line")
    access_log: bool = param(True, "one JSON line per request on standard output; never prompts, never keys")
