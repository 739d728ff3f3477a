"""The bytes that an engine's chat template will see, in its order: tools, system, then messages with their roles; the
media of a request; and its head, which precedes all user content."""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import takewhile
from sys import byteorder
from typing import Any, NamedTuple

import orjson
import xxhash

from proxy.core.errors import BadRequest
from proxy.core.request import BYTES_PER_TOKEN
from proxy.openai.bodies import has_many_values

MEDIA_TOKENS = {"image": 225, "audio": 225, "video": 4500}
"""Tokens of a medium that is not decoded: 640x360 pixels at 1024 a token, and 20 such frames."""

MEDIA_KINDS = {
    "image_url": "image",
    "input_image": "image",
    "image": "image",
    "image_embeds": "image",
    "input_audio": "audio",
    "audio_url": "audio",
    "audio": "audio",
    "video_url": "video",
    "video": "video",
}

MOST_MEDIA = 1 << 20
"""Bytes that the media of a prompt stand for, at most; further media count as their digests. A reference to a video may
have 17 bytes, so a small body would take memory without bound."""

_MEDIUM = re.compile(rb'"type"\s*:\s*"(?:%s)"' % "|".join(MEDIA_KINDS).encode())

_OTHER_FIELDS = (
    "name",
    "tool_calls",
    "tool_call_id",
    "reasoning_content",
    "reasoning",
    "call_id",
    "arguments",
    "output",
)
"""Fields of a message besides role and content that templates render."""

ROLE_AND_CONTENT = 2
"""A message with exactly these fields."""


class Pieces(list[str]):
    """The texts of a prompt. `media`: the bytes that its media stand for."""

    media = 0


def chat(tools: Any, messages: Any, system: Any = None) -> bytes:
    """Raise BadRequest if the messages are no list of objects."""
    given = None if tools or system else plain(messages)
    return _encode(_conversation(tools, messages, system)) if given is None else given


def has_media(body: bytes) -> bool:
    """Return whether a JSON body contains media, without parsing it: it may be large."""
    return _MEDIUM.search(body) is not None


def media_digest(part: Mapping[str, Any]) -> str:
    """Return the digest of the medium itself, without its other fields."""
    source = {name: value for name, value in part.items() if name not in ("type", "cache_control", "uuid", "detail")}
    return xxhash.xxh3_128_hexdigest(_encode(_json(source)))


def plain(messages: Any) -> bytes | None:
    """Return the prompt of a simple conversation, in which each message is a role and a text: equal to `_conversation`
    at half the cost. Return None for any other."""
    pieces: list[Any] = []
    add = pieces.append
    try:
        for message in messages:
            role = message["role"]
            if len(message) != ROLE_AND_CONTENT or not role:
                return None
            add(role)
            add(message["content"])
        add("")
        return "\n".join(pieces).encode("utf-8", "surrogatepass")
    except (KeyError, TypeError, IndexError):
        return None


def _conversation(tools: Any, messages: Any, system: Any) -> str:
    if not isinstance(messages, list):
        raise BadRequest("A conversation must be a list of messages.", param="messages")
    pieces = Pieces()
    if tools:
        pieces.append(_json(tools))
    if system:
        pieces.append("system\n")
        _content(pieces, system)
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise BadRequest(f"Message {index} must be an object with role and content.", param=f"messages.{index}")
        _message(pieces, message)
    return "".join(pieces)


def batch(prompt: Any, name: str) -> tuple[bytes, ...]:
    """Return one part per prompt of a text, token ids, or a list of either. Raise BadRequest for anything else."""
    if prompt is None:
        return ()
    if isinstance(prompt, str):
        return (_encode(prompt),)
    if not isinstance(prompt, list):
        raise BadRequest(f"'{name}' must be a string, token ids, or a list of either.", param=name)
    if prompt and isinstance(prompt[0], int):
        return (_tokens(prompt, name),)
    return tuple(_one(item, name) for item in prompt)


def texts(given: Any) -> tuple[bytes, ...]:
    """Return the texts of a query or of documents in any form."""
    items = given if isinstance(given, list) else [given]
    return tuple(_encode(item) if isinstance(item, str) else _encode(_json(item)) for item in items if item is not None)


def _one(item: Any, name: str) -> bytes:
    if isinstance(item, str):
        return _encode(item)
    if isinstance(item, list):
        return _tokens(item, name)
    return _encode(_json(item))


