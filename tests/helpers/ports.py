"""Free ports for programs that are started with a port, and a port that accepts nothing."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

FIRST, LAST, STEP = 10_000, 32_000, 8

_turns = itertools.count(97 * os.getpid())
"""Where this process continues to search: no port is given twice, and other processes search elsewhere."""


def free_port(count: int = 1) -> int:
    """Return the first of `count` consecutive free ports, eight at most.

    They are below the ports that systems give to connections and for port 0: such a port may be taken before the
    program listens, or while it restarts."""
    for turn in _turns:
        port = FIRST + STEP * turn % (LAST - FIRST)
        if all(_is_free(one) for one in range(port, port + count)):
            return port
    raise AssertionError("the turns do not end")


@contextmanager
def full_address(host: str = "127.0.0.1") -> Iterator[Any]:
    """Give an address that neither accepts nor refuses a connection, because its queue is full. Raise OSError if there
    is no such host."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as stack:
        server = stack.enter_context(socket.socket(family))
        server.bind((host, 0))
        server.listen(0)
        for _ in range(4):
            filler = stack.enter_context(socket.socket(family))
            filler.setblocking(False)
            filler.connect_ex(server.getsockname())
        yield server.getsockname()


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True
