"""Where the store is, as its URL says: redis-py reads URLs of one server only."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster")

PORT, SENTINEL_PORT = 6379, 26379
"""Where none is given."""


@dataclass(frozen=True, slots=True)
class Address:
    """`url` is that of one server, or of the first of several hosts: with TLS, if they have it, and all options."""

    url: str
    hosts: tuple[tuple[str, int], ...] = ()
    """Of the sentinels, or of nodes of a cluster."""
    service: str = ""
    """What the sentinels are asked for."""

    @property
    def urls(self) -> list[str]:
        """Of each of the hosts."""
        _, __, options = self.url.partition("?")
        scheme = urlsplit(self.url).scheme
        return [f"{scheme}://{_bracketed(host)}:{port}{options and '?' + options}" for host, port in self.hosts]

    @property
    def has_tls(self) -> bool:
        return self.url.startswith("rediss:")


def address_of(store: str) -> Address:
    """Raises ValueError."""
    parts = urlsplit(store)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"store is 'none' or a URL of one of {', '.join(SCHEMES)}")
    if "@" in parts.netloc:
        raise ValueError("store has a password in it, which would be shown: give username and password beside it")
    scheme, _, kind = parts.scheme.partition("+")
    if not kind:
        _host(parts.netloc, PORT)
        return Address(store)
    service = parts.path.strip("/")
    if kind == "sentinel" and not service:
        raise ValueError("store names no service: redis+sentinel://HOST:PORT/SERVICE")
    hosts = _hosts(parts, SENTINEL_PORT if kind == "sentinel" else PORT)
    host, port = hosts[0]
    options = parts.query and f"?{parts.query}"
    return Address(f"{scheme}://{_bracketed(host)}:{port}{options}", hosts, service if kind == "sentinel" else "")


def _hosts(parts: SplitResult, port: int) -> tuple[tuple[str, int], ...]:
    hosts = tuple(_host(host, port) for host in parts.netloc.split(","))
    if not all(host for host, _ in hosts):
        raise ValueError("store names no host")
    return hosts


def _host(text: str, port: int) -> tuple[str, int]:
    found = urlsplit(f"//{text.strip()}")
    try:
        return found.hostname or "", found.port or port
    except ValueError:
        raise ValueError(f"store: {text!r} is no HOST:PORT") from None


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
