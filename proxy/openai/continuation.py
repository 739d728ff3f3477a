"""Continue a response that was cut on another pod: the part that came, the request for the rest, and its events."""

from __future__ import annotations

import re
from functools import partial as bound
from typing import Any, NamedTuple

import orjson

from proxy.openai.bodies import is_light, with_long_integers
from proxy.openai.events import EVENT_END, FLAT_OBJECT, at_the_end, fields_of

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
PATHS = (CHAT, COMPLETIONS)

READ_AT = 64 * 1024
"""Bytes of events that are collected before they are parsed: 250 events, in 1.5 ms."""

LONGEST = 1024 * 1024
"""Characters. A longer response is not continued."""

LONGEST_STOP = 1
"""Largest number of characters of a stop sequence. For longer ones engines hold text back, so that the sent text ends
within a token."""

DONE = b"data: [DONE]"

COUNTING = b'"stream_options":{"include_usage":true,"continuous_usage_stats":true}'
"""Makes engines report the token count in each event, which may contain several tokens, for example with speculative
decoding."""

_COUNTED = {"include_usage": True, "continuous_usage_stats": True}

_SAME = """
model messages prompt stream stream_options max_tokens max_completion_tokens min_tokens temperature top_p top_k min_p
repetition_penalty logit_bias bad_words ignore_eos stop_token_ids include_stop_str_in_output skip_special_tokens
spaces_between_special_tokens chat_template chat_template_kwargs reasoning_effort cache_salt priority user metadata
store service_tier request_id safety_identifier prompt_cache_key kv_transfer_params
"""
"""Fields that mean the same for the rest as for the whole response, or that are rewritten for it."""

_ANYTHING = frozenset(_SAME.split())

_NOTHING: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}
"""Values besides null with which these fields have no effect."""

_LIMITS = ("max_tokens", "max_completion_tokens")
_PARTS_OF_TEXT = frozenset(("role", "content"))

Fields = dict[str, Any]


class ContinuableRequest(NamedTuple):
    """A request whose response may be continued, as pods get it. `counts_added`: its client did not ask for usage in
    every event, `usage_added`: nor for any."""

    body: bytes
    counts_added: bool = False
    usage_added: bool = False


def with_token_counts(path: str, body: bytes) -> ContinuableRequest | None:
    """Return the request with options that make engines report token counts in each event; None if its response can
    never be continued. A request that is too long to be read twice stays as it is."""
    if not is_light(body):
        return ContinuableRequest(body)
    fields = _fields(body)
    if fields is None or not _can_go_on(path, fields):
        return None
    options = fields.get("stream_options")
    options = {} if options is None else options
    if not isinstance(options, dict):
        return ContinuableRequest(body)
    usage_added = options.get("include_usage") is not True
    if not usage_added and options.get("continuous_usage_stats") is True:
        return ContinuableRequest(body)
    if "stream_options" not in fields:
        changed = at_the_end(body, COUNTING)
    else:
        changed = _json_of(with_long_integers(fields, body) | {"stream_options": {**options, **_COUNTED}})
    return ContinuableRequest(body) if changed is None else ContinuableRequest(changed, True, usage_added)


def without_counts(event: bytes) -> bytes:
    """Return an event as it would be without usage in each. Text of the model has no such thing in it: its quotes
    are escaped."""
    return event if _NO_CHOICES(event) else _USAGE(event)


_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]').search
_USAGE = bound(re.compile(rb',\s*"usage"\s*:\s*' + FLAT_OBJECT).sub, b"", count=1)


