"""Pods that follow a script, a gateway without a scheduler, and clients that see every byte."""

from __future__ import annotations

import asyncio
import http.client
import io
import json
import math
import socket
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadGateway, GatewayTimeout, Reason, UpstreamFailed, UpstreamTimedOut
from proxy.core.listener import NO_LISTENERS, Listener, Listeners
from proxy.core.params import Duration
from proxy.core.ports import ClientRequest, Clock, Relay, SystemClock
from proxy.core.request import InferenceRequest
from proxy.gateway import Gateway
from proxy.http.client_connection import ClientConnection
from proxy.http.guards import CloseReason
from proxy.http.server import DataPortConfig, DataServer
from proxy.http.settings import ListenSettings, PodTlsContexts, SecuritySettings
from proxy.http.upstream.pool import UpstreamPool
from proxy.reliability.settings import Timeouts
from tests.helpers.waiting import PATIENCE, until

CHAT = "/v1/chat/completions"
PATIENT = Timeouts()


@dataclass
class Received:
    """One request as a pod got it."""

    line: bytes
    headers: list[tuple[bytes, bytes]]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    connection: int

    def all(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.headers if key.lower() == name]

    async def body(self) -> bytes:
        if self.all(b"transfer-encoding"):
            return await self._chunks()
        return await self.reader.readexactly(int((self.all(b"content-length") or [b"0"])[0]))

    async def send(self, *pieces: bytes, pause: float = 0.0) -> None:
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(pause)

    async def gone(self) -> None:
        """Until the other side leaves."""
        try:
            while await self.reader.read(65536):
                pass
        except ConnectionError:
            pass

    def break_off(self) -> None:
        self.writer.close()

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readline(), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body


Script = Callable[[Received], Awaitable[None]]


class Pod:
    """Runs `script` once per request; while it returns, the connection is kept."""

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None, buffer: int | None = None) -> None:
        """`room`: bytes that the kernel takes for a pod that does not read."""
        self.script = script
        self._buffer = buffer
        self._tls = tls
        self.requests: list[Received] = []
        self.connections = 0
        self._server: asyncio.Server
        self._tasks: set[asyncio.Task[Any]] = set()
        self.endpoint: Endpoint

    async def __aenter__(self) -> Pod:
        sock = socket.socket(proto=socket.IPPROTO_TCP) if self._buffer is None else small(self._buffer)
        sock.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._serve, sock=sock, ssl=self._tls)
        port = self._server.sockets[0].getsockname()[1]
        self.endpoint = Endpoint(f"pod-{port}", f"{'https' if self._tls else 'http'}://127.0.0.1:{port}")
        return self

    def close(self) -> None:
        """The port; what is connected stays so."""
        self._server.close()

    async def __aexit__(self, *_: object) -> None:
        self.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                line, *lines = head[:-4].split(b"\r\n")
                headers = [(name, value.strip()) for name, _, value in (each.partition(b":") for each in lines)]
                request = Received(line, headers, reader, writer, number)
                self.requests.append(request)
                await self.script(request)
                if writer.is_closing():
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.transport.abort()
            self._tasks.discard(task)


def answering(*pieces: bytes, pause: float = 0.0) -> Script:
    """Reads the request and sends these bytes."""

    async def script(request: Received) -> None:
        await request.body()
        await request.send(*pieces, pause=pause)

    return script


def plain(body: bytes = b'{"ok":true}', extra: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n%bcontent-length: %d\r\n\r\n%b" % (
        extra,
        len(body),
        body,
    )


SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def event(text: str) -> bytes:
    return chunk(b"data: " + text.encode() + b"\n\n")


BUFFER = 64 * 1024


