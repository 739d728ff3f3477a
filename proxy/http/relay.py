"""The way to one client: sends legs to pods and waits for their answers to have passed."""

from __future__ import annotations

import asyncio

from proxy.core.errors import BadGateway, KvlaneError, RequestError, UpstreamFailed
from proxy.core.exchange import Ending, Exchange
from proxy.core.tasks import Tasks
from proxy.http.answer import Answer, Rim
from proxy.http.body import Upload
from proxy.http.call import HttpCall
from proxy.http.framing import LAST_CHUNK, chunk
from proxy.http.head import encode_pairs, first_lines, header_line, upstream_head
from proxy.http.upstream.connection import Connection
from proxy.http.upstream.errors import Disconnected
from proxy.http.upstream.pool import Address


class ClientRelay:
    """Implements `core.ports.Relay` for one request. `exchange` is its last leg."""

    __slots__ = ("_call", "_rim", "exchange")

    def __init__(self, call: HttpCall, rim: Rim) -> None:
        self._call = call
        self._rim = rim
        self.exchange: Exchange | None = None

    async def relay(self, exchange: Exchange) -> None:
        """See the port. Raises RequestError too, if the client's upload broke off or cannot be sent again.

        A connection that was used before may be closing at the other end: if it dies without a byte, the pod has not
        begun, and gets the request on a fresh one.
        """
        self.exchange = exchange
        call, rim, body = self._call, self._rim, exchange.request.body
        upload = call.upload
        try:
            pod = rim.pool.pods[exchange.endpoint.url]
            head = self._head(exchange, pod.address)
            used = pod.take() if upload is None else None
            while True:
                connection = used or await rim.pool.connect(pod)
                answer = Answer(call, exchange, rim, connection)
                try:
                    if upload is None:
                        if not body:
                            connection.head_only = call.method == "HEAD"
                        connection.send(answer, head, body)
                        error = await answer.done
                    else:
                        error = await self._upload(answer, connection, head, upload)
                except BaseException:
                    answer.abandon()
                    raise
                if error is None:
                    return
                if used is None or not isinstance(error, Disconnected) or not error.silent:
                    raise error
                used = exchange.ending = None
        except asyncio.CancelledError:
            exchange.ending = exchange.ending or Ending.CLIENT_GONE
            raise
        except UpstreamFailed as error:
            exchange.ending = exchange.ending or Ending.UPSTREAM_FAILED
            if upload is not None and upload.begun:
                raise BadGateway("The pod failed while the upload was passed on; send it again.") from error
            raise

    async def _upload(self, answer: Answer, connection: Connection, head: bytes, upload: Upload) -> KvlaneError | None:
        """The answer may come, and even end, before all is sent."""
        chunked = self._call.chunked
        body = self._call.body
        connection.request_sent = False
        connection.send(answer, head, chunk(body) if chunked else body)
        async with Tasks() as tasks:
            tasks.start(_pump(upload, connection, answer, chunked), "upload")
            return await answer.done

    def _head(self, exchange: Exchange, address: Address) -> bytes:
        call, body, key = self._call, exchange.request.body, exchange.endpoint.api_key
        first = first_lines(call.method, call.path + call.query, address.base, address.host_header)
        if body and call.upload is None:
            ours = b"%bcontent-length: %d\r\n" % (call.id_line, len(body))
        else:
            ours = call.id_line + self._framing()
        if key is not None:
            ours += header_line("authorization", f"Bearer {key}")
        if exchange.upstream_headers:
            ours += encode_pairs(exchange.upstream_headers)
        return upstream_head(first, call.raw_headers, key is not None, ours + b"\r\n")

    def _framing(self) -> bytes:
        """Of a body that is streamed, or of none."""
        call = self._call
        if call.upload is not None:
            if call.chunked:
                return b"transfer-encoding: chunked\r\n"
            return b"content-length: %d\r\n" % (call.content_length or 0)
        if call.wants_websocket:
            return b"connection: Upgrade\r\nupgrade: websocket\r\n"
        return b"content-length: 0\r\n" if call.method in ("POST", "PUT", "PATCH") else b""


async def _pump(upload: Upload, connection: Connection, answer: Answer, chunked: bool) -> None:
    try:
        while piece := await upload.next():
            connection.write(chunk(piece) if chunked else piece)
            if answer.upload_room is not None:
                await answer.upload_room
        if chunked:
            connection.write(LAST_CHUNK)
        connection.request_sent = True
    except RequestError as error:
        connection.abort()
        answer.failed(error)
