"""Connections to pods, kept open between requests, per endpoint."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConnectFailed
from proxy.core.ports import Clock
from proxy.http.upstream.connection import Connection

IDLE_LIMIT = 4.0
"""Seconds; below the five after which uvicorn closes, so that requests seldom meet a connection that is just going."""

IDLE_PER_POD = 512


@dataclass(frozen=True, slots=True)
class Address:
    """Where a pod listens, from its URL. `host_header` and `base` (path before every path) are as sent."""

    host: str
    port: int
    tls: bool
    host_header: bytes
    base: bytes

    @classmethod
    def of(cls, url: str) -> Address:
        """Raises ValueError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http or https URL")
        tls = parts.scheme == "https"
        netloc = parts.netloc.rpartition("@")[2]
        return cls(
            host=parts.hostname,
            port=parts.port or (443 if tls else 80),
            tls=tls,
            host_header=netloc.encode("idna" if not netloc.isascii() else "ascii"),
            base=parts.path.rstrip("/").encode("ascii"),
        )


class Pod:
    """The pool's side of an endpoint, until it is forgotten."""

    __slots__ = ("_clock", "address", "forgotten", "idle", "url")

    def __init__(self, url: str, clock: Clock) -> None:
        """Raises ValueError for a URL that is none."""
        self.url = url
        self.address = Address.of(url)
        self.idle: list[Connection] = []
        """Most recently used last, and taken first."""
        self.forgotten = False
        self._clock = clock

    def take(self) -> Connection | None:
        oldest = self._clock.now() - IDLE_LIMIT
        while self.idle:
            connection = self.idle.pop()
            if connection.is_usable() and connection.idle_since > oldest:
                return connection
            connection.abort()
        return None

    def release(self, connection: Connection) -> None:
        if self.forgotten or len(self.idle) >= IDLE_PER_POD:
            connection.abort()
            return
        connection.idle_since = self._clock.now()
        self.idle.append(connection)

    def lost(self, connection: Connection) -> None:
        if connection in self.idle:
            self.idle.remove(connection)

    def reap(self) -> None:
        oldest = self._clock.now() - IDLE_LIMIT
        stale = [connection for connection in self.idle if connection.idle_since <= oldest]
        if stale:
            del self.idle[: len(stale)]
            _close(stale)

    def forget(self) -> None:
        self.forgotten = True
        idle, self.idle = self.idle, []
        _close(idle)


class UpstreamPool:
    """Hands out connections; they come back by themselves when an answer ended well."""

    def __init__(self, connect_timeout: float, clock: Clock) -> None:
        self._connect_timeout = connect_timeout
        self._clock = clock
        self._pods: dict[Endpoint, Pod] = {}
        self._tls: ssl.SSLContext | None = None

    def address(self, endpoint: Endpoint) -> Address:
        """Raises ConnectFailed if the endpoint's URL is none."""
        return self._pod(endpoint).address

    def idle(self, endpoint: Endpoint) -> Connection | None:
        """A connection that was used before: the pod may be closing it at this moment."""
        return self._pod(endpoint).take()

    async def connect(self, endpoint: Endpoint) -> Connection:
        """A fresh connection. Raises ConnectFailed."""
        pod = self._pod(endpoint)
        try:
            async with asyncio.timeout(self._connect_timeout):
                return await self._open(pod)
        except TimeoutError as error:
            raise ConnectFailed(f"no connection within {self._connect_timeout:g} s") from error
        except OSError as error:
            raise ConnectFailed(f"no connection: {error}") from error

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint is gone: its idle connections close; those in use do when their answers end."""
        pod = self._pods.pop(endpoint, None)
        if pod is not None:
            pod.forget()

    def reap(self) -> None:
        """Closes what has been idle for too long; called now and then."""
        for pod in self._pods.values():
            pod.reap()

    def close(self) -> None:
        for endpoint in list(self._pods):
            self.forget(endpoint)

    def _pod(self, endpoint: Endpoint) -> Pod:
        """What the pool knows of the pod at this URL: an endpoint that moved keeps nothing of where it was."""
        pod = self._pods.get(endpoint)
        if pod is not None and pod.url == endpoint.url:
            return pod
        self.forget(endpoint)
        try:
            pod = self._pods[endpoint] = Pod(endpoint.url, self._clock)
        except ValueError as error:
            raise ConnectFailed(str(error)) from error
        return pod

    async def _open(self, pod: Pod) -> Connection:
        address = pod.address
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(pod.release, pod.lost),
            address.host,
            address.port,
            ssl=self._context() if address.tls else None,
        )
        return connection

    def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = ssl.create_default_context()
        return self._tls


def _close(connections: list[Connection]) -> None:
    for connection in connections:
        connection.abort()
