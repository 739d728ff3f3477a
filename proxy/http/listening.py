"""Opens the ports where others speak first."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence
from typing import Any

from proxy.http.tls import HANDSHAKE_TIMEOUT

BACKLOG = 1024


async def listeners(
    accept: Callable[[], asyncio.Protocol],
    host: str,
    port: int,
    sockets: Sequence[socket.socket],
    tls: ssl.SSLContext | None,
) -> list[asyncio.Server]:
    """On `sockets`, which are bound; where there are none, on the port. Raises OSError if it cannot be had."""
    loop = asyncio.get_running_loop()
    how: dict[str, Any] = {"backlog": BACKLOG}
    if tls is not None:
        how |= {"ssl": tls, "ssl_handshake_timeout": HANDSHAKE_TIMEOUT}
    if not sockets:
        return [await loop.create_server(accept, host, port, **how)]
    return [await loop.create_server(accept, sock=sock, **how) for sock in sockets]


def port_of(listening: Sequence[asyncio.Server]) -> int:
    """The same for all of them."""
    port: int = listening[0].sockets[0].getsockname()[1]
    return port
