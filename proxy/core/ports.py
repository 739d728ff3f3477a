"""The outside world as the middle of the program sees it.

A plugin field that is annotated with one of these types is filled in by `core.wiring` and is no YAML parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NewType, Protocol

from proxy.core.exchange import Exchange

InstanceName = NewType("InstanceName", str)
"""The name under which a plugin was configured; it defaults to the plugin's type."""

ProfileNames = NewType("ProfileNames", tuple[str, ...])
"""The profiles of the scheduler that may decide, in the order of the file (shadow profiles are not among them)."""


class Clock(Protocol):
    """Two clocks, both in seconds."""

    def now(self) -> float:
        """Monotonic time; only differences mean something."""

    def wall(self) -> float:
        """Time since the Unix epoch."""


class Random(Protocol):
    """A seeded generator; `random.Random` is one."""

    def random(self) -> float:
        """Uniform in [0, 1)."""


class Tally(Protocol):
    """Counts up; a counter of the catalogue is one."""

    def add(self, amount: float = 1.0) -> None: ...


class Call(Protocol):
    """One HTTP request of a client, as the rim hands it to the gateway. Header keys are found in any case."""

    @property
    def id(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def query(self) -> str:
        """With its `?`; empty if there is none."""

    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes:
        """All of it, or the beginning of a streamed upload."""

    @property
    def received_at(self) -> float: ...


class Relay(Protocol):
    """The way to one client."""

    async def relay(self, exchange: Exchange) -> None:
        """Send `exchange.request` to `exchange.endpoint` and its answer to the client, until one of them ends it.

        Sets what `Exchange` says the relay sets; `ending` in every case. Raises UpstreamFailed only while nothing of
        the answer has reached the client and the request can be sent again; otherwise it has ended the client's
        response itself: cut short, it never looks whole. Cancelled, it aborts the pod's request at once.
        """
