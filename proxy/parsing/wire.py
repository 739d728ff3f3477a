"""What goes between the proxy and the process that reads large bodies for it.

A message is a frame with all that is small, a length of eight bytes (little-endian) and a pickle, and behind it the
large pieces as they are, whose sizes the frame gives: packing them too would copy each twice more. Both ends are this
program, so the pickle may be trusted.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from proxy.core.errors import RequestError
from proxy.core.request import EMPTY_PROMPT, Prompt
from proxy.openai.parse import Parsed

LENGTH = 8

MOST = 2 << 20
"""Bytes of a prompt that come back, four times what is hashed by default: to copy 8 MiB takes 5 ms."""

MOST_PARTS = 4096
"""Parts of a prompt that come back: to take 65,000 apart takes 10 ms."""


class Question(NamedTuple):
    """Behind it: the body."""

    path: str
    content_type: str
    size: int


class Reply(NamedTuple):
    """`parsed` lacks its body, which is the one that was asked about unless the first size is more than 0, and its
    prompt. Behind it: the body and the beginning of the prompt's parts. Or it is what the parser raised, and nothing is
    behind it."""

    parsed: Parsed | RequestError
    salt: str = ""
    tokens: int = 0
    sizes: Sequence[int] = ()


def framed(value: Any) -> bytes:
    packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(packed).to_bytes(LENGTH, "little") + packed


def taken_apart(parsed: Parsed, body: bytes) -> list[bytes]:
    prompt = parsed.prompt
    pieces = [b"" if parsed.body is body else parsed.body, *_beginning(prompt.parts)]
    small = parsed._replace(body=b"", prompt=EMPTY_PROMPT)
    return [framed(Reply(small, prompt.salt, prompt.tokens, list(map(len, pieces)))), *pieces]


def assembled(reply: Reply, pieces: Sequence[bytes], body: bytes) -> Parsed:
    """The other way round. Raises what the parser raised."""
    if isinstance(reply.parsed, RequestError):
        raise reply.parsed
    changed, *parts = pieces
    return reply.parsed._replace(body=changed or body, prompt=Prompt(tuple(parts), reply.salt, reply.tokens))


def _beginning(parts: Sequence[bytes]) -> Iterator[bytes]:
    left = MOST
    for part in parts[:MOST_PARTS]:
        yield part[:left]
        left -= min(left, len(part))
