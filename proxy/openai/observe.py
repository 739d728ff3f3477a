"""What a response says about itself: token usage at its end, the id of a stored answer at its beginning."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import orjson

from proxy.core.exchange import Usage
from proxy.openai.events import FLAT_OBJECT

_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(' + FLAT_OBJECT + rb")")
"""With objects of details in it, which have none in them."""

_META_INFO = re.compile(rb'(?<!\\)"meta_info"\s*:\s*(' + FLAT_OBJECT + rb")")
"""What SGLang's own API says at the end of each event, of all tokens so far."""

_LAST = (b"data: [DONE]", b"event: message_stop", b"event: response.completed")

_COUNTS = (
    *("prompt_tokens", "completion_tokens"),
    *("prompt_tokens_details", "input_tokens_details", "cached_tokens", "cache_read_input_tokens"),
)
_NOT_SAID = [None] * 4
"""What engines give for the last four, unless they are told to count hits."""

_RESPONSE_ID = re.compile(rb'(?<!\\)"id"\s*:\s*"(resp_[^"\\]+)"')


def usage_from(tail: bytes) -> Usage | None:
    """The last usage object in the end of a body, streamed or not. Text of the model cannot be taken for one: inside
    a JSON string its quotes are escaped."""
    return _last(tail, b'"usage"', _USAGE) or _last(tail, b'"meta_info"', _META_INFO)


def ends_whole(tail: bytes) -> bool:
    """Whether the end of an event stream is the event after which there are no more."""
    last = tail.rstrip(b"\r\n")
    return len(tail) - len(last) > 1 and last[last.rfind(b"\n\n") + 1 :].lstrip().startswith(_LAST)


def response_id_from(head: bytes) -> str | None:
    """The id of a `/v1/responses` answer, in the beginning of its body."""
    found = _RESPONSE_ID.search(head)
    return found[1].decode() if found else None


def _last(tail: bytes, name: bytes, pattern: re.Pattern[bytes]) -> Usage | None:
    at = tail.rfind(name)
    while at >= 0:
        found = pattern.match(tail, at)
        if found and (usage := _usage(found[1])) is not None:
            return usage
        at = tail.rfind(name, 0, at)
    return None


def _usage(text: bytes) -> Usage | None:
    try:
        fields = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    prompt, completion, *cached = map(fields.get, _COUNTS)
    if type(prompt) is not int or type(completion) is not int:
        prompt = _count(fields, "prompt_tokens", "input_tokens")
        completion = _count(fields, "completion_tokens", "output_tokens")
        if prompt is None and completion is None:
            return None
    return _used((prompt or 0, completion or 0, None if cached == _NOT_SAID else _cached(fields)))


_used = partial(tuple.__new__, Usage)
"""Of a tuple of its fields, without the Python frame that a NamedTuple's own constructor takes."""


def _cached(fields: dict[str, Any]) -> int | None:
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    return _count(details if isinstance(details, dict) else fields, "cached_tokens", "cache_read_input_tokens")


def _count(fields: dict[str, Any], name: str, other: str) -> int | None:
    value = fields.get(name)
    if value is None:
        value = fields.get(other)
    return value if isinstance(value, int) else None
