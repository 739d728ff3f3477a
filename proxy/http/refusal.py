"""Whether a pod answers a request, or declines: by its status, or by the first event of a stream."""

from __future__ import annotations

import re

from proxy.core.errors import Declined
from proxy.http.head import AnswerHead
from proxy.openai import first_event

_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*(\d{1,6})[ \t]*\r\n", re.IGNORECASE)


def is_open(head: AnswerHead, beginning: bytes) -> bool:
    """Whether it takes more of the body to know; the reason for a status may be anywhere in it."""
    return len(beginning) <= first_event.LONGEST and (head.declines or not first_event.is_whole(beginning))


def refusal(head: AnswerHead, beginning: bytes) -> Declined | None:
    """None if it answers, or finds fault with the request."""
    return declined_with(head, beginning) if head.declines else first_event.declined(beginning)


def declined_with(head: AnswerHead, beginning: bytes) -> Declined:
    """By its status."""
    after = _RETRY_AFTER.search(head.start)
    text = beginning[: first_event.LONGEST].decode("utf-8", "replace")
    return Declined(head.status, None if after is None else float(after[1]), text)
