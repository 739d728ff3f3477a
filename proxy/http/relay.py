"""The relay of one client request: send attempts to pods and wait until their responses have been relayed."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from proxy.core.attempt import Attempt, Ending, crashes_of, ending_of
from proxy.core.errors import (
    BadGateway,
    ConnectFailed,
    Disconnected,
    GatewayTimeout,
    KvlaneError,
    OutOfFiles,
    RequestError,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import Relay
from proxy.core.request import TIME_LIMIT
from proxy.core.tasks import Tasks
from proxy.http.body import Upload
from proxy.http.framing import LAST_CHUNK, chunk
from proxy.http.head import (
    BAD_REQUEST,
    RawHeaders,
    ResponseHead,
    declined_or_none,
    encode_pairs,
    first_lines,
    header_line,
    passing,
)
from proxy.http.pipeline import make_continuable
from proxy.http.rank import RANK_HEADER, body_for
from proxy.http.request import HttpRequest, RequestHead
from proxy.http.response import ASK_AFTER, RelayContext, Response
from proxy.http.upstream.connection import PodConnection, ResponseMeter
from proxy.http.upstream.pool import Collected, PodAddress, PodConnections, UpstreamPool
from proxy.openai.errors import ABORTED, aborted, is_aborted_message, stream_error
from proxy.openai.events import MESSAGES

if TYPE_CHECKING:
    from proxy.http.client_connection import ClientConnection, ResponseWriter


CLOSED_WITHIN = 0.01
"""Seconds from sending on an idle connection within which a close without a byte means that the pod closed it before
the request arrived. An engine that crashes as quickly is detected on the fresh connection, which it refuses."""


class TrackedRelay(Relay):
    """What relays to clients have in common, on the data port and through Envoy. `attempt` is the last attempt."""

    __slots__ = ("_context", "attempt", "client_request")

    def __init__(self, client_request: HttpRequest, context: RelayContext) -> None:
        self.client_request = client_request
        self._context = context
        self.attempt: Attempt | None = None

    async def collect(self, attempt: Attempt, seconds: float) -> bytes:
        context = self._context
        try:
            connections = context.upstream[attempt.endpoint.url]
            body = body_for(attempt.endpoint, attempt.request.body)
            headers = [each for each in self.client_request.raw_headers if each[0].lower() != b"accept-encoding"]
            head = self._head(
                attempt, connections.address, body, headers
            )  # a compressed response could not be read here
            used, first_error = connections.acquire(), None
            while True:
                connection = used or await _connect(
                    context.upstream, connections, first_error, attempt.request.deadline
                )
                attempt.sent_at = context.clock.now()
                response = Collected(connection)
                connection.send(response, head, body)
                self.stage_sent(attempt)
                try:
                    response_head, content = await self._whole(response, attempt, seconds)
                    break
                except Disconnected as error:
                    if used is None or not self._note_closing_connection(attempt, error):
                        raise
                    first_error, used = error.with_traceback(None), None
            ResponseMeter().finish_at_once(attempt, content)
            attempt.status = response_head.status
            attempt.first_byte_at = attempt.last_byte_at = context.clock.now()
            if ABORTED in content or (attempt.request.path == MESSAGES and is_aborted_message(content)):
                raise aborted()
            if response_head.declines or response_head.status == BAD_REQUEST:
                declined = declined_or_none(response_head, content, attempt.endpoint.rank)
                if declined is not None:
                    raise declined
            attempt.ending = Ending.COMPLETE
            return content
        except asyncio.CancelledError:
            attempt.ending = attempt.ending or self._cancelled()
            raise
        except UpstreamFailed as error:
            attempt.ending = attempt.ending or ending_of(error)
            raise

    async def _whole(self, response: Collected, attempt: Attempt, seconds: float) -> tuple[ResponseHead, bytes]:
        """Wait for the response, for `seconds` at most and no longer than the request has. Close the connection if the
        response does not become whole."""
        context, size = self._context, 0
        silent_since = context.clock.now()
        seconds = min(seconds, attempt.request.deadline - silent_since)
        try:
            async with asyncio.timeout(seconds):
                while not response.whole.done():
                    await asyncio.wait((response.whole,), timeout=ASK_AFTER)
                    if response.size != size:
                        size, silent_since = response.size, context.clock.now()
                    if not response.whole.done() and (why := context.config.reason_to_give_up(attempt, silent_since)):
                        raise UpstreamFailed(why)
                return response.whole.result()
        except TimeoutError:
            raise UpstreamTimedOut(f"no response within {seconds:g} s") from None
        finally:
            if not response.whole.done():
                attempt.last_byte_at = context.clock.now()
                response.abandon()

    def _cancelled(self) -> Ending:
        """Return the ending of an attempt that is cancelled: by its client, or for another request or a stop."""
        return Ending.CLIENT_GONE if self.client_request.has_left else Ending.EVICTED

    def stage_sent(self, attempt: Attempt) -> None:
        """Receive an attempt of `collect` whose request was written to a connection of its pod."""

    def pass_on(self, attempt: Attempt, body: bytes) -> None:
        self.attempt = attempt
        kind = "application/json" if body.lstrip().startswith(b"{") else "text/plain; charset=utf-8"
        headers = [("content-type", kind), ("x-request-id", self.client_request.id), *attempt.response_headers]
        self.client_request.respond(attempt.status or 502, headers, body)

    def end(self, error: RequestError) -> None:
        """Do nothing: only the data port continues streams."""

    def _note_closing_connection(self, attempt: Attempt, error: KvlaneError) -> bool:
        """Note on the request that the pod was closing an idle connection when the request arrived, and so has not seen
        it. Return whether that is so, for the first time."""
        if not isinstance(error, Disconnected) or not error.silent:
            return False
        if attempt.sent_at is None or self._context.clock.now() - attempt.sent_at > CLOSED_WITHIN:
            return False
        crashes = crashes_of(attempt.request)
        was_first, crashes.met_closing_connection = not crashes.met_closing_connection, True
        return was_first

    def _head(
        self,
        attempt: Attempt,
        address: PodAddress,
        body: bytes,
        headers: RawHeaders,
        client_head: RequestHead | None = None,
    ) -> bytes:
        """Return the head for the pod. `client_head` is given if it was parsed from HTTP/1.1."""
        client_request, key, rank = self.client_request, attempt.endpoint.api_key, attempt.endpoint.rank
        if body and client_request.upload is None:
            ours = b"%bcontent-length: %d\r\n" % (client_request.id_line, len(body))
        else:
            ours = client_request.id_line + self._framing(len(body) - len(client_request.body))
        if key is not None:
            ours += header_line("authorization", f"Bearer {key}")
        if rank is not None:
            ours += header_line(RANK_HEADER, str(rank))
        if attempt.upstream_headers:  # of hooks, which may replace the id and the trace context of the client
            names = [name for name, _ in attempt.upstream_headers]
            if "x-request-id" in names:
                ours = ours.replace(client_request.id_line, b"", 1)
            if "traceparent" in names:
                headers = [each for each in headers if each[0].lower() not in (b"traceparent", b"tracestate")]
            ours += encode_pairs(attempt.upstream_headers)
        # The cached head has all fields, so it is not used where kvlane has removed the key of the client.
        if client_head is not None and headers is client_head.raw_headers:
            first = client_head.head_for_pod(address.base, address.host_header, key is not None)
        else:
            first = first_lines(
                client_request.method, client_request.path + client_request.query, address.base, address.host_header
            )
            first += passing(headers, key is not None)
        return b"%b%b\r\n" % (first, ours)

    def _framing(self, longer: int) -> bytes:
        """Return the framing of a streamed body that is this many bytes longer than the client's, or of no body."""
        client_request = self.client_request
        if client_request.upload is not None:
            if client_request.chunked:
                return b"transfer-encoding: chunked\r\n"
            return b"content-length: %d\r\n" % ((client_request.content_length or 0) + longer)
        if client_request.wants_websocket:
            return b"connection: Upgrade\r\nupgrade: websocket\r\n"
        return b"content-length: 0\r\n" if client_request.method in ("POST", "PUT", "PATCH") else b""


