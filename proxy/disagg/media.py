"""The requests that have the media of a prompt encoded, one for each, and what their answers hand on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from proxy.disagg.bodies import CHAT, json_of

TRANSFER = "ec_transfer_params"
"""Where the embeddings are, in answers of encode pods and in requests to those that need them."""

_KINDS = ("image_url", "video_url", "audio_url", "input_audio", "image_embeds")


def encode_bodies(path: str, fields: dict[str, Any]) -> list[bytes]:
    """One per medium, without the text around it; the same one twice is encoded once."""
    if path != CHAT:
        return []
    shared: dict[str, Any] = {name: fields[name] for name in ("model", "mm_processor_kwargs") if name in fields}
    parts = {json_of(part): part for part in _media(fields.get("messages"))}
    return [
        json_of(
            {
                **shared,
                "messages": [{"role": "user", "content": [part]}],
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "stream": False,
            }
        )
        for part in parts.values()
    ]


def merged(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What the next request is given; nothing where engines find embeddings by the digests of the media."""
    found: dict[str, Any] = {}
    for answer in answers:
        if isinstance(params := answer.get(TRANSFER), dict):
            found |= params
    return {TRANSFER: found} if found else {}


def _media(messages: Any) -> Iterator[dict[str, Any]]:
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in _KINDS:
                yield part
