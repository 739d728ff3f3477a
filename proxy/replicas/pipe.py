"""A connection to Redis or Valkey once it is open: bytes out, replies in, and nothing between that takes its time."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, cast

_PART = object()
"""What the parser gives while a reply is not whole."""


class Pipe(asyncio.Protocol):
    """`said(reply)` for every reply and message: a list, a number, bytes, or an exception that it is. `lost(error)`
    when the other side is gone, or what came was none of it; `said` may raise, which is such a loss too.

    redis-py opens connections, with all there is to that. What it does for each message, a coroutine and a lock or two,
    takes longer than everything else that is done about it; so its parser, hiredis, is asked without it.
    """

    def __init__(self, connection: Any, said: Callable[[Any], None], lost: Callable[[Exception | None], None]) -> None:
        """Over a connection of redis-py all of whose replies were read; it must not be asked for any others."""
        self._said = said
        self._lost = lost
        self._reader = importlib.import_module("hiredis").Reader(notEnoughData=_PART)
        self._room = asyncio.Event()
        self._room.set()
        self.is_slow = False
        """Whether what is written waits, because the other side does not read, or is not there."""
        self._transport = cast(asyncio.Transport, connection._writer.transport)
        self.write: Callable[[bytes], None] = self._transport.write
        self._transport.set_protocol(self)
        if self._transport.is_closing():
            self.connection_lost(None)

    async def has_room(self) -> None:
        """Waits while it is slow."""
        await self._room.wait()

    def close(self) -> None:
        """What was written goes out still, unless it waits already."""
        self.write = _nowhere
        if self.is_slow:
            self._transport.abort()
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        reader, said = self._reader, self._said
        try:
            reader.feed(data)
            while (reply := reader.gets(False)) is not _PART:
                said(reply)
        except Exception as error:  # noqa: BLE001  # asyncio would close and tell nobody who waits for the loss
            self._lost(error)
            self._transport.abort()

    def pause_writing(self) -> None:
        self.is_slow = True
        self._room.clear()

    def resume_writing(self) -> None:
        self.is_slow = False
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_slow, self.write = True, _nowhere
        self._room.set()
        self._lost(error)


def _nowhere(data: bytes) -> None:
    """Else asyncio would log each time that nobody is there."""


def command(channel: str, message: bytes) -> bytes:
    """That publishes it, as the store reads it."""
    return b"%b%d\r\n%b\r\n" % (_beginning(channel), len(message), message)


@lru_cache(maxsize=256)
def _beginning(channel: str) -> bytes:
    name = channel.encode()
    return b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$" % (len(name), name)
