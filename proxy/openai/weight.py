"""An estimate of how long it takes to read a body, made without reading it."""

from __future__ import annotations

import math

LARGE = 256 * 1024
"""Bytes. A body takes 4 us per KiB as one text, and no thread can help, for the parser holds the interpreter."""

_SMALL = 16 * 1024
"""Bytes that are read in 4 ms whatever is in them."""

_MOST = 8_000
"""Commas, and brackets by four: what costs most of that weight takes 4 ms, to parse and to ask for usage."""

_DIGITS = 400
"""Of an integer. Converting 4,000 takes 75 us."""

_BRACKET = 4
_FORM_PART = 8


def is_light(body: bytes, content_type: str = "") -> bool:
    """Return whether a body can be read on the event loop: in at most 5 ms, whatever is in it. Text with many commas or
    brackets may be taken for values; it is only read elsewhere then."""
    size = len(body)
    if size <= _SMALL:
        return True
    if size >= LARGE:
        return False
    if content_type.startswith("multipart/"):
        return _FORM_PART * body.count(b"--") <= _MOST
    return body.count(b",") + _BRACKET * (body.count(b"[") + body.count(b"{")) <= _MOST


def bounded_int(digits: str) -> int | float:
    """Return a JSON integer; infinity for one that no engine takes, which would take long to convert."""
    return int(digits) if len(digits) <= _DIGITS else math.inf
