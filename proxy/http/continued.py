"""Streams that go on when their pod has failed: another one is asked for the rest."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import BadRequest, CutShort, Declined, KvlaneError, UpstreamFailed, UpstreamTimedOut
from proxy.core.patterns import any_matches
from proxy.core.request import InferenceRequest, changed
from proxy.http.answer import LOST, Answer, Rim
from proxy.http.call import HttpCall
from proxy.http.framing import LAST_CHUNK, Bodies, Framing, Marks, UntilClose, chunk, unchunked
from proxy.http.head import NOT_FOUND, AnswerHead
from proxy.http.refusal import refusal
from proxy.http.rewritten import RewrittenAnswer, is_rewritten
from proxy.http.send_progress import reset
from proxy.http.upstream.connection import Connection
from proxy.http.upstream.errors import Garbled
from proxy.openai.continuation import PATHS, Counted, Partial, Rest, counted, rest, without_counts
from proxy.openai.events import EVENT_END
from proxy.openai.first_event import ABORTED, declined
from proxy.openai.render import stream_error

ERROR = b'data: {"error"'
"""What an event begins with that says why there are no more."""

LARGEST_EVENT = 1024 * 1024
"""Bytes of an event that wait for its end. An answer with a larger one does not go on."""


def kind_of_continued(call: HttpCall, attempt: Attempt, models: Sequence[str]) -> type[Answer] | None:
    """Of the answer to a request for one of `models`, which are patterns; None if it is not to go on. Else the request
    of the leg becomes one by which it is known how many tokens were sent."""
    if call.answered:
        return RestOfAnswer
    request = attempt.request
    if not request.stream or request.path not in PATHS or call.upload is not None:
        return None
    if not any_matches(models, request.model):
        return None
    call.story = _story_of(call.story, request)
    if call.story is None:
        return None
    attempt.request = call.story.asked
    return ContinuedRewrittenAnswer if is_rewritten(attempt) else ContinuedAnswer


class Story:
    """One answer, whoever tells it."""

    def __init__(self, request: InferenceRequest, counted: Counted) -> None:
        self.request = request
        self.counted = counted
        self.asked = request
        """As pods are."""
        if counted.body is not request.body:
            self.asked = changed(request, body=counted.body, asks_usage=request.asks_usage or counted.asks_usage)
        self.partial = Partial()
        self.events: WholeEvents | None = None
        """None for what is no stream of events."""
        self.pending: Framing | None = None
        """All that frames the answer, while nobody tells it."""

    def go_on(self) -> InferenceRequest | None:
        """The request for the rest; None if there can be none."""
        request = self.asked
        body = None if self.events is None else rest(request.path, request.body, self.partial)
        return None if body is None else changed(request, body=body, naming=None)

    def end(self, call: HttpCall) -> None:
        """Tells the client that there is no more, if that was left open."""
        framing, self.pending = self.pending, None
        if framing is None or call.transport.is_closing():
            return
        out = framing.cut(stream_error(call.path, LOST), b"")
        if out is None:
            call.closing = True
            reset(call.transport)
        else:
            call.transport.write(out)


def _story_of(before: Story | None, request: InferenceRequest) -> Story | None:
    """Of a request that another pod may have been sent, which failed before it began."""
    if before is not None and request is before.asked:
        return Story(before.request, before.counted)
    question = counted(request.path, request.body)
    return None if question is None else Story(request, question)


class WholeEvents:
    """The innermost framing of an answer that may go on: what goes out ends with an event, so that what its client has
    is known. It stays when the pod changes."""

    __slots__ = ("_begun", "_chunked", "_framing", "_gap", "_partial", "_rest", "_takes_counts", "_unframe")
    looks_at_events = True

    def __init__(self, framing: Framing, chunked: bool, partial: Partial, takes_counts: bool) -> None:
        """`chunked` says whether `framing` writes chunks, or the bare body; so does this one. `takes_counts` out of
        the events, when they were read."""
        self._framing = framing
        self._chunked = self._unframe = chunked
        self._partial = partial
        self._takes_counts = takes_counts
        self._rest: Rest | None = None
        self._begun = b""
        """Of an event that is not whole."""
        self._gap = b""
        """Ends an event of which a part went out."""

    @property
    def in_step(self) -> bool:
        return self._rest is None and self._framing.in_step and not self._begun

    def go_on(self) -> None:
        """With the answer of another pod. Of an event that was not whole nothing has gone out."""
        self._framing, self._unframe = UntilClose(), False
        self._rest = Rest(self._partial)
        self._begun = b""

    def feed(self, raw: bytes, bodies: Bodies, marks: Marks) -> bytes:
        return self._take(self._framing.feed(raw, bodies, marks))

    def finish(self, raw: bytes, bodies: Bodies, exact: bool) -> bytes:
        """What is no event at the end is dropped, as clients do."""
        return self._take(self._framing.finish(raw, bodies, exact)) + (LAST_CHUNK if self._chunked else b"")

    def cut(self, event: bytes, tail: bytes) -> bytes | None:
        event = self._gap + event
        return chunk(event) + LAST_CHUNK if self._chunked else event

    def _take(self, out: bytes) -> bytes:
        """One chunk for each event, which is how engines send them."""
        searched = max(0, len(self._begun) - 3)
        body = self._begun + (unchunked(out) if self._unframe else out)
        events, start = [], 0
        for found in EVENT_END.finditer(body, searched):
            events.append(body[start : found.end()])
            start = found.end()
        self._begun = body[start:]
        if self._rest is not None:
            events = [each for each in map(self._rest.event, events) if each]
        self._partial.add(b"".join(events))
        if self._takes_counts:
            events = list(map(without_counts, events))
        if len(self._begun) > LARGEST_EVENT:
            self._partial.is_plain = False
            self._gap = b"\n\n"
            events.append(self._begun)
            self._begun = b""
        return b"".join(map(chunk, events) if self._chunked else events)


class _Continued(Answer):
    """What came through the framing is known to it; what went by it is told of before the next that does not."""

    _by = 0
    """Pieces of the meter that went by."""

    def __init__(self, call: HttpCall, attempt: Attempt, rim: Rim, connection: Connection) -> None:
        super().__init__(call, attempt, rim, connection)
        assert call.story is not None
        self._story = call.story

    def received(self, raw: bytes) -> None:
        error = _engine_failed(raw) if self.head is None else None
        if error is None:
            self._remember()
            super().received(raw)
        else:
            self._connection.abort()
            self.failed(error)

    def finished(self, raw: bytes, exact: bool) -> None:
        error = _engine_failed(raw) if self.head is None else None
        self._remember()
        if error is None:
            super().finished(raw, exact)
        else:
            self._connection.meter.finish(self._attempt)
            self.failed(error)

    def failed(self, error: KvlaneError) -> None:
        """Once something has gone out, the gateway is given the request for the rest."""
        if self._attempt.ending is None and self._call.answered and isinstance(error, UpstreamFailed):
            self._remember()
            request = self._story.go_on()
            if request is not None:
                self._leave(error, _cut_short(error, request))
                return
        super().failed(error)

    def _leave(self, error: KvlaneError, said: KvlaneError | None = None) -> None:
        """The story to whoever tells the rest."""
        self._story.pending = self._framing
        is_late = isinstance(error, UpstreamTimedOut)
        self._end(Ending.TIMED_OUT if is_late else Ending.UPSTREAM_FAILED, said or error)

    def _of_events(self, framing: Framing) -> Framing:
        story = self._story
        story.events = WholeEvents(framing, self._call.speaks_11, story.partial, story.counted.takes_counts)
        return super()._of_events(story.events)

    def _pass_events(self, raw: bytes) -> None:
        if self._story.counted.takes_counts or ERROR in raw or ABORTED in raw:
            self.received(raw)
            return
        super()._pass_events(raw)
        self._by = len(self._connection.meter.pieces)

    def _remember(self) -> None:
        if self._by:
            self._story.partial.add(b"".join(self._connection.meter.pieces[: self._by]))
            self._by = 0


class ContinuedAnswer(_Continued):
    """To a request that may be continued."""


class ContinuedRewrittenAnswer(_Continued, RewrittenAnswer):
    """The same, of which something is changed besides."""


class RestOfAnswer(_Continued):
    """Goes on with a story that was begun: its head has gone out, and all that frames it stays."""

    def __init__(self, call: HttpCall, attempt: Attempt, rim: Rim, connection: Connection) -> None:
        super().__init__(call, attempt, rim, connection)
        self._events = True
        if self._story.pending is not None:
            self._framing, self._story.pending = self._story.pending, None

    def begin(self, head: AnswerHead) -> None:
        if head.declines or head.status == NOT_FOUND:
            raise refusal(head, b"") or Declined(head.status)
        if not head.events or head.status != 200:
            raise Garbled(f"the rest of an answer cannot be read: {head.status}")
        if self._story.events is not None:
            self._story.events.go_on()
        self._connection.until_close = not head.chunked
        self._undecided = True

    def received(self, raw: bytes) -> None:
        head = self.head
        if head is None or not head.simple:
            super().received(raw)
        else:
            self._connection.abort()
            self._leave(_refused(head))

    def finished(self, raw: bytes, exact: bool) -> None:
        head = self.head
        if head is None or not head.simple:
            super().finished(raw, exact)
        else:
            self._connection.meter.finish(self._attempt)
            self._leave(_refused(head))

    def failed(self, error: KvlaneError) -> None:
        """Before anything came of it, it is asked for again as it was."""
        if self._attempt.ending is None and self._attempt.status is None:
            self._leave(error)
        else:
            super().failed(error)

    def _declined(self, head: AnswerHead, beginning: bytes) -> Declined | None:
        return refusal(head, beginning)

    def _opening(self, head: AnswerHead) -> bytes:
        self._attempt.status = head.status
        return b""


def _engine_failed(raw: bytes) -> UpstreamFailed | None:
    """What vLLM says in a stream when its engine has died, or will."""
    if ABORTED in raw:
        return UpstreamFailed("it aborted the answer")
    at = raw.find(ERROR)
    return None if at < 0 else declined(raw[at:])


def _refused(head: AnswerHead) -> BadRequest:
    """By an answer in one piece: no pod will do what was asked."""
    return BadRequest(f"The rest of this answer was refused: {head.status}.")


def _cut_short(error: UpstreamFailed, request: InferenceRequest) -> CutShort:
    cut = CutShort(str(error), request)
    cut.__cause__ = error
    return cut
