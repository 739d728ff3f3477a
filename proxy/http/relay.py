"""The way to one client: sends legs to pods and waits for their answers to have passed."""

from __future__ import annotations

import asyncio

from proxy.core.errors import BadGateway, KvlaneError, RequestError, UpstreamFailed
from proxy.core.exchange import Ending, Exchange
from proxy.core.tasks import Tasks
from proxy.http.answer import Answer, Rim
from proxy.http.body import Upload
from proxy.http.call import HttpCall
from proxy.http.head import upstream_head
from proxy.http.upstream.connection import Connection, Disconnected


class ClientRelay:
    """Implements `core.ports.Relay` for one request. `exchange` is its last leg."""

    __slots__ = ("_call", "_rim", "exchange")

    def __init__(self, call: HttpCall, rim: Rim) -> None:
        self._call = call
        self._rim = rim
        self.exchange: Exchange | None = None

    async def relay(self, exchange: Exchange) -> None:
        """See the port. Raises RequestError too, if the client's upload broke off or cannot be sent again."""
        self.exchange = exchange
        try:
            await self._send(exchange)
        except asyncio.CancelledError:
            exchange.ending = exchange.ending or Ending.CLIENT_GONE
            raise
        except UpstreamFailed as error:
            exchange.ending = exchange.ending or Ending.UPSTREAM_FAILED
            if self._call.upload is not None and self._call.upload.begun:
                raise BadGateway("The pod failed while the upload was passed on; send it again.") from error
            raise

    async def _send(self, exchange: Exchange) -> None:
        """A connection that was used before may be closing at the other end: if it dies without a byte, the pod has not
        begun, and gets the request on a fresh one."""
        endpoint, pool = exchange.endpoint, self._rim.pool
        head = self._head(exchange)
        used = pool.idle(endpoint) if self._call.upload is None else None
        if used is not None:
            try:
                await self._leg(exchange, used, head)
            except Disconnected as error:
                if not error.silent:
                    raise
                exchange.ending = None
            else:
                return
        await self._leg(exchange, await pool.connect(endpoint), head)

    async def _leg(self, exchange: Exchange, connection: Connection, head: bytes) -> None:
        call, watched = self._call, self._rim.sweep.watched
        answer = Answer(call, exchange, self._rim, connection)
        watched.add(answer)
        call.connection.sink = answer
        try:
            if call.connection.writing_paused:
                answer.pause()
            if call.upload is None:
                connection.send(answer, head, exchange.request.body, head_only=call.method == "HEAD")
                error = await answer.done
            else:
                error = await self._upload(answer, connection, head, call.upload)
            if error is not None:
                raise error
        finally:
            call.connection.sink = None
            watched.discard(answer)
            if answer.open:
                answer.abandon()

    async def _upload(self, answer: Answer, connection: Connection, head: bytes, upload: Upload) -> KvlaneError | None:
        """The answer may come, and even end, before all is sent."""
        chunked = self._call.chunked
        body = self._call.body
        connection.send(answer, head, _chunk(body) if chunked else body, whole=False)
        async with Tasks() as tasks:
            tasks.start(_pump(upload, connection, answer, chunked), "upload")
            return await answer.done

    def _head(self, exchange: Exchange) -> bytes:
        call, endpoint = self._call, exchange.endpoint
        address = self._rim.pool.address(endpoint)
        return upstream_head(
            method=call.method,
            target=address.base + (call.path + call.query).encode("utf-8", "surrogateescape"),
            host=address.host_header,
            headers=call.raw_headers,
            request_id=call.id_line,
            api_key=endpoint.api_key,
            framing=self._framing(exchange),
            added=exchange.upstream_headers,
            upgrade=call.wants_websocket,
        )

    def _framing(self, exchange: Exchange) -> bytes:
        call, body = self._call, exchange.request.body
        if call.upload is not None:
            if call.chunked:
                return b"transfer-encoding: chunked\r\n"
            return b"content-length: %d\r\n" % (call.content_length or 0)
        if body or call.method in ("POST", "PUT", "PATCH"):
            return b"content-length: %d\r\n" % len(body)
        return b""


async def _pump(upload: Upload, connection: Connection, answer: Answer, chunked: bool) -> None:
    try:
        while piece := await upload.next():
            connection.write(_chunk(piece) if chunked else piece)
            if answer.upload_room is not None:
                await answer.upload_room
        if chunked:
            connection.write(b"0\r\n\r\n")
        connection.request_sent = True
    except RequestError as error:
        connection.abort()
        answer.failed(error)


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)
