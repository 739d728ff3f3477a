"""What a request looks like to the model: one byte string, four bytes to the token."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson
from xxhash import xxh3_64_intdigest

from proxy.lab.sim.text import BYTES_PER_TOKEN

VOCABULARY = 1 << 32


def render_chat(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[object] = (), *, continue_final_message: bool = False
) -> bytes:
    """The chat template: tools, then each message with its role, then the place where the answer begins.

    A final message that is to be continued is left open, so that its text stands where the answer's would.
    """
    parts = [f"<|tools|>{orjson.dumps(tools).decode()}\n"] if tools else []
    parts += [f"<|{message.get('role', 'user')}|>{_content(message)}\n" for message in messages]
    if continue_final_message:
        parts[-1] = parts[-1][:-1]
    else:
        parts.append("<|assistant|>")
    return "".join(parts).encode(errors="replace")


def _content(message: Mapping[str, Any]) -> str:
    text = flatten(message.get("content"))
    if calls := message.get("tool_calls"):
        text += orjson.dumps(calls).decode()
    return text


def flatten(content: object) -> str:
    """The text of a message's content: a string, or parts of which those without text count as their JSON."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return orjson.dumps(content).decode()
    return "".join(_part(part) for part in content)


def _part(part: object) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return orjson.dumps(part).decode()


def from_token_ids(ids: Iterable[int]) -> bytes:
    """Raises OverflowError for an id outside of the vocabulary."""
    return _little_endian(array("I", ids)).tobytes()


def token_ids(text: bytes) -> list[int]:
    padded = text + b"\0" * (-len(text) % BYTES_PER_TOKEN)
    return _little_endian(array("I", padded)).tolist()


def _little_endian(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def text_hash(prompt: bytes) -> int:
    return xxh3_64_intdigest(prompt)


def cache_root(model: str, salt: str | None) -> int:
    """Where the hash chains of a model (or adapter) and salt begin: no two share a block."""
    return xxh3_64_intdigest(f"{model}\0{salt or ''}".encode())
