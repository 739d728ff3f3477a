"""Request bodies as bytes: how expensive one is to parse, and the replacement of the model name."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any

import orjson

from proxy.openai import multipart

LARGE = 256 * 1024
"""Bytes above which a body is not parsed on the event loop. Text takes 4 us per KiB, and a thread does not help,
because the parser holds the interpreter lock."""

SMALL = 16 * 1024
"""Bytes that are parsed within 4 ms whatever they contain."""

_MOST = 8_000
"""Limit on commas, plus four per bracket. The most expensive body of this weight takes 4 ms to parse and to rewrite."""

_DIGITS = 400
"""Largest number of digits of an integer. Converting 4,000 takes 75 us."""

MOST_VALUES = 250_000
"""Values of a body that may be parsed a second time on the event loop, in 50 ms. A prompt of token ids has as many."""

_NO_VALUE_SIGNS = bytes(byte for byte in range(256) if byte not in b'",[{')

_BRACKET = 4
_FEW = 32

_TEXT = re.compile(rb'(?:content|text|prompt|input)": ?"').search
"""The beginning of a text. Its first quote ends a key: a string never starts behind a letter."""

_QUOTES = 32
_BACKSLASH, _BRACE = b"\\{"


def is_light(body: bytes, content_type: str = "") -> bool:
    """Return whether a body can be parsed on the event loop: in at most 5 ms, whatever it contains. Text with many
    commas or brackets may count as values; it is then parsed elsewhere."""
    size = len(body)
    if size <= SMALL:
        return True
    if size >= LARGE:
        return False
    if _is_mostly_text(body) or multipart.is_multipart(content_type):  # a form takes 3 ms at most
        return True
    return _occurrences(body, b",") + _BRACKET * (_occurrences(body, b"[") + _occurrences(body, b"{")) <= _MOST


def _is_mostly_text(body: bytes) -> bool:
    """Return whether the first texts leave so few bytes that a parser is fast even if each of these is a bracket.
    It spares most bodies the slower `_occurrences`."""
    if body[0] != _BRACE or not body[1]:  # in UTF-16 and UTF-32, other characters contain the byte of a quote
        return False
    most = _MOST // _BRACKET
    left, start, at = len(body) - most, 0, 0
    for _ in range(_QUOTES):
        if not start:
            text = _TEXT(body, at, at + most)
            if text is None:
                return False
            start = at = text.end()
        end = body.find(b'"', at)
        if end < 0:
            return False
        at = end + 1
        if body[end - 1] != _BACKSLASH:
            left -= end - start
            start = 0
            if left <= 0:
                return True
        elif body[end - 2] == _BACKSLASH:  # a quote behind two backslashes may be escaped or not
            return False
    return False


def _occurrences(body: bytes, sign: bytes) -> int:
    """Return how often the byte occurs, `_MOST + 1` at most. `bytes.count` looks at each byte by itself before Python
    3.13, which dominates large bodies (docs/notes/cpu.md); `find` and `replace` use memchr, and `replace` makes a copy,
    which few occurrences do not need."""
    at = -1
    for count in range(_FEW):
        at = body.find(sign, at + 1)
        if at < 0:
            return count
    return len(body) - len(body.replace(sign, b"", _MOST + 1))


def has_many_values(body: bytes) -> bool:
    """Return whether a body of valid JSON has more than about MOST_VALUES values. 40 MB of values block the event loop
    for seconds, where as much text takes 0.2 s."""
    if len(body) <= 2 * MOST_VALUES:
        return False
    if _occurs_more(body, b'"', 2 * MOST_VALUES):
        return True
    if not any(_occurs_more(body, sign, MOST_VALUES // 3) for sign in (b",", b"[", b"{")):
        return False
    text = body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body
    outside = text.translate(None, _NO_VALUE_SIGNS).split(b'"')[::2]
    return sum(map(len, outside)) > MOST_VALUES


def _occurs_more(body: bytes, sign: bytes, most: int) -> bool:
    """Return whether the byte occurs more than `most` times; see `_occurrences`."""
    return len(body) - len(body.replace(sign, b"", most + 1)) > most


def bounded_int(digits: str) -> int | float:
    """Return a JSON integer; infinity for one that no engine accepts and that would take long to convert."""
    return int(digits) if len(digits) <= _DIGITS else math.inf


_LONG = b"0" * 19
"""Digits of the shortest integer that may have more than 64 bits, when all digits are written as zeros."""

_AS_ZEROS = bytes(ord("0") if chr(byte).isdecimal() else byte for byte in range(128)) + bytes(range(128, 256))


def with_long_integers(fields: dict[str, Any], body: bytes) -> dict[str, Any]:
    """Return the fields of the body, for writing them again, with its integers of more than 64 bits, which orjson reads
    as floats."""
    if _LONG in body.translate(_AS_ZEROS):
        with suppress(RecursionError):
            exact: dict[str, Any] = json.loads(body, parse_int=bounded_int)
            return exact
    return fields


def object_in(body: bytes) -> dict[str, Any] | None:
    """Return the fields of a JSON object, parsed as engines do; None for anything else."""
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            fields = json.loads(body, parse_int=bounded_int)
        except (ValueError, RecursionError):
            return None
    return fields if isinstance(fields, dict) else None


_KEY = re.compile(rb'"(?:m|\\u006[dD])(?:o|\\u006[fF])(?:d|\\u0064)(?:e|\\u0065)(?:l|\\u006[cC])"\s*:\s*')
"""The key in any JSON spelling, up to its value."""

_NAME = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|null', re.DOTALL)
_START = re.compile(rb"(?:\xef\xbb\xbf)?\s*\{")
_EMPTY = re.compile(rb"\s*\}")

_NO_SIGNS = bytes(byte for byte in range(256) if byte not in b'"{}[]')

MOST_KEYS = 5_000
"""Keys of this name, at any depth, that are examined in about 5 ms. No API has as many in one body."""


class ModelNotReplaceable(ValueError):
    """The model name in the body cannot be replaced."""


def with_model(body: bytes, model: str) -> bytes | None:
    """Return the JSON object with `model` as its model, whether it had one or not. Return None if the input is no
    object in UTF-8, if its model is no text, or if it has more than `MOST_KEYS` such keys. The rest of the body is
    assumed to be valid."""
    start = _START.match(body)
    if start is None or b"\0" in body[:4]:
        return None
    try:
        place = _place(body)
    except ModelNotReplaceable:
        return None
    if place is not None:
        return _spliced(body, place, model)
    comma = b"" if _EMPTY.match(body, start.end()) else b","
    return b"".join((body[: start.end()], b'"model":', _quoted(model), comma, body[start.end() :]))


def renamed(body: bytes, model: str) -> bytes | None:
    """Return the response with `model` as its model; None if it names none."""
    try:
        place = _place(body)
    except ModelNotReplaceable:
        return None
    return None if place is None else _spliced(body, place, model)


@lru_cache(maxsize=256)
def renaming(names: frozenset[str], model: str) -> Callable[[bytes], bytes]:
    """Return a function that replaces any of `names` by `model` where events contain the model name. Generated text is
    unchanged, because quotes are escaped inside a JSON string."""
    written = {text for name in names for text in (_quoted(name), json.dumps(name).encode())}
    search = re.compile(rb'("model"\s*:\s*)(?:%b)' % b"|".join(map(re.escape, sorted(written))))
    return partial(search.sub, rb"\g<1>" + _quoted(model).replace(b"\\", b"\\\\"))


def _place(body: bytes) -> tuple[int, int] | None:
    """Return the position of the model name: the value of the last such key of the outer object, which parsers use;
    None without such a key. Raise ModelNotReplaceable if its value is no text or if there are too many such keys.
    Methods of bytes do the work in linear time: 1.3 MB of 15,000 messages take 4 to 13 ms, and each key of this name
    1 us."""
    text = body.replace(b"\\\\", b"__").replace(b'\\"', b"__") if b"\\" in body else body
    found = None
    depth = at = 0
    for count, key in enumerate(_KEY.finditer(text)):
        if count == MOST_KEYS:
            raise ModelNotReplaceable
        depth += _depth(text[at : key.start()])
        at = key.start()
        if depth == 1:
            found = key.end()
    if found is None:
        return None
    value = _NAME.match(body, found)
    if value is None:
        raise ModelNotReplaceable
    return value.span()


def _depth(text: bytes) -> int:
    """Return the change of the nesting depth after `text`, which has no escaped quotes and ends no string that it does
    not start. Strings without brackets are removed first, because each of them would be a piece."""
    outside = b"".join(text.translate(None, _NO_SIGNS).replace(b'""', b"").split(b'"')[::2])
    return outside.count(b"{") + outside.count(b"[") - outside.count(b"}") - outside.count(b"]")


def _spliced(body: bytes, place: tuple[int, int], model: str) -> bytes:
    return b"".join((body[: place[0]], _quoted(model), body[place[1] :]))


def _quoted(name: str) -> bytes:
    """Return the JSON text of the name. Clients may send lone surrogates, which UTF-8 cannot represent."""
    try:
        return orjson.dumps(name)
    except TypeError:
        return json.dumps(name).encode()
