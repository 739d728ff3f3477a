"""Connections to pods, kept open between requests, and kvlane's own requests to pods."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import math
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TypeVar
from urllib.parse import quote, urlsplit

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

from proxy.core.endpoint import Endpoint
from proxy.core.errors import (
    ConnectFailed,
    ConnectRefused,
    Disconnected,
    InvalidResponse,
    OutOfFiles,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.files import CANNOT_CONNECT, files_limit_of, report_out_of_files
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.http.head import ResponseHead, header_line
from proxy.http.rank import RANK_HEADER
from proxy.http.settings import PodTlsContexts
from proxy.http.upstream.connection import PodConnection, Receiver

log = logging.getLogger(__name__)


IDLE_LIMIT = 4.0
"""Seconds; below the five after which uvicorn closes, so that requests seldom meet a closing connection."""

IDLE_PER_POD = 512
QUIET_REAPS = 600


NEXT_AFTER = 0.25
"""Seconds before the next address of a host is tried in parallel (RFC 8305, section 5)."""

Resolve = Callable[[str, int], Awaitable[Sequence[AddrInfoType]]]
"""(host, port) -> addresses as of `socket.getaddrinfo`, best first. Raises OSError."""

P = TypeVar("P", bound=asyncio.Protocol)


async def resolve_host(host: str, port: int) -> Sequence[AddrInfoType]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


@dataclass(frozen=True, slots=True)
class PodAddress:
    """The address of a pod, from its URL. `host_header` and `base` (the path before every path) are as sent."""

    host: str
    port: int
    tls: bool
    host_header: bytes
    base: bytes

    @classmethod
    def of(cls, url: str) -> PodAddress:
        """Raise ValueError."""
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


class PodConnections:
    """The connections of one URL."""

    def __init__(self, url: str, clock: Clock, idle_limit: float) -> None:
        """Raise ValueError for an invalid URL."""
        self.address = PodAddress.of(url)
        self.idle: list[PodConnection] = []
        """Most recently used last, and taken first."""
        self.quiet = 0
        """Number of consecutive calls of `reap` that found nothing."""
        self._capacity = IDLE_PER_POD
        self._idle_limit = idle_limit
        self._now = clock.now

    def acquire(self) -> PodConnection | None:
        """Return a used connection, which the pod may be closing at this moment."""
        idle, oldest = self.idle, self._now() - self._idle_limit
        while idle:
            connection = idle.pop()
            if connection.idle_since > oldest and not connection.transport.is_closing():
                return connection
            connection.abort()
        return None

    def release(self, connection: PodConnection) -> None:
        idle = self.idle
        if len(idle) < self._capacity:
            connection.idle_since = self._now()
            idle.append(connection)
        else:
            connection.abort()

    def lost(self, connection: PodConnection) -> None:
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
        """Close idle connections now and the others after their responses."""
        self._capacity = 0
        idle, self.idle = self.idle, []
        _close(idle)


class UpstreamPool(dict[str, PodConnections]):
    """Provides connections by the URL of a pod; an endpoint that moves gets new ones. They return by themselves when a
    response has ended well."""

    def __init__(
        self,
        connect_timeout: float,
        clock: Clock,
        resolve: Resolve = resolve_host,
        idle_limit: float = IDLE_LIMIT,
        pod_tls: PodTlsContexts | None = None,
    ) -> None:
        """Connections that were idle for `idle_limit` seconds are not reused. Without `pod_tls` the certificate
        authorities of the system apply."""
        super().__init__()
        self.connect_timeout = connect_timeout
        self._idle_limit = idle_limit
        self._resolve = resolve
        self._clock = clock
        self._pod_tls = pod_tls or PodTlsContexts()

    def __missing__(self, url: str) -> PodConnections:
        """Raise ConnectFailed for an invalid URL."""
        try:
            pod = self[url] = PodConnections(url, self._clock, self._idle_limit)
        except ValueError as error:
            raise ConnectFailed(str(error)) from error
        return pod

    async def connect(self, pod: PodConnections, deadline: float = math.inf) -> PodConnection:
        """Return a fresh connection. Raise ConnectFailed, ConnectRefused, OutOfFiles, or UpstreamTimedOut at
        `deadline`, in monotonic seconds."""
        address, left = pod.address, deadline - self._clock.now()
        try:
            tls = self._pod_tls.at(address.host, address.port) if address.tls else None
            async with asyncio.timeout(min(self.connect_timeout, left)):
                return await dial(
                    lambda: PodConnection(pod.release, pod.lost), address.host, address.port, tls, self._resolve
                )
        except TimeoutError as error:
            if left < self.connect_timeout:
                raise UpstreamTimedOut("no connection in the time that the request has") from error
            raise ConnectFailed(f"no connection within {self.connect_timeout:g} s") from error
        except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up, or is invalid for TLS
            raise not_connected(error) from error

    async def takes_connections(self, endpoint: Endpoint) -> bool:
        """Return whether the pod accepts a connection now; True if this process has no descriptor to find out."""
        try:
            pod = self[endpoint.url]
            pod.release(await self.connect(pod))
        except OutOfFiles:
            return True
        except ConnectFailed:
            return False
        return True

    async def keep_reaping(self, interval: float) -> None:
        """Call `reap` every `interval` seconds until cancelled."""
        while True:
            await asyncio.sleep(interval)
            self.reap()

    def reap(self) -> None:
        """Close connections that were idle for too long. A pod without idle connections in
        QUIET_REAPS calls is dropped: its endpoint moved or is unused."""
        for url, pod in tuple(self.items()):
            pod.reap()
            if pod.quiet > QUIET_REAPS:
                self.forget(url)

    def close(self) -> None:
        for url in tuple(self):
            self.forget(url)

    def forget(self, url: str) -> None:
        """Close the connections of a removed pod: idle ones now, others after their responses."""
        pod = self.pop(url, None)
        if pod is not None:
            pod.forget()


def _close(connections: list[PodConnection]) -> None:
    for connection in connections:
        connection.abort()


async def dial(
    make: Callable[[], P], host: str, port: int, tls: tuple[ssl.SSLContext, str] | None, resolve: Resolve
) -> P:
    """Return the protocol of a new connection. `tls` has the name that the certificate must have. uvloop tries
    addresses only in sequence, so they race here. Raise OSError."""
    loop = asyncio.get_running_loop()
    context, name = tls or (None, None)
    if is_address(host):
        _, protocol = await loop.create_connection(make, host, port, ssl=context, server_hostname=name)
        return protocol
    addresses = await resolve(host, port)
    sock = await aiohappyeyeballs.start_connection(addresses, happy_eyeballs_delay=NEXT_AFTER)
    try:
        _, protocol = await loop.create_connection(make, sock=sock, ssl=context, server_hostname=name)
    except BaseException:
        sock.close()
        raise
    return protocol


@lru_cache(maxsize=4096)
def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def not_connected(error: OSError | ValueError) -> ConnectFailed:
    """Return the failure to raise for an error of connecting to a pod, or of looking up its name."""
    if code := files_limit_of(error):
        return OutOfFiles(f"no connection: {report_out_of_files(CANNOT_CONNECT, code)}")
    failure = ConnectRefused if isinstance(error, ConnectionRefusedError) else ConnectFailed
    return failure(f"no connection: {error}")


LONGEST = 4 * 1024 * 1024
"""Bytes of a response that is collected."""

FETCH_IDLE_LIMIT = 60.0
"""Seconds; longer than for requests, because pods of large fleets are scraped rarely."""

REAP_INTERVAL = 4.0

_HEAD = b"host: %b\r\nuser-agent: kvlane\r\naccept: text/plain, application/json\r\naccept-encoding: identity\r\n"
_SAFE = "/?%:@!$&'()*+,;=~[]"


class PooledFetcher:
    """Implements `fleet.refresh.Fetcher` inside `async with`. It has its own connections, so that scrapes never compete
    with requests."""

    def __init__(self, timeout: float, clock: Clock, pod_tls: PodTlsContexts | None = None) -> None:
        """`timeout`: seconds for one exchange. `pod_tls`: see `UpstreamPool`."""
        self._pool = UpstreamPool(timeout, clock, idle_limit=FETCH_IDLE_LIMIT, pod_tls=pod_tls)
        self._tasks = Tasks()

    @property
    def timeout(self) -> float:
        return self._pool.connect_timeout

    @timeout.setter
    def timeout(self, timeout: float) -> None:
        self._pool.connect_timeout = timeout

    async def __aenter__(self) -> PooledFetcher:
        self._tasks.keep(partial(self._pool.keep_reaping, REAP_INTERVAL), "idle-connections-of-scrapes")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()
        self._pool.close()

    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        return await self.post(url, None, api_key)

    async def post(
        self, url: str, body: bytes | None, api_key: str | None, rank: int | None = None
    ) -> tuple[int, bytes]:
        """Implements `ports.Poster`; without a body, send a GET."""
        origin, head = _request(url, api_key, None if body is None else len(body), rank)
        try:
            async with asyncio.timeout(self.timeout):
                return await self._ask(self._pool[origin], head, body or b"")
        except TimeoutError as error:
            raise UpstreamTimedOut(f"no response within {self.timeout:g} s") from error

    async def _ask(self, pod: PodConnections, head: bytes, body: bytes) -> tuple[int, bytes]:
        """Send the request; if a reused connection closes without a byte, repeat it on a fresh one."""
        used = pod.acquire()
        if used is not None:
            try:
                return await _response_of(used, head, body)
            except Disconnected as error:
                if not error.silent:
                    raise
        return await _response_of(await self._pool.connect(pod), head, body)


class Collected(Receiver):
    """Keeps a response until it is whole."""

    def __init__(self, connection: PodConnection) -> None:
        self._connection = connection
        self.size = 0
        """Bytes of it that have come, framing and all, before the last read."""
        self.whole: asyncio.Future[tuple[ResponseHead, bytes]] = asyncio.get_running_loop().create_future()

    def abandon(self) -> None:
        """Close the connection before the response is whole."""
        self._connection.abort()
        self.whole.cancel()

    def head_received(self, head: ResponseHead) -> None:
        if head.status == 101:
            raise InvalidResponse("it switched protocols without a request")
        self._connection.until_close = head.until_close

    def received(self, raw: bytes) -> None:
        self.size += len(raw)
        if self.size > LONGEST:
            self._connection.abort()
            self.failed(InvalidResponse("the response is too long"))

    def finished(self, raw: bytes, exact: bool) -> None:
        body = self._connection.meter.pop()
        if self.head is not None and not self.whole.done():
            self.whole.set_result((self.head, body))

    def failed(self, error: UpstreamFailed) -> None:
        self.internal_error(error)

    def internal_error(self, error: Exception) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)


async def _response_of(connection: PodConnection, head: bytes, body: bytes) -> tuple[int, bytes]:
    """Wait for the response. Cancellation closes the connection."""
    response = Collected(connection)
    connection.send(response, head, body)
    try:
        response_head, body = await response.whole
    except asyncio.CancelledError:
        response.abandon()
        raise
    except UpstreamFailed:
        raise
    except Exception as error:
        log.exception("failed to read a response of a pod")
        raise InvalidResponse(f"the response could not be read: {error!r}") from error
    return response_head.status, body


@lru_cache(maxsize=4096)
def _request(url: str, api_key: str | None, length: int | None, rank: int | None) -> tuple[str, bytes]:
    """Return scheme and host of the URL, and the head of a request with a body of this length, if any. Raise
    ConnectFailed for an invalid URL."""
    try:
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        lines = _HEAD % PodAddress.of(origin).host_header
        if api_key:
            lines += header_line("authorization", f"Bearer {api_key}")
        if rank is not None:
            lines += header_line(RANK_HEADER, str(rank))
        if length is not None:
            lines += b"content-type: application/json\r\ncontent-length: %d\r\n" % length
        target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
    except ValueError as error:
        raise ConnectFailed(str(error)) from error
    return origin, b"%b %b HTTP/1.1\r\n%b\r\n" % (b"GET" if length is None else b"POST", target.encode(), lines)
