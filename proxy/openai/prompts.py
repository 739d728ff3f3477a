"""The bytes an engine's chat template will see, in its order: tools, system, then messages with their roles."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping
from sys import byteorder
from typing import Any

import orjson
import xxhash

from proxy.core.errors import BadRequest
from proxy.core.request import BYTES_PER_TOKEN

MEDIA_TOKENS = {"image": 225, "audio": 225, "video": 4500}
"""What a medium counts where nobody has looked at it: 640x360 pixels at 1024 a token, and 20 such frames."""

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
"""What a template shows of a message besides role and content."""

ROLE_AND_CONTENT = 2
"""Fields, and no others."""


def chat(tools: Any, messages: Any, system: Any = None) -> bytes:
    """Raises BadRequest for messages that are no list of objects."""
    given = None if tools or system else plain(messages)
    return _encode(_conversation(tools, messages, system)) if given is None else given


def has_media(body: bytes) -> bool:
    """Whether a JSON body has a part that is a medium; found without parsing it: it may be large."""
    return _MEDIUM.search(body) is not None


def media_digest(part: Mapping[str, Any]) -> str:
    """Of the medium itself, whatever is said beside it."""
    source = {name: value for name, value in part.items() if name not in ("type", "cache_control", "uuid", "detail")}
    return xxhash.xxh3_128_hexdigest(_encode(_json(source)))


def plain(messages: Any) -> bytes | None:
    """The usual conversation, where every message is a role and a text: what `_conversation` would give, for half the
    price. None for any other."""
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
    pieces: list[str] = []
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
    """One part per prompt of: a text, token ids, or a list of either. Raises BadRequest for anything else."""
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
    """The texts of a query or of documents, whatever their form."""
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


def _message(pieces: list[str], message: Mapping[str, Any]) -> None:
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


def _content(pieces: list[str], content: Any) -> None:
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


def _part(pieces: list[str], part: Mapping[str, Any]) -> None:
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
        pieces.append((digest * (length // len(digest) + 1))[:length])


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:
        return _json_of_the_odd(value)


def _json_of_the_odd(value: Any) -> str:
    """Huge integers, lone surrogates, and what is nested deeper than orjson goes."""
    try:
        return repr(value)
    except RecursionError:
        raise BadRequest("The request body is nested too deeply.") from None


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")
