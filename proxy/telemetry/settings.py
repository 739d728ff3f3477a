"""The `telemetry` section."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from proxy.core.params import param
from proxy.core.units import Size


class LogLevel(Enum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(Enum):
    TEXT = "text"
    JSON = "json"


@dataclass(frozen=True, slots=True)
class RecordSettings:
    file: str = param(doc="path, which all workers write to; beside it `FILE.key` has the secret of the hashes")
    max_size: Size = param(Size(256 << 20), "a file that is larger makes room for the next one", at_least=1 << 10)
    keep: int = param(4, "full files that stay, as `FILE.1`, `FILE.2`, …; the oldest goes", at_least=0)

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError("file is empty; give a path, or leave record out")


@dataclass(frozen=True, slots=True)
class Telemetry:
    log_level: LogLevel = param(LogLevel.INFO, "debug, info, warning or error")
    log_format: LogFormat = param(LogFormat.TEXT, "text for people, json for collectors: one object per line")
    access_log: bool = param(True, "one JSON line per request on standard output; never prompts, never keys")
    ask_for_usage: bool = param(
        False, "ask pods for the usage of streams whose clients do not ask, and take it out of the answer again"
    )
    record: RecordSettings | None = param(
        None, "what `kvlane replay` and `kvlane tune` need of each request, to a file: lengths, times, salted hashes"
    )
