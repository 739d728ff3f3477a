"""Server-sent events and usage: the ends of events and streams, and token counts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import orjson

from proxy.core.attempt import Usage
from proxy.core.request import InferenceRequest, changed
from proxy.openai.bodies import is_light, object_in
from proxy.openai.parse import SGLANG_GENERATE

EVENT_END = re.compile(rb"\n\n|\r\n\r\n|\r\r")
EVENT_ENDS = (b"\n\n", b"\r\n\r\n", b"\r\r")

FLAT_OBJECT = rb"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}"
"""Pattern of a JSON object such as usage: nested one level deep, without braces in its texts."""


def fields_of(event: bytes) -> dict[str, Any]:
    """Return the data of an event; empty if the data is not an object."""
    lines = [line[5:] for line in event.splitlines() if line.startswith(b"data:")]
    try:
        fields = orjson.loads(b"\n".join(lines))
    except orjson.JSONDecodeError:
        return {}
    return fields if isinstance(fields, dict) else {}


_USAGE = re.compile(rb'(?<!\\)"usage"\s*:\s*(' + FLAT_OBJECT + rb")")
"""Matches usage with nested details."""

_USUAL = re.compile(
    rb'(?<!\\)"usage":\s?{"prompt_tokens":\s?(\d{1,18}),\s?"total_tokens":\s?\d{1,18},\s?"completion_tokens":\s?(\d{1,18})'
    rb'(?:,\s?"prompt_tokens_details":\s?(?:null|{"cached_tokens":\s?(\d{1,18})}))?}'
).match
"""Matches usage as vLLM and SGLang write it, at two thirds of the cost of the general pattern."""

_META_INFO = re.compile(rb'(?<!\\)"meta_info"\s*:\s*(' + FLAT_OBJECT + rb")")
"""Matches the token counts that SGLang's own API reports at the end of each event."""

USAGE_LAST = ("/v1/chat/completions", "/v1/completions")
USAGE_WITHIN = 2 * 1024
"""Bytes at the end of a stream of these APIs in which usage is searched. Searching the whole stream costs 15,000
instructions."""

DONE = b"data: [DONE]"

_TERMINAL = rb"message_stop|response\.(?:completed|incomplete|failed|cancelled)"
"""The last events of /v1/messages and /v1/responses."""

_ENDS_WHOLE = re.compile(
    rb"(?:\A|[\r\n])(?:data:[ \t]*\[DONE\]|event:[ \t]*(?:" + _TERMINAL + rb"))[ \t]*(?=[\r\n])"
    rb'|(?<!\\)"type"\s*:\s*"(?:' + _TERMINAL + rb')"'
)


class _Marks(NamedTuple):
    """Patterns that find an event by its data and by its name. Generated text contains neither: its quotes and line
    ends are escaped. Tokens of log probabilities are JSON texts, or keys of numbers."""

    data: re.Pattern[bytes]
    name: re.Pattern[bytes]

    def are_in(self, tail: bytes) -> bool:
        return self.data.search(tail) is not None or self.name.search(tail) is not None


NOTHING = rb"(?!)"
"""A pattern that matches no name."""


def _marks(names: bytes, data: bytes = b"") -> _Marks:
    """Return two patterns: a single one has no literal to search for and takes 160 us for 8 KB instead of 10."""
    name = rb"event:(?<![^\r\n]event:)[ \t]*(?:" + names + rb")[ \t]*(?=[\r\n]|\Z)"
    return _Marks(re.compile(rb'"(?:type|object)"\s*:\s*"(?:' + names + rb')"' + data), re.compile(name))


_ERROR = rb'|"error"\s*:\s*[{"]'
_NOT_BEFORE_ANOTHER = rb'(?!(?s:.*)"index"\s*:\s*[1-9](?s:(?!"index").)*"finish_reason"\s*:\s*null)'
_CHOICES = (
    _marks(NOTHING, rb'|"finish_reason"\s*:\s*null'),
    _marks(
        b"error",
        rb'|data:(?<![^\r\n]data:)[ \t]*\[DONE\]|"finish_reason"\s*:\s*["{]' + _NOT_BEFORE_ANOTHER + _ERROR,
    ),
)
"""A choice of another index may be unfinished when one has its finish reason, a text or SGLang's object."""

_ABORTED_MESSAGE = re.compile(rb'"delta"\s*:\s*\{\s*"stop_reason"\s*:\s*null(?!(?s:.*)"stop_reason"\s*:\s*")').search
"""Finds the end of a message that vLLM aborted: without a stop reason, but with its last event."""

MESSAGES = "/v1/messages"

_STORED = "/v1/responses/"

