"""A request of a gateway: its gRPC stream and its body."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc.aio

from proxy.core.errors import BadGateway, BadRequest, BodyTimeout, BodyTooLarge, RequestError
from proxy.core.ports import Identity
from proxy.extproc.addresses import SUBSET, subset_of
from proxy.extproc.messages import BUFFERED_PARTIAL, FULL_DUPLEX_STREAMED, NONE, WHOLE, ProcessingRequest, go_on, plain
from proxy.http.body import BODY_LATE, MemoryBudget, Upload, too_large
from proxy.http.head import INTERNAL_HEADERS, INTERNAL_PREFIXES, Pairs
from proxy.http.paths import split_target
from proxy.http.settings import ListenSettings


class EnvoyRequest:
    """Implements `http.service.IncomingRequest`; lives as long as the request. A response of kvlane itself is kept in
    `local` until it is sent to the gateway."""

    body = b""
    retained = 0
    sent_status = 0
    sent = 0
    closing = False
    identity: Identity | None = None
    local: tuple[int, Pairs, bytes] | None = None
    is_aborted = False
    """Whether the response is incomplete and must not look complete."""
    upload: Upload | None = None
    refusal = ""
    model = ""
    chunked = False
    wants_websocket = False

    def __init__(self, stream: Stream, ids: Iterator[str], received_at: float) -> None:
        """`ids` are for requests without an id; `received_at` is in monotonic seconds."""
        self.stream = stream
        fields = [
            (each.key, each.raw_value or each.value.encode()) for each in stream.head.request_headers.headers.headers
        ]
        headers: dict[str, str] = {}
        for name, value in fields:
            text = value.decode("utf-8", "surrogateescape")
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        self.method = headers.pop(":method", "")
        self.path, self.query = split_target(headers.pop(":path", "/"))
        headers = {name: value for name, value in headers.items() if not name.startswith(":")}
        subset = subset_of(metadata_of(stream.head))
        if subset is not None:
            headers[SUBSET] = subset
        self.headers: Mapping[str, str] = headers
        self.raw_headers = tuple((name.encode(), value) for name, value in fields if not name.startswith(":"))
        self.id = headers.get("x-request-id") or next(ids)
        self.id_line = b"x-request-id: %b\r\n" % self.id.encode("utf-8", "surrogateescape")
        self.received_at = received_at

    @property
    def has_left(self) -> bool:
        return self.stream.is_over

    def respond(self, status: int, headers: Pairs, body: bytes) -> None:
        self.sent_status = status
        self.sent = len(body)
        self.local = (status, headers, b"" if self.method == "HEAD" else body)

    def abort(self) -> None:
        self.is_aborted = True

    def end(self) -> None:
        """Do nothing: the gRPC handler ends the stream."""

    def unwanted(self) -> list[str]:
        """Return names of fields that do not reach the pod: credentials of kvlane, and headers between routers and
        engines."""
        passed = {
            name for name, _ in self.raw_headers if not (name in INTERNAL_HEADERS or name.startswith(INTERNAL_PREFIXES))
        }
        return [name for name in self.headers if name != SUBSET and name.encode() not in passed]


def fields_of(headers: Any) -> dict[str, str]:
    """Return header fields by lower-case name."""
    return {each.key: (each.raw_value or each.value.encode()).decode("latin-1") for each in headers.headers}


QUEUED = 64
"""Largest number of queued messages; beyond that the gateway waits."""

LARGER = "The request body is larger than the buffer of Envoy (request_body_mode BUFFERED)."

GONE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""Errors of writes to a stream that has ended."""

ATTRIBUTES = "envoy.filters.http.ext_proc"


