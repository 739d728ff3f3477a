"""A stream of server-sent events, pushed into the client's connection."""

from __future__ import annotations

from types import TracebackType

from aiohttp import web

from proxy.lab.sim.api.call import SERVER, Call
from proxy.lab.sim.api.errors import ApiError
from proxy.lab.sim.api.spoil import spoilt

DONE = b"data: [DONE]\n\n"


def data(content: bytes) -> bytes:
    return b"data: %b\n\n" % content


def event(name: bytes, content: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name, content)


class EventStream:
    """Entering it sends the headers, leaving it ends the body; an ApiError becomes its last event.

    `send` writes whole chunks of the chunked encoding to the transport itself: no coroutine wakes per token. What a
    slow client does not read stays in memory.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._spoilt = spoilt(call)
        headers = {"Content-Type": "text/event-stream; charset=utf-8", "Server": SERVER}
        self.response = web.StreamResponse(headers=headers)

    async def __aenter__(self) -> EventStream:
        self.response.enable_chunked_encoding()
        await self.response.prepare(self._call.request)
        self._call.record.status = self.response.status
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, ApiError):
            self._send_error(error)
        if kind is None or isinstance(error, ApiError):
            if self._spoilt is not None:
                await self._spoilt.end()
            await self.response.write_eof()
            return True
        return False

    def _send_error(self, error: ApiError) -> None:
        path = self._call.request.path
        if path.startswith("/v1/messages"):
            self.send(event(b"error", error.anthropic()))
        elif path.startswith("/v1/responses"):
            self.send(event(b"error", error.openai()))
        else:
            self.send(data(error.openai()))
            self.send(DONE)

    def send(self, content: bytes) -> None:
        transport = self._call.request.transport
        if transport is None or transport.is_closing() or not content:
            return
        if self._spoilt is not None:
            self._spoilt.send(transport, content)
        else:
            transport.write(b"%x\r\n%b\r\n" % (len(content), content))
