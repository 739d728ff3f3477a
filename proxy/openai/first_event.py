"""What a stream begins with: its first event may say that the pod declines, under a head that says 200.

vLLM does so where its queue is found full, or its engine dead, only after it has answered. Of /v1/messages the error is
one of its own converter, without the status.
"""

from __future__ import annotations

import re
from typing import Any

from proxy.core.errors import Declined
from proxy.openai.events import EVENT_END, fields_of

LONGEST = 8 * 1024
"""Bytes of a first event that are waited for. Errors are shorter."""

TOO_MANY_REQUESTS = 429
UNAVAILABLE = 503

ENDING = 2 * 1024
"""Bytes of an answer in which its last choice says why it has ended, and its usage stands."""

ABORTED = b'"finish_reason":"abort"'
"""Of an answer that vLLM does not finish, as it is told to stop. A model can write neither: its quotes are escaped."""

_NAMED_ERROR = re.compile(rb"event:[ \t]*error[ \t]*[\r\n]").match

_STATUSES = {
    "service unavailable": 503,
    "overloaded_error": 503,
    "rate_limit_error": TOO_MANY_REQUESTS,
    "api_error": 500,
    "internal_error": 500,
    "internal_server_error": 500,
    "internalservererror": 500,
    "server_error": 500,
}
"""Of errors that have none, by type or code in lower case."""


def is_whole(beginning: bytes) -> bool:
    """Whether there is as much of the body as it takes."""
    if beginning.find(b"\n\n") >= 0 or len(beginning) > LONGEST:  # the usual end, without 5,000 instructions of `re`
        return True
    return EVENT_END.search(beginning) is not None


def declined(beginning: bytes) -> Declined | None:
    """Why a pod has not begun; None if it has, or found fault with the request."""
    # A stream that comes whole may have 17 KB in 64 events: to look for a word in all of it takes 24,000 instructions.
    end_at = beginning.find(b"\n\n", 0, LONGEST)
    if beginning.find(b"error", 0, LONGEST if end_at < 0 else end_at) < 0:
        ending = 0 if beginning.startswith(b"{") else -ENDING  # a whole answer may have its tokens behind
        return aborted() if beginning.find(ABORTED, ending) >= 0 else None  # `in` raises an error first: 2,500
    end = EVENT_END.search(beginning)
    fields = fields_of(beginning if end is None else beginning[: end.start()])
    error = fields.get("error")
    if error is None and (fields.get("type") == "error" or _NAMED_ERROR(beginning)):
        error = fields
    if not isinstance(error, dict):
        return None
    status = _status(error)
    if status < 500 and status != TOO_MANY_REQUESTS:
        return None
    return Declined(status, text=str(error.get("message") or ""))


def aborted() -> Declined:
    """What it amounts to that the pod has broken off, under a head that says 200."""
    return Declined(UNAVAILABLE, text="it aborted the answer")


def _status(error: dict[str, Any]) -> int:
    code = error.get("code")
    if isinstance(code, int):
        return code
    if isinstance(code, str) and code.isdecimal():
        return int(code)
    return _STATUSES.get(str(code).lower(), 0) or _STATUSES.get(str(error.get("type")).lower(), 0)
