"""Which images, audio and video a request shows the model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from proxy.openai.prompts import MEDIA_KINDS, has_media, media_digest
from proxy.openai.weight import has_many_values

NONE: frozenset[str] = frozenset()

_CONVERSATIONS = ("messages", "input")


def media_in(body: bytes) -> frozenset[str]:
    """A digest of each, the same for the same medium; bodies without any are not parsed, nor are those of very many
    values."""
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
    """Parts of messages, and parts of what stands in them, as the results of tools do."""
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
