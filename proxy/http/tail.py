"""The end of a body, bounded, at a constant price per piece."""

from __future__ import annotations

from collections.abc import Sequence

TAIL = 8 * 1024
"""Bytes that are kept at least, if there were as many; twice as many at most."""


class Tail:
    """Keeps references to the last pieces; they are joined once in TAIL bytes, and at the end."""

    __slots__ = ("_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0

    def add(self, pieces: Sequence[bytes], size: int) -> None:
        """`size` is the sum of their lengths."""
        self._pieces += pieces
        self._size += size
        if self._size > 2 * TAIL:
            last = self._pieces[-1]
            kept = last[-TAIL:] if len(last) >= TAIL else b"".join(self._pieces)[-TAIL:]
            self._pieces = [kept]
            self._size = len(kept)

    def bytes(self) -> bytes:
        return b"".join(self._pieces)
