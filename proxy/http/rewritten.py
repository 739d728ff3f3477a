"""Answers that name the model as the client does, and the cached tokens as they were."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

from proxy.core.attempt import NOT_YET, Attempt
from proxy.core.request import InferenceRequest
from proxy.http.answer import Answer
from proxy.http.framing import EVENT_ENDS, LAST_CHUNK, Bodies, Framing, Marks, chunk, unchunked
from proxy.http.head import AnswerHead
from proxy.openai.asked_usage import IN_QUESTION
from proxy.openai.events import EVENT_END
from proxy.openai.model_field import renamed, renaming
from proxy.openai.told_cached import telling

Change = Callable[[bytes], bytes]

LARGEST = 4 * 1024 * 1024
"""Bytes of an answer that wait for its end, because its length changes. A larger one passes as it is."""

LARGEST_EVENT = 1024 * 1024
"""Bytes of an event that wait for its end."""

_LENGTH = re.compile(rb"(?im)^(content-length:[ \t]*)\d+")
_JSON = re.compile(rb"(?im)^content-type:[^\r\n]*json")
_CODED = re.compile(rb"(?im)^content-encoding:[ \t]*(?!identity)")


def kind_of_answer(attempt: Attempt) -> type[Answer]:
    return RewrittenAnswer if is_rewritten(attempt) else Answer


def is_rewritten(attempt: Attempt) -> bool:
    return attempt.told_cached is not None or _is_renamed(attempt.request)


class RewrittenAnswer(Answer):
    """To a request whose model was rewritten, or whose prompt was computed by another pod. What is neither JSON nor
    events, or is compressed, passes as it is; so do errors, which say no such thing but in their text."""

    def begin(self, head: AnswerHead) -> None:
        super().begin(head)
        if not head.sized and head.status < 300 and (self._events or _is_json(head)):
            self._change = of_events(self._attempt)
            self._framing = Rewritten(self._framing, self._call.speaks_11, self._change)
            self._asks_usage = self._attempt.request.asks_usage

    def received(self, raw: bytes) -> None:
        """A JSON answer of known length is kept until it is whole."""
        head = self.head
        if head is None or not head.simple:
            super().received(raw)
        elif _is_json(head) and self._passed + len(raw) <= LARGEST:
            self._passed += len(raw)
        else:
            super().received(b"".join(self._connection.meter.pieces))

    def finished(self, raw: bytes, exact: bool) -> None:
        head = self.head
        if head is not None and head.simple and _is_json(head):
            body = b"".join(self._connection.meter.pieces)
            if self._passed:
                raw, exact = body, True
            changed = of_whole(self._attempt, body)
            if changed is not None:
                self.head = replace(head, start=_LENGTH.sub(rb"\g<1>%d" % len(changed), head.start))
                raw, exact = changed, True
        super().finished(raw, exact)

    def _pass_events(self, raw: bytes) -> None:
        """A paced event is one read of one chunk: 3 us, not 19."""
        pieces = self._connection.meter.pieces
        event = pieces[-1] if pieces else b""
        passed = self._passed + len(raw)
        if (
            passed < self._settle_at
            and raw == b"%x\r\n%b\r\n" % (len(event), event)
            and event.endswith(EVENT_ENDS)
            and not (self._asks_usage and IN_QUESTION(event))
        ):
            self._passed = passed
            event = self._change(event)
            self._call.transport.write(b"%x\r\n%b\r\n" % (len(event), event))
        else:
            self.received(raw)


class Rewritten:
    """Around the framing that the answer would have else: whole events go out, changed."""

    __slots__ = ("_begun", "_change", "_chunked", "_framing")
    looks_at_events = True

    def __init__(self, framing: Framing, chunked: bool, change: Change) -> None:
        """`chunked` says whether that one writes chunks, or the bare body. `change` is given whole events."""
        self._framing = framing
        self._chunked = chunked
        self._change = change
        self._begun = b""
        """Of an event that is not whole."""

    @property
    def in_step(self) -> bool:
        return self._framing.in_step and not self._begun

    def feed(self, raw: bytes, bodies: Bodies, marks: Marks) -> bytes:
        searched = max(0, len(self._begun) - 3)
        body = self._begun + self._body(self._framing.feed(raw, bodies, marks))
        end = len(body) if len(body) > LARGEST_EVENT else 0
        for found in EVENT_END.finditer(body, searched):
            end = max(end, found.end())
        self._begun = body[end:]
        return self._framed(body[:end])

    def finish(self, raw: bytes, bodies: Bodies, exact: bool) -> bytes:
        body = self._begun + self._body(self._framing.finish(raw, bodies, exact))
        return self._framed(body) + (LAST_CHUNK if self._chunked else b"")

    def cut(self, event: bytes, tail: bytes) -> bytes | None:
        """An event that is not whole goes out with nothing of it: the one around has a blank line before its own."""
        out = self._framing.cut(event, tail)
        return None if out is None else self._framed(self._body(out)) + (LAST_CHUNK if self._chunked else b"")

    def _body(self, out: bytes) -> bytes:
        return unchunked(out) if self._chunked else out

    def _framed(self, events: bytes) -> bytes:
        events = self._change(events)
        return chunk(events) if self._chunked else events


def _is_renamed(request: InferenceRequest) -> bool:
    return request.naming is not None and request.naming.asked != request.model


def of_events(attempt: Attempt) -> Change:
    """What is to be done with them."""
    changes: list[Change] = []
    request = attempt.request
    if request.naming is not None and _is_renamed(request):
        changes.append(renaming((attempt.endpoint.models or frozenset()) | {request.model}, request.naming.asked))
    if attempt.told_cached is not None:
        is_known = attempt.told_cached != NOT_YET
        changes.append(telling(attempt.told_cached) if is_known else partial(_telling_what_is_known, attempt))
    return lambda events: reduce(lambda seen, change: change(seen), changes, events)


def of_whole(attempt: Attempt, body: bytes) -> bytes | None:
    """None if nothing is to be done with it."""
    changed, request = None, attempt.request
    if request.naming is not None and _is_renamed(request):
        changed = renamed(body, request.naming.asked)
    if attempt.told_cached is None or attempt.told_cached == NOT_YET:
        return changed
    return telling(attempt.told_cached)(body if changed is None else changed)


def _telling_what_is_known(attempt: Attempt, events: bytes) -> bytes:
    """By now: the prompt is computed beside this answer, and its usage comes last."""
    cached = attempt.told_cached
    return events if cached is None or cached == NOT_YET else telling(cached)(events)


def _is_json(head: AnswerHead) -> bool:
    return _JSON.search(head.start) is not None and not _CODED.search(head.start)