class PartialResponse:
    """The part of a streamed response that a client has. Its events are kept as they came, and read when there are many
    or when a value is needed."""

    def __init__(self) -> None:
        self.shown = 0
        """Tokens up to the end of the text: as the engine reports, else one per event."""
        self.produced = 0
        """The same, with tokens that were not shown when the response ended."""
        self.prompt: int | None = None
        """Tokens of the prompt, if reported."""
        self.stamp: Fields = {}
        """What all events of the response have in common."""
        self.is_plain = True
        """Whether it has the text of one choice alone."""
        self.has_role = self.is_finished = self.has_usage = self.is_done = False
        self._text: list[str] = []
        self._length = 0
        self._unread: list[bytes] = []
        self._unread_size = 0

    def add(self, events: bytes) -> None:
        if self.is_plain and events:
            self._unread.append(events)
            self._unread_size += len(events)
            if self._unread_size > READ_AT:
                self.read()

    def complete_text(self) -> str:
        """Parse all events and return the text. Tokens whose text was not sent will be generated again."""
        self.read()
        if not self.is_finished:
            self.produced = self.shown
        return "".join(self._text)

    def read(self) -> None:
        events = b"".join(self._unread)
        self._unread.clear()
        self._unread_size = start = 0
        for end in EVENT_END.finditer(events):
            self._see(events[start : end.end()])
            start = end.end()
        if self._length > LONGEST:
            self.is_plain = False
        if not self.is_plain:
            self._text.clear()

    def _see(self, event: bytes) -> None:
        if event.startswith(b":"):
            return
        if event.startswith(DONE):
            self.is_done = True
            return
        fields = fields_of(event)
        choices = _choices(fields)
        if choices is None or len(choices) > 1:
            self.is_plain = False
            return
        self.stamp = self.stamp or {name: fields[name] for name in ("id", "created", "model") if name in fields}
        usage = fields.get("usage")
        if choices:
            self._see_choice(choices[0], self._count(usage if isinstance(usage, dict) else {}))
        elif usage:
            self.has_usage = True

    def _count(self, usage: Fields) -> int:
        """Count the tokens of an event with this usage."""
        if isinstance(prompt := usage.get("prompt_tokens"), int):
            self.prompt = prompt
        given = usage.get("completion_tokens")
        return given if isinstance(given, int) else self.produced + 1

    def _see_choice(self, choice: Fields, produced: int) -> None:
        text, is_plain = _text_of(choice)
        finish = choice.get("finish_reason")
        self.is_plain = self.is_plain and is_plain and choice.get("index") == 0
        if "role" in (choice.get("delta") or ()) and not text and finish is None:
            self.has_role = True
            return
        self.produced = produced
        if text:
            self._text.append(text)
            self._length += len(text)
            self.shown = self.produced
        if finish is not None:
            self.is_finished = True
            self.is_plain = self.is_plain and finish in ("stop", "length")


def rest(path: str, body: bytes, partial: PartialResponse) -> bytes | None:
    """Return the request for the rest of a response; None if the two parts together would not be the same response. A
    finished one lacks its usage, or its end: one token is asked for, and not shown."""
    text = partial.complete_text()
    fields = _fields(body)
    if not partial.is_plain or fields is None or not _can_go_on(path, fields):
        return None
    fields = with_long_integers(fields, body)
    fields.pop("kv_transfer_params", None)  # what they name is gone by now
    if partial.shown:
        if path == CHAT:
            fields["messages"] = [*fields["messages"], {"role": "assistant", "content": text}]
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        else:
            fields["prompt"] += text
    if not _limit(fields, partial):
        return None
    return _json_of(fields)


