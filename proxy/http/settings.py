"""The `listen`, `admin` and `security` sections."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from proxy.auth.settings import AuthSettings
from proxy.core.params import param
from proxy.core.units import Duration, Size
from proxy.http.paths import faults_of_extension

MIB = 1024 * 1024
SEND_TIMEOUT = Duration(60.0)

_HOST_NAME = re.compile(r"[a-zA-Z0-9_-]+(\.[a-zA-Z0-9_-]+)*\.?(:[0-9]+)?")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files are PEM, and read again when they change."""

    cert: str = param(doc="file of the certificate, and of those between it and the one that clients trust")
    key: str | None = param(None, "file of its key, unless that is in the same file")
    client_ca: str | None = param(
        None, "file of the certificates that a client's must be signed by; without it clients show none"
    )
    min_version: Literal["1.2", "1.3"] = param("1.2", "oldest version of TLS that is spoken")


@dataclass(frozen=True, slots=True)
class Listen:
    """The data port."""

    host: str = param("0.0.0.0", "address of the data port")
    port: int = param(8000, "port of the data port; 0 takes any that is free", at_least=0, at_most=65535)
    max_body: Size = param(Size(64 * MIB), "largest request body; more is 413", at_least=1)
    retained_bodies: Size = param(
        Size(512 * MIB),
        "memory for request bodies, heads and pipelined requests in the whole process; beyond it reading pauses",
        at_least=1,
    )
    kept_upload: Size = param(
        Size(64 * MIB),
        "largest form that is read whole, so that it can be sent to another pod if one fails;"
        " a larger one is streamed to one pod",
        at_least=1,
    )
    head_timeout: Duration = param(
        Duration(30.0), "from the first byte of a request's head to its last; longer is 408", more_than=0
    )
    body_timeout: Duration = param(Duration(60.0), "between two pieces of a request body; longer is 408", more_than=0)
    min_body_rate: Size = param(
        Size(1024), "of a request body per second, once bodyTimeout has passed; less is 408; 0: any", at_least=0
    )
    send_timeout: Duration = param(
        SEND_TIMEOUT,
        "how long a client may read none of the bytes that wait for it; then its connection is reset",
        more_than=0,
    )
    max_connections: int = param(
        20_000, "clients that one process is connected to; one more is hung up on", at_least=1, at_most=10_000_000
    )
    tls: ServerTls | None = param(None, "to speak https")
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
    hosts: tuple[str, ...] = param(
        (),
        "further host names that requests may be addressed to, as a service name of Kubernetes or Compose;"
        " IP addresses, localhost and admin.host are always accepted. With a key, only /metrics is restricted",
    )
    tls: ServerTls | None = param(None, "to speak https")

    def __post_init__(self) -> None:
        """Raises ValueError for an empty key, which would open what it was meant to close, and for invalid hosts."""
        if self.api_key is not None and not self.api_key.strip():
            raise ValueError("apiKey is empty; set it, or leave it out to go without one")
        for name in self.hosts:
            if not _HOST_NAME.fullmatch(name):
                raise ValueError(f"hosts: {name!r} is not a host name; write it as in a URL, without scheme and path")

    @property
    def host_names(self) -> frozenset[str]:
        """The accepted host names beside `localhost` and IP addresses, normalised."""
        return frozenset(map(host_name, (self.host, *self.hosts)))


def host_name(host: str) -> str:
    """Return the name or address in a `Host` header, in lower case, without port, brackets and trailing dot."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    if host.count(":") > 1:  # an IPv6 address of the settings, which has no brackets
        return host.lower()
    return host.partition(":")[0].removesuffix(".").lower()


@dataclass(frozen=True, slots=True)
class CorsSettings:
    """Off while no origin is named."""

    origins: tuple[str, ...] = param(
        (), "sites whose pages may ask and read answers, as browsers name them: https://host; `*` is every one"
    )

    def __post_init__(self) -> None:
        """Raises ValueError for what no browser calls an origin."""
        for origin in self.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise ValueError(f"origins: {origin!r} is none; write https://host, with the port if it is another")


@dataclass(frozen=True, slots=True)
class Security(AuthSettings):
    """Who may ask for what. Without keys and tokens nobody is asked who he is."""

    relay_paths: tuple[str, ...] = param((), "further paths to relay: exact, or `/prefix/*`")

    expose_endpoint: bool = param(
        True, "name the pod, and the model in place of another, in x-kvlane-endpoint and -model"
    )

    client_ranks: bool = param(
        False, "Let clients choose a data-parallel rank by X-data-parallel-rank; it is ignored otherwise."
    )

    cors: CorsSettings = field(default_factory=CorsSettings)

    def __post_init__(self) -> None:
        AuthSettings.__post_init__(self)
        faults = [fault for path in self.relay_paths for fault in faults_of_extension(path)]
        if faults:
            raise ValueError("; ".join(faults))