def small(buffer: int = BUFFER) -> socket.socket:
    """A socket whose kernel does not grow its buffer."""
    sock = socket.socket(proto=socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    return sock


@dataclass
class Ended:
    path: str
    status: int
    outcome: Ending | Reason
    attempt: Attempt | None


@dataclass
class FakeGateway:
    """Sends to its pods in order, the next one while nothing was sent."""

    pods: Sequence[Endpoint]
    ready: bool = True
    cards: list[dict[str, Any]] = field(default_factory=list)
    upstream_headers: list[tuple[str, str]] = field(default_factory=list)
    response_headers: list[tuple[str, str]] = field(default_factory=list)
    calls: list[ClientRequest] = field(default_factory=list)
    attempts: list[Attempt] = field(default_factory=list)
    crash: Exception | None = None
    failure: UpstreamFailed | None = None
    """Of the last attempt that failed."""
    patience: float = math.inf
    listeners: Listeners = NO_LISTENERS

    async def serve(self, client_request: ClientRequest, relay: Relay) -> None:
        self.calls.append(client_request)
        if self.crash is not None:
            raise self.crash
        json_body = client_request.body if client_request.body.startswith(b"{") else b"{}"
        fields = json.loads(json_body)
        request = InferenceRequest(
            client_request.id,
            client_request.path,
            fields.get("model", "m"),
            body=client_request.body,
            headers=client_request.headers,
            stream=fields.get("stream", False),
            received_at=client_request.received_at,
            deadline=client_request.received_at + self.patience,
        )
        failure: UpstreamFailed | None = None
        for number, pod in enumerate(self.pods):
            attempt = Attempt(request, Decision(pod), pod, number, SystemClock().now())
            attempt.listeners = self.listeners
            attempt.upstream_headers += self.upstream_headers
            attempt.response_headers += self.response_headers
            self.attempts.append(attempt)
            try:
                await relay.relay(attempt)
            except UpstreamTimedOut as error:
                raise GatewayTimeout("too late") from error
            except UpstreamFailed as error:
                self.failure = failure = error
            else:
                return
        raise BadGateway("nobody answered") from failure

    def retries_instead(self, attempt: Attempt, status: int) -> bool:
        return status >= 500 and attempt.endpoint is not self.pods[-1]

    def health(self) -> bool:
        return self.ready

    def models(self) -> list[dict[str, Any]]:
        return self.cards


@dataclass
class Noted(Listener):
    """Keeps the first bytes and the ends of requests."""

    first_bytes: list[Attempt] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)

    def first_byte(self, attempt: Attempt) -> None:
        self.first_bytes.append(attempt)

    def request_ended(
        self, client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        self.ended.append(Ended(client_request.path, status, outcome, attempt))


@dataclass
class Rig:
    """A data port in front of pods."""

    server: DataServer
    gateway: FakeGateway
    first_bytes: list[Attempt]
    ended: list[Ended]
    hung_up: Counter[CloseReason] = field(default_factory=Counter)

    @property
    def attempt(self) -> Attempt:
        return self.gateway.attempts[-1]

    @asynccontextmanager
    async def client(self, buffer: int | None = None) -> AsyncIterator[Client]:
        """`room`: bytes that the kernel takes for a client that does not read; else it may take tens of megabytes."""
        sock = socket.create_connection(("127.0.0.1", self.server.port)) if buffer is None else small(buffer)
        if buffer is not None:
            sock.connect(("127.0.0.1", self.server.port))
        reader, writer = await asyncio.open_connection(sock=sock, limit=2**26)
        try:
            yield Client(reader, writer)
        finally:
            writer.transport.abort()

    async def ask(self, request: bytes) -> Seen:
        """One request on a connection of its own, which ends with it."""
        async with self.client() as client:
            client.send(request)
            return await client.until_closed(request.split(b" ", 1)[0].decode())

    async def until_ended(self, count: int = 1) -> Ended:
        await until(lambda: len(self.ended) >= count)
        return self.ended[-1]

    async def standstill(self) -> int:
        """Waits until no more requests end; how many have."""
        served = -1
        while served != len(self.ended):
            served = len(self.ended)
            await asyncio.sleep(0.2)
        return served


@asynccontextmanager
async def rig(
    *pods: Pod | Endpoint,
    timeouts: Timeouts = PATIENT,
    security: SecuritySettings | None = None,
    pod_tls: PodTlsContexts | None = None,
    clock: Clock | None = None,
    **listen: Any,
) -> AsyncIterator[Rig]:
    endpoints = [pod.endpoint if isinstance(pod, Pod) else pod for pod in pods]
    noted = Noted()
    listeners = Listeners([noted])
    gateway = FakeGateway(endpoints, patience=timeouts.request, listeners=listeners)
    hung_up: Counter[CloseReason] = Counter()
    server = DataServer(
        ListenSettings(host="127.0.0.1", port=0, **listen),
        DataPortConfig(
            cast(Gateway, gateway), security or SecuritySettings(), timeouts, listeners, gateway.retries_instead
        ),
        clock or SystemClock(),
        UpstreamPool(timeouts.connect, clock or SystemClock(), pod_tls=pod_tls),
        count_closed=lambda why, number: hung_up.update({why: number}),
    )
    await server.start()
    try:
        yield Rig(server, gateway, noted.first_bytes, noted.ended, hung_up)
    finally:
        await server.stop(grace=0)


@dataclass
class Seen:
    """What a client made of the bytes. `ending`: complete, cut (the framing was not finished) or reset."""

    raw: bytes
    status: int
    headers: list[tuple[str, str]]
    body: bytes
    ending: str

    def all(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Client:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def leave(self) -> None:
        self.writer.transport.abort()

    async def until_closed(self, method: str = "POST") -> Seen:
        pieces, reset = [], False
        try:
            async with asyncio.timeout(PATIENCE):
                while data := await self.reader.read(2**20):
                    pieces.append(data)
        except ConnectionError:
            reset = True
        return understand(b"".join(pieces), reset, method)

    async def response(self) -> bytes:
        """Read one complete response with a Content-Length."""
        async with asyncio.timeout(PATIENCE):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(
                int(line.partition(b":")[2])
                for line in head.split(b"\r\n")
                if line.lower().startswith(b"content-length:")
            )
            return head + await self.reader.readexactly(length)

    async def until(self, text: bytes) -> bytes:
        async with asyncio.timeout(PATIENCE):
            return await self.reader.readuntil(text)


class _Socket:
    def __init__(self, raw: bytes) -> None:
        self._raw = raw

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._raw)


def understand(raw: bytes, reset: bool = False, method: str = "POST") -> Seen:
    """Parse a response as the standard library's client does."""
    response = http.client.HTTPResponse(_Socket(raw), method=method)  # type: ignore[arg-type]
    try:
        response.begin()
    except (http.client.HTTPException, ValueError, OSError):
        return Seen(raw, 0, [], b"", "reset" if reset else "cut")
    try:
        body, ending = response.read(), "complete"
    except (http.client.IncompleteRead, ValueError) as error:
        body, ending = getattr(error, "partial", b""), "cut"
    return Seen(raw, response.status, response.getheaders(), body, "reset" if reset else ending)


def post(
    path: str = CHAT, body: bytes = b'{"model":"m"}', *headers: str, close: bool = True, version: str = "1.1"
) -> bytes:
    lines = ["host: kvlane", *headers, f"content-length: {len(body)}"]
    if close:
        lines.append("connection: close")
    return f"POST {path} HTTP/{version}\r\n".encode() + "\r\n".join(lines).encode() + b"\r\n\r\n" + body


STREAMED = b'{"model":"m","stream":true}'


def connection_of(port: Rig) -> ClientConnection:
    (connection,) = port.server.connections
    return connection


def timeouts(**seconds: float) -> Timeouts:
    return Timeouts(**{name: Duration(value) for name, value in seconds.items()})
