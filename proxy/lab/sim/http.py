"""One HTTP request to a pod: its log record, its event stream, and the faults that affect its response."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from proxy.lab.sim import fields
from proxy.lab.sim.config import SimConfig
from proxy.lab.sim.driver import EngineDriver
from proxy.lab.sim.faults import SPOILT, Fault, FaultCondition, FaultKind, Faults
from proxy.lab.sim.fields import Json, SimError, unknown_model
from proxy.lab.sim.sequence import SequenceProgress
from proxy.lab.sim.transfer import Embeddings, SimConnector

REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One request, from its headers to its end. `status` is None until the response starts. `fault` is the fault that
    it met; `aborted`: the client disconnected; `cut`: the pod closed the connection."""

    id: str
    method: str
    path: str
    headers: dict[str, str]
    arrived: float
    body_sha256: str = ""
    model: str | None = None
    status: int | None = None
    ended: float | None = None
    aborted: bool = False
    cut: bool = False
    fault: str | None = None
    rank: int | None = None
    """The data-parallel rank of its first sequence."""
    sequences: list[SequenceProgress] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(sequence.prompt_tokens for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        return sum(sequence.cached_tokens for sequence in self.sequences)

    @property
    def generated_tokens(self) -> int:
        return sum(sequence.generated_tokens for sequence in self.sequences)

    @property
    def started(self) -> float | None:
        """The time at which its first sequence left the queue."""
        return min((s.started for s in self.sequences if s.started is not None), default=None)

    @property
    def first_token(self) -> float | None:
        return min((s.first_token for s in self.sequences if s.first_token is not None), default=None)

    def as_json(self) -> dict[str, object]:
        names = (
            "id method path headers body_sha256 model prompt_tokens cached_tokens generated_tokens "
            "arrived started first_token ended aborted cut fault rank status"
        )
        return {name: getattr(self, name) for name in names.split()}


class RequestLog(deque[RequestRecord]):
    """The last requests in order of arrival, and the open requests; `idle` is set while no request is open."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        super().__init__(maxlen=remembered)
        self.aborted = 0
        self.open: dict[RequestRecord, None] = {}
        self.idle = asyncio.Event()
        self.idle.set()

    def start(self, record: RequestRecord) -> None:
        self.open[record] = None
        self.idle.clear()
        self.append(record)

    def end(self, record: RequestRecord, now: float, *, aborted: bool) -> None:
        record.ended = now
        record.aborted = aborted and not record.cut
        self.aborted += record.aborted
        self.open.pop(record, None)
        if not self.open:
            self.idle.set()

    def clear(self) -> None:
        self.aborted = 0
        super().clear()


@dataclass(frozen=True, slots=True)
class SimService:
    """The state that all handlers of one pod share. `out` starts the outage that a fault describes."""

    config: SimConfig
    driver: EngineDriver
    connector: SimConnector
    embeddings: Embeddings
    log: RequestLog
    started_at: float
    faults: Faults
    condition: FaultCondition
    out: Callable[[Fault], None]
    responses: dict[str, Any] = field(default_factory=dict)
    """Stored responses by id, the oldest first."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """One request. `id` is the client's X-Request-Id, or generated; `tail` is the segment of the path at `{tail}` of
    the route."""

    service: SimService
    id: str
    web_request: web.Request
    raw: bytes
    record: RequestRecord
    tail: str = ""
    fault: Fault | None = None

    @property
    def config(self) -> SimConfig:
        return self.service.config

    def body(self) -> Json:
        return fields.parse(self.web_request.headers.get("Content-Type", ""), self.raw)

    def resolve_model(self, body: Json) -> str:
        """Return the requested model, by default the base model."""
        name = fields.text(body, "model") or self.config.model
        if name != self.config.model and name not in self.config.lora_adapters:
            raise unknown_model(name, self.config.model)
        self.record.model = name
        return name


Handler = Callable[[SimRequest], Awaitable[web.StreamResponse]]

Routes = Mapping[str, Handler]
"""Handlers by method and path, as in "GET /v1/responses/{tail}"."""


def json_response(content: Any, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(content), status=status, content_type="application/json")


RESET_ON_CLOSE = struct.pack("ii", 1, 0)
"""SO_LINGER: on, zero seconds."""

GARBAGE = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 this is not HTTP\r\n\r\n"
NO_CHUNK = b"so many bytes\r\n"
DRIP = 7
"""Number of bytes that are sent at a time."""

DRIP_SECONDS = 0.001
LAST = (b"data: [DONE]", b"message_stop", b"response.completed")
"""The events that a broken stream omits."""


def reset(transport: asyncio.Transport) -> None:
    """Close the connection with RST, as the kernel does for a process that died with unread data."""
    transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
    transport.abort()


async def break_off(request: SimRequest, kind: FaultKind) -> None:
    """Send no more bytes; the handler is cancelled with the connection. HANG and MISFRAME wait until the client
    disconnects."""
    break_connection(request, kind)
    await asyncio.get_running_loop().create_future()


def break_connection(request: SimRequest, kind: FaultKind) -> None:
    transport = request.web_request.transport
    if transport is None or transport.is_closing():
        return
    request.record.cut = kind in (FaultKind.RESET, FaultKind.FIN, FaultKind.GARBAGE)
    if kind is FaultKind.RESET:
        reset(transport)
    elif kind in (FaultKind.FIN, FaultKind.GARBAGE):
        if kind is FaultKind.GARBAGE:
            transport.write(GARBAGE)
        transport.close()
    elif kind is FaultKind.MISFRAME:
        transport.write(NO_CHUNK)


class SpoiltStream:
    """A filter between the events of one stream and its transport, which applies a fault."""

    def __init__(self, request: SimRequest, fault: Fault) -> None:
        self._request = request
        self._kind = fault.kind
        self._left = fault.events
        self._broken = False
        self._corrupted = False
        self._held = bytearray()
        """The bytes that are still to be sent slowly."""
        self._dripped = asyncio.Event()
        self._dripped.set()

    def send(self, transport: asyncio.Transport, content: bytes) -> None:
        if self._broken:
            return
        if self._kind is FaultKind.DRIP:
            self.drip(_chunk(content))
        elif self._left > 0 and not any(last in content for last in LAST):
            self._left -= 1
            transport.write(_chunk(content))
        elif self._kind is FaultKind.CORRUPT:
            transport.write(_chunk(content if self._corrupted else content[: len(content) // 2]))
            self._corrupted = True
        else:
            self._broken = True
            break_connection(self._request, self._kind)

    async def end(self) -> None:
        """Wait until the body may be terminated; a broken stream waits without end."""
        await self._dripped.wait()
        if self._broken:
            await asyncio.get_running_loop().create_future()

    def drip(self, data: bytes) -> None:
        if self._dripped.is_set():
            self._dripped.clear()
            asyncio.get_running_loop().call_later(DRIP_SECONDS, self._drip)
        self._held += data

    def _drip(self) -> None:
        transport = self._request.web_request.transport
        if transport is None or transport.is_closing():
            self._held.clear()
        else:
            transport.write(bytes(self._held[:DRIP]))
            del self._held[:DRIP]
        if self._held:
            asyncio.get_running_loop().call_later(DRIP_SECONDS, self._drip)
        else:
            self._dripped.set()


async def spoil_whole(request: SimRequest, whole: web.Response, fault: Fault) -> web.StreamResponse:
    body = whole.body if isinstance(whole.body, bytes) else b""
    half = body[: len(body) // 2]
    if fault.kind is FaultKind.CORRUPT:
        whole.body = half
        return whole
    response = web.StreamResponse(status=whole.status, headers=whole.headers)
    if fault.kind is FaultKind.MISFRAME:
        response.enable_chunked_encoding()
    else:
        response.content_length = len(body)
    await response.prepare(request.web_request)
    transport = request.web_request.transport
    if fault.kind is FaultKind.DRIP:
        spoilt = SpoiltStream(request, fault)
        spoilt.drip(body)
        await spoilt.end()
    elif transport is not None:
        transport.write(_chunk(half) if fault.kind is FaultKind.MISFRAME else half)
        request.record.status = response.status
        await break_off(request, fault.kind)
    return response


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


DONE = b"data: [DONE]\n\n"


def data(content: Json) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)


def event(name: str, content: Json) -> bytes:
    return b"event: %b\n" % name.encode() + data(content)


class EventStream:
    """An event stream. Entering it sends the headers, leaving it ends the body; a SimError becomes its last event.
    `send` writes whole chunks of the chunked encoding directly to the transport: no coroutine wakes per token. Data
    that a slow client does not read stays in memory."""

    def __init__(self, request: SimRequest) -> None:
        self._request = request
        fault = request.fault
        self._spoilt = SpoiltStream(request, fault) if fault is not None and fault.kind in SPOILT else None
        self.response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})

    async def __aenter__(self) -> EventStream:
        self.response.enable_chunked_encoding()
        await self.response.prepare(self._request.web_request)
        self._request.record.status = self.response.status
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, SimError):
            self._send_error(error)
        elif error is not None:
            return False
        if self._spoilt is not None:
            await self._spoilt.end()
        await self.response.write_eof()
        return True

    def _send_error(self, error: SimError) -> None:
        path = self._request.web_request.path
        if path.startswith("/v1/messages"):
            self.send(event("error", error.anthropic()))
        elif path.startswith("/v1/responses"):
            self.send(event("error", error.openai()))
        else:
            self.send(data(error.openai()))
            self.send(DONE)

    def send(self, content: bytes) -> None:
        transport = self._request.web_request.transport
        if transport is None or transport.is_closing() or not content:
            return
        if self._spoilt is not None:
            self._spoilt.send(transport, content)
        else:
            transport.write(_chunk(content))
