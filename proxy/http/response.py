"""A pod's response on its way to the client: pushed by the pod's connection, written to the client's socket."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from proxy.core.attempt import COMPLETE, Attempt, Ending, ending_of
from proxy.core.errors import (
    Declined,
    InvalidResponse,
    KvlaneError,
    RankOutOfRange,
    ShuttingDown,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import Clock
from proxy.http.client_connection import Tunnel
from proxy.http.framing import LAST_CHUNK, Framing, Plain, Rechunked, UntilClose, WholeChunks
from proxy.http.guards import reset
from proxy.http.head import (
    BAD_REQUEST,
    BODYLESS,
    NOT_FOUND,
    UNSURE,
    ResponseHead,
    declined_or_none,
    header_line,
    needs_more,
    without_length,
)
from proxy.http.pipeline import (
    Continuation,
    Pipeline,
    ResponseTransform,
    RestDeclined,
    WholeBody,
    event_transforms,
    is_changed,
    transforms_of,
)
from proxy.http.request import HttpRequest
from proxy.http.upstream.connection import FLUSH_BYTES, PodConnection, Receiver
from proxy.http.upstream.pool import UpstreamPool
from proxy.openai.errors import (
    ABORTED,
    ENDING,
    RESPONSES_PATHS,
    aborted,
    is_aborted_message,
    starts_without_error,
    stream_error,
)
from proxy.openai.events import MESSAGES, STREAMED, ends_whole, is_truncated

if TYPE_CHECKING:
    from proxy.http.relay import RacingAttempt
    from proxy.http.server import DataPortConfig

ASK_AFTER = 1.0
"""Seconds of silence after which the pod's state decides whether to keep waiting."""

LONGEST_HELD_BACK = 64 * 1024
"""Largest number of held bytes of a response, with its chunk framing. Only very small chunks reach it, because
`openai.errors.LONGEST` limits the body."""

_LENGTH = re.compile(rb"(?im)^(content-length:[ \t]*)\d+")
_JSON = re.compile(rb"(?im)^content-type:[^\r\n]*json")
_CODED = re.compile(rb"(?im)^content-encoding:[ \t]*(?!identity)")

POD_STOPPED = "The pod stopped responding; this response is incomplete."
OUT_OF_TIME = "The time limit of the request passed; this response is incomplete."
PROXY_STOPS = "The proxy is shutting down; this response is incomplete."
EVICTED = "More urgent requests needed the capacity; this response is incomplete."


@dataclass(frozen=True, slots=True)
class RelayContext:
    """What all relays of a server share."""

    upstream: UpstreamPool
    clock: Clock
    loop: asyncio.AbstractEventLoop
    """Looking up the running loop costs a system call before Python 3.12."""
    config: DataPortConfig


