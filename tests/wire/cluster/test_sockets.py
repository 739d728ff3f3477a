"""Listening sockets that several workers share."""

from __future__ import annotations

import socket
from contextlib import AsyncExitStack

import pytest

from proxy.cluster.workers import bound


async def test_every_worker_has_its_own_socket_on_the_same_port() -> None:
    async with AsyncExitStack() as stack:
        sockets = bound(stack, "127.0.0.1", 0, 3)
        names = {sock.getsockname() for seat in sockets for sock in seat}
        assert [len(seat) for seat in sockets] == [1, 1, 1]
        assert len(names) == 1
        assert len({sock.fileno() for seat in sockets for sock in seat}) == 3


async def test_a_port_in_use_is_not_shared() -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(OSError, match="in use"):
            bound(AsyncExitStack(), "127.0.0.1", other.getsockname()[1], 2)


async def test_an_invalid_address_is_an_error() -> None:
    with pytest.raises(OSError):
        bound(AsyncExitStack(), "192.0.2.1", 0, 2)
