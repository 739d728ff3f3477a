"""An estimate of how long it takes to read a body, made without reading it."""

from __future__ import annotations

import math

from proxy.openai import multipart

LARGE = 256 * 1024
"""Bytes. A body takes 4 us per KiB as one text, and no thread can help, for the parser holds the interpreter."""

SMALL = 16 * 1024
"""Bytes that are read in 4 ms whatever is in them."""

_MOST = 8_000
"""Commas, and brackets by four: what costs most of that weight takes 4 ms, to parse and to ask for usage."""

_DIGITS = 400
"""Of an integer. Converting 4,000 takes 75 us."""

MOST_VALUES = 250_000
"""Values of a body that is read a second time, on the event loop: 50 ms. A prompt of tokens has as many."""

_NO_SIGNS = bytes(byte for byte in range(256) if byte not in b'",[{')

_BRACKET = 4
_FEW = 32


def is_light(body: bytes, content_type: str = "") -> bool:
    """Return whether a body can be read on the event loop: in at most 5 ms, whatever is in it. Text with many commas or
    brackets may be taken for values; it is only read elsewhere then."""
    size = len(body)
    if size <= SMALL:
        return True
    if size >= LARGE:
        return False
    if multipart.is_multipart(content_type):
        return True  # at worst 3 ms
    return _count(body, b",") + _BRACKET * (_count(body, b"[") + _count(body, b"{")) <= _MOST


def _count(body: bytes, sign: bytes) -> int:
    """Return how often the byte occurs, `_MOST + 1` at most. `bytes.count` looks at each byte by itself before Python
    3.13, which takes 500,000 of 1,230,000 instructions of a request with 32 KB (`bench/instructions.py --case 32k`);
    `find` and `replace` use memchr, and `replace` makes a copy, which few occurrences do not need."""
    at = -1
    for count in range(_FEW):
        at = body.find(sign, at + 1)
        if at < 0:
            return count
    return len(body) - len(body.replace(sign, b"", _MOST + 1))


def has_many_values(body: bytes) -> bool:
    """Return whether a body, which is valid JSON, has more than about MOST_VALUES values: 40 MB of them hold up the
    event loop for seconds, where as much text takes 0.2 s."""
    if len(body) <= 2 * MOST_VALUES:
        return False
    if _occurs_more(body, b'"', 2 * MOST_VALUES):
        return True
    if not any(_occurs_more(body, sign, MOST_VALUES // 3) for sign in (b",", b"[", b"{")):
        return False
    text = body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body
    outside = text.translate(None, _NO_SIGNS).split(b'"')[::2]
    return sum(map(len, outside)) > MOST_VALUES


def _occurs_more(body: bytes, sign: bytes, most: int) -> bool:
    """Return whether the byte occurs more than `most` times; see `_count`."""
    return len(body) - len(body.replace(sign, b"", most + 1)) > most


def bounded_int(digits: str) -> int | float:
    """Return a JSON integer; infinity for one that no engine takes, which would take long to convert."""
    return int(digits) if len(digits) <= _DIGITS else math.inf