class ClientRelay(TrackedRelay):
    """The relay of a request of the data port."""

    __slots__ = ()

    def race(self, on_start: Callable[[Attempt], None]) -> ResponseRace | None:
        client_request = self.client_request
        if client_request.upload is not None or client_request.wants_websocket or client_request.sent_status:
            return None
        return ResponseRace(self, self._context, on_start)

    async def relay(
        self, attempt: Attempt, context: RelayContext | None = None, racing: RacingAttempt | None = None
    ) -> None:
        """See `core.ports.Relay.relay`. Also raise RequestError if the client's upload broke off or cannot be sent
        again. `context` and `racing` are given for one of several concurrent attempts. If the pod was closing the idle
        connection, send the request again on a fresh one."""
        if context is None:
            context, self.attempt = self._context, attempt
        client_request = self.client_request
        upload, continuation, timer = client_request.upload, None, None
        if (models := context.config.continuable_models) and upload is None:
            continuation = client_request.continuation
            if not client_request.sent_status:
                continuation = client_request.continuation = make_continuable(continuation, attempt, models)
        body = attempt.request.body
        if attempt.endpoint.rank is not None and upload is None:
            body = body_for(attempt.endpoint, body)
        if TIME_LIMIT in attempt.request.headers:
            deadline, outlet = attempt.request.deadline, client_request.connection if racing is None else racing
            timer = context.loop.call_later(deadline - context.clock.now(), _end_at, deadline, outlet)
        try:
            connections = context.upstream[attempt.endpoint.url]
            head = self._head(attempt, connections.address, body, client_request.raw_headers, client_request.head)
            used, first_error = connections.acquire() if upload is None else None, None
            while True:
                connection = used or await _connect(
                    context.upstream, connections, first_error, attempt.request.deadline
                )
                response = Response(client_request, attempt, context, connection, racing)
                if continuation is not None:
                    response.continue_with(continuation)
                attempt.sent_at = context.clock.now()
                try:
                    if client_request.method == "HEAD":
                        connection.head_only = True
                    if upload is None:
                        connection.send(response, head, body)
                        error = await response.done
                    else:
                        error = await self._upload(response, connection, head, body, upload)
                except BaseException:
                    response.abandon()
                    raise
                if error is None:
                    return
                if used is None or not self._note_closing_connection(attempt, error):
                    raise error
                first_error, used, attempt.ending, attempt.error = error, None, None, ""
        except asyncio.CancelledError:
            attempt.ending = attempt.ending or self._cancelled()
            raise
        except UpstreamFailed as error:
            attempt.ending = attempt.ending or ending_of(error)
            if upload is not None and upload.begun:
                if isinstance(error, UpstreamTimedOut):
                    raise GatewayTimeout("The pod did not respond to the upload in time.") from error
                raise BadGateway("The pod failed while the upload was passed on; send it again.") from error
            raise
        finally:
            if timer is not None:
                timer.cancel()

    def end(self, error: RequestError) -> None:
        """End a partial response that no pod continues, with an error event that names `error`."""
        client_request = self.client_request
        if client_request.continuation is not None and not client_request.transport.is_closing():
            message = f"{error.message} This response is incomplete."
            out = client_request.continuation.end(stream_error(client_request.path, message))
            if out:
                client_request.transport.write(out)

    async def _upload(
        self, response: Response, connection: PodConnection, head: bytes, body: bytes, upload: Upload
    ) -> KvlaneError | None:
        """Send the rest of an upload. The response may start, and even end, before that. `body` is the first part."""
        chunked = self.client_request.chunked
        connection.request_sent = False
        connection.send(response, head, chunk(body) if chunked else body)
        async with Tasks() as tasks:
            tasks.start(_pump(upload, connection, response, chunked), "upload")
            return await response.done


