"""The port for gateways: ext_proc and health checks, over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.extproc import messages
from proxy.extproc.addresses import Addresses
from proxy.extproc.call import EnvoyCall
from proxy.extproc.front import Front
from proxy.extproc.messages import immediate
from proxy.extproc.relay import EnvoyRelay
from proxy.extproc.settings import ExtProcSettings
from proxy.extproc.stream import Stream
from proxy.http.response import RelayContext
from proxy.http.service import Service

READY = ("", "readiness", messages.SERVICE)
"""What may be asked about, beside whether the process lives."""

LAST_WORDS = 1.0
"""Seconds in which those that are cut are told so."""

GONE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""What a write to a stream raises that has ended."""

UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))

CUT = "the answer is incomplete"


class Picker:
    """Listens between `start` and `stop`."""

    def __init__(
        self,
        settings: ExtProcSettings,
        make_service: Callable[[], Service[EnvoyCall]],
        addresses: Addresses,
        context: Callable[[], RelayContext],
        clock: Clock,
    ) -> None:
        """`make_service` is called again by `renew`, and `context` with each request."""
        self._make_service = make_service
        self.service = make_service()
        self._settings = settings
        self._addresses = addresses
        self._context = context
        self._clock = clock
        self._tasks = Tasks()
        self._ids = map(f"{os.urandom(8).hex()}{{:012x}}".format, itertools.count(1))
        self._server: Any = None
        self._front: Front
        self._directory: tempfile.TemporaryDirectory[str]

    async def start(self, sockets: Sequence[socket.socket] = ()) -> None:
        """On `sockets`, which are bound; else on the port of the settings. Raises OSError if it cannot be had, or the
        certificate cannot."""
        settings = self._settings
        self._directory = tempfile.TemporaryDirectory(prefix="kvlane-")
        self._front = Front(f"{self._directory.name}/picker.sock")
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
        is_stopping, self.service = self.service.stopping, self._make_service()
        self.service.stopping = is_stopping

    @property
    def port(self) -> int:
        return self._front.port

    async def stop(self, grace: float) -> None:
        """No new requests; those that run have `grace` seconds to end, then they are cut."""
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
        """Whether there are requests that have not ended."""
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
        """One request. It is served beside what is read: the end of the stream ends it, whatever it waits for."""
        head = await context.read()
        if head is grpc.aio.EOF or not head.HasField("request_headers"):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a stream begins with request_headers")
        stream = Stream(head, context.write, GONE)
        call = EnvoyCall(stream, self._ids, self._clock.now())
        serving = self._tasks.start(self._serve(call, context), "request of a gateway")
        serving.add_done_callback(lambda _: stream.deaf())
        try:
            while (message := await context.read()) is not grpc.aio.EOF:
                if not serving.done():
                    await stream.told(message)
        finally:
            stream.end()
            if not serving.done():
                # Without an await: this task may be cancelled too, at any of them.
                asyncio.get_running_loop().call_later(LAST_WORDS if stream.is_answered else 0.0, serving.cancel)

    async def _serve(self, call: EnvoyCall, context: Any) -> None:
        relay = EnvoyRelay(call, self._context(), self._addresses, self._settings.fallbacks)
        try:
            await self.service.serve(call, relay)
        finally:
            if call.local is not None and not call.has_left:
                await call.stream.write(immediate(*call.local))
            elif call.is_broken and not call.has_left:
                await context.abort(grpc.StatusCode.ABORTED, CUT)

    async def _check(self, request: Any, context: Any) -> Any:
        if request.service not in (*READY, "liveness"):
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no such service: {request.service}")
        ready = request.service == "liveness" or not self.service.stopping
        return messages.HealthCheckResponse(status=messages.SERVING if ready else messages.NOT_SERVING)
