"""Token ids of long texts that have much in common with earlier ones: only what is new goes through the tokenizer.

A text is cut where no token can reach across: before special tokens, and, in long stretches of tokenizers that split
words first, between a line feed and a letter. Where it is cut depends on what is before, so equal beginnings are cut
alike, and a conversation that has grown by a message is the pieces it had and one or two more.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from sys import byteorder

Encode = Callable[[Sequence[str]], list[list[int]]]
"""Texts -> their token ids, each for itself and without special tokens around them."""

STRETCH = 4096
"""Characters between two cuts at line feeds."""

_LINE = re.compile(r"(?<=\n)(?=[A-Za-z])")

_PROBES = ("one two", "  three\n\nfour  ", "fünf\t6", "x = {}\n", "\nseven", "eight ", "九十")


class Cutter:
    """`added` are all added tokens that are looked for in the raw text, `edges` those before which it may be cut.
    What is promised about cuts is tried out with the tokenizer, and left alone where it fails."""

    def __init__(self, encode: Encode, added: Sequence[str], edges: Sequence[str]) -> None:
        ordered = sorted(added, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._edges = frozenset(edge for edge in edges if _holds(encode, lambda a, b, edge=edge: (a, edge + b)))  # type: ignore[misc]
        self._lines = _holds(encode, lambda a, b: (a + "\n", "Word" + b))

    def pieces(self, text: str) -> Iterator[str]:
        start = 0
        for found in self._tokens.finditer(text) if self._tokens and self._edges else ():
            if found[0] in self._edges and found.start() > start:
                yield from self._stretches(text[start : found.start()])
                start = found.start()
        yield from self._stretches(text[start:])

    def _stretches(self, text: str) -> Iterator[str]:
        start = 0
        while self._lines and len(text) - start > STRETCH:
            cut = _LINE.search(text, start + STRETCH)
            if cut is None:
                break
            yield text[start : cut.start()]
            start = cut.start()
        yield text[start:]


def _holds(encode: Encode, split: Callable[[str, str], tuple[str, str]]) -> bool:
    """Whether texts have the same tokens in two pieces as in one."""
    pairs = [split(before, after) for before in _PROBES for after in _PROBES]
    whole = encode([a + b for a, b in pairs])
    heads, tails = encode([a for a, _ in pairs]), encode([b for _, b in pairs])
    return all(one == head + tail for one, head, tail in zip(whole, heads, tails, strict=True))


class PieceCache:
    """Packed token ids of pieces; what was used longest ago goes when `max_bytes` are full. Several threads use it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._known: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.bytes = 0

    def find(self, pieces: Sequence[str]) -> list[bytes | None]:
        with self._lock:
            found = list(map(self._known.get, pieces))
            for piece, ids in zip(pieces, found, strict=True):
                if ids is not None:
                    self._known.move_to_end(piece)
        return found

    def add(self, piece: str, ids: bytes) -> None:
        with self._lock:
            if piece in self._known:
                return
            self._known[piece] = ids
            self.bytes += _size(piece, ids)
            while self.bytes > self._max_bytes and self._known:
                self.bytes -= _size(*self._known.popitem(last=False))


def packed(ids: Sequence[int]) -> bytes:
    words = array("I", ids)
    if byteorder == "big":
        words.byteswap()
    return words.tobytes()


def _size(piece: str, ids: bytes) -> int:
    """Of a text that is not ASCII up to four times as much; that is rare enough."""
    return len(piece) + len(ids) + 250