class Stream:
    """The gRPC stream of one request. `head` is the message with the request's header fields."""

    def __init__(self, head: Any, write: Callable[[Any], Awaitable[None]]) -> None:
        config = head.protocol_config
        has_modes = head.HasField("protocol_config")
        self.head = head
        self.request_mode: int = config.request_body_mode if has_modes else FULL_DUPLEX_STREAMED
        self.response_mode: int = config.response_body_mode if has_modes else FULL_DUPLEX_STREAMED
        self._write = write
        self.is_over = False
        """Whether the gateway has ended the stream: the client has disconnected, or has its response."""
        self.is_complete = False
        """Whether the response is complete; only the last reply is left."""
        self.trailers = False
        """Whether the request had trailers."""
        self.is_idle = asyncio.Event()
        """Whether no write is in progress."""
        self.is_idle.set()
        self.kind = "request_headers"
        """Kind of the request's message that waits for a reply."""
        self.messages: asyncio.Queue[Any] = asyncio.Queue(QUEUED)
        """Messages of the gateway that were not read yet."""

    async def write(self, reply: Any) -> None:
        """Send a reply. After the gateway has disconnected, wait: the reader of the stream cancels this task."""
        self.is_idle.clear()
        try:
            await self._write(reply)
        except GONE:
            if not self.is_complete:
                await asyncio.sleep(math.inf)
        finally:
            self.is_idle.set()

    def end(self) -> None:
        """Record the end of the stream. If the gateway sends no bodies, this ends the response."""
        self.is_over = True
        if self.is_complete and self.response_mode == NONE:
            if self.messages.full():
                self.messages.get_nowait()
            self.messages.put_nowait(ProcessingRequest(response_body={"end_of_stream": True}))

    def deaf(self) -> None:
        """Drop queued messages: the request has ended."""
        while not self.messages.empty():
            self.messages.get_nowait()

    async def next(self) -> tuple[str, Any]:
        message = await self.messages.get()
        return message.WhichOneof("kind"), message

    async def body(self) -> AsyncIterator[bytes]:
        """Yield the pieces of the request's body. Raise RequestError if the gateway does not send it."""
        if self.head.request_headers.end_of_stream:
            return
        if self.request_mode in WHOLE:
            await self.write(go_on(self.kind))
        elif self.request_mode != FULL_DUPLEX_STREAMED:
            raise RequestError("Envoy sends no bodies: set request_body_mode to FULL_DUPLEX_STREAMED or BUFFERED.")
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
    """Return the error for a message in place of a body: a gateway without space for a body, or that has waited too
    long for it, responds itself."""
    status = fields_of(message.response_headers.headers).get(":status", "") if kind == "response_headers" else ""
    if status == "413":
        return BodyTooLarge(LARGER)
    if status == "408":
        return BodyTimeout(BODY_LATE)
    if status.startswith("5"):
        return BadGateway("Envoy gave up the request before its body was complete; retry shortly.")
    return BadRequest(f"{kind} came before the end of the request's body")


def metadata_of(message: Any) -> dict[str, Any]:
    """Return the metadata by namespace."""
    return plain(message.metadata_context.filter_metadata)


def attributes_of(message: Any) -> dict[str, Any]:
    """Return the attributes that the gateway is configured to send."""
    found: dict[str, Any] = plain(message.attributes).get(ATTRIBUTES, {})
    return found


class StreamedBodyReader:
    """Implements `http.service.Bodies`."""

    def __init__(self, settings: ListenSettings, budget: MemoryBudget) -> None:
        self._settings = settings
        self._budget = budget
        self.give_back = budget.give

    def acquire_complete(self, client_request: EnvoyRequest) -> bool:
        return False

    async def read(self, client_request: EnvoyRequest) -> None:
        """Read the body. Raise BadRequest, BodyTooLarge, BodyTimeout or Saturated."""
        if "upgrade" in client_request.headers:
            raise BadRequest("Upgrades are not supported behind Envoy; connect to kvlane directly.")
        pieces: list[bytes] = []
        await self._reserve(client_request, _declared(client_request))
        body, size = aiter(client_request.stream.body()), 0
        try:
            while True:
                async with asyncio.timeout(self._settings.body_timeout):
                    piece = await anext(body, None)
                if piece is None:
                    break
                size += len(piece)
                await self._reserve(client_request, size)
                pieces.append(piece)
        except TimeoutError:
            raise BodyTimeout(BODY_LATE) from None
        client_request.body = b"".join(pieces)

    async def _reserve(self, client_request: EnvoyRequest, size: int) -> None:
        """Reserve memory for this part of a body. A body of declared length is reserved as a whole: bodies with half of
        their memory would wait for each other."""
        if size > self._settings.max_body:
            raise too_large(self._settings.max_body)
        if size > client_request.retained:
            more = size - client_request.retained
            await self._budget.acquire(more, client_request.retained)
            client_request.retained += more


MOST_DIGITS = 18
"""Largest number of digits of a declared length."""


def _declared(client_request: EnvoyRequest) -> int:
    """Return the declared length; 0 without one. Raise BadRequest for an invalid one."""
    length = client_request.headers.get("content-length") or "0"
    if not (length.isascii() and length.isdigit() and len(length) <= MOST_DIGITS):
        raise BadRequest("The content-length of the request is no length.")
    return int(length)
