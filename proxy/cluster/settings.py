"""The `replicas` section, and the parser of its store's URL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, urlsplit

from proxy.core.params import Duration, param
from proxy.fleet.settings import bracketed

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")

PORT, SENTINEL_PORT = 6379, 26379
"""Default ports."""


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """The address of the store. `url` is the URL of one server, or of the first of several hosts, with TLS if they use
    it, and with all options."""

    url: str
    hosts: tuple[tuple[str, int], ...] = ()
    """The sentinels, or the nodes of a cluster."""
    service: str = ""
    """The name of the master that the sentinels watch."""

    @property
    def urls(self) -> list[str]:
        """Return the URL of each host."""
        _, __, options = self.url.partition("?")
        scheme = urlsplit(self.url).scheme
        return [f"{scheme}://{bracketed(host)}:{port}{options and '?' + options}" for host, port in self.hosts]

    @property
    def has_tls(self) -> bool:
        return self.url.startswith("rediss:")


def address_of(store: str) -> StoreAddress:
    """Return the address of a URL. Raise ValueError."""
    parts = urlsplit(store)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"store: must be 'none' or a URL of one of {', '.join(SCHEMES)}")
    if "@" in parts.netloc:
        raise ValueError("store: has a password in it, which would be shown; give username and password beside it")
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        _host(parts.netloc, PORT)
        return StoreAddress(store)
    service = parts.path.strip("/")
    if kind == "sentinel" and not service:
        raise ValueError("store: names no service; write redis+sentinel://HOST:PORT/SERVICE")
    hosts = _hosts(parts, SENTINEL_PORT if kind == "sentinel" else PORT)
    host, port = hosts[0]
    options = parts.query and f"?{parts.query}"
    return StoreAddress(f"{scheme}://{bracketed(host)}:{port}{options}", hosts, service if kind == "sentinel" else "")


def _hosts(parts: SplitResult, port: int) -> tuple[tuple[str, int], ...]:
    hosts = tuple(_host(host, port) for host in parts.netloc.split(","))
    if not all(host for host, _ in hosts):
        raise ValueError("store: names no host")
    return hosts


def _host(text: str, port: int) -> tuple[str, int]:
    found = urlsplit(f"//{text.strip()}")
    try:
        return found.hostname or "", found.port or port
    except ValueError:
        raise ValueError(f"store: {text!r} is no HOST:PORT") from None


NONE = "none"


@dataclass(frozen=True, slots=True)
class ReplicaSettings:
    """Several proxies that share state over Redis or Valkey; needs the extra kvlane[redis]. Workers of one host share
    state without it."""

    store: str = param(
        NONE,
        "URL of the store, or none: redis://HOST:PORT/DB, rediss:// with TLS, unix://PATH, "
        "redis+sentinel://HOST:PORT,HOST:PORT/SERVICE, redis+cluster://HOST:PORT,HOST:PORT",
    )
    username: str | None = param(None, "user name for the store's ACL")
    password: str | None = param(None, "password of the store")
    sentinel_username: str | None = param(None, "user name for the sentinels' ACL")
    sentinel_password: str | None = param(None, "password of the sentinels; they do not use that of the store")
    prefix: str = param("kvlane", "prefix of all channels and keys; proxies with the same prefix form one group")
    name: str | None = param(None, "name of this proxy in the group; default: the host name")
    lease: Duration = param(
        Duration(5.0),
        "time without a message after which a proxy and its requests in flight are forgotten",
        at_least=0.5,
    )
    limits: Literal["localShare", "open"] = param(
        "localShare",
        "limits while the store is unreachable. localShare: assume that the other proxies spend as much as "
        "this one, and enforce this proxy's share of each cap; open: assume that they spend nothing",
    )

    def __post_init__(self) -> None:
        """Raise ValueError for inconsistent values."""
        if not self.is_shared:
            return
        is_watched = bool(address_of(self.store).service)
        if not is_watched and (self.sentinel_username or self.sentinel_password):
            raise ValueError("sentinelUsername and sentinelPassword are for redis+sentinel://")
        if not self.prefix:
            raise ValueError("prefix: is empty")

    @property
    def is_shared(self) -> bool:
        return self.store != NONE