class Response(Receiver):
    """The response of one attempt, from sending the request to its ending.

    States: waiting for the head -> held back, while the start of the body decides whether the pod declines
    (`_is_accepted`) -> started, once the head has gone to the client (`_start_response` sets `attempt.status`) ->
    ended. It ends once, and `attempt.ending` says how:

    - `finished`: the pod's last read. COMPLETE, unless the stream is truncated or reports a failure: then `failed`.
    - `failed`: the pod failed or was too slow, or the client's upload broke off. Before the start `done` gets the
      error, and after a failure of the pod another pod is tried. After the start `_leave_open` lets another pod
      continue the stream, if one can and the request has time left; else `_end_incomplete` tells the client.
    - `stop`, as kvlane stops, and `abandon`, as the relay is cancelled: `_end_incomplete` after the start.
    - `gone`: the client left. CLIENT_GONE, or COMPLETE if it had the last event.
    - `internal_error`: a defect of kvlane. `done` raises it.

    `done` gets the error that the gateway must handle: the response did not start, or another pod can send the rest.
    Otherwise it gets None, even if the response failed. Attributes that most responses never change are class
    attributes and are not stored per response."""

    paused = False
    upload_resumed: asyncio.Future[None] | None = None
    """Pending while the pod does not keep up with an upload."""
    _framing: Framing = Plain()
    _framing_lines = b""
    _is_patched = False
    """Whether model name or cached tokens in the body are replaced."""
    _events = False
    _is_held_back = False
    """Whether everything, including the head, is held back until it is known that the pod does not decline."""
    _held = b""
    """The bytes that are held back."""
    _racing: RacingAttempt | None = None
    _continuation: Continuation | None = None
    _resumes = False
    """Whether it continues a response that another pod started."""
    _fed = 0
    """Number of pieces of the meter, since the last flush, that the framing has got."""
    _received = 0
    """Bytes of the body that came to `received`, including the framing; the connection counts the others."""
    _flush_at = FLUSH_BYTES
    _seen = 0
    _seen_at = 0.0

    def __init__(
        self,
        client_request: HttpRequest,
        attempt: Attempt,
        context: RelayContext,
        connection: PodConnection,
        racing: RacingAttempt | None = None,
    ) -> None:
        """`racing` replaces the client's connection while several responses may start."""
        self._client_request = client_request
        self._attempt = attempt
        self._context = context
        self._connection = connection
        self.done: asyncio.Future[KvlaneError | None] = context.loop.create_future()
        self._outlet = outlet = client_request.connection if racing is None else racing
        outlet.writer = self
        if outlet.writing_paused:
            self.pause()
        if racing is not None:
            self._racing = racing
        if attempt.request.naming is not None or attempt.cached_to_report is not None:
            self._is_patched = self.changes_body = is_changed(attempt)
        if attempt.request.usage_added:
            self.changes_body = True

    def continue_with(self, continuation: Continuation) -> None:
        """Let another pod continue the response if this one fails. If the client has received a part, this is the
        rest."""
        self._continuation = continuation
        self.changes_body = True
        if self._client_request.sent_status:
            self._resumes = self._is_held_back = self._events = True
            if continuation.pipeline is not None:
                self._framing, continuation.pipeline = continuation.pipeline, None

    # what the pod's connection calls

    def head_received(self, head: ResponseHead) -> None:
        """Choose the framing of the body and the transforms of its pipeline."""
        client_request = self._client_request
        if head.events and head.sized and self.changes_body:
            head = self.head = without_length(head)
        if self._resumes:
            self._start_rest(head)
            return
        if head.simple:
            if self._is_patched and _is_json(head):
                self._framing = WholeBody(transforms_of(self._attempt, whole=True))
                self.head = replace(head, simple=False)
            return
        if head.status == 101:
            if not (client_request.wants_websocket and head.upgrade):
                raise InvalidResponse("it switched protocols without a request")
            self._framing_lines = b"connection: Upgrade\r\nupgrade: %b\r\n" % head.upgrade
            client_request.closing = False
        elif not head.sized and client_request.method != "HEAD" and head.status not in BODYLESS:
            self._events = head.events
            self._connection.until_close = head.until_close
            if client_request.speaks_11:
                self._framing = WholeChunks() if head.chunked else Rechunked()
                self._framing_lines = b"transfer-encoding: chunked\r\n"
            else:
                self._framing = UntilClose()
                client_request.closing = True
            transforms: Sequence[ResponseTransform] = ()
            is_patched = self._is_patched and head.status < 300  # errors contain the model only in their text
            if head.events and (is_patched or self._continuation is not None or self._attempt.request.usage_added):
                transforms = event_transforms(self._attempt, self._continuation, is_patched)
            elif is_patched and _is_json(head):
                transforms = transforms_of(self._attempt)
            if transforms:
                self._framing = Pipeline(transforms, client_request.speaks_11)
        self._is_held_back = self._events or head.declines or head.status in UNSURE

    def received(self, raw: bytes) -> None:
        """Relay a read that is not the last. From the second on, reads of whole chunks go straight from the pod's
        connection to the client's socket (`pass_chunks`)."""
        head, connection, attempt, framing = self.head, self._connection, self._attempt, self._framing
        if not raw and head is not None and head.simple:
            return  # the head alone: as long as nothing has gone to the client, another pod can be tried
        meter = connection.meter
        if self._is_held_back and head is not None:
            raw = self._held = self._held + raw
            beginning = b"".join(meter.pieces)
            if not (head.status == 200 and starts_without_error(beginning)) and not self._is_accepted(head, beginning):
                return
            self._is_held_back = False
        out = framing.feed(raw, meter.pieces[self._fed :] if self._fed else meter.pieces, meter.marks)
        self._fed = len(meter.pieces)
        self._received += len(raw)
        if head is not None:
            if not out and isinstance(framing, WholeBody):
                connection.receive = self.received
                return
            out = self._start_response(head) + out
            self.head = None
        if out:
            self._client_request.transport.write(out)
        if attempt.first_byte_at is None and meter.pieces:
            attempt.note_first_byte(self._context.clock.now())
            if attempt.request.path == RESPONSES_PATHS:
                self._flush_meter()  # finds the id
                attempt.note_stored_response()
        if self._received + connection.bypassed >= self._flush_at:
            self._flush_meter()
        if not framing.holds_nothing or attempt.first_byte_at is None:
            connection.receive = self.received
        elif isinstance(framing, Pipeline):
            connection.receive = self._pass_events
        else:
            connection.pass_chunks(self._client_request.transport.write)
        if self._continuation is not None:
            self._check_engine(self._continuation)

    def finished(self, raw: bytes, exact: bool) -> None:
        """Relay the last read; most responses that are no streams have only this one."""
        head, attempt, context = self.head, self._attempt, self._context
        meter = self._connection.meter
        if head is not None and (
            raw.find(ABORTED, -ENDING if self._events else 0) >= 0
            or (attempt.request.path == MESSAGES and is_aborted_message(b"".join(meter.pieces)))
        ):
            meter.pop()
            self.failed(aborted())
            return
        if self._events and self._connection.meter.is_truncated(self._attempt):
            self._end_truncated(head, raw, exact)
            return
        if head is not None and head.simple and exact:
            self._client_request.transport.write(self._start_response(head) + raw)
            meter.finish_at_once(attempt, raw)
        elif not self._finish(head, raw, exact):
            return
        attempt.last_byte_at = now = context.clock.now()
        if attempt.first_byte_at is None:
            attempt.note_first_byte(now)
        attempt.ending = COMPLETE
        self._outlet.writer = None
        if not self.done.done():
            self.done.set_result(None)

    def _finish(self, head: ResponseHead | None, raw: bytes, exact: bool) -> bool:
        """As `finished`, for a response that is not simple; return False if it failed."""
        meter, framing = self._connection.meter, self._framing
        if self._is_held_back and head is not None:
            body = b"".join(meter.pieces)
            error = self._declined(head, body)
            if error is None and not body and self._lacks_all_events(head):
                error = UpstreamFailed("it ended the stream before its first event")
            if error is not None:
                meter.pop()
                self.failed(error)
                return False
            raw, exact = (body, True) if head.sized else (self._held + raw, exact)
        out = framing.finish(raw, meter.pieces[self._fed :], exact)
        if isinstance(framing, WholeBody) and head is not None:
            head = replace(head, start=_LENGTH.sub(rb"\g<1>%d" % len(out), head.start))
            self._client_request.transport.write(self._start_response(head) + out)
            meter.pop()
            meter.finish_at_once(self._attempt, out)
            return True
        failure = None if self._continuation is None else self._continuation.failure
        if failure is not None and self._client_request.speaks_11:
            out = out.removesuffix(LAST_CHUNK)
        if head is not None:
            out = self._start_response(head) + out
        if out:
            self._client_request.transport.write(out)
        meter.finish(self._attempt)
        if failure is not None:
            self.failed(failure)
        return failure is None

    def upgraded(self, rest: bytes) -> None:
        if self.head is not None:
            self._client_request.transport.write(self._start_response(self.head) + rest)
        self._client_request.closing = True
        self._attempt.note_first_byte(self._context.clock.now())
        tunnel = Tunnel(self, self._client_request.connection, self._connection.transport)
        self._connection.splice(tunnel)
        self._outlet.writer = tunnel
        self._client_request.connection.become_tunnel(tunnel)

    def tunnel_ended(self, failed: bool) -> None:
        """Receive the end of the pod's side of the tunnel."""
        if self._attempt.ending is None:
            self._end_attempt(Ending.UPSTREAM_FAILED if failed else Ending.COMPLETE)

    def failed(self, error: KvlaneError, message: str = POD_STOPPED) -> None:
        """A client that has a part of the response receives `message`."""
        if self._attempt.ending is not None:
            return
        self._attempt.error = str(error)
        ending = ending_of(error)
        can_continue = message is not OUT_OF_TIME
        if self._continuation is not None and can_continue and self._leave_open(self._continuation, error, ending):
            return
        if self._has_started:
            self._end_incomplete(ending, message)
            return
        self._attempt.ending = ending
        self._resolve(error)

    def internal_error(self, error: Exception) -> None:
        """Fail the attempt; the task of the request raises the error, logs it and sends a 500, or resets the client's
        connection."""
        self._attempt.ending = self._attempt.ending or Ending.EVICTED  # the pod is not at fault
        self._outlet.writer = None
        self._connection.abort()
        if not self.done.done():
            self.done.set_exception(error)

    def pause_writing(self) -> None:
        self.upload_resumed = self._context.loop.create_future()

    def resume_writing(self) -> None:
        resumed, self.upload_resumed = self.upload_resumed, None
        if resumed is not None and not resumed.done():
            resumed.set_result(None)

    def stop(self) -> None:
        """End the response because the proxy stops."""
        self.abandon(PROXY_STOPS, ShuttingDown())

    def abandon(self, message: str = EVICTED, error: KvlaneError | None = None) -> None:
        """End the response because the relay was cancelled. A client that has a part of it receives `message`; `done`
        gets `error` if the response did not start."""
        if self._attempt.ending is not None:
            return
        self._connection.abort()
        if self._client_request.transport.is_closing():
            self._end_attempt(Ending.CLIENT_GONE)
        elif self._has_started:
            self._end_incomplete(Ending.EVICTED, message)
        else:
            self._attempt.ending = Ending.EVICTED
            self._resolve(error)

    # what the client's connection calls

    def pause(self) -> None:
        self.paused = True
        self._connection.pause_reading()

    def resume(self) -> None:
        self.paused = False
        self._connection.resume_reading()

    def gone(self) -> None:
        """Handle the disconnection of the client. A client that closes after the last event, as official clients do
        before the last chunk, has received everything."""
        if self._attempt.ending is None:
            self._connection.abort()
            self._end_attempt(Ending.CLIENT_GONE)
            if self._events and ends_whole(self._connection.meter.tail):
                self._attempt.ending = Ending.COMPLETE
                self._attempt.usage = self._connection.meter.usage_at_end(self._attempt)

    def check(self, now: float) -> None:
        """End a stalled response; called by the sweep. `now` is monotonic seconds."""
        timeouts, attempt = self._context.config.timeouts, self._attempt
        request = attempt.request
        passed = self._received + self._connection.bypassed
        if passed != self._seen or self.paused or not self._connection.request_sent:
            self._seen, self._seen_at = passed, now
        silent_since = self._seen_at or attempt.started_at
        is_stream = request.stream or self._events  # only the response says that of a transcription or a GET
        if now > request.deadline:
            self._time_out(f"not complete within {request.deadline - request.received_at:g} s", OUT_OF_TIME)
        elif request.stream and attempt.first_byte_at is None and now - attempt.started_at > timeouts.first_byte:
            self._time_out(f"no first byte within {timeouts.first_byte:g} s")
        elif self._events and attempt.first_byte_at is None and now - silent_since > timeouts.first_byte:
            self._time_out(f"no event within {timeouts.first_byte:g} s")
        elif is_stream and attempt.first_byte_at is not None and now - silent_since > timeouts.idle:
            self._time_out(f"nothing for {timeouts.idle:g} s")
        elif now - silent_since > ASK_AFTER and (why := self._context.config.reason_to_give_up(attempt, silent_since)):
            self._connection.abort()
            self.failed(UpstreamFailed(why))

    # what `PodConnection.receive` is while events go through transforms

    def _pass_events(self, raw: bytes) -> None:
        """Relay a read of a response with transforms."""
        pieces = self._connection.meter.pieces
        body = pieces[-1] if len(pieces) == self._fed + 1 else b"".join(pieces[self._fed :])
        self._fed = len(pieces)
        self._received += len(raw)
        framing = self._framing
        assert isinstance(framing, Pipeline)
        out = framing.process(body)
        if out:
            self._client_request.transport.write(out)
        if self._received >= self._flush_at:
            self._flush_meter()
        if self._continuation is not None:
            self._check_engine(self._continuation)

    # below here in order of use

    def _start_rest(self, head: ResponseHead) -> None:
        """Start the rest of a response. Raise UpstreamFailed for a head that does not continue it."""
        if head.declines or head.status == NOT_FOUND:
            raise declined_or_none(head, b"") or Declined(head.status)
        if head.status == BAD_REQUEST and self._attempt.endpoint.rank is not None:
            self._events = False  # the body says whether it is the rank
            return
        if head.simple or head.status == BAD_REQUEST:
            raise RestDeclined(head.status)
        if not head.events or head.status != 200:
            raise InvalidResponse(f"the rest of a response cannot be read: {head.status}")
        if self._continuation is not None and isinstance(self._framing, Pipeline):
            self._continuation.resume(self._framing)
        self._connection.until_close = head.until_close

    @property
    def _has_started(self) -> bool:
        """Whether the client has received a part of the response."""
        return self._resumes or self._attempt.status is not None

    def _flush_meter(self) -> None:
        self._connection.meter.flush(self._attempt)
        self._flush_at = self._received + self._connection.bypassed + FLUSH_BYTES
        self._fed = 0

    def _check_engine(self, continuation: Continuation) -> None:
        """End the response if the stream reports that its engine failed."""
        if (failure := continuation.failure) is not None:
            self._connection.abort()
            self.failed(failure)

    def _leave_open(self, continuation: Continuation, error: KvlaneError, ending: Ending) -> bool:
        """End the attempt but not the stream, with the error by which the gateway asks another pod for the rest. Return
        False and do nothing if no pod can send the rest."""
        if isinstance(error, RestDeclined):
            for_gateway: KvlaneError | None = error.refusal
        elif self._resumes and self._attempt.status is None:
            for_gateway = error
        elif self._has_started and isinstance(error, UpstreamFailed):
            for_gateway = continuation.interruption(error)
        else:
            for_gateway = None
        if for_gateway is None:
            return False
        if isinstance(self._framing, Pipeline):
            continuation.pipeline = self._framing
        self._end_attempt(ending, for_gateway)
        return True

    def _is_accepted(self, head: ResponseHead, beginning: bytes) -> bool:
        """Return whether the response goes to the client. If the pod declines, fail the attempt."""
        if needs_more(head, beginning) and len(self._held) <= LONGEST_HELD_BACK:
            return False
        error = self._declined(head, beginning)
        if error is not None:
            self._connection.abort()
            self.failed(error)
        return error is None

    def _end_truncated(self, head: ResponseHead | None, raw: bytes, exact: bool) -> None:
        """Handle a response that ended in valid HTTP but incomplete, as if the pod had broken off. The remaining bytes
        are sent, unless none has been sent: then another pod is tried."""
        meter = self._connection.meter
        if head is None:
            out = self._framing.finish(raw, meter.pieces[self._fed :], exact)
            out = out.removesuffix(LAST_CHUNK) if self._client_request.speaks_11 else out
            if out:
                self._client_request.transport.write(out)
        if meter.marks:
            self._attempt.chunks -= 1  # the last one only says that there are no more
        self.failed(UpstreamFailed("it ended the stream before the response was complete"))
        meter.pop()

    def _declined(self, head: ResponseHead, beginning: bytes) -> UpstreamFailed | None:
        """Return the error of a response for which another pod can be tried."""
        error = declined_or_none(head, beginning, self._attempt.endpoint.rank)
        if error is None:
            return RestDeclined(head.status) if self._resumes and head.status == BAD_REQUEST else None
        if self._resumes or isinstance(error, RankOutOfRange):
            return error
        upload = self._client_request.upload
        retries_instead = self._context.config.retries_instead
        if (upload is not None and upload.begun) or not retries_instead(self._attempt, error.status):
            return None
        return error

    def _start_response(self, head: ResponseHead) -> bytes:
        """Record that the response starts, and return the head for the client; empty for the rest of a response."""
        client_request, attempt = self._client_request, self._attempt
        if self._resumes:
            attempt.status = head.status
            return b""
        if self._racing is not None:
            self._racing.response_starts()
        if self._continuation is not None:
            client_request.continuation = self._continuation
        if not self._connection.request_sent:
            client_request.closing = True
        last = (
            b"\r\n"
            if client_request.speaks_11 and not client_request.closing
            else client_request.connection_header() + b"\r\n"
        )
        client_request.sent_status = attempt.status = head.status
        ours = client_request.response_lines
        for name, value in attempt.response_headers:  # `_racing.response_starts` may have added one
            ours += header_line(name, value)
        return b"".join((head.start, client_request.id_line, ours, self._framing_lines, last))

    def _lacks_all_events(self, head: ResponseHead) -> bool:
        """Return whether a response without a body should have had events."""
        request = self._attempt.request
        return self._events and head.status == 200 and request.stream and request.path in STREAMED

    def _is_whole(self) -> bool:
        """Return whether the client has received all events of the stream."""
        if self._continuation is not None or (
            isinstance(self._framing, WholeChunks) and not self._framing.holds_nothing
        ):
            return False
        tail = self._connection.meter.tail
        return ends_whole(tail) and not is_truncated(self._attempt.request.path, tail)

    def _time_out(self, why: str, message: str = POD_STOPPED) -> None:
        self._connection.abort()
        self.failed(UpstreamTimedOut(why), message)

    def _end_incomplete(self, ending: Ending, message: str) -> None:
        """End a partial response: an event stream with an error event, unless the client has the last event; any other
        response by a reset. So no client takes a part for the whole. If the framing is ended in order, the connection
        stays open: the client may be sending its next request already."""
        out = None
        is_evicted = ending is Ending.EVICTED
        if self._events:
            meter = self._connection.meter
            meter.flush(self._attempt)
            if self._is_whole():
                event, ending, self._attempt.error = b"", COMPLETE, ""
                self._attempt.usage = meter.usage_at_end(self._attempt)
            else:
                event = stream_error(self._client_request.path, message)
            out = self._framing.end_with(event, meter.tail)
        if out is not None:
            self._client_request.transport.write(out)
        if out is None or is_evicted:
            self._client_request.closing = True
        self._end_attempt(ending)
        if out is None:
            reset(self._client_request.transport)

    def _end_attempt(self, ending: Ending, error: KvlaneError | None = None) -> None:
        """End the attempt for a reason other than a complete response."""
        self._connection.meter.flush(self._attempt)
        self._attempt.last_byte_at = self._context.clock.now()
        self._attempt.ending = ending
        self._resolve(error)

    def _resolve(self, error: KvlaneError | None) -> None:
        """Release the client's connection and wake the task of the request."""
        self._outlet.writer = None
        if not self.done.done():
            self.done.set_result(error)


def _is_json(head: ResponseHead) -> bool:
    return _JSON.search(head.start) is not None and not _CODED.search(head.start)
