"""A pod's answer on its way to the client: pushed in by the pod's connection, pushed out to the client's socket."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import starmap

from proxy.core.errors import KvlaneError, ShuttingDown, UpstreamTimedOut
from proxy.core.exchange import Ending, Exchange
from proxy.core.ports import Clock
from proxy.http.call import HttpCall
from proxy.http.framing import Framing, Plain, Rechunked, UntilClose, WholeChunks
from proxy.http.head import BODYLESS, AnswerHead, header_line
from proxy.http.meter import TAIL
from proxy.http.tunnel import Tunnel
from proxy.http.upstream.connection import Connection
from proxy.http.upstream.errors import Garbled
from proxy.http.upstream.pool import UpstreamPool
from proxy.openai.render import stream_error
from proxy.reliability.settings import Timeouts

UNSETTLED = 2 * TAIL
"""Bytes that pass before the meter is settled: 60 events or more at its price."""

LOST = "The pod stopped answering; this answer is incomplete."
STOPPED = "The proxy is being stopped; this answer is incomplete."
RESET = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Rim:
    """What all relays of a server share."""

    pool: UpstreamPool
    timeouts: Timeouts
    clock: Clock
    loop: asyncio.AbstractEventLoop
    """Asking for the running one costs a system call before Python 3.12."""
    on_first_byte: Callable[[Exchange], None]


class Answer:
    """One leg's answer, from the request being sent to its ending. `done` is given what went wrong while nothing had
    reached the client, else None.

    What most answers never change stands on the class, and is not stored for each.
    """

    head: AnswerHead | None = None
    """As the pod's connection has read it; None before that, and once it has been sent on."""
    paused = False
    upload_room: asyncio.Future[None] | None = None
    """Pending while the pod does not keep up with an upload."""
    _framing: Framing = Plain()
    _framing_lines = b""
    _events = False
    _passed = 0
    """Bytes read of the body, framing and all."""
    _settle_at = 0
    _seen = 0
    _seen_at = 0.0

    def __init__(self, call: HttpCall, exchange: Exchange, rim: Rim, connection: Connection) -> None:
        self._call = call
        self._exchange = exchange
        self._rim = rim
        self._connection = connection
        self.done: asyncio.Future[KvlaneError | None] = rim.loop.create_future()
        client = call.connection
        client.sink = self
        if client.writing_paused:
            self.pause()

    # what the pod's connection calls

    def begin(self, head: AnswerHead) -> None:
        """Chooses how to frame a body whose length nobody knows, or none."""
        call = self._call
        if head.status == 101:
            if not (call.wants_websocket and head.upgrade):
                raise Garbled("switched protocols unasked")
            self._framing_lines = b"connection: Upgrade\r\nupgrade: %b\r\n" % head.upgrade
            call.closing = False
        elif call.method != "HEAD" and head.status not in BODYLESS:
            self._events = head.events
            self._connection.until_close = not head.chunked
            if call.speaks_11:
                self._framing = WholeChunks() if head.chunked else Rechunked()
                self._framing_lines = b"transfer-encoding: chunked\r\n"
            else:
                self._framing = UntilClose()
                call.closing = True

    def received(self, raw: bytes) -> None:
        """Any read but the last. From the second on, those of whole chunks go to `_pass_chunks`, without all this."""
        connection, exchange, framing = self._connection, self._exchange, self._framing
        meter = connection.meter
        out = framing.feed(raw, meter.pieces, meter.marks)
        if self.head is not None:
            out = self._opening(self.head) + out
            self.head = None
        if out:
            self._call.transport.write(out)
        if exchange.first_byte_at is None and meter.pieces:
            exchange.first_byte_at = self._rim.clock.now()
            self._rim.on_first_byte(exchange)
        meter.settle(exchange)
        self._passed += len(raw)
        self._settle_at = self._passed + UNSETTLED
        straight = framing.in_step and exchange.first_byte_at is not None
        connection.receive = self._pass_chunks if straight else self.received

    def finished(self, raw: bytes, exact: bool) -> None:
        """The last read; of most answers that are no streams, the only one. A whole answer without a body has its first
        byte now."""
        head, exchange, rim = self.head, self._exchange, self._rim
        meter = self._connection.meter
        if head is not None and head.sized and exact:
            self._call.transport.write(self._opening(head) + raw)
            meter.finish_at_once(exchange, raw)
        else:
            out = self._framing.finish(raw, meter.pieces, exact)
            if head is not None:
                out = self._opening(head) + out
            if out:
                self._call.transport.write(out)
            meter.finish(exchange)
        exchange.last_byte_at = now = rim.clock.now()
        if exchange.first_byte_at is None:
            exchange.first_byte_at = now
            rim.on_first_byte(exchange)
        exchange.ending = Ending.COMPLETE
        self._close(None)

    def upgraded(self, rest: bytes) -> None:
        if self.head is not None:
            self._call.transport.write(self._opening(self.head) + rest)
        self._call.closing = True
        self._exchange.first_byte_at = self._rim.clock.now()
        self._rim.on_first_byte(self._exchange)
        tunnel = Tunnel(self._call.connection, self._connection.transport, self._tunnel_ended)
        self._connection.splice(tunnel)
        self._call.connection.sink = tunnel
        self._call.connection.become_tunnel(tunnel)

    def failed(self, error: KvlaneError) -> None:
        if self._exchange.ending is not None:
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
        if self._exchange.ending is not None:
            return
        self._connection.abort()
        if self._call.transport.is_closing():
            self._end(Ending.CLIENT_GONE)
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
        if self._exchange.ending is None:
            self._connection.abort()
            self._end(Ending.CLIENT_GONE)

    def check(self, now: float) -> None:
        """For the sweep: ends what has stalled. `now` is monotonic seconds."""
        timeouts, exchange = self._rim.timeouts, self._exchange
        if now - exchange.request.received_at > timeouts.request:
            self._time_out(f"not answered within {timeouts.request:g} s")
        elif exchange.request.stream:
            if exchange.first_byte_at is None:
                if now - exchange.started_at > timeouts.first_byte:
                    self._time_out(f"no first byte within {timeouts.first_byte:g} s")
            elif self._passed != self._seen or self.paused:
                self._seen, self._seen_at = self._passed, now
            elif now - self._seen_at > timeouts.idle:
                self._time_out(f"nothing for {timeouts.idle:g} s")

    # what `Connection.receive` is while chunks go by

    def _pass_chunks(self, raw: bytes) -> None:
        """A paced event is one read of one chunk, and its price is this and the parser's: 55 bytecodes, two calls."""
        passed = self._passed + len(raw)
        if self._connection.meter.marks[-1] and raw.endswith(b"\r\n") and passed < self._settle_at:
            self._passed = passed
            self._call.transport.write(raw)
        else:
            self.received(raw)

    # below here in order of use

    def _opening(self, head: AnswerHead) -> bytes:
        """The head towards the client, about to be sent."""
        call, exchange = self._call, self._exchange
        if not self._connection.request_sent:
            call.closing = True
        ours = starmap(header_line, exchange.response_headers)
        last = b"\r\n" if call.speaks_11 and not call.closing else call.connection_header() + b"\r\n"
        call.answered = exchange.status = head.status
        return b"".join((head.start, call.id_line, *ours, self._framing_lines, last))

    def _time_out(self, message: str) -> None:
        self._connection.abort()
        self.failed(UpstreamTimedOut(message))

    def _cut(self, ending: Ending, message: str) -> None:
        """The client has a part of the answer and must not take it for the whole."""
        self._call.closing = True
        out = None
        if self._events:
            self._connection.meter.settle(self._exchange)
            out = self._framing.cut(stream_error(self._call.path, message), self._connection.meter.tail)
        if out is not None:
            self._call.transport.write(out)
        self._end(ending)
        if out is None:
            reset(self._call.transport)

    def _tunnel_ended(self, failed: bool) -> None:
        if self._exchange.ending is None:
            self._end(Ending.UPSTREAM_FAILED if failed else Ending.COMPLETE)

    def _end(self, ending: Ending) -> None:
        """Not by the pod's connection, or not well."""
        self._connection.meter.settle(self._exchange)
        self._exchange.last_byte_at = self._rim.clock.now()
        self._exchange.ending = ending
        self._close(None)

    def _close(self, error: KvlaneError | None) -> None:
        self._call.connection.sink = None
        if not self.done.done():
            self.done.set_result(error)


def reset(transport: asyncio.Transport) -> None:
    """Closes with a reset: an answer that ends with the connection would look whole after an orderly close."""
    sock = transport.get_extra_info("socket")
    if sock is not None and not transport.is_closing():
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    transport.abort()
