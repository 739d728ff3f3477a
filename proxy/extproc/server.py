"""The port for gateways: ext_proc and health checks, over gRPC."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.extproc import messages
from proxy.extproc.addresses import Addresses
from proxy.extproc.call import EnvoyCall
from proxy.extproc.relay import EnvoyRelay
from proxy.extproc.replies import immediate
from proxy.extproc.settings import ExtProcSettings
from proxy.extproc.stream import Stream
from proxy.http.answer import Rim
from proxy.http.service import Service
from proxy.http.settings import ServerTls

READY = ("", "readiness", messages.SERVICE)
"""What may be asked about, beside whether the process lives."""

LAST_WORDS = 1.0
"""Seconds in which those that are cut are told so."""

GONE = (grpc.aio.InternalError, grpc.aio.UsageError)
"""What a write to a stream raises that has ended."""

CUT = "the answer is incomplete"


class Picker:
    """Listens between `start` and `stop`."""

    def __init__(
        self,
        settings: ExtProcSettings,
        service: Service[EnvoyCall],
        addresses: Addresses,
        rim: Callable[[], Rim],
        clock: Clock,
        shares_port: bool = False,
    ) -> None:
        """`rim` is asked for with each request. `shares_port`: other processes may listen there too, and the kernel
        deals connections; else it is an error."""
        self.service = service
        self.port = 0
        """From `start` on."""
        self._settings = settings
        self._addresses = addresses
        self._rim = rim
        self._clock = clock
        self._shares_port = shares_port
        self._tasks = Tasks()
        self._ids = map(f"{os.urandom(8).hex()}{{:012x}}".format, itertools.count(1))
        self._server: Any = None

    async def start(self) -> None:
        """Raises OSError if the port cannot be had, or the certificate cannot."""
        settings = self._settings
        unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        self._server = grpc.aio.server(options=[*unlimited, ("grpc.so_reuseport", int(self._shares_port))])
        self._server.add_generic_rpc_handlers(self._handlers())
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        try:
            if settings.tls is None:
                self.port = self._server.add_insecure_port(f"{host}:{settings.port}")
            else:
                self.port = self._server.add_secure_port(f"{host}:{settings.port}", credentials(settings.tls))
        except RuntimeError as error:
            raise OSError(f"extproc: {error}") from None
        await self._server.start()

    async def stop(self, grace: float) -> None:
        """No new requests; those that run have `grace` seconds to end, then they are cut."""
        self.service.stopping = True
        if self._server is None:
            return
        async with Tasks() as tasks:
            stopped = tasks.start(self._server.stop(grace + LAST_WORDS), "port for gateways")
            await asyncio.wait((stopped,), timeout=grace)
            await self._tasks.stop()
            await stopped

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
        relay = EnvoyRelay(call, self._rim(), self._addresses, self._settings.fallbacks)
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


def credentials(tls: ServerTls) -> Any:
    """Whose files are read again at each handshake. Raises OSError."""

    def read() -> Any:
        cert = Path(tls.cert).read_bytes()
        key = Path(tls.key).read_bytes() if tls.key else cert
        roots = Path(tls.client_ca).read_bytes() if tls.client_ca else None
        return grpc.ssl_server_certificate_configuration([(key, cert)], roots)

    def read_again() -> Any:
        try:
            return read()
        except OSError:
            return None

    return grpc.dynamic_ssl_server_credentials(read(), read_again, require_client_authentication=bool(tls.client_ca))
