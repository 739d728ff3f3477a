"""Images, video and audio in a request's messages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from proxy.lab.sim.api import fields

KINDS = frozenset({"image_url", "image", "input_image", "video_url", "audio_url", "input_audio"})
"""Types of content parts, in all APIs."""


def media_in(body: fields.Body) -> tuple[int, ...]:
    """A hash of each, in their order."""
    return tuple(
        xxh3_64_intdigest(orjson.dumps(part, option=orjson.OPT_SORT_KEYS))
        for messages in (body.get("messages"), body.get("input"))
        if isinstance(messages, list)
        for message in messages
        if isinstance(message, dict)
        for part in _parts(message.get("content"))
    )


def _parts(content: Any) -> Iterator[dict[str, Any]]:
    if isinstance(content, list):
        yield from (part for part in content if isinstance(part, dict) and part.get("type") in KINDS)
