"""Connections to pods, kept open between requests, per endpoint."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass
from urllib.parse import urlsplit

from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConnectFailed, OutOfFiles, UpstreamTimedOut
from proxy.core.ports import Clock
from proxy.http.upstream.connection import Connection
from proxy.http.upstream.dial import Resolve, dial, look_up
from proxy.http.upstream.errors import not_connected
from proxy.http.upstream.trust import Trust

IDLE_LIMIT = 4.0
"""Seconds; below the five after which uvicorn closes, so that requests seldom meet a connection that is just going."""

IDLE_PER_POD = 512
QUIET_LOOKS = 600


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
    """The pool's side of one URL, until it is forgotten."""

    __slots__ = ("_idle_limit", "_now", "_room", "address", "idle", "quiet")

    def __init__(self, url: str, clock: Clock, idle_limit: float) -> None:
        """Raises ValueError for a URL that is none."""
        self.address = Address.of(url)
        self.idle: list[Connection] = []
        """Most recently used last, and taken first."""
        self.quiet = 0
        """How often in a row `reap` found nothing here."""
        self._room = IDLE_PER_POD
        self._idle_limit = idle_limit
        self._now = clock.now

    def take(self) -> Connection | None:
        """A connection that was used before: the pod may be closing it at this moment."""
        idle, oldest = self.idle, self._now() - self._idle_limit
        while idle:
            connection = idle.pop()
            if connection.idle_since > oldest and not connection.transport.is_closing():
                return connection
            connection.abort()
        return None

    def release(self, connection: Connection) -> None:
        idle = self.idle
        if len(idle) < self._room:
            connection.idle_since = self._now()
            idle.append(connection)
        else:
            connection.abort()

    def lost(self, connection: Connection) -> None:
        if connection in self.idle:
            self.idle.remove(connection)

    def reap(self) -> None:
        oldest = self._now() - self._idle_limit
        stale = [connection for connection in self.idle if connection.idle_since <= oldest]
        if stale:
            del self.idle[: len(stale)]
            _close(stale)
        self.quiet = 0 if self.idle else self.quiet + 1

    def forget(self) -> None:
        """Connections in use close when their answers end."""
        self._room = 0
        idle, self.idle = self.idle, []
        _close(idle)


class Pods(dict[str, Pod]):
    """By URL, made when they are asked for: an endpoint that moves has a pod of its own where it goes."""

    def __init__(self, clock: Clock, idle_limit: float) -> None:
        self._clock = clock
        self._idle_limit = idle_limit

    def __missing__(self, url: str) -> Pod:
        """Raises ConnectFailed if the URL is none."""
        try:
            pod = self[url] = Pod(url, self._clock, self._idle_limit)
        except ValueError as error:
            raise ConnectFailed(str(error)) from error
        return pod


class UpstreamPool:
    """Hands out connections; they come back by themselves when an answer ended well."""

    def __init__(
        self,
        connect_timeout: float,
        clock: Clock,
        resolve: Resolve = look_up,
        idle_limit: float = IDLE_LIMIT,
        trust: Trust | None = None,
    ) -> None:
        """Connections that were idle for `idle_limit` seconds are not used again. Without `trust` the system's
        certificates are trusted."""
        self.pods = Pods(clock, idle_limit)
        self.connect_timeout = connect_timeout
        self._resolve = resolve
        self._clock = clock
        self._trust = trust or Trust()

    async def connect(self, pod: Pod, deadline: float = math.inf) -> Connection:
        """Return a fresh connection. Raises ConnectFailed, ConnectRefused or OutOfFiles if that is why, or
        UpstreamTimedOut at `deadline`, in monotonic seconds."""
        address, left = pod.address, deadline - self._clock.now()
        try:
            tls = self._trust.at(address.host, address.port) if address.tls else None
            async with asyncio.timeout(min(self.connect_timeout, left)):
                return await dial(
                    lambda: Connection(pod.release, pod.lost), address.host, address.port, tls, self._resolve
                )
        except TimeoutError as error:
            if left < self.connect_timeout:
                raise UpstreamTimedOut("no connection in the time that the request has") from error
            raise ConnectFailed(f"no connection within {self.connect_timeout:g} s") from error
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up, or is none for TLS
            raise not_connected(error, self._clock.now()) from error

    async def takes_connections(self, endpoint: Endpoint) -> bool:
        """Return whether the pod does at this moment; True if this process has no descriptor left to find out."""
        try:
            pod = self.pods[endpoint.url]
            pod.release(await self.connect(pod))
        except OutOfFiles:
            return True
        except ConnectFailed:
            return False
        return True

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint is gone: its idle connections close; those in use do when their answers end."""
        self._drop(endpoint.url)

    def reap(self) -> None:
        """Closes what has been idle for too long; called now and then. A pod where nothing was idle for QUIET_LOOKS of
        them was left by an endpoint that moved, or is not in use."""
        for url, pod in tuple(self.pods.items()):
            pod.reap()
            if pod.quiet > QUIET_LOOKS:
                self._drop(url)

    def close(self) -> None:
        for url in tuple(self.pods):
            self._drop(url)

    def _drop(self, url: str) -> None:
        pod = self.pods.pop(url, None)
        if pod is not None:
            pod.forget()


def _close(connections: list[Connection]) -> None:
    for connection in connections:
        connection.abort()
