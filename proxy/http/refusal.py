"""Whether a pod answers a request, or declines: by its status, its error, or the first event of a stream."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from proxy.core.errors import Declined
from proxy.http.head import NOT_FOUND, AnswerHead
from proxy.openai import first_event
from proxy.openai.missing_model import says_that_model_is_missing

_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*(?:(\d{1,6})|([a-z]{3,9},[^\r\n]{1,60}?))[ \t]*\r\n", re.IGNORECASE)
_DATE = re.compile(rb"\r\ndate:[ \t]*([^\r\n]{1,60}?)[ \t]*\r\n", re.IGNORECASE)


def is_open(head: AnswerHead, beginning: bytes) -> bool:
    """Whether it takes more of the body to know; the reason for a status may be anywhere in it."""
    waits_for_end = head.declines or head.status == NOT_FOUND
    return len(beginning) <= first_event.LONGEST and (waits_for_end or not first_event.is_whole(beginning))


def refusal(head: AnswerHead, beginning: bytes) -> Declined | None:
    """None if it answers, or finds fault with the request. A 404 is one only for a model that the pod does not have."""
    if head.declines or (head.status == NOT_FOUND and says_that_model_is_missing(beginning)):
        return declined_with(head, beginning)
    return None if head.status == NOT_FOUND else first_event.declined(beginning)


def declined_with(head: AnswerHead, beginning: bytes) -> Declined:
    """By its status."""
    text = beginning[: first_event.LONGEST].decode("utf-8", "replace")
    return Declined(head.status, _retry_after(head.start), text)


def _retry_after(head: bytes) -> float | None:
    """Of RFC 9110, in either form. A moment is compared with the pod's own `date`, as clocks differ."""
    after = _RETRY_AFTER.search(head)
    if after is None:
        return None
    if after[1]:
        return float(after[1])
    then, now = _moment(after[2]), _DATE.search(head)
    at = None if now is None else _moment(now[1])
    return None if then is None or at is None else max(0.0, (then - at).total_seconds())


def _moment(date: bytes) -> datetime | None:
    try:
        moment = parsedate_to_datetime(date.decode("latin-1"))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
