"""A stream of server-sent events, pushed into the client's connection."""

from __future__ import annotations

from types import TracebackType

from aiohttp import web

from proxy.sim.api.call import SERVER, Call

DONE = b"data: [DONE]\n\n"


def data(content: bytes) -> bytes:
    return b"data: %b\n\n" % content


def event(name: bytes, content: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, content)


class EventStream:
    """Entering it sends the headers, leaving it without an error ends the body.

    `send` writes whole chunks of the chunked encoding to the transport itself: no coroutine wakes per token. What a
    slow client does not read stays in memory.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Server": SERVER}
        self.response = web.StreamResponse(headers=headers)

    async def __aenter__(self) -> EventStream:
        self.response.enable_chunked_encoding()
        await self.response.prepare(self._call.request)
        self._call.record.status = self.response.status
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            await self.response.write_eof()

    def send(self, content: bytes) -> None:
        transport = self._call.request.transport
        if transport is not None and not transport.is_closing() and content:
            transport.write(b"%x\r\n%b\r\n" % (len(content), content))
