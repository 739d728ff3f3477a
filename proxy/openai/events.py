"""Server-sent events: where one ends, and the JSON object in it."""

from __future__ import annotations

import re
from typing import Any

import orjson

EVENT_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")

FLAT_OBJECT = rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
"""Pattern of a JSON object such as usage: its values may be objects, theirs not, and no text in it has braces."""


def fields_of(event: bytes) -> dict[str, Any]:
    """The object that is an event's data; empty if it is none."""
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        fields = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}
