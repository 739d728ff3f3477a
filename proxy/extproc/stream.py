"""One request as a gateway tells of it: its messages in, one after the other, and the replies to them out."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from proxy.core.errors import BadRequest, BodyTooLarge, RequestError
from proxy.extproc.messages import BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED, NONE, WHOLE, ProcessingRequest, go_on, plain

QUEUED = 64
"""Messages that may wait here; then the gateway has to."""

LARGER = "The request body is larger than what the gateway holds back to ask where it goes."

ATTRIBUTES = "envoy.filters.http.ext_proc"

Write = Callable[[Any], Awaitable[None]]


class Stream:
    """Lives as long as the gRPC stream of one request. `head` is the message with the request's header fields."""

    def __init__(self, head: Any, write: Write, gone: tuple[type[Exception], ...] = ()) -> None:
        """`gone`: what `write` raises once the gateway has gone."""
        config = head.protocol_config
        told = head.HasField("protocol_config")
        self.head = head
        self.request_mode: int = config.request_body_mode if told else FULL_DUPLEX_STREAMED
        self.response_mode: int = config.response_body_mode if told else FULL_DUPLEX_STREAMED
        self._write = write
        self._gone = gone
        self.is_over = False
        """The gateway says nothing more: the client has left, or has its answer."""
        self.is_answered = False
        """Nothing is left to be done but to say so."""
        self.trailers = False
        """Whether the request had some."""
        self.kind = "request_headers"
        """Of the request's message that has not been replied to."""
        self._messages: asyncio.Queue[Any] = asyncio.Queue(QUEUED)

    async def write(self, reply: Any) -> None:
        """Where the gateway has gone, whoever reads hears of it too, and ends what would go on here."""
        try:
            await self._write(reply)
        except self._gone:
            if not self.is_answered:
                await asyncio.sleep(math.inf)

    async def told(self, message: Any) -> None:
        """By the gateway."""
        await self._messages.put(message)

    def end(self) -> None:
        """By the gateway. Where it shows no bodies, this is how an answer ends."""
        self.is_over = True
        if self.is_answered and self.response_mode == NONE:
            if self._messages.full():
                self._messages.get_nowait()
            self._messages.put_nowait(ProcessingRequest(response_body={"end_of_stream": True}))

    def deaf(self) -> None:
        """Nobody reads any more."""
        while not self._messages.empty():
            self._messages.get_nowait()

    async def next(self) -> tuple[str, Any]:
        """The kind of the next message, and the message."""
        message = await self._messages.get()
        return message.WhichOneof("kind"), message

    async def body(self) -> AsyncIterator[bytes]:
        """That of the request, in the pieces in which it comes. Raises RequestError where it does not."""
        if self.head.request_headers.end_of_stream:
            return
        if self.request_mode in WHOLE:
            await self.write(go_on(self.kind))
        elif self.request_mode != FULL_DUPLEX_STREAMED:
            raise RequestError("The gateway must send bodies: request_body_mode FULL_DUPLEX_STREAMED or BUFFERED.")
        last = False
        while not last:
            kind, message = await self.next()
            if kind == "request_trailers":
                self.trailers = last = True
            elif kind == "request_body":
                if self.request_mode == BUFFERED_PARTIAL and not message.request_body.end_of_stream:
                    raise BodyTooLarge(LARGER)
                yield message.request_body.body
                last = message.request_body.end_of_stream or self.request_mode in WHOLE
            else:
                raise _instead_of_a_body(kind, message)
        if self.request_mode in WHOLE:
            self.kind = "request_body"


def _instead_of_a_body(kind: str, message: Any) -> RequestError:
    """A gateway that has no room for a body answers by itself, and shows that too."""
    fields = message.response_headers.headers.headers if kind == "response_headers" else ()
    if any(each.key == ":status" and b"413" in (each.raw_value, each.value.encode()) for each in fields):
        return BodyTooLarge(LARGER)
    return BadRequest(f"{kind} came before the end of the request's body")


def metadata_of(message: Any) -> dict[str, Any]:
    """By namespace."""
    return plain(message.metadata_context.filter_metadata)


def attributes_of(message: Any) -> dict[str, Any]:
    """Those that the gateway is configured to tell."""
    found: dict[str, Any] = plain(message.attributes).get(ATTRIBUTES, {})
    return found
