"""The name of the model in requests and answers: exchanged for another one, with all other bytes as they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import islice

import orjson

_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")
_NAME = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|null', re.DOTALL)
_EMPTY = re.compile(rb"\s*\}")

_LONGEST_SPELLING = len(b'"model"') + 5 * len("model")
"""Of the key: each letter may be an escape of six."""

MOST = 50_000
"""Strings, brackets and braces that are looked at: 12 ms. Bodies of that many before the model's name are rare."""


def with_model(body: bytes, model: str) -> bytes | None:
    """A JSON object that asks for `model`, whether it named one or not; None for what is no UTF-8 object, or names
    something that is no text, or too late. Else the body is taken to be valid."""
    place = _place(body)
    if place is not None:
        return _spliced(body, place, model)
    start = _TOKEN.search(body)
    if start is None or start[0] != b"{" or b"\0" in body[:4] or _names(body):
        return None
    comma = b"" if _EMPTY.match(body, start.end()) else b","
    return b"".join((body[: start.end()], b'"model":', _quoted(model), comma, body[start.end() :]))


def renamed(body: bytes, model: str) -> bytes | None:
    """An answer that says to be of `model`; None if it does not say of which it is."""
    place = _place(body)
    return None if place is None else _spliced(body, place, model)


@lru_cache(maxsize=256)
def renaming(names: frozenset[str], model: str) -> Callable[[bytes], bytes]:
    """Exchanges any of `names` for `model`, wherever events name their model. What a model has written is left alone:
    inside a JSON string the quotes are escaped."""
    written = {text for name in names for text in (_quoted(name), json.dumps(name).encode())}
    search = re.compile(rb'("model"\s*:\s*)(?:%b)' % b"|".join(map(re.escape, sorted(written))))
    return partial(search.sub, rb"\g<1>" + _quoted(model).replace(b"\\", b"\\\\"))


def _place(body: bytes) -> tuple[int, int] | None:
    """Where the name stands that counts: of equal keys the last. Whatever is in the body, it is read once at most."""
    found = None
    depth = 0
    for token in islice(_TOKEN.finditer(body), MOST):
        sign = token[0]
        if sign in b"{[":
            depth += 1
        elif sign in b"}]":
            depth -= 1
        elif depth == 1 and _is_model(sign) and (colon := _COLON.match(body, token.end())):
            value = _NAME.match(body, colon.end())
            found = None if value is None else value.span()
            if not _names(body, colon.end()):
                break
    return found


def _is_model(text: bytes) -> bool:
    if text == b'"model"' or b"\\" not in text or len(text) > _LONGEST_SPELLING:
        return text == b'"model"'
    try:
        return bool(json.loads(text) == "model")
    except ValueError:
        return False


def _names(body: bytes, start: int = 0) -> bool:
    """Whether something that may be the key follows."""
    return body.find(b'"model"', start) >= 0 or body.find(b"\\u00", start) >= 0


def _spliced(body: bytes, place: tuple[int, int], model: str) -> bytes:
    return b"".join((body[: place[0]], _quoted(model), body[place[1] :]))


def _quoted(name: str) -> bytes:
    """What clients send may have halves of surrogate pairs in it, which are no UTF-8."""
    try:
        return orjson.dumps(name)
    except TypeError:
        return json.dumps(name).encode()