def _end_at(deadline: float, outlet: ClientConnection | RacingAttempt) -> None:
    """End the attempt whose client's deadline has passed; the sweep may be a second late. An event loop may call this a
    little earlier, because it keeps time less exactly than the clock."""
    if outlet.writer is not None:
        outlet.writer.check(math.nextafter(deadline, math.inf))


async def _connect(
    upstream: UpstreamPool, connections: PodConnections, first_error: KvlaneError | None, deadline: float
) -> PodConnection:
    """Return a fresh connection. If the pod no longer accepts connections, raise `first_error`, that of the idle
    connection: the pod may have received the request and crashed."""
    try:
        return await upstream.connect(connections, deadline)
    except ConnectFailed as error:
        if first_error is not None and not isinstance(error, OutOfFiles):
            raise first_error from None
        raise


async def _pump(upload: Upload, connection: PodConnection, response: Response, chunked: bool) -> None:
    try:
        while piece := await upload.next():
            connection.transport.write(chunk(piece) if chunked else piece)
            if response.upload_resumed is not None:
                await response.upload_resumed
        if chunked:
            connection.transport.write(LAST_CHUNK)
        connection.request_sent = True
    except RequestError as error:
        connection.abort()
        response.failed(error, error.message)
    except Exception as error:  # noqa: BLE001  # raised by the task of the request
        response.internal_error(error)


