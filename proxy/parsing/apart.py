"""The process that reads large bodies, one after the other, until its standard input ends.

A frame is a length of eight bytes, little-endian, and a pickle: (path, body, content type) comes in, what `parse` gave
or raised goes out. Both ends are this program, so the pickle may be trusted.
"""

from __future__ import annotations

import pickle
import sys
from dataclasses import replace
from typing import Any

from proxy.core.errors import RequestError
from proxy.openai.parse import Parsed, parse

LENGTH = 8


def main() -> None:
    while header := sys.stdin.buffer.read(LENGTH):
        request = pickle.loads(sys.stdin.buffer.read(int.from_bytes(header, "little")))
        sys.stdout.buffer.write(framed(answer(*request)))
        sys.stdout.buffer.flush()


def framed(value: Any) -> bytes:
    packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return len(packed).to_bytes(LENGTH, "little") + packed


def answer(path: str, body: bytes, content_type: str) -> Parsed | RequestError:
    """A body that stays as it was is not sent back: it is empty then."""
    try:
        parsed = parse(path, body, content_type)
    except RequestError as error:
        return error
    return replace(parsed, body=b"") if parsed.body is body else parsed


if __name__ == "__main__":
    main()