_RESPONSES = (
    _marks(rb"response\.(?!(?:completed|incomplete|failed|cancelled)\b)[a-z_.]+"),
    _marks(_TERMINAL + b"|error", _ERROR),
)
_TRANSCRIPTS = (
    _marks(rb"trans(?:cription|lation)\.chunk|transcript\.text\.delta"),
    _marks(rb"transcript\.text\.done|error", rb"|data:(?<![^\r\n]data:)[ \t]*\[DONE\]" + _ERROR),
)

_UNFINISHED = {
    "/v1/chat/completions": _CHOICES,
    "/v1/completions": _CHOICES,
    SGLANG_GENERATE: _CHOICES,
    "/inference/v1/generate": _CHOICES,
    MESSAGES: (_marks(rb"message_(?:start|delta)|content_block_\w+|ping"), _marks(b"message_stop|error", _ERROR)),
    "/v1/responses": _RESPONSES,
    "/v1/audio/transcriptions": _TRANSCRIPTS,
    "/v1/audio/translations": _TRANSCRIPTS,
}
"""Events that others follow, and last events, by path."""

STREAMED = frozenset(_UNFINISHED)
"""Paths whose streams have at least one event."""

_USAGE_FIELDS = (
    *("prompt_tokens", "completion_tokens"),
    *("prompt_tokens_details", "input_tokens_details", "cached_tokens", "cache_read_input_tokens"),
)
"""The fields of usage: two counts, and the four fields in which engines report cached tokens."""

_NO_CACHED_TOKENS = [None] * 4
"""The values of the last four fields in usage of an engine that does not report cached tokens."""

_RESPONSE_ID = re.compile(rb'(?<!\\)"id"\s*:\s*"(resp_[!#-\[\]-~]{1,256})"')
"""Printable ASCII. Other ids are not remembered."""


def usage_from(tail: bytes, path: str = "") -> Usage | None:
    """Return the last usage object at the end of a body or stream. Generated text cannot contain one: inside a JSON
    string its quotes are escaped."""
    if path == SGLANG_GENERATE:
        return _last(tail, tail.rfind(b'"meta_info"'), b'"meta_info"', _META_INFO)
    at = tail.rfind(b'"usage"')  # looked for once: it may be missing
    if at < 0:
        return None
    usual = _USUAL(tail, at)
    if usual is not None:
        prompt, completion, cached = usual.groups()
        return Usage(int(prompt), int(completion), None if cached is None else int(cached))
    return _last(tail, at, b'"usage"', _USAGE)


def usage_at_start(beginning: bytes) -> Usage | None:
    """Return the first usage object at the start of a stream."""
    found = _USAGE.search(beginning)
    return None if found is None else _usage(found[1])


def ends_whole(tail: bytes) -> bool:
    """Return whether an event stream ends with its last event."""
    if not tail.endswith(EVENT_ENDS):
        return False
    last = tail.rstrip(b"\r\n")
    start = max(last.rfind(blank) for blank in EVENT_ENDS)
    return _ENDS_WHOLE.search(tail, max(0, start)) is not None


_PART = re.compile(rb"(?:\A|[\r\n])data: ?\{[^\r\n]*\Z")
"""Matches an event without its end, which clients ignore."""


def is_truncated(path: str, tail: bytes) -> bool:
    """Return whether an event stream ended as valid HTTP although it is incomplete, as when a proxy in front of the
    engine ends it after a lost connection."""
    marks = _RESPONSES if path.startswith(_STORED) else _UNFINISHED.get(path)
    if marks is None:
        return False
    more, end = marks
    if not more.are_in(tail) and _PART.search(tail) is None:
        return False
    return not end.are_in(tail) or (path == MESSAGES and _ABORTED_MESSAGE(tail) is not None)


def response_id_from(head: bytes) -> str | None:
    """Return the id of a `/v1/responses` response, from the beginning of its body."""
    found = _RESPONSE_ID.search(head)
    return found[1].decode() if found else None


def _last(tail: bytes, at: int, name: bytes, pattern: re.Pattern[bytes]) -> Usage | None:
    """`at` is the last position of its name."""
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
    prompt, completion, *cached = map(fields.get, _USAGE_FIELDS)
    if type(prompt) is not int or type(completion) is not int or prompt < 0 or completion < 0:
        prompt = _count(fields, "prompt_tokens", "input_tokens")
        completion = _count(fields, "completion_tokens", "output_tokens")
        if prompt is None and completion is None:
            return None
    return Usage(prompt or 0, completion or 0, None if cached == _NO_CACHED_TOKENS else _cached(fields))


def _cached(fields: dict[str, Any]) -> int | None:
    details = fields.get("prompt_tokens_details") or fields.get("input_tokens_details")
    return _count(details if isinstance(details, dict) else fields, "cached_tokens", "cache_read_input_tokens")


