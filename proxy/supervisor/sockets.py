"""The listening sockets of all workers, held by the supervisor."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack


def bound(host: str, port: int, workers: int) -> list[list[socket.socket]]:
    """For each worker one socket for every address of the host, all on one port; the kernel shares new connections out
    among them. Raises OSError, also if somebody else listens there: SO_REUSEPORT alone would share with them."""
    with ExitStack() as stack:
        addresses = _addresses(host, port)
        for family, address in addresses:
            _bind(family, address).close()
        found: list[list[socket.socket]] = []
        for _ in range(workers):
            mine = []
            for family, address in addresses:
                sock = stack.enter_context(_bind(family, (address[0], port, *address[2:]), shared=True))
                port = port or sock.getsockname()[1]
                mine.append(sock)
            found.append(mine)
        stack.pop_all()
    return found


def _addresses(host: str, port: int) -> Sequence[tuple[int, tuple[str, int]]]:
    infos = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, address) for family, _, _, _, address in infos))  # type: ignore[misc]


def _bind(family: int, address: tuple[object, ...], shared: bool = False) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, f"error while attempting to bind on address {address}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    return sock
