"""Answers that a fault spoils on their way to the client."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Mapping

from aiohttp import web

from proxy.lab.sim.api.call import Call
from proxy.lab.sim.faults import SPOILT, Fault, Kind

RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER: on, zero seconds."""

GARBAGE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is not HTTP\r\n\r\n"
NO_CHUNK = b"so many bytes\r\n"
DRIP = 7
"""Bytes at a time."""

DRIP_SECONDS = 0.001
LAST = (b"data: [DONE]", b"message_stop", b"response.completed")
"""What a broken stream does not get to say."""


def reset(transport: asyncio.Transport) -> None:
    """Close with RST, as the kernel does for a process that died with unread data."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    transport.abort()


async def break_off(call: Call, kind: Kind) -> None:
    """No more bytes; the handler is cancelled with the connection. HANG and MISFRAME wait for the client to leave."""
    break_connection(call, kind)
    await asyncio.get_running_loop().create_future()


def break_connection(call: Call, kind: Kind) -> None:
    transport = call.request.transport
    if transport is None or transport.is_closing():
        return
    call.record.cut = kind in (Kind.RESET, Kind.FIN, Kind.GARBAGE)
    if kind is Kind.RESET:
        reset(transport)
    elif kind in (Kind.FIN, Kind.GARBAGE):
        if kind is Kind.GARBAGE:
            transport.write(GARBAGE)
        transport.close()
    elif kind is Kind.MISFRAME:
        transport.write(NO_CHUNK)


class SpoiltStream:
    """Stands between the events of one stream and its transport."""

    def __init__(self, call: Call, fault: Fault) -> None:
        self._call = call
        self._kind = fault.kind
        self._left = fault.events
        self._broken = False
        self._corrupted = False
        self._held = bytearray()
        """What has still to drip."""
        self._dripped = asyncio.Event()
        self._dripped.set()

    def send(self, transport: asyncio.Transport, content: bytes) -> None:
        if self._broken:
            return
        if self._kind is Kind.DRIP:
            self._drip_soon(_chunk(content))
        elif self._left > 0 and not any(last in content for last in LAST):
            self._left -= 1
            transport.write(_chunk(content))
        elif self._kind is Kind.CORRUPT:
            transport.write(_chunk(content if self._corrupted else content[: len(content) // 2]))
            self._corrupted = True
        else:
            self._broken = True
            break_connection(self._call, self._kind)

    async def end(self) -> None:
        """Before the body is ended in good order, which a broken one never is."""
        await self._dripped.wait()
        if self._broken:
            await asyncio.get_running_loop().create_future()

    def _drip_soon(self, data: bytes) -> None:
        if self._dripped.is_set():
            self._dripped.clear()
            asyncio.get_running_loop().call_later(DRIP_SECONDS, self._drip)
        self._held += data

    def _drip(self) -> None:
        transport = self._call.request.transport
        if transport is None or transport.is_closing():
            self._held.clear()
        else:
            transport.write(bytes(self._held[:DRIP]))
            del self._held[:DRIP]
        if self._held:
            asyncio.get_running_loop().call_later(DRIP_SECONDS, self._drip)
        else:
            self._dripped.set()


def spoilt(call: Call) -> SpoiltStream | None:
    """Where the call's stream is spoilt."""
    return SpoiltStream(call, call.fault) if call.fault is not None and call.fault.kind in SPOILT else None


async def spoil_whole(call: Call, response: web.Response, fault: Fault) -> web.StreamResponse:
    """An answer that is no stream."""
    body = response.body if isinstance(response.body, bytes) else b""
    if fault.kind is Kind.CORRUPT:
        response.body = body[: len(body) // 2]
        return response
    if fault.kind is Kind.DRIP:
        return await _dripping(call, response, body)
    transport = call.request.transport
    if transport is not None:
        framing = (
            {"Transfer-Encoding": "chunked"} if fault.kind is Kind.MISFRAME else {"Content-Length": str(len(body))}
        )
        half = _chunk(body[: len(body) // 2]) if fault.kind is Kind.MISFRAME else body[: len(body) // 2]
        transport.write(_head(response.status, framing) + half)
        call.record.status = response.status
    await break_off(call, fault.kind)
    return response


async def _dripping(call: Call, whole: web.Response, body: bytes) -> web.StreamResponse:
    response = web.StreamResponse(status=whole.status, headers=whole.headers)
    response.content_length = len(body)
    await response.prepare(call.request)
    for at in range(0, len(body), DRIP):
        await response.write(body[at : at + DRIP])
        await asyncio.sleep(DRIP_SECONDS)
    await response.write_eof()
    return response


def _head(status: int, headers: Mapping[str, str]) -> bytes:
    lines = [f"HTTP/1.1 {status} OK", "Content-Type: application/json"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode()


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)
