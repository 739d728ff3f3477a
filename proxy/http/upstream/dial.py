"""Connecting to a host with several addresses: a dead one costs a quarter of a second, not the connect timeout."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import lru_cache
from typing import TypeVar

import aiohappyeyeballs
from aiohappyeyeballs import AddrInfoType

NEXT_AFTER = 0.25
"""Seconds that an address has before the next one is tried beside it (RFC 8305, section 5)."""

Resolve = Callable[[str, int], Awaitable[Sequence[AddrInfoType]]]
"""(host, port) -> addresses as of `socket.getaddrinfo`, best first. Raises OSError."""

P = TypeVar("P", bound=asyncio.Protocol)


async def dial(
    make: Callable[[], P], host: str, port: int, tls: tuple[ssl.SSLContext, str] | None, resolve: Resolve
) -> P:
    """`tls` has the name that the certificate must have. uvloop tries addresses only one after the other, so they race
    here. Raises OSError."""
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


async def look_up(host: str, port: int) -> Sequence[AddrInfoType]:
    return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


@lru_cache(maxsize=4096)
def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