class ResponseRace:
    """Implements `core.ports.Race`. It replaces the client's connection for all attempts. A response announces
    itself before it starts; at that moment the other attempts are ended, so none of them writes."""

    def __init__(self, relay: ClientRelay, context: RelayContext, on_start: Callable[[Attempt], None]) -> None:
        self.client_request = relay.client_request
        self.winner: Attempt | None = None
        self._relay = relay
        self._context = replace(context, config=replace(context.config, retries_instead=self._retries_instead))
        self._retries_alone = context.config.retries_instead
        self._on_start = on_start
        self._racing: list[RacingAttempt] = []

    def __enter__(self) -> None:
        self.client_request.connection.writer = self

    def __exit__(self, *_: object) -> None:
        if self.client_request.connection.writer is self:
            self.client_request.connection.writer = None

    async def relay(self, attempt: Attempt) -> None:
        if not self._racing:
            self._relay.attempt = attempt
        racing = RacingAttempt(self, attempt)
        self._racing.append(racing)
        try:
            await self._relay.relay(attempt, self._context, racing)
        finally:
            self._racing.remove(racing)

    def response_starts(self, racing: RacingAttempt) -> None:
        self.winner = self._relay.attempt = racing.attempt
        self._on_start(racing.attempt)
        for other in tuple(self._racing):
            if other is not racing:
                other.give_up()

    # what the client's connection calls

    def pause(self) -> None:
        for writer in self._writers():
            writer.pause()

    def resume(self) -> None:
        for writer in self._writers():
            writer.resume()

    def gone(self) -> None:
        for writer in self._writers():
            writer.gone()

    def check(self, now: float) -> None:
        for writer in self._writers():
            writer.check(now)

    # what the server calls

    def stop(self) -> None:
        writers = self._writers()
        for writer in writers:
            if isinstance(writer, Response):
                writer.stop()
        if not writers:  # all attempts wait for their connections
            self.client_request.connection.stop()

    def _writers(self) -> list[ResponseWriter]:
        return [racing.writer for racing in self._racing if racing.writer is not None]

    def _retries_instead(self, attempt: Attempt, status: int) -> bool:
        """Return whether an error response waits while another attempt may respond."""
        return len(self._racing) > 1 or self._retries_alone(attempt, status)


class RacingAttempt:
    """The client's connection as one of several attempts sees it."""

    def __init__(self, race: ResponseRace, attempt: Attempt) -> None:
        self.attempt = attempt
        self.writer: ResponseWriter | None = None
        self._race = race
        self._connection = race.client_request.connection
        self._task = asyncio.current_task()

    @property
    def writing_paused(self) -> bool:
        return self._connection.writing_paused

    def response_starts(self) -> None:
        """Make this attempt the one that responds."""
        self._race.response_starts(self)

    def give_up(self) -> None:
        """End this attempt, because another one responds."""
        if isinstance(self.writer, Response):
            self.writer.abandon()
        elif self._task is not None:
            self.attempt.ending = Ending.EVICTED
            self._task.cancel()
