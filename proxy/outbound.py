"""HTTP requests to servers of the control plane: sessions, timeouts, TLS and size limits in one place. Requests to pods
use `http.upstream.pool`, which shares connections, TLS and errors with the data path and takes half the CPU of a
request of aiohttp (88 instead of 176 us for a scrape of 69 KB on loopback); that limits how often a large fleet can be
scraped."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Mapping
from typing import Any, NamedTuple

import aiohttp
from multidict import CIMultiDictProxy

LARGEST = 64 << 20
"""Largest response in bytes, unless the caller sets another limit."""

FAILURES = (aiohttp.ClientError, OSError)
"""Errors of requests; TimeoutError is an OSError."""

_KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""A silent connection to a dead peer fails after half a minute. Not every system has all of these options."""


class FetchedResponse(NamedTuple):
    status: int
    body: bytes
    headers: CIMultiDictProxy[str]


def session(
    timeout: float | None,
    *,
    headers: Mapping[str, str] | None = None,
    tls: ssl.SSLContext | bool = True,
    socket_path: str = "",
    silence: float | None = None,
    decompress: bool = True,
) -> aiohttp.ClientSession:
    """Return a session with timeouts in seconds: `timeout` for a whole request, and `silence` between two reads.
    `socket_path` is a unix socket that is used for every host."""
    limits = aiohttp.ClientTimeout(total=timeout, sock_read=silence)
    connector: aiohttp.BaseConnector
    if socket_path:
        connector = aiohttp.UnixConnector(socket_path)
    else:
        connector = aiohttp.TCPConnector(ssl=tls, socket_factory=tcp_socket)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),  # a session serves many operators and pods
        headers=headers,
        timeout=limits,
        auto_decompress=decompress,
    )


async def send(
    http: aiohttp.ClientSession, method: str, url: str, limit: int = LARGEST, **options: Any
) -> FetchedResponse:
    """Return the complete response. `options` are options of aiohttp. Raise FAILURES, also for a response that is too
    large."""
    async with http.request(method, url, **options) as response:
        return FetchedResponse(response.status, await read(response, limit), response.headers)


async def fetch(
    method: str,
    url: str,
    timeout: float,
    *,
    tls: ssl.SSLContext | bool = True,
    socket_path: str = "",
    limit: int = LARGEST,
    **options: Any,
) -> FetchedResponse:
    """As `send`, on a new connection."""
    async with session(timeout, tls=tls, socket_path=socket_path) as http:
        return await send(http, method, url, limit, **options)


async def read(response: aiohttp.ClientResponse, limit: int = LARGEST) -> bytes:
    """Return the body. Raise ClientPayloadError if it has more than `limit` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise aiohttp.ClientPayloadError(f"the response has more than {limit} bytes")
    return bytes(body)


def bearer(token: str | None) -> dict[str, str]:
    """Return the header that presents a token, if there is one."""
    return {"authorization": f"Bearer {token}"} if token else {}


def tls_context(ca_file: str | None) -> ssl.SSLContext:
    """Return a context that trusts the certificates of the file, or the system's. Raise OSError or ValueError for a
    file that cannot be used."""
    return ssl.create_default_context(cafile=ca_file or None)


def tcp_socket(address: Any) -> socket.socket:
    """Return a socket as aiohttp makes one, with keep-alive probes."""
    family, kind, protocol, _, _ = address
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEP_ALIVE.items():
        if hasattr(socket, option):
            made.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    made.setblocking(False)
    return made
