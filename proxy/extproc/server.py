"""The gRPC port for gateways: ext_proc and health checks."""

from __future__ import annotations

import asyncio
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, cast

import grpc
import grpc.aio

from proxy.core.tasks import Tasks
from proxy.extproc import messages
from proxy.extproc.addresses import Addresses
from proxy.extproc.messages import GO_AWAY, GrpcFrames, go_on, immediate, pieces_of
from proxy.extproc.relay import EnvoyRelay
from proxy.extproc.request import EnvoyRequest, Stream, StreamedBodyReader
from proxy.extproc.settings import ExtProcSettings
from proxy.http.server import DataServer, listen_on, port_of
from proxy.http.settings import ServerTls, server_context

READY = ("", "readiness", messages.SERVICE)
"""Services of the health check that are ready while kvlane is ready; liveness is separate."""

LAST_WORDS = 1.0
"""Seconds to send the last reply of aborted requests."""

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

CUT = "the response is incomplete"


class PickerServer:
    """The gRPC server. It listens between `start` and `stop`."""

    def __init__(self, settings: ExtProcSettings, data_server: DataServer, addresses: Addresses) -> None:
        """`data_server` has the graph by which requests are served."""
        self._settings = settings
        self._data_server = data_server
        self._addresses = addresses
        self._bodies = StreamedBodyReader(data_server.settings, data_server.budget)
        self.service = data_server.service_of(self._bodies)
        self._tasks = Tasks()
        self._server: Any = None
        self._front: EnvoyListener
        self._directory: tempfile.TemporaryDirectory[str]

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen on bound `sockets`, else on the configured port. Raise OSError if the port or the certificate is not
        available."""
        settings = self._settings
        self._directory = tempfile.TemporaryDirectory(prefix="kvlane-")
        self._front = EnvoyListener(f"{self._directory.name}/picker.sock")
        try:
            await self._front.start(settings.host, settings.port or 0, settings.tls, sockets)
            server = grpc.aio.server(options=UNLIMITED)
            server.add_generic_rpc_handlers(self._handlers())
            server.add_insecure_port(f"unix:{self._front.path}")
            await server.start()
        except BaseException:
            self._directory.cleanup()
            raise
        self._server = server

    def renew(self) -> None:
        """Serve new requests under the configuration that is in use now."""
        is_stopping, self.service = self.service.stopping, self._data_server.service_of(self._bodies)
        self.service.stopping = is_stopping

    @property
    def port(self) -> int:
        return self._front.port

    async def stop(self, grace: float) -> None:
        """Accept no new requests; running ones have `grace` seconds to end, then they are aborted."""
        self.service.stopping = True
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        end = loop.time() + grace
        await self._front.leave(grace, lambda: self.busy)
        left = max(0.0, end - loop.time())
        async with Tasks() as tasks:
            stopped = tasks.start(self._server.stop(left + LAST_WORDS), "port for gateways")
            await asyncio.wait((stopped,), timeout=left)
            await self._tasks.stop()
            await stopped
        await self._front.close()
        self._directory.cleanup()

    @property
    def busy(self) -> bool:
        return bool(self._tasks)

    def _handlers(self) -> tuple[Any, ...]:
        process = grpc.stream_stream_rpc_method_handler(
            self._process, messages.ProcessingRequest.FromString, messages.ProcessingResponse.SerializeToString
        )
        check = grpc.unary_unary_rpc_method_handler(
            self._check, messages.HealthCheckRequest.FromString, messages.HealthCheckResponse.SerializeToString
        )
        return (
            grpc.method_handlers_generic_handler(messages.SERVICE, {"Process": process}),
            grpc.method_handlers_generic_handler(messages.HEALTH, {"Check": check}),
        )

    async def _process(self, _: object, context: Any) -> None:
        """Serve one request while its stream is read: the end of the stream ends it in any state."""
        head = await context.read()
        if head is not grpc.aio.EOF and head.HasField("response_headers"):
            await _pass_on(head, context)
            return
        if head is grpc.aio.EOF or not head.HasField("request_headers"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream must begin with request_headers")
        stream = Stream(head, context.write)
        client_request = EnvoyRequest(stream, self._data_server.ids, self._data_server.now())
        serving = self._tasks.start(self._serve(client_request, context), "request of a gateway")
        serving.add_done_callback(lambda _: stream.deaf())
        try:
            while (message := await context.read()) is not grpc.aio.EOF and is_known(message):
                if not serving.done():
                    await stream.messages.put(message)
            with suppress(TimeoutError):  # if its first write is cancelled, gRPC cannot end the stream
                async with asyncio.timeout(LAST_WORDS):
                    await stream.is_idle.wait()
        finally:
            stream.end()
            if not serving.done():
                # Without an await: this task may be cancelled too, at any of them.
                asyncio.get_running_loop().call_later(LAST_WORDS if stream.is_complete else 0.0, serving.cancel)
        await asyncio.wait((serving,))
        if message is not grpc.aio.EOF:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNKNOWN)

    async def _serve(self, client_request: EnvoyRequest, context: Any) -> None:
        relay = EnvoyRelay(client_request, self._data_server.context, self._addresses, self._settings.fallbacks)
        try:
            await self.service.serve(client_request, relay)
        finally:
            if client_request.local is not None and not client_request.has_left:
                await client_request.stream.write(immediate(*client_request.local))
            elif client_request.is_aborted and not client_request.has_left:
                await context.abort(grpc.StatusCode.ABORTED, CUT)

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service not in (*READY, "liveness"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {request.service}")
        ready = request.service == "liveness" or not self.service.stopping
        return messages.HealthCheckResponse(status=messages.SERVING if ready else messages.NOT_SERVING)


UNKNOWN = "the kind of a message is unknown"


def is_known(message: Any) -> bool:
    """Return whether this version knows the kind of the message. The gateway waits for a reply to any, so the stream
    ends with one of another kind."""
    return message.WhichOneof("kind") is not None


async def _pass_on(message: Any, context: Any) -> None:
    """Pass on the gateway's own response to a request that did not come here: one of the gateway itself, or of a filter
    before this one that authenticates, say. `message` is the first of the stream."""
    stream = Stream(message, context.write)
    stream.is_complete = True
    while message is not grpc.aio.EOF:
        if not is_known(message):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNKNOWN)
        kind, piece = message.WhichOneof("kind"), message.response_body
        if kind == "response_body":
            for reply in pieces_of(stream.response_mode, piece.body, piece.end_of_stream, piece.body):
                await stream.write(reply)
        else:
            await stream.write(go_on(kind))
        message = await context.read()


QUIET = 1.0
"""Seconds without a request after which a gateway is considered to use another endpoint picker."""

CHECK_INTERVAL = 0.02
"""Seconds."""


class EnvoyListener:
    """A listener for the connections of gateways. It accepts between `start` and `leave`, and ends with `close`."""

    def __init__(self, path: str) -> None:
        """`path` is the path of gRPC's socket."""
        self.path = path
        self.tasks = Tasks()
        self.open: set[EnvoyConnection] = set()
        self._port_servers: list[asyncio.Server] = []

    async def start(self, host: str, port: int, tls: ServerTls | None, sockets: Sequence[socket.socket] = ()) -> None:
        """Listen on bound `sockets`, else on host and port. Raise OSError for an unavailable port or certificate."""
        context = None if tls is None else server_context(tls, "extproc.tls", ("h2",))
        self._port_servers = await listen_on(lambda: EnvoyConnection(self), host, port, sockets, context)

    @property
    def port(self) -> int:
        return port_of(self._port_servers)

    async def leave(self, grace: float, is_busy: Callable[[], bool]) -> None:
        """Accept no new connections and send GOAWAY to gateways. Return when all have disconnected or are quiet, or
        after `grace` seconds."""
        loop = asyncio.get_running_loop()
        for server in self._port_servers:
            server.close()
        busy_at, end = loop.time(), loop.time() + grace
        while loop.time() < end and (is_busy() or loop.time() < busy_at + QUIET):
            for gateway in self.open:  # including accepted connections without a request
                gateway.ask_to_leave()
            await asyncio.sleep(CHECK_INTERVAL)
            if not self.open:
                return
            if is_busy():
                busy_at = loop.time()

    async def close(self) -> None:
        for gateway in tuple(self.open):
            gateway.close()
        await self.tasks.stop()


