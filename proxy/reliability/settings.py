"""The `reliability` section."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.core.params import param
from proxy.core.units import Duration


@dataclass(frozen=True, slots=True)
class Timeouts:
    """`first_byte` and `idle` are for streams: an answer in one piece sends its headers only when it is done, so it is
    bounded by `request`."""

    connect: Duration = param(Duration(2.0), "to establish a connection to a pod", more_than=0)
    first_byte: Duration = param(Duration(300.0), "from the request to the first byte of a stream", more_than=0)
    idle: Duration = param(Duration(60.0), "between two chunks of a stream", more_than=0)
    request: Duration = param(Duration(1800.0), "for the whole of a request", more_than=0)


@dataclass(frozen=True, slots=True)
class Retries:
    attempts: int = param(3, "pods tried in all, before the first byte", at_least=1)


@dataclass(frozen=True, slots=True)
class Drain:
    grace: Duration = param(Duration(120.0), "that running requests have to end when kvlane is told to stop")


@dataclass(frozen=True, slots=True)
class ReliabilitySettings:
    timeouts: Timeouts = field(default_factory=Timeouts)
    retries: Retries = field(default_factory=Retries)
    drain: Drain = field(default_factory=Drain)
