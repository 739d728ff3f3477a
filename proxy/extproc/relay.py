"""The relay of a request through a gateway."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from proxy.core.attempt import Attempt, Ending, Stage
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import (
    BadGateway,
    ConnectFailed,
    EnvoyOverflow,
    FewerRanks,
    GatewayTimeout,
    RankOutOfRange,
    RequestError,
    TriedByEnvoy,
    UnknownModel,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.ports import Race
from proxy.extproc.addresses import Addresses
from proxy.extproc.messages import (
    BUFFERED,
    DESTINATION,
    FULL_DUPLEX_STREAMED,
    NAMESPACE,
    NONE,
    SERVED,
    STREAMED,
    WHOLE,
    go_on,
    pieces_of,
    streamed,
    with_body,
    with_destination,
    with_fields,
)
from proxy.extproc.request import EnvoyRequest, attributes_of, fields_of, metadata_of
from proxy.http.framing import Framing, UntilClose
from proxy.http.head import BAD_REQUEST, NOT_FOUND
from proxy.http.pipeline import Pipeline, WholeBody, event_transforms, is_changed, transforms_of
from proxy.http.rank import RANK_HEADER, body_for
from proxy.http.relay import TrackedRelay
from proxy.http.request import HttpRequest
from proxy.http.response import POD_STOPPED, RelayContext
from proxy.http.upstream.connection import ResponseMeter
from proxy.http.upstream.pool import PodAddress
from proxy.openai.errors import (
    LONGEST,
    RESPONSES_PATHS,
    names_rank_out_of_range,
    says_that_model_is_missing,
    stream_error,
)
from proxy.reliability.failover import sees_some_models


class EnvoyRelay(TrackedRelay):
    """The relay of a request of a gateway; an attempt that is not for the client (`collect`) goes around it."""

    def __init__(
        self, client_request: EnvoyRequest, context: RelayContext, addresses: Addresses, fallbacks: int
    ) -> None:
        """`fallbacks` is the largest number of fallback pods that are sent to the gateway."""
        super().__init__(cast(HttpRequest, client_request), context)  # it reads only the head
        self._gateway_request = client_request
        self._stream = client_request.stream
        self._addresses = addresses
        self._fallbacks = fallbacks
        self._held: deque[tuple[str, Any]] = deque()
        """Messages of the response that were read before the reply to its head."""
        self._response: Any = None
        """The head of the pod's response."""
        self._is_sent = False
        """Whether the gateway has got the destination, which cannot change after that."""
        self._prefill_sent = asyncio.Event()
        self._failure: RequestError | None = None
        """The error with which further attempts end, because Envoy cannot send the request again."""

    async def relay(self, attempt: Attempt) -> None:
        """See `core.ports.Relay.relay`. If Envoy used another pod, the next attempt is on that pod."""
        if self._failure is None and self._is_sent and self._response is None:
            self._failure = BadGateway("A pod failed after Envoy had got the destination; try again shortly.")
        if self._failure is not None:
            attempt.ending = Ending.EVICTED
            raise self._failure
        self.attempt = attempt
        try:
            if self._response is None:
                await self._send(attempt)
                self._response = await self._response_head(attempt)
                self._judge(self._response, attempt)
            await self._pass(self._response, attempt)
        except asyncio.CancelledError:
            attempt.ending = attempt.ending or self._ending_of_incomplete(attempt)
            raise
        except (TriedByEnvoy, EnvoyOverflow, BadGateway, UnknownModel, RankOutOfRange) as error:
            attempt.ending = Ending.UPSTREAM_FAILED
            if isinstance(error, RankOutOfRange):
                self._failure = FewerRanks()
            elif isinstance(error, UnknownModel):
                self._failure = error
            raise
        except (UpstreamTimedOut, GatewayTimeout):
            attempt.ending = Ending.TIMED_OUT
            raise

    def race(self, on_start: Callable[[Attempt], None]) -> Race | None:
        """Return None: a gateway sends a request once, so there is no hedging."""
        return None

    def stage_sent(self, attempt: Attempt) -> None:
        if attempt.stage is Stage.PREFILL:
            self._prefill_sent.set()

    # the request

    async def _send(self, attempt: Attempt) -> None:
        if attempt.stage is Stage.DECODE:  # its request may name the prefill pod, which is final once it is sent
            await self._prefill_sent.wait()
        request, client_request, stream = attempt.request, self._gateway_request, self._stream
        destination = ",".join(await self._destinations(attempt))
        body = body_for(attempt.endpoint, request.body)
        changed = body is not client_request.body and body != client_request.body
        add = [(DESTINATION, destination), ("x-request-id", client_request.id), *attempt.upstream_headers]
        if key := attempt.endpoint.api_key:
            add.append(("authorization", f"Bearer {key}"))
        if base := PodAddress.of(attempt.endpoint.url).base:
            add.append((":path", base.decode() + client_request.path + client_request.query))
        if (rank := attempt.endpoint.rank) is not None:
            add.append((RANK_HEADER, str(rank)))
        if changed:
            add.append(("content-length", str(len(body))))
        reply = with_fields(stream.kind, add, set(client_request.unwanted()) - {name for name, _ in add})
        with_destination(reply, destination)
        if changed and stream.kind == "request_body":
            with_body(reply, body)
        attempt.sent_at = self._context.clock.now()
        self._is_sent = True
        await stream.write(reply)
        if stream.request_mode == FULL_DUPLEX_STREAMED and not stream.head.request_headers.end_of_stream:
            for piece in streamed("request_body", body, not stream.trailers):
                await stream.write(piece)
            if stream.trailers:
                await stream.write(go_on("request_trailers"))

    async def _destinations(self, attempt: Attempt) -> list[str]:
        """Return the addresses of the pods for the gateway. Raise ConnectFailed if the target has none."""
        target, *others = self._named(attempt)
        found = [await self._addresses.of(target)]
        for endpoint in others:
            with suppress(ConnectFailed):
                found.append(await self._addresses.of(endpoint))
        return found

    def _named(self, attempt: Attempt) -> list[Endpoint]:
        """Return the pods for the gateway. It sends the same request to each, so the request names one rank for all of
        them, and a KV cache that was computed for one pod has no other destination."""
        target = attempt.endpoint
        if attempt.stage is Stage.DECODE:
            return [target]
        others = [each for each in attempt.decision.candidates() if each.rank == target.rank and each is not target]
        ready = [each for each in others if each.state is EndpointState.READY]
        return [target, *ready[: self._fallbacks]]

    # the response

    async def _response_head(self, attempt: Attempt) -> Any:
        """Wait for the head of the response. Raise UpstreamTimedOut."""
        seconds = attempt.request.deadline - self._context.clock.now()
        try:
            async with asyncio.timeout(seconds):
                kind, message = await self._stream.next()
                while kind not in ("response_headers", "response_body"):
                    if kind == "request_trailers":
                        await self._stream.write(go_on(kind))
                    kind, message = await self._stream.next()
        except TimeoutError:
            raise UpstreamTimedOut("Envoy had no response before the deadline of the request") from None
        return message

    def _judge(self, head: Any, attempt: Attempt) -> None:
        """Check that the chosen pod responded. Raise TriedByEnvoy, EnvoyOverflow, BadGateway or
        GatewayTimeout."""
        details = str(attributes_of(head).get("response.code_details") or "")
        if details.startswith(("upstream_", "no_healthy_upstream")):
            raise failure(details)
        if details and details != BY_POD:
            attempt.is_by_envoy = True
        address = metadata_of(head).get(NAMESPACE, {}).get(SERVED) or attributes_of(head).get("upstream.address")
        if not isinstance(address, str) or address in self._addresses.known(attempt.endpoint):
            return
        same_rank = [each for each in attempt.decision.candidates() if each.rank == attempt.endpoint.rank]
        responder = self._addresses.at(address, same_rank)
        if responder is not None:
            raise TriedByEnvoy("Envoy went on to another pod", responder)

    async def _pass(self, head: Any, attempt: Attempt) -> None:
        client_request, stream = self._gateway_request, self._stream
        fields = fields_of(head.response_headers.headers)
        attempt.status = _status(fields.get(":status", "200"))
        mode, rank = stream.response_mode, attempt.endpoint.rank
        checks_error = attempt.status == NOT_FOUND and sees_some_models(attempt.request)
        if attempt.status == BAD_REQUEST and rank is not None and mode not in (NONE, STREAMED):
            checks_error = True
        coded = fields.get("content-encoding", "identity") != "identity"
        body_out = ResponseBody(attempt, fields.get("content-type", ""), coded, "content-length" in fields)
        try:
            kind, message = "response_body", head
            if not head.HasField("response_headers"):
                client_request.sent_status = attempt.status
            else:
                is_over, is_late = head.response_headers.end_of_stream, mode in WHOLE
                checks_error &= not is_over
                if checks_error and not is_late:
                    await self._check_error(attempt)
                add = [("x-request-id", client_request.id), *attempt.response_headers]
                remove = ["content-length"] if body_out.changes and "content-length" in fields else []
                stream.is_complete = mode == NONE  # the gateway may end the stream with this reply
                await stream.write(with_fields("response_headers", add, remove))
                if checks_error and is_late:
                    await self._check_error(attempt)
                client_request.sent_status = attempt.status
                if is_over:
                    self._finish(attempt, body_out)
                    return
                kind, message = await self._next()
            while not await self._pass_message(kind, message, attempt, body_out):
                kind, message = await self._next()
        finally:
            if attempt.ending is None:
                body_out.meter.flush(attempt)

    async def _check_error(self, attempt: Attempt) -> None:
        """Raise UnknownModel for a 404 that reports a missing model: the pod may list its models, and the key may not
        use all of them. If the gateway sends the head before the body, any 404 counts. Raise RankOutOfRange for a 400
        that reports the rank of the attempt."""
        stream, body, is_whole = self._stream, b"", False
        if stream.response_mode in (NONE, STREAMED):
            raise UnknownModel(attempt.request.model)
        while not is_whole and len(body) <= LONGEST:
            kind, message = await stream.next()
            self._held.append((kind, message))
            body += message.response_body.body
            is_whole = kind == "response_trailers" or message.response_body.end_of_stream
            is_whole |= stream.response_mode in WHOLE  # nothing follows before the reply
        if attempt.status == NOT_FOUND and says_that_model_is_missing(body):
            raise UnknownModel(attempt.request.model)
        error = names_rank_out_of_range(body) if attempt.status == BAD_REQUEST else None
        if error is not None and error.rank == attempt.endpoint.rank:
            raise error

    async def _next(self) -> tuple[str, Any]:
        return self._held.popleft() if self._held else await self._stream.next()

    async def _pass_message(self, kind: str, message: Any, attempt: Attempt, body_out: ResponseBody) -> bool:
        """Relay a message. Return whether it ended the response."""
        stream, mode = self._stream, self._stream.response_mode
        piece = message.response_body
        last = kind == "response_trailers" or piece.end_of_stream
        if piece.body:
            self._note_first_byte(attempt)
        is_whole = last or mode == BUFFERED  # a buffered body comes in one message, before its trailers
        out = body_out.feed(piece.body, is_whole)
        if not (is_whole or attempt.response_bytes) and attempt.request.path == RESPONSES_PATHS:
            body_out.meter.flush(attempt)  # finds the id
            attempt.note_stored_response()
        if is_whole:
            self._finish(attempt)
            if body_out.is_truncated:
                attempt.ending = Ending.UPSTREAM_FAILED
        if kind == "response_body":
            for reply in pieces_of(mode, out, last, piece.body):
                await stream.write(reply)
        elif out and mode != FULL_DUPLEX_STREAMED:  # trailers have no reply with more of the body
            attempt.ending = Ending.UPSTREAM_FAILED
            self._gateway_request.abort()
        else:
            for reply in streamed("response_body", out, False) if out else ():
                await stream.write(reply)
            await stream.write(go_on("response_trailers"))
        return last

    def _finish(self, attempt: Attempt, body_out: ResponseBody | None = None) -> None:
        """Complete the attempt before the last reply, after which the gateway may end the stream."""
        if body_out is not None:
            body_out.feed(b"", True)
        self._note_first_byte(attempt)
        attempt.last_byte_at = self._context.clock.now()
        attempt.ending = Ending.COMPLETE
        self._stream.is_complete = True

    def _note_first_byte(self, attempt: Attempt) -> None:
        """Record the first byte of a pod's response. A response of Envoy itself shows nothing about the pod."""
        if attempt.first_byte_at is None and not attempt.is_by_envoy:
            attempt.note_first_byte(self._context.clock.now())

    def _ending_of_incomplete(self, attempt: Attempt) -> Ending:
        """Return the ending of an incomplete response: by the client or its pod, which a gateway does not distinguish,
        or by kvlane."""
        attempt.last_byte_at = self._context.clock.now()
        if not self._stream.is_over:
            if self._gateway_request.sent_status:
                self._gateway_request.abort()
            return Ending.EVICTED
        return Ending.CLIENT_GONE


