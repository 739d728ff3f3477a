"""The `telemetry` section."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from proxy.core.params import Duration, Size, param


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
    file: str = param(doc="path of the record; all workers append to it. `FILE.key` holds the secret of the hashes")
    max_size: Size = param(Size(256 << 20), "start a new file at this size", at_least=1 << 10)
    keep: int = param(4, "number of full files to keep, as `FILE.1`, `FILE.2`, …; the oldest is deleted", at_least=0)

    def __post_init__(self) -> None:
        if not self.file:
            raise ValueError("file: is empty; set a path, or remove record")


@dataclass(frozen=True, slots=True)
class DecisionSettings:
    """Explained decisions. Limits apply to each process."""

    keep: int = param(
        1000, "number of recent decisions to keep, and the number of slow, failed or requested ones", at_least=1
    )
    sample: float = param(
        1.0,
        "share of requests whose decision is kept; 0 keeps only decisions requested with x-kvlane-explain",
        at_least=0,
        at_most=1,
    )
    slow: Duration = param(Duration(5.0), "time to first byte above which a decision is kept for longer", more_than=0)


@dataclass(frozen=True, slots=True)
class TracingSettings:
    """Needs `kvlane[otel]`."""

    endpoint: str = param(
        "http://localhost:4318",
        "URL of the collector, for OTLP over HTTP; /v1/traces is appended to a URL without a path",
    )
    sample: float = param(1.0, "share of requests without a traceparent header that are traced", at_least=0, at_most=1)
    collector_headers: Mapping[str, str] = param({}, "headers sent to the collector, such as an API key")
    service_name: str = param("kvlane", "service.name of the spans")

    def __post_init__(self) -> None:
        if not self.endpoint.startswith(("http://", "https://")):
            raise ValueError(f"endpoint: {self.endpoint!r} is not an http or https URL")


@dataclass(frozen=True, slots=True)
class Telemetry:
    log_level: LogLevel = param(LogLevel.INFO, "least severe level that is logged: debug, info, warning or error")
    log_format: LogFormat = param(LogFormat.TEXT, "text, or json: one object per line")
    access_log: bool = param(True, "write one JSON line per request to standard output, without prompts and keys")
    ask_for_usage: bool = param(
        False,
        "request usage of every stream from the pods, and remove it from responses to clients that did not request it",
    )
    record: RecordSettings | None = param(
        None, "record lengths, times and salted hashes of requests to a file, for `kvlane replay` and `kvlane tune`"
    )
    decisions: DecisionSettings | None = param(
        None, "keep decisions for x-kvlane-explain, /debug/decisions and `kvlane explain`; null keeps none"
    )
    tracing: TracingSettings | None = param(
        None,
        "export OpenTelemetry spans of requests, decisions and attempts; null exports none, trace headers pass",
    )
