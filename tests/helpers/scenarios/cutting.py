"""A path to a pod on which responses end after so many bytes: anywhere, even where no pod would end them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from urllib.parse import urlsplit

HEAD_END = b"\r\n\r\n"
NOTHING = 0
"""The pod gets the request, and no byte of its response arrives."""
INSIDE_THE_HEAD = 20


class End(Enum):
    RESET = "reset"
    FIN = "fin"
    HANG = "hang"


@dataclass(slots=True)
class Cut:
    """Where a response is cut, after `head` bytes or `body` bytes of its body, and how it ends then.

    Only responses to POSTs are cut, so the pod looks healthy to checks."""

    end: End
    head: int = NOTHING
    body: int | None = None
    release: asyncio.Event | None = None
    """The pod notices that its response is unwanted when this is set; None: at once."""
    met: int = 0


@dataclass(slots=True)
class Way:
    """A TCP proxy before a pod that cuts responses. The client's bytes pass unchanged."""

    host: str
    port: int
    cut: Cut
    url: str = ""
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        theirs, pod = await asyncio.open_connection(self.host, self.port)
        self._open.add(pod)
        posted = asyncio.Event()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._forward(reader, pod, posted))
                group.create_task(self._respond(theirs, writer, posted))
        except* OSError:
            pass
        for each in (writer, pod):
            each.close()
            self._open.discard(each)

    def close(self) -> None:
        for writer in self._open:
            writer.close()

    async def _respond(self, theirs: asyncio.StreamReader, writer: asyncio.StreamWriter, posted: asyncio.Event) -> None:
        seen = b""
        while data := await theirs.read(65536):
            if not posted.is_set():
                writer.write(data)
                continue
            sent, seen = len(seen), seen + data
            most = self._most(seen)
            writer.write(seen[sent:most])
            if len(seen) >= most:
                self.cut.met += 1
                await writer.drain()
                await self._end(writer)
        writer.close()

    def _most(self, seen: bytes) -> int:
        if self.cut.body is None:
            return self.cut.head
        head = seen.find(HEAD_END)
        return len(seen) + 1 if head < 0 else head + len(HEAD_END) + self.cut.body

    async def _end(self, writer: asyncio.StreamWriter) -> None:
        if self.cut.end is End.HANG:
            await asyncio.Event().wait()
        if self.cut.end is End.RESET:
            linger = struct.pack("ii", 1, 0)
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        await self._released()
        raise ConnectionResetError

    async def _forward(self, reader: asyncio.StreamReader, pod: asyncio.StreamWriter, posted: asyncio.Event) -> None:
        """Pass the client's bytes until it disconnects. The pod notices the disconnection."""
        while data := await reader.read(65536):
            if data.startswith(b"POST /v1"):
                posted.set()
            pod.write(data)
        await self._released()
        pod.close()
        raise ConnectionResetError

    async def _released(self) -> None:
        if self.cut.release is not None:
            await self.cut.release.wait()


@asynccontextmanager
async def way_to(url: str, cut: Cut) -> AsyncIterator[Way]:
    parts = urlsplit(url)
    way = Way(parts.hostname or "", parts.port or 80, cut)
    server = await asyncio.start_server(way.pass_on, "127.0.0.1", 0)
    way.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield way
    finally:
        server.close()
        way.close()
