"""One client connection: one request after the other, and the bytes that arrive in between."""

from __future__ import annotations

import asyncio
import inspect
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, Protocol, cast

from proxy.core.attempt import Ending
from proxy.core.errors import RequestError, ShuttingDown
from proxy.http.body import FREE_BUFFER
from proxy.http.guards import CloseReason, HalfClosed, SendProgress, guarded, has_hung_up, reset
from proxy.http.reader import ContentLengthReader, RequestReader
from proxy.http.request import HttpRequest

if TYPE_CHECKING:
    from proxy.http.response import Response
    from proxy.http.server import DataServer

log = logging.getLogger(__name__)

PIPELINED_LIMIT = 64 * 1024
"""Bytes after the current request at which reading pauses."""


class ResponseWriter(Protocol):
    """Writes to the client's socket. It must pause while the socket is full, and stop when the client is gone."""

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def gone(self) -> None: ...

    def check(self, now: float) -> None:
        """End a stalled response; called by the sweep."""


class ClientConnection(asyncio.BufferedProtocol):
    """States: waiting -> collecting a body, if it comes in several reads -> serving -> waiting, until it closes,
    lingers or becomes a tunnel. One request is served at a time; following bytes are held unparsed. A reader finds
    where each request ends: ContentLengthReader while heads come in one read and bodies have a declared length;
    GeneralReader from the first other request on."""

    def __init__(self, server: DataServer, loop: asyncio.AbstractEventLoop) -> None:
        self._server = server
        self._serve = server.serve
        self._loop = loop
        self._buffer = server.buffer
        self.socket: asyncio.Transport
        self.connected = True
        self.writer: ResponseWriter | None = None
        self.writing_paused = False
        self.reader: RequestReader = ContentLengthReader(self, server, loop)
        self.consume: Callable[[memoryview], object] = self.reader.feed
        """What bytes go to. They are overwritten by the next read."""
        self.client_request: HttpRequest | None = None
        """The request that is being collected or served."""
        self.task: asyncio.Task[None] | None = None
        """The task that serves it. It is held here, and cancelled when the client disconnects."""
        self._tail = b""
        """Bytes after the current request."""
        self.head_size = 0
        """Bytes of memory for an incomplete or large head, until its request has ended."""
        self._counted = 0
        """Bytes of the budget that it holds; see `count`."""
        self._has_dropped = False
        """Whether bytes after the request were dropped."""
        self._paused = False
        self._deferred = False
        """Whether the next request waits until the client has read the last response."""
        self._lingering: HalfClosed | None = None
        self.idle_since: float | None = None
        """When the sweep first saw it between two requests."""
        self._send_progress: SendProgress | None = None
        """Set while the client has more to read than the kernel buffers."""
        self.is_fresh = True
        """Whether it is waiting for its first request and the sweep has not seen it twice."""

    # what the transport calls

    @guarded
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.socket = cast(asyncio.Transport, transport)
        connected = transport.get_extra_info("socket")
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        if self._server.has_capacity(connected.fileno()):
            self._server.connections.add(self)
        else:
            self.connected = False
            self.forget()
            self.socket.abort()

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer of all connections: each read is processed before the next one. So the body of a request
        is copied once, not once more from a read that has it as a part."""
        return self._buffer

    def buffer_updated(self, size: int) -> None:
        try:
            self.consume(self._buffer[:size])
        except Exception as error:  # noqa: BLE001  # logged there
            self.internal_error(error)

    @guarded
    def connection_lost(self, error: Exception | None) -> None:
        """Stop the writer at once. The task ends one turn of the loop later; until then a pod's response could be
        written to a closed socket, which uvloop reports as an error."""
        self._server.connections.discard(self)
        self.connected = False
        self.forget()
        if self.task is not None:
            self.task.cancel()
        if self.writer is not None:
            self.writer.gone()
        self._give_up(Ending.CLIENT_GONE)

    @guarded
    def pause_writing(self) -> None:
        self.writing_paused = True
        if self.writer is not None:
            self.writer.pause()

    @guarded
    def resume_writing(self) -> None:
        self.writing_paused = False
        if self.writer is not None:
            self.writer.resume()
        elif self._deferred:
            self._go_on()

    def internal_error(self, error: Exception) -> None:
        """End the request and the connection after a consumer of the client's bytes failed. Not at once: asyncio closes
        a transport twice that is aborted during `resume_writing`."""
        log.error("request %s failed", "-" if self.client_request is None else self.client_request.id, exc_info=error)
        self._loop.call_soon(reset, self.socket)

    @guarded
    def eof_received(self) -> None:
        """Abort a response that the client does not read: the transport, which closes now, would report the
        disconnection only when all bytes have been sent."""
        if self.task is not None and self.socket.get_write_buffer_size():
            reset(self.socket)

    # what a reader calls

    def start(self, client_request: HttpRequest) -> None:
        """Serve the request in a task that is created directly with a fixed name: `loop.create_task` costs a quarter
        more."""
        self.consume = self.hold
        self.client_request = client_request
        self.task = asyncio.Task(self._serve(client_request), loop=self._loop, name="request")

    def hold(self, data: bytes | memoryview) -> None:
        """Hold the bytes after the current request."""
        if self._has_dropped:
            return
        self._tail += data
        size = len(self._tail)
        if size > PIPELINED_LIMIT:
            self.pause_reading()
        if (size > FREE_BUFFER or self.head_size) and not self.count():
            self._drop_held()

    def count(self) -> bool:
        """Count the buffered bytes of this connection against the budget of all connections. Return False and change
        nothing if the budget is exhausted."""
        more = max(0, self.head_size + len(self._tail) - FREE_BUFFER) - self._counted
        if more > 0 and not self._server.buffers.acquire_within(more):
            return False
        if more < 0:
            self._server.buffers.give(-more)
        self._counted += more
        return True

    def refuse(self, client_request: HttpRequest, error: RequestError) -> None:
        """Refuse a request that did not arrive completely."""
        self.client_request = None
        try:
            self._server.unserved(client_request, error)
        finally:
            self._linger()

    def forget(self) -> None:
        """Read nothing more from this connection."""
        self.reader = RequestReader()
        self.consume = self.reader.feed
        self._tail = b""
        self._deferred = False
        self.head_size = 0
        if self._counted:
            self.count()

    # what the stream of a body calls

    def pause_reading(self) -> None:
        if not self._paused and not self.socket.is_closing():
            self._paused = True
            self.socket.pause_reading()

    def resume_reading(self, resume_parser: bool = True) -> None:
        if self._paused and len(self._tail) <= PIPELINED_LIMIT and not self.socket.is_closing():
            self._paused = False
            self.socket.resume_reading()

    # what the server calls

    @property
    def idle(self) -> bool:
        """Return whether closing it loses nothing."""
        return self.client_request is None and self._lingering is None

    @property
    def is_replaceable(self) -> bool:
        """Return whether it can be closed for a new client: between two requests, with no bytes of the next request or
        the last response pending. Only the sweep knows what a general reader holds."""
        if not self.idle or self.socket.is_closing() or self.socket.get_write_buffer_size():
            return False
        return self.idle_since is not None or not (self.is_fresh or self.reader.may_hold_bytes)

    def request_ended(self, client_request: HttpRequest) -> None:
        """Release what a request held that has been served; then read the next one, or close the connection."""
        self.client_request = self.task = self.idle_since = None
        self.is_fresh = False
        if self.head_size:
            self.head_size = 0
            self.count()
        if self._has_dropped or (client_request.payload is not None and not client_request.payload.is_eof()):
            self._linger()
        elif client_request.closing or not client_request.sent_status:
            self.close()
        elif self._tail or self.reader.may_hold_bytes or self.writing_paused:
            try:
                self._go_on()
            except Exception as error:  # noqa: BLE001  # logged there
                self.internal_error(error)
        else:
            self.consume = self.reader.feed

    def become_tunnel(self, tunnel: Tunnel) -> None:
        """Pass all bytes after the upgrade request to `tunnel`."""
        tail = self.reader.leftover() + self._tail
        self.forget()
        self.consume = tunnel.feed_data
        if tail:
            tunnel.feed_data(memoryview(tail))
        self.resume_reading()

    def close(self) -> None:
        """Close after the written bytes have been sent."""
        if self.connected:
            self.forget()
            self.socket.close()
            self._give_up(Ending.EVICTED)

    def stop(self) -> None:
        """End a request without a pod because the proxy stops."""
        self.forget()
        self._give_up(ShuttingDown())
        if self.task is not None:
            self.task.cancel()

    def check(self, now: float) -> None:
        """End stalled requests and connections. `now` is monotonic seconds."""
        if (self.writing_paused or self._send_progress is not None) and self._does_not_read(now):
            self._server.count_closed(CloseReason.SEND_TIMEOUT, 1)
            reset(self.socket)
        elif self.task is not None:
            if self._paused and has_hung_up(self.socket):  # no end of the stream is read while reading is paused
                reset(self.socket)
            elif self.writer is not None:
                self.writer.check(now)
        elif self._lingering is not None:
            self._lingering.check(now)
        elif self.reader.check(now):
            pass
        elif self.idle_since is None:
            self.idle_since = now
            if self.socket.get_write_buffer_size():  # of the last response, if it is too little to pause writing
                self._send_progress = SendProgress(self.socket)
        else:
            self.is_fresh = False
            if now - self.idle_since > self._server.settings.keep_alive:
                self.close()

    def _does_not_read(self, now: float) -> bool:
        """Return whether the client has read nothing for `sendTimeout`. Between two requests `keepAlive` counts too."""
        if self._send_progress is None:
            self._send_progress = SendProgress(self.socket)
        stalled = self._send_progress.stalled_for(now)
        if not stalled and not self.writing_paused and not self.socket.get_write_buffer_size():
            self._send_progress = None
        settings = self._server.settings
        limit = settings.send_timeout if self.task is not None else min(settings.send_timeout, settings.keep_alive)
        return stalled > limit

    # how a request ends

    def _go_on(self) -> None:
        """Continue with the held bytes, once the client reads: otherwise responses would accumulate."""
        self._deferred = self.writing_paused
        if self._deferred:
            self.consume = self.hold
            return
        tail, self._tail = self._tail, b""
        if self._counted:
            self.count()
        self.resume_reading()
        self.consume = self.reader.feed
        if tail or self.reader.may_hold_bytes:
            self.reader.feed(memoryview(tail))

    def _give_up(self, why: RequestError | Ending) -> None:
        """End a request that is not being served yet. A task that is cancelled before its first step cannot release
        what it holds."""
        client_request, work = self.client_request, None if self.task is None else self.task.get_coro()
        if client_request is None:
            return
        if work is None or inspect.getcoroutinestate(cast(Coroutine[Any, Any, None], work)) == inspect.CORO_CREATED:
            self.client_request = None
            self._server.unserved(client_request, why)

    def _drop_held(self) -> None:
        """Drop the requests after the current one, for which there is no memory. The connection closes after the
        response, so the client sends them again."""
        self._has_dropped = True
        self._tail = b""
        self.count()
        if self.client_request is not None:
            self.client_request.closing = True
        self.pause_reading()

    def _linger(self) -> None:
        self.forget()
        if not self.socket.is_closing():
            self.resume_reading()
            self._lingering = HalfClosed(self.socket)
            self.consume = self._lingering.feed


class Tunnel(asyncio.Protocol):
    """The protocol of the pod's socket; the client's connection passes the client's bytes to it."""

    def __init__(self, response: Response, client: ClientConnection, pod: asyncio.Transport) -> None:
        self._response = response
        self._client = client.socket
        self._pod = pod
        if client.writing_paused:
            self.pause()

    def internal_error(self, error: Exception) -> None:
        self._pod.abort()
        self._response.internal_error(error)

    # the pod's side

    @guarded
    def data_received(self, data: bytes) -> None:
        self._client.write(data)

    @guarded
    def connection_lost(self, error: Exception | None) -> None:
        self._response.tunnel_ended(error is not None)
        self._client.close()

    @guarded
    def pause_writing(self) -> None:
        if not self._client.is_closing():
            self._client.pause_reading()

    @guarded
    def resume_writing(self) -> None:
        if not self._client.is_closing():
            self._client.resume_reading()

    # the client's side

    def feed_data(self, data: memoryview) -> None:
        self._pod.write(data.tobytes())

    def gone(self) -> None:
        self._pod.abort()

    def check(self, now: float) -> None:
        """Do nothing: both sides may be silent for any time."""

    def pause(self) -> None:
        if not self._pod.is_closing():
            self._pod.pause_reading()

    def resume(self) -> None:
        if not self._pod.is_closing():
            self._pod.resume_reading()
