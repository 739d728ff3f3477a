"""What a response says about itself: token usage at its end, the id of a stored answer at its beginning."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import orjson

from proxy.core.exchange import Usage

_USAGE = re.compile(rb'"usage"\s*:\s*(\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\})')
"""With objects of details in it, which have none in them."""

_RESPONSE_ID = re.compile(rb'(?<!\\)"id"\s*:\s*"(resp_[^"\\]+)"')


def usage_from(tail: bytes) -> Usage | None:
    """The last usage object in the end of a body, streamed or not. Text of the model cannot be taken for one: inside
    a JSON string its quotes are escaped."""
    for fields in _last_objects(tail):
        prompt = _count(fields, "prompt_tokens", "input_tokens")
        completion = _count(fields, "completion_tokens", "output_tokens")
        if prompt is not None or completion is not None:
            return Usage(prompt or 0, completion or 0, _cached(fields))
    return None


def response_id_from(head: bytes) -> str | None:
    """The id of a `/v1/responses` answer, in the beginning of its body."""
    found = _RESPONSE_ID.search(head)
    return found[1].decode() if found else None


def _last_objects(tail: bytes) -> Iterator[dict[str, Any]]:
    """The usage objects, last first."""
    end = len(tail)
    while (at := tail.rfind(b'"usage"', 0, end)) >= 0:
        end = at
        found = _USAGE.match(tail, at)
        if found and tail[at - 1 : at] != b"\\":
            try:
                yield orjson.loads(found[1])
            except orjson.JSONDecodeError:
                continue


def _count(fields: dict[str, Any], name: str, other: str) -> int | None:
    value = fields.get(name)
    if value is None:
        value = fields.get(other)
    return value if isinstance(value, int) else None


def _cached(fields: dict[str, Any]) -> int | None:
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    return _count(details if isinstance(details, dict) else fields, "cached_tokens", "cache_read_input_tokens")
