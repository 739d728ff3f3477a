"""What a response says about itself: token usage at its end, the id of a stored answer at its beginning."""

from __future__ import annotations

import re
from functools import partial
from typing import Any, NamedTuple

import orjson

from proxy.core.attempt import Usage
from proxy.openai.events import FLAT_OBJECT
from proxy.openai.parse import GENERATE

_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(' + FLAT_OBJECT + rb")")
"""With objects of details in it, which have none in them."""

_USUAL = re.compile(
    rb'(?<!\\)"usage":\s?{"prompt_tokens":\s?(\d{1,18}),\s?"total_tokens":\s?\d{1,18},\s?"completion_tokens":\s?(\d{1,18})'
    rb'(?:,\s?"prompt_tokens_details":\s?(?:null|{"cached_tokens":\s?(\d{1,18})}))?}'
).match
"""The same as vLLM and SGLang write it: two thirds of the price of an object of any form."""

_META_INFO = re.compile(rb'(?<!\\)"meta_info"\s*:\s*(' + FLAT_OBJECT + rb")")
"""What SGLang's own API says at the end of each event, of all tokens so far."""

USAGE_LAST = ("/v1/chat/completions", "/v1/completions")
USAGE_WITHIN = 2 * 1024
"""Bytes of the end of a stream of these, where usage has an event of its own or comes with the last choice. Where no
client has asked for it, it is not looked for further up, for 15,000 instructions."""

DONE = b"[DONE]"

_TERMINAL = rb"message_stop|response\.(?:completed|incomplete|failed|cancelled)"
"""Events after which an answer has no more, of /v1/messages and /v1/responses."""

_BLANK_LINES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_ENDS_WHOLE = re.compile(
    rb"(?:\A|[\r\n])(?:data:[ \t]*\[DONE\]|event:[ \t]*(?:" + _TERMINAL + rb"))[ \t]*(?=[\r\n])"
    rb'|(?<!\\)"type"\s*:\s*"(?:' + _TERMINAL + rb')"'
)


class _Marks(NamedTuple):
    """Two ways to find an event: by what its data says, and by its name. A model cannot write either: its quotes and
    line ends are escaped."""

    data: re.Pattern[bytes]
    name: re.Pattern[bytes]

    def are_in(self, tail: bytes) -> bool:
        return self.data.search(tail) is not None or self.name.search(tail) is not None


NOTHING = rb"(?!)"
"""Pattern of no name."""


def _marks(names: bytes, data: bytes = b"") -> _Marks:
    """One pattern of both takes 160 us for 8 KB, not 10: it has no literal to look for."""
    name = rb"event:(?<![^\r\n]event:)[ \t]*(?:" + names + rb")[ \t]*(?=[\r\n]|\Z)"
    return _Marks(re.compile(data or rb'"(?:' + names + rb')"'), re.compile(name))


_CHOICES = (
    _marks(NOTHING, rb'"finish_reason"\s*:\s*null'),
    _marks(b"error", rb'\[DONE\]|"finish_reason"\s*:\s*"|"error"'),
)
_UNFINISHED = {
    "/v1/chat/completions": _CHOICES,
    "/v1/completions": _CHOICES,
    "/v1/messages": (_marks(b"message_start|content_block_delta"), _marks(b"message_stop|error")),
    "/v1/responses": (_marks(rb"response\.(?:created|[a-z_]+\.delta)"), _marks(_TERMINAL + b"|error")),
}
"""Events that have others behind them, and those that are the last, by path."""

_COUNTS = (
    *("prompt_tokens", "completion_tokens"),
    *("prompt_tokens_details", "input_tokens_details", "cached_tokens", "cache_read_input_tokens"),
)
_NOT_SAID = [None] * 4
"""What engines give for the last four, unless they are told to count hits."""

_RESPONSE_ID = re.compile(rb'(?<!\\)"id"\s*:\s*"(resp_[!#-\[\]-~]{1,256})"')
"""Printable ASCII. Any other id is not remembered."""


def usage_from(tail: bytes, path: str = "") -> Usage | None:
    """The last usage object in the end of a body, streamed or not. Text of the model cannot be taken for one: inside
    a JSON string its quotes are escaped."""
    if path == GENERATE:
        return _last(tail, tail.rfind(b'"meta_info"'), b'"meta_info"', _META_INFO)
    at = tail.rfind(b'"usage"')  # in 8 KB where there is none 19,000 instructions: it is looked for once
    if at < 0:
        return None
    usual = _USUAL(tail, at)
    if usual is not None:
        prompt, completion, cached = usual.groups()
        return _used((int(prompt), int(completion), None if cached is None else int(cached)))
    return _last(tail, at, b'"usage"', _USAGE)


def ends_whole(tail: bytes) -> bool:
    """Whether the end of an event stream is the event after which there are no more."""
    if not tail.endswith(_BLANK_LINES):
        return False
    last = tail.rstrip(b"\r\n")
    start = max(last.rfind(blank) for blank in _BLANK_LINES)
    return _ENDS_WHOLE.search(tail, max(0, start)) is not None


def is_cut(path: str, tail: bytes) -> bool:
    """Whether an event stream that ended in good order says that its answer had not: a proxy before the engine may take
    what broke off for the end."""
    more, end = _UNFINISHED.get(path, (None, None))
    return more is not None and end is not None and more.are_in(tail) and not end.are_in(tail)


def response_id_from(head: bytes) -> str | None:
    """The id of a `/v1/responses` answer, in the beginning of its body."""
    found = _RESPONSE_ID.search(head)
    return found[1].decode() if found else None


def _last(tail: bytes, at: int, name: bytes, pattern: re.Pattern[bytes]) -> Usage | None:
    """`at` is where its name is found last."""
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
    if type(prompt) is not int or type(completion) is not int or prompt < 0 or completion < 0:
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
    return value if type(value) is int and value >= 0 else None