def _tokens(ids: list[Any], name: str) -> bytes:
    try:
        packed = array("I", ids)
    except (TypeError, OverflowError):
        raise BadRequest(f"'{name}' holds something that is no token id.", param=name) from None
    if byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _message(pieces: Pieces, message: Mapping[str, Any]) -> None:
    role = message.get("role") or message.get("type")
    pieces.append(role if isinstance(role, str) else "")
    pieces.append("\n")
    content = message.get("content")
    if type(content) is str:
        pieces.append(content)
    elif content is not None:
        _content(pieces, content)
    if len(message) > 2:
        pieces.extend(_json(message[field]) for field in _OTHER_FIELDS if message.get(field))
    pieces.append("\n")


def _content(pieces: Pieces, content: Any) -> None:
    if isinstance(content, str):
        pieces.append(content)
        return
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            pieces.append(part)
        elif isinstance(part, Mapping):
            _part(pieces, part)
        else:
            pieces.append(_json(part))


def _part(pieces: Pieces, part: Mapping[str, Any]) -> None:
    text = part.get("text", part.get("refusal"))
    if isinstance(text, str):
        pieces.append(text)
        return
    kind = part.get("type")
    medium = MEDIA_KINDS.get(kind) if isinstance(kind, str) else None
    if medium is None:
        pieces.append(_json(part))
    else:
        digest, length = media_digest(part), MEDIA_TOKENS[medium] * BYTES_PER_TOKEN
        pieces.media += length
        pieces.append((digest * (length // len(digest) + 1))[:length] if pieces.media <= MOST_MEDIA else digest)


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return _json_of_the_odd(value)


def _json_of_the_odd(value: Any) -> str:
    """Return JSON for values that orjson refuses: huge integers, lone surrogates and deep nesting."""
    try:
        return repr(value)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


NONE: frozenset[str] = frozenset()

_CONVERSATIONS = ("messages", "input")


def media_in(body: bytes) -> frozenset[str]:
    """A digest of each, the same for the same medium; bodies without media are not parsed, nor are bodies of very
    many values."""
    if not has_media(body) or has_many_values(body):
        return NONE
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError:
        return NONE
    if not isinstance(fields, dict):
        return NONE
    return frozenset(map(media_digest, _media(map(fields.get, _CONVERSATIONS))))


def _media(conversations: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield parts of messages and nested parts, such as those in results of tools."""
    left = list(conversations)
    while left:
        item = left.pop()
        if isinstance(item, list):
            left.extend(item)
        elif isinstance(item, dict):
            kind = item.get("type")
            if isinstance(kind, str) and kind in MEDIA_KINDS:
                yield item
            else:
                left.extend((item.get("content"), item.get("output")))


SHORTEST = 256
"""Smallest size of a head in bytes; shorter ones have only a few blocks to cache."""

EMPTY_CONTENT = "."

_SYSTEM = frozenset(("system", "developer"))
_TEMPLATE = ("tools", "chat_template", "chat_template_kwargs", "reasoning_effort")
"""Fields of a chat that decide what the template renders before the first message."""

Fields = dict[str, Any]


class PromptHead(NamedTuple):
    """A request for one token with the head as its prompt; equal heads have equal bytes."""

    path: str
    model: str
    body: bytes


def head(path: str, model: str, body: bytes) -> PromptHead | None:
    """Return the head; None without system prompt and tools, for other APIs, and for requests with a cache salt, which
    share nothing. `body` is the result of `openai.parse`."""
    read = _HEADS.get(path)
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
    return PromptHead(path, model, made) if len(made) >= SHORTEST else None


def _chat_head(fields: Fields) -> Fields | None:
    system = list(takewhile(lambda message: message.get("role") in _SYSTEM, fields["messages"]))
    return _head_of(fields, _TEMPLATE, system) if system or fields.get("tools") else None


def _anthropic_head(fields: Fields) -> Fields | None:
    return _head_of(fields, ("system", "tools"), []) if fields.get("system") or fields.get("tools") else None


def _head_of(fields: Fields, names: tuple[str, ...], system: list[Any]) -> Fields:
    kept = {name: fields[name] for name in names if fields.get(name) is not None}
    return {**kept, "messages": [*system, {"role": "user", "content": EMPTY_CONTENT}]}


_HEADS: dict[str, Callable[[Fields], Fields | None]] = {
    "/v1/chat/completions": _chat_head,
    "/v1/messages": _anthropic_head,
}