class End(asyncio.Protocol):
    """One end of a byte pipe: received bytes are written at the other end, with back-pressure."""

    other: End | None = None
    _transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self.other is not None:
            self.other.write(data)

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def pause_writing(self) -> None:
        if self.other is not None and self.other._transport is not None:
            self.other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self.other is not None and self.other._transport is not None:
            self.other._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self.other is not None:
            self.other.close()

    def close(self) -> None:
        """Close after the written data was sent."""
        if self._transport is not None:
            self._transport.close()


class EnvoyConnection(End):
    """The end of a gateway."""

    def __init__(self, front: EnvoyListener) -> None:
        self._front = front
        self._early = bytearray()
        """Bytes received before the other end exists. They are read at once, because uvloop reads even if reading was
        paused before the start."""
        self._frames = GrpcFrames()
        self._leaving = self._sent = False
        self._has_settings = False
        """Whether gRPC's settings were sent to the gateway."""
        self._has_acknowledged = False
        """Whether the gateway has sent something after them. A GOAWAY that arrives together with the settings leaves
        gRPC's client library waiting on the connection until it is closed."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._front.open.add(self)
        self._front.tasks.start(self._connect(), "connection of a gateway")

    def data_received(self, data: bytes) -> None:
        if self.other is None:
            self._early += data
        else:
            self._has_acknowledged = self._has_settings
            self.other.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        self._front.open.discard(self)

    def ask_to_leave(self) -> None:
        """Send GOAWAY after the current frame, once the gateway has acknowledged the settings. Call it repeatedly."""
        self._leaving = self._has_acknowledged
        if self._leaving and not self._sent and self._frames.is_between:
            self._send_go_away()

    def write(self, data: bytes) -> None:
        self._has_settings = True
        if not self._sent:
            at = self._frames.passed(data, self._leaving)
            super().write(data[:at])
            data = data[at:]
            if self._leaving and self._frames.is_between:
                self._send_go_away()
        if data:
            super().write(data)

    def _send_go_away(self) -> None:
        self._sent = True
        super().write(GO_AWAY)

    async def _connect(self) -> None:
        inner = End()
        inner.other = self
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: inner, self._front.path)
        except OSError:
            self.close()
            return
        self.other = inner
        inner.write(bytes(self._early))
        if self._transport is None:
            inner.close()
