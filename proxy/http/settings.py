"""The `listen`, `admin` and `security` sections."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.params import param
from proxy.core.units import Duration, Size
from proxy.http.paths import check_extension

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Listen:
    """The data port."""

    host: str = param("0.0.0.0", "address of the data port")
    port: int = param(8000, "port of the data port; 0 takes any that is free", at_least=0, at_most=65535)
    max_body: Size = param(Size(64 * MIB), "largest request body; more is 413", at_least=1)
    retained_bodies: Size = param(
        Size(512 * MIB), "request bodies held in memory by the whole process; beyond it reading pauses", at_least=1
    )
    head_timeout: Duration = param(
        Duration(30.0), "from the first byte of a request's head to its last; longer is 408", more_than=0
    )
    body_timeout: Duration = param(Duration(60.0), "between two pieces of a request body; longer is 408", more_than=0)
    keep_alive: Duration = param(
        Duration(3630.0),
        "that a connection without a request stays open; keep it above that of a proxy in front",
        more_than=0,
    )


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin port."""

    host: str = param("127.0.0.1", "address of the admin port")
    port: int = param(9190, "port of the admin port; 0 takes any that is free", at_least=0, at_most=65535)
    api_key: str | None = param(None, "bearer token of everything but probes and /metrics")

    def __post_init__(self) -> None:
        """Raises ValueError for an empty key, which would open what it was meant to close."""
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("apiKey is empty; set it, or leave it out to go without one")


@dataclass(frozen=True, slots=True)
class Security:
    """Who may ask for what."""

    relay_paths: tuple[str, ...] = param((), "further paths to relay: exact, or `/prefix/*`")

    expose_endpoint: bool = param(True, "name the pod in the x-kvlane-endpoint header of answers")

    def __post_init__(self) -> None:
        for path in self.relay_paths:
            check_extension(path)
