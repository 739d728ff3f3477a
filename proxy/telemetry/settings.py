"""The `telemetry` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from proxy.core.params import param
from proxy.core.units import Duration, Size


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
class DecisionSettings:
    """Of each process."""

    keep: int = param(
        1000, "latest decisions that are kept, and as many that were slow, failed or asked for", at_least=1
    )
    sample: float = param(
        1.0, "share of the requests of which it is kept; 0: of those only that ask for it", at_least=0, at_most=1
    )
    slow: Duration = param(Duration(5.0), "to the first byte: what takes longer is kept for longer", more_than=0)
    max_bytes: Size = param(Size(64 << 20), "memory of all of them; what is oldest goes", at_least=1 << 16)


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Needs `kvlane[otel]`."""

    endpoint: str = param(
        "http://localhost:4318", "of the collector, for OTLP over HTTP; /v1/traces is added to a URL without a path"
    )
    sample: float = param(
        1.0, "share of the requests that are traced, of those that come without a traceparent", at_least=0, at_most=1
    )
    collector_headers: Mapping[str, str] = param({}, "sent to the collector, for its keys")
    service_name: str = param("kvlane", "that spans are said to come from")

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint: {self.endpoint!r} is no URL of http or https")


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
    decisions: DecisionSettings | None = param(
        None, "why pods were chosen, for `x-kvlane-explain`, /debug/decisions and `kvlane explain`; null: nothing"
    )
    tracing: TracingSettings | None = param(
        None, "spans of requests, decisions and legs, for OpenTelemetry; null: nothing, and trace headers just pass"
    )