def _status(text: str) -> int:
    """Return the status. Raise BadGateway for an invalid one."""
    if text.isascii() and text.isdigit() and len(text) == len("200"):
        return int(text)
    raise BadGateway("Envoy passed on a response that has no valid status.")


BY_POD = "via_upstream"
"""The details of a response of a pod. A response of a filter behind this one has details of the filter."""

NOT_REACHED = ("no_healthy_upstream", "connection_failure", "connection_timeout", "refused")
"""Parts of the details of a request that no pod has received."""


def failure(details: str) -> UpstreamFailed | BadGateway | GatewayTimeout:
    """Return the error for a response of the gateway itself, from its response code details."""
    if "{overflow" in details:
        return EnvoyOverflow(f"a circuit breaker of Envoy is open: {details}")
    if any(each in details for each in NOT_REACHED):
        return TriedByEnvoy(f"Envoy has no connection to the pod: {details}", None)
    if "timeout" in details or "max_stream_duration" in details:
        return GatewayTimeout("The pod did not respond in time.")
    return BadGateway("The pod closed the connection, or sent no valid response; retry shortly.")


MOST_PIECES = 64
"""Number of pieces after which the meter is flushed."""


class ResponseBody:
    """The body of a response on its way to the client. `changes`: its length may differ from the declared one."""

    is_truncated = False
    """Whether it is an event stream that ended incomplete, and so with an error event."""
    _is_over = False

    def __init__(self, attempt: Attempt, content_type: str, coded: bool, sized: bool) -> None:
        """`coded`: the body is compressed and passes unchanged; `sized`: its length is declared."""
        events = content_type.startswith("text/event-stream") and not coded
        changed = is_changed(attempt) and not coded and (attempt.status or 0) < 300
        self._attempt = attempt
        self.meter = ResponseMeter()
        self._framing: Framing = UntilClose()
        if events and (changed or attempt.request.usage_added):
            self._framing = Pipeline(event_transforms(attempt, is_patched=changed), chunked=False)
        elif changed and "json" in content_type:
            self._framing = WholeBody(transforms_of(attempt, whole=True))
        self.changes = not isinstance(self._framing, UntilClose)
        self._can_end_with_error = events and not sized

    def feed(self, body: bytes, last: bool) -> bytes:
        """Return the bytes for the client after the next piece; none after the last one."""
        if self._is_over:
            return b""
        self._is_over = last
        meter, framing, bodies = self.meter, self._framing, [body] if body else []
        meter.pieces += bodies
        out = framing.finish(b"", bodies, True) if last else framing.feed(b"", bodies, [])
        if last and self._can_end_with_error and meter.is_truncated(self._attempt):
            self.is_truncated = True
            event = stream_error(self._attempt.request.path, POD_STOPPED)
            out += framing.end_with(event, meter.tail + b"".join(meter.pieces)) or b""
        if last:
            meter.finish(self._attempt)
        elif len(meter.pieces) > MOST_PIECES:
            meter.flush(self._attempt)
        return out