def _count(fields: dict[str, Any], name: str, other: str) -> int | None:
    value = fields.get(name)
    if value is None:
        value = fields.get(other)
    return value if type(value) is int and value >= 0 else None


OPTIONS = b'"stream_options":{"include_usage":true}'
WITH_USAGE_OPTION = ("/v1/chat/completions", "/v1/completions")

_TEXT_PROMPT = re.compile(rb'"prompt"\s*:\s*"')
_PLACES = (
    (re.compile(rb'"include_usage"\s*:\s*(?=false|null)'), re.compile(rb"false|null"), b"true"),
    (re.compile(rb'"stream_options"\s*:\s*(?=null)'), re.compile(rb"null"), b'{"include_usage":true}'),
    (re.compile(rb'"stream_options"\s*:\s*\{(?=\s*\})'), re.compile(rb""), b'"include_usage":true'),
    (re.compile(rb'"stream_options"\s*:\s*\{'), re.compile(rb""), b'"include_usage":true,'),
)
"""Where the request for usage is added to existing options: after the first field, or instead of the second."""

_TRIES = 2


def with_usage(request: InferenceRequest) -> InferenceRequest:
    """Return the request with the question for usage in its body, and `usage_added`; all other bytes stay.

    Unchanged are a request for no stream, or for one that has usage anyway; one whose client asks itself; and one for
    several choices, whose last chunks would differ: one of them may come long before the others."""
    if not request.stream or request.path not in WITH_USAGE_OPTION:
        return request
    body = with_include_usage(request.body, request.path)
    return request if body is None else changed(request, body=body, usage_added=True)


def with_include_usage(body: bytes, path: str) -> bytes | None:
    """Return the body of a streaming request with usage added; None if that is impossible or could change anything
    else."""
    if _is_plain(body, path):
        return at_the_end(body, OPTIONS)
    if not is_light(body) or b"\0" in body[:4]:  # in UTF-16 and UTF-32, which Python reads too
        return None
    fields = object_in(body)
    if fields is None or not _has_one_choice(fields):
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
    """Return an object that is not empty with one more field, and all other bytes as they are; None for no object."""
    text = body.rstrip(b" \t\r\n")
    if not text.endswith(b"}"):
        return None
    return b"".join((text[:-1], b",", field, b"}", body[len(text) :]))


IN_QUESTION = re.compile(rb'"usage"\s*:\s*\{|"finish_reason"\s*:\s*"').search
"""Finds the parts of events that may have to change. Generated text contains none: its quotes are escaped."""


class DropUsage:
    """Transform that removes the usage that kvlane requested. Engines then send a chunk with usage and without choices,
    which contains fields that would otherwise be in the last chunk before it (`_MOVED`). So the last chunk waits for
    the next one, which arrives at once. A stream of an engine that reports usage in chunks with choices, which it
    does in every case, is unchanged."""

    __slots__ = ("_last", "_passes_all")

    def __init__(self) -> None:
        self._passes_all = False
        self._last = b""
        """An event with a finish reason."""

    def process(self, events: list[bytes], ends: bool) -> list[bytes]:
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
                yield _with_moved(last, fields)
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
    """Return whether the object certainly has no options and one choice. Escapes could hide a key."""
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
    """Change an occurrence of a name, and check what that makes of the object. Of equal keys the last counts."""
    for before, replaced, by in _PLACES:
        for found in islice(reversed(list(before.finditer(body))), _TRIES):
            there = replaced.match(body, found.end())
            end = found.end() if there is None else there.end()
            changed_body = body[: found.end()] + by + body[end:]
            if object_in(changed_body) == wanted:
                return changed_body
    return None


_MOVED = ("system_fingerprint", "timings")
"""Fields of the last chunk that vLLM and llama.cpp send in the chunk with usage instead."""


def _with_moved(event: bytes, usage_fields: dict[str, Any]) -> bytes:
    for name in _MOVED:
        value, end = usage_fields.get(name), event.rfind(b"}")
        if value is not None and end >= 0 and b'"%b"' % name.encode() not in event:
            event = b'%b,"%b":%b%b' % (event[:end], name.encode(), orjson.dumps(value), event[end:])
    return event


_USAGE_VALUE = re.compile(rb'("usage"\s*:\s*)(' + FLAT_OBJECT + rb")")
"""Matches usage with nested details. Inside a JSON string the quotes are escaped."""


def telling(cached: int) -> Callable[[bytes], bytes]:
    """Return a function that sets the cached tokens in usage, in events or in a whole response."""
    return partial(_USAGE_VALUE.sub, partial(_patched, cached))


def _patched(cached: int, found: re.Match[bytes]) -> bytes:
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
