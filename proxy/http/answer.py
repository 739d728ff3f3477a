"""A pod's answer on its way to the client: pushed in by the pod's connection, pushed out to the client's socket."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass

from proxy.core.errors import KvlaneError, ShuttingDown, UpstreamTimedOut
from proxy.core.exchange import Ending, Exchange
from proxy.core.ports import Clock
from proxy.http.call import HttpCall
from proxy.http.framing import Bodies, Framing, Marks, Plain, Rechunked, WholeChunks
from proxy.http.head import AnswerHead, encode_pairs, read_answer_head
from proxy.http.meter import Meter
from proxy.http.sweep import Sweep
from proxy.http.tunnel import Tunnel
from proxy.http.upstream.connection import Connection, Garbled
from proxy.http.upstream.pool import UpstreamPool
from proxy.openai.render import stream_error
from proxy.reliability.settings import Timeouts

BODYLESS = (204, 304)

LOST = "The pod stopped answering; this answer is incomplete."
STOPPED = "The proxy is being stopped; this answer is incomplete."
RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Rim:
    """What all relays of a server share."""

    pool: UpstreamPool
    timeouts: Timeouts
    sweep: Sweep
    clock: Clock
    loop: asyncio.AbstractEventLoop
    """Asking for the running one costs a system call before Python 3.12."""
    on_first_byte: Callable[[Exchange], None]


class Answer:
    """One leg's answer, from the request being sent to its ending. `done` is given what went wrong while nothing had
    reached the client, else None; `open` is false from then on."""

    __slots__ = (
        "_call",
        "_connection",
        "_events",
        "_exchange",
        "_framing",
        "_head",
        "_meter",
        "_rim",
        "_seen",
        "_seen_at",
        "_transport",
        "done",
        "open",
        "paused",
        "upload_room",
    )

    def __init__(self, call: HttpCall, exchange: Exchange, rim: Rim, connection: Connection) -> None:
        self._call = call
        self._exchange = exchange
        self._rim = rim
        self._connection = connection
        self._transport = call.transport
        self._framing: Framing
        self._head = b""
        self._events = False
        self._meter = Meter(exchange, rim.clock, rim.on_first_byte)
        self._seen = 0
        self._seen_at = 0.0
        self.done: asyncio.Future[KvlaneError | None] = rim.loop.create_future()
        self.open = True
        self.paused = False
        self.upload_room: asyncio.Future[None] | None = None
        """Pending while the pod does not keep up with an upload."""

    # what the pod's connection calls

    def head(self, status: int, lines: list[bytes]) -> bool:
        head = read_answer_head(lines)
        self._exchange.status = status
        bodyless = status in BODYLESS or self._call.method == "HEAD"
        until_close = not (head.chunked or bodyless or head.has_length)
        self._events = head.events
        self._head = self._client_head(status, head, self._frame(head.chunked and not bodyless, until_close))
        return until_close

    def received(self, raw: bytes, bodies: Bodies, marks: Marks) -> None:
        self._meter.add(bodies, marks)
        out = self._framing.feed(raw, bodies, marks)
        if self._head:
            out = self._take_head() + out
        if out:
            self._transport.write(out)

    def finished(self, raw: bytes, bodies: Bodies, marks: Marks, exact: bool) -> None:
        self._meter.add(bodies, marks[:-1])  # the last chunk only says that there are no more
        out = self._framing.finish(raw, bodies, exact)
        if self._head:
            out = self._take_head() + out
        if out:
            self._transport.write(out)
        self._end(Ending.COMPLETE)

    def upgraded(self, rest: bytes) -> None:
        self._transport.write(self._take_head() + rest)
        self._call.closing = True
        self._meter.first_byte()
        tunnel = Tunnel(self._call.connection, self._connection.transport, self._tunnel_ended)
        self._connection.splice(tunnel)
        self._rim.sweep.watched.discard(self)
        self._call.connection.sink = tunnel
        self._call.connection.become_tunnel(tunnel)

    def failed(self, error: KvlaneError) -> None:
        if not self.open:
            return
        ending = Ending.TIMED_OUT if isinstance(error, UpstreamTimedOut) else Ending.UPSTREAM_FAILED
        if self._call.answered:
            self._cut(ending, LOST)
            return
        self._exchange.ending = ending
        self._close(error)

    def pause_writing(self) -> None:
        self.upload_room = self._rim.loop.create_future()

    def resume_writing(self) -> None:
        room, self.upload_room = self.upload_room, None
        if room is not None and not room.done():
            room.set_result(None)

    def evict(self) -> None:
        """Ends it because the proxy stops."""
        self._connection.abort()
        if self._call.answered:
            self._cut(Ending.EVICTED, STOPPED)
        else:
            self._exchange.ending = Ending.EVICTED
            self._close(ShuttingDown())

    def abandon(self) -> None:
        """The relay was cancelled: the client left, or has to see that there is no more."""
        self._connection.abort()
        if self._transport.is_closing():
            self._exchange.ending = Ending.CLIENT_GONE
            self._close(None)
        elif self._call.answered:
            self._cut(Ending.EVICTED, STOPPED)
        else:
            self._exchange.ending = Ending.EVICTED
            self._close(None)

    # what the client's connection calls

    def pause(self) -> None:
        self.paused = True
        self._connection.pause_reading()

    def resume(self) -> None:
        self.paused = False
        self._connection.resume_reading()

    def gone(self) -> None:
        if self.open:
            self._connection.abort()
            self._end(Ending.CLIENT_GONE)

    # what the sweep calls

    def check(self, now: float) -> None:
        timeouts, request = self._rim.timeouts, self._exchange.request
        if now - request.received_at > timeouts.request:
            self._time_out(f"not answered within {timeouts.request:g} s")
        elif request.stream:
            progress = self._exchange.response_bytes
            if not progress:
                if now - self._exchange.started_at > timeouts.first_byte:
                    self._time_out(f"no first byte within {timeouts.first_byte:g} s")
            elif progress != self._seen or self.paused:
                self._seen, self._seen_at = progress, now
            elif now - self._seen_at > timeouts.idle:
                self._time_out(f"nothing for {timeouts.idle:g} s")

    # below here in order of use

    def _frame(self, chunked: bool, until_close: bool) -> bytes:
        """Chooses the framing towards the client; returns its header line."""
        if not (chunked or until_close):
            self._framing = Plain()
            return b""
        self._meter.chunked = chunked
        if not self._call.speaks_11:
            self._framing = Plain(ends_by_close=True)
            self._call.closing = True
            return b""
        self._framing = WholeChunks() if chunked else Rechunked()
        return b"transfer-encoding: chunked\r\n"

    def _client_head(self, status: int, head: AnswerHead, framing: bytes) -> bytes:
        call = self._call
        if status == 101:
            if not (call.wants_websocket and head.upgrade):
                raise Garbled("switched protocols unasked")
            connection = b"connection: Upgrade\r\nupgrade: %b\r\n" % head.upgrade
        else:
            if not self._connection.request_sent:
                call.closing = True
            connection = call.connection_header()
        ours = encode_pairs(self._exchange.response_headers)
        return b"".join((head.status_line, head.fields, framing, call.id_line, ours, connection, b"\r\n"))

    def _take_head(self) -> bytes:
        head, self._head = self._head, b""
        self._call.answered = self._exchange.status or 0
        return head

    def _time_out(self, message: str) -> None:
        self._connection.abort()
        self.failed(UpstreamTimedOut(message))

    def _cut(self, ending: Ending, message: str) -> None:
        """The client has a part of the answer and must not take it for the whole."""
        self._call.closing = True
        out = self._framing.cut(stream_error(self._call.path, message), self._meter.tail()) if self._events else None
        if out is not None:
            self._transport.write(out)
        self._end(ending)
        if out is None:
            reset(self._transport)

    def _tunnel_ended(self, failed: bool) -> None:
        if self.open:
            self._end(Ending.UPSTREAM_FAILED if failed else Ending.COMPLETE)

    def _end(self, ending: Ending) -> None:
        self._meter.finish(ending is Ending.COMPLETE)
        self._exchange.ending = ending
        self._close(None)

    def _close(self, error: KvlaneError | None) -> None:
        self.open = False
        if not self.done.done():
            self.done.set_result(error)
        self.resume_writing()


def reset(transport: asyncio.Transport) -> None:
    """Closes with a reset: an answer that ends with the connection would look whole after an orderly close."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()
