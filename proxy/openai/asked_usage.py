"""Usage requested on behalf of the client and removed from its response, and cached tokens put into usage."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import orjson

from proxy.core.request import InferenceRequest, changed
from proxy.openai.events import FLAT_OBJECT, fields_of
from proxy.openai.weight import bounded_int, is_light

OPTIONS = b'"stream_options":{"include_usage":true}'
ASKED_HERE = ("/v1/chat/completions", "/v1/completions")

_TEXT_PROMPT = re.compile(rb'"prompt"\s*:\s*"')
_PLACES = (
    (re.compile(rb'"include_usage"\s*:\s*(?=false|null)'), re.compile(rb"false|null"), b"true"),
    (re.compile(rb'"stream_options"\s*:\s*(?=null)'), re.compile(rb"null"), b'{"include_usage":true}'),
    (re.compile(rb'"stream_options"\s*:\s*\{(?=\s*\})'), re.compile(rb""), b'"include_usage":true'),
    (re.compile(rb'"stream_options"\s*:\s*\{'), re.compile(rb""), b'"include_usage":true,'),
)
"""Where it can be asked in options that are there: behind the first, in place of the second."""

_TRIES = 2


def asking(request: InferenceRequest) -> InferenceRequest:
    """With the question in its body, all other bytes of which stay, and `asks_usage`. As it is, if its answer is no
    stream or tells its usage anyway; if the client has asked itself; or if it has several choices, for their last
    chunks, of which one may come long before the others, are not as they would be without the question."""
    if not request.stream or request.path not in ASKED_HERE:
        return request
    body = with_question(request.body, request.path)
    return request if body is None else changed(request, body=body, asks_usage=True)


def with_question(body: bytes, path: str) -> bytes | None:
    """The body, a JSON object that asks for a stream, with the question; None if that is not to be, or not certain to
    change nothing else."""
    if _is_plain(body, path):
        return at_the_end(body, OPTIONS)
    if not is_light(body) or b"\0" in body[:4]:  # in UTF-16 and UTF-32, which Python reads too
        return None
    fields = _read(body)
    if not isinstance(fields, dict) or not _has_one_choice(fields):
        return None
    if "stream_options" not in fields:
        return at_the_end(body, OPTIONS)
    options = fields["stream_options"]
    options = {} if options is None else options
    if not isinstance(options, dict) or options.get("continuous_usage_stats") not in (None, False):
        return None
    if options.get("include_usage") not in (None, False):
        return None
    return _within(body, {**fields, "stream_options": {**options, "include_usage": True}})


def at_the_end(body: bytes, field: bytes) -> bytes | None:
    """An object that is not empty, with one field more, all other bytes of which stay; None for what is no object."""
    text = body.rstrip(b" \t\r\n")
    if not text.endswith(b"}"):
        return None
    return b"".join((text[:-1], b",", field, b"}", body[len(text) :]))


IN_QUESTION = re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"').search
"""Finds what events have that may have to be changed. Text of the model has no such thing: its quotes are escaped."""


class DropUsage:
    """Stage that gives the events of a stream as they would be without the question.

    vLLM, asked, sends a chunk with usage and without choices, and in it the `system_fingerprint` that would else be in
    the last chunk before it: so the last chunk waits for what follows, which comes at once. An engine that tells usage
    in chunks with choices tells it to everybody: its stream passes as it is.
    """

    __slots__ = ("_last", "_passes_all")

    def __init__(self) -> None:
        self._passes_all = False
        self._last = b""
        """An event that gives a reason to finish."""

    def take(self, events: list[bytes], ends: bool) -> list[bytes]:
        if self._passes_all or (len(events) == 1 and not self._last and not IN_QUESTION(events[0])):
            return events
        passed = [shown for event in events for shown in self._shown(event)]
        if ends and self._last:
            passed.append(self._last)
            self._last = b""
        return passed

    def _shown(self, event: bytes) -> Iterator[bytes]:
        last, self._last = self._last, b""
        fields = fields_of(event) if not self._passes_all and IN_QUESTION(event) else {}
        has_usage = isinstance(fields.get("usage"), dict)
        if has_usage and fields.get("choices") == []:
            if last:
                yield _stamped(last, fields.get("system_fingerprint"))
            return
        if last:
            yield last
        if has_usage:
            self._passes_all = True
        if fields and not has_usage:
            self._last = event
        else:
            yield event


def _is_plain(body: bytes, path: str) -> bool:
    """Whether it can be seen at once that the object has no options and one choice. A key can hide only in escapes."""
    if b'"stream_options"' in body or b'"n"' in body or b"\\u00" in body or b"\0" in body[:4]:
        return False
    return path != "/v1/completions" or (body.count(b'"prompt"') == 1 and _TEXT_PROMPT.search(body) is not None)


def _has_one_choice(fields: dict[str, Any]) -> bool:
    if fields.get("n") not in (None, 1):
        return False
    prompt = fields.get("prompt", "")
    return isinstance(prompt, str) or (
        isinstance(prompt, list) and bool(prompt) and (len(prompt) == 1 or isinstance(prompt[0], int))
    )


def _within(body: bytes, wanted: dict[str, Any]) -> bytes | None:
    """What an occurrence of a name is can be told from what it makes of the object. Of equal keys the last counts."""
    for before, replaced, by in _PLACES:
        for found in islice(reversed(list(before.finditer(body))), _TRIES):
            there = replaced.match(body, found.end())
            end = found.end() if there is None else there.end()
            asked = body[: found.end()] + by + body[end:]
            if _read(asked) == wanted:
                return asked
    return None


def _read(body: bytes) -> Any:
    """As engines do; None for what is no JSON."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(body, parse_int=bounded_int)
    except (ValueError, RecursionError):
        return None


def _stamped(event: bytes, fingerprint: Any) -> bytes:
    end = event.rfind(b"}")
    if fingerprint is None or end < 0 or b'"system_fingerprint"' in event:
        return event
    return b'%b,"system_fingerprint":%b%b' % (event[:end], orjson.dumps(fingerprint), event[end:])


_USAGE = re.compile(rb'("usage"\s*:\s*)(' + FLAT_OBJECT + rb")")
"""With objects of details in it, which have none in them. Inside a JSON string the quotes are escaped."""


def telling(cached: int) -> Callable[[bytes], bytes]:
    """Says so wherever usage with prompt tokens is given, be it in events or in a whole answer."""
    return partial(_USAGE.sub, partial(_told, cached))


def _told(cached: int, found: re.Match[bytes]) -> bytes:
    try:
        usage: dict[str, Any] = orjson.loads(found[2])
    except orjson.JSONDecodeError:
        return found[0]
    if "cache_read_input_tokens" in usage:
        usage["cache_read_input_tokens"] = cached
    elif "prompt_tokens" in usage:
        _put(usage, "prompt_tokens_details", cached)
    elif "input_tokens_details" in usage:
        _put(usage, "input_tokens_details", cached)
    else:
        return found[0]
    return found[1] + orjson.dumps(usage)


def _put(usage: dict[str, Any], name: str, cached: int) -> None:
    details = usage.get(name)
    usage[name] = {**(details if isinstance(details, dict) else {}), "cached_tokens": cached}