class RestOfResponse:
    """Turns events of the rest into events of the response that was cut."""

    def __init__(self, partial: PartialResponse) -> None:
        """`partial` has been read to its end by `complete_text`."""
        self._stamp = partial.stamp
        self._prompt = partial.prompt
        self._shown, self._produced = partial.shown, partial.produced
        self._has_role = partial.has_role
        self._is_finished = partial.is_finished
        self._has_usage = partial.has_usage
        self._is_over = partial.is_done

    def event(self, event: bytes) -> bytes:
        """Return the rewritten event; empty if the client has already received an equivalent."""
        if self._is_over:
            return b""
        if event.startswith(DONE):
            return event
        fields = fields_of(event)
        if "error" in fields:
            self._is_over = True
        choices = _choices(fields)
        if choices is None:
            return event
        if choices and (self._is_finished or not self._is_news(choices[0])):
            return b""
        if isinstance(usage := fields.get("usage"), dict):
            if not choices and self._has_usage:
                return b""
            fields["usage"] = self._merged(usage)
        return b"data: %b\n\n" % orjson.dumps(fields | self._stamp)

    def _is_news(self, choice: Fields) -> bool:
        """Return whether the event has new content; remove a role that was already sent."""
        delta = choice.get("delta")
        if not self._has_role or delta is None or "role" not in delta:
            return True
        del delta["role"]
        return bool(_text_of(choice)[0]) or choice.get("finish_reason") is not None

    def _merged(self, usage: Fields) -> Fields:
        """Return the usage of the whole response. The prompt of the rest includes the text that was shown."""
        prompt = self._prompt
        if prompt is None:
            prompt = max(0, _count(usage, "prompt_tokens") - self._shown)
        completion = self._produced if self._is_finished else self._shown + _count(usage, "completion_tokens")
        total: Fields = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion}
        details = usage.get("prompt_tokens_details")
        if isinstance(details, dict) and _count(details, "cached_tokens") > prompt:
            total["prompt_tokens_details"] = {**details, "cached_tokens": prompt}
        return usage | total


def _fields(body: bytes) -> Fields | None:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return fields if isinstance(fields, dict) else None


def _json_of(fields: Fields) -> bytes | None:
    """Return None for integers of more than 64 bits and for lone surrogates."""
    try:
        return orjson.dumps(fields)
    except TypeError:
        return None


def _can_go_on(path: str, fields: Fields) -> bool:
    for name, value in fields.items():
        if value is not None and name not in _ANYTHING and not _is_harmless(name, value, fields):
            return False
    if path == CHAT:
        return isinstance(fields.get("messages"), list)
    # without a limit engines give a completion a few tokens, and a rest as many again
    return isinstance(fields.get("prompt"), str) and "max_tokens" in fields


def _is_harmless(name: str, value: Any, fields: Fields) -> bool:
    if name == "seed":
        return fields.get("temperature") == 0
    if name == "stop":
        stops = [value] if isinstance(value, str) else value
        return isinstance(stops, list) and all(isinstance(s, str) and len(s) <= LONGEST_STOP for s in stops)
    return any(value == none and isinstance(value, bool) is isinstance(none, bool) for none in _NOTHING.get(name, ()))


def _limit(fields: Fields, partial: PartialResponse) -> bool:
    """Subtract the shown tokens from the limits; return False if nothing is left."""
    if partial.is_finished:
        given = [name for name in _LIMITS if fields.get(name) is not None] or ["max_tokens"]
        fields |= dict.fromkeys(given, 1)
        fields.pop("min_tokens", None)
        return True
    for name in (*_LIMITS, "min_tokens"):
        if isinstance(limit := fields.get(name), int):
            fields[name] = max(0, limit - partial.shown)
    return all(fields.get(name) != 0 for name in _LIMITS)


def _choices(fields: Fields) -> list[Fields] | None:
    """Return the choices; None if this is no event of these APIs."""
    choices = fields.get("choices")
    return choices if isinstance(choices, list) and all(map(_is_choice, choices)) else None


def _is_choice(choice: Any) -> bool:
    if not isinstance(choice, dict):
        return False
    delta = choice.get("delta")
    if delta is not None and not isinstance(delta, dict):
        return False
    text = choice.get("text") if delta is None else delta.get("content")
    return text is None or isinstance(text, str)


def _count(fields: Fields, name: str) -> int:
    count = fields.get(name)
    return count if isinstance(count, int) else 0


def _text_of(choice: Fields) -> tuple[str, bool]:
    """Return the text, and whether the choice has text alone."""
    delta = choice.get("delta")
    if delta is None:
        text, others = choice.get("text"), False
    else:
        text = delta.get("content")
        others = any(value for name, value in delta.items() if name not in _PARTS_OF_TEXT)
    return text or "", not others and not choice.get("logprobs")
