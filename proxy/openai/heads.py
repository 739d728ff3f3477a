"""What requests begin with, made into a request of its own: tools and system prompt, and nothing that a user said."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any, NamedTuple

import orjson

SHORTEST = 256
"""Bytes of a head: below it there are a few blocks at most to be cached."""

NOTHING_SAID = "."

_SYSTEM = frozenset(("system", "developer"))
_TEMPLATE = ("tools", "chat_template", "chat_template_kwargs", "reasoning_effort")
"""Fields of a chat by which its template decides what stands before the first message, or that stand there."""

Fields = dict[str, Any]


class Head(NamedTuple):
    """A request for one token; equal heads are equal bytes."""

    path: str
    model: str
    body: bytes


def head(path: str, model: str, body: bytes) -> Head | None:
    """None for what has no system prompt and no tools, for APIs without either, and for what was salted so that it
    shares nothing. `body` is one that `openai.parse` has read."""
    read = _READERS.get(path)
    if read is None or not model:
        return None
    try:
        fields = orjson.loads(body)
        kept = None if fields.get("cache_salt") else read(fields)
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError):
        return None
    if kept is None:
        return None
    made = orjson.dumps({"model": model, **kept, "max_tokens": 1})
    return Head(path, model, made) if len(made) >= SHORTEST else None


def _chat(fields: Fields) -> Fields | None:
    system = list(takewhile(lambda message: message.get("role") in _SYSTEM, fields["messages"]))
    return _asked(fields, _TEMPLATE, system) if system or fields.get("tools") else None


def _anthropic(fields: Fields) -> Fields | None:
    return _asked(fields, ("system", "tools"), []) if fields.get("system") or fields.get("tools") else None


def _asked(fields: Fields, names: tuple[str, ...], system: list[Any]) -> Fields:
    kept = {name: fields[name] for name in names if fields.get(name) is not None}
    return {**kept, "messages": [*system, {"role": "user", "content": NOTHING_SAID}]}


_READERS: dict[str, Callable[[Fields], Fields | None]] = {
    "/v1/chat/completions": _chat,
    "/v1/messages": _anthropic,
}
