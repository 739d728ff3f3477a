"""What a response says about itself: token usage at its end, the id of a stored answer at its beginning."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from proxy.core.exchange import Usage

_DECODER = json.JSONDecoder()
_RESPONSE_ID = re.compile(rb'(?<!\\)"id"\s*:\s*"(resp_[^"\\]+)"')


def usage_from(tail: bytes) -> Usage | None:
    """The last usage object in the end of a body, streamed or not. Text of the model cannot be taken for one: inside
    a JSON string its quotes are escaped."""
    for fields in _last_objects(tail, b'"usage"'):
        prompt = _count(fields, "prompt_tokens", "input_tokens")
        completion = _count(fields, "completion_tokens", "output_tokens")
        if prompt is not None or completion is not None:
            return Usage(prompt or 0, completion or 0, _cached(fields))
    return None


def response_id_from(head: bytes) -> str | None:
    """The id of a `/v1/responses` answer, in the beginning of its body."""
    found = _RESPONSE_ID.search(head)
    return found[1].decode() if found else None


def _last_objects(tail: bytes, key: bytes) -> Iterator[dict[str, Any]]:
    """The objects under `key`, last first."""
    end = len(tail)
    while (at := tail.rfind(key, 0, end)) >= 0:
        end = at
        if tail[at - 1 : at] == b"\\":
            continue
        rest = tail[at + len(key) :].lstrip()
        if not rest.startswith(b":") or not rest[1:].lstrip().startswith(b"{"):
            continue
        try:
            value, _ = _DECODER.raw_decode(rest[1:].lstrip().decode("utf-8", "replace"))
        except ValueError:
            continue
        yield value


def _count(fields: dict[str, Any], *names: str) -> int | None:
    return next((value for name in names if isinstance(value := fields.get(name), int)), None)


def _cached(fields: dict[str, Any]) -> int | None:
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    if isinstance(details, dict):
        return _count(details, "cached_tokens")
    return _count(fields, "cache_read_input_tokens")
