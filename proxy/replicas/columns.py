"""Rows of numbers as bytes: column by column, so that a batch takes the same few calls whatever is in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from struct import Struct

from proxy.replicas.wire import Garbled

MOST = 0xFFFFFFFF

FEW = 64
"""Numbers that are packed by one call for their number, which takes less than to make an array of them first."""


def words(numbers: Sequence[int]) -> bytes:
    """Four bytes each; what is more than fits is the most that does, and less than nothing is nothing."""
    try:
        return array("I", numbers).tobytes()
    except OverflowError:
        return array("I", clamped(numbers)).tobytes()


def clamped(numbers: Iterable[int]) -> list[int]:
    """As they fit into four bytes."""
    return [min(max(number, 0), MOST) for number in numbers]


def longs(numbers: Sequence[int]) -> bytes:
    """Eight bytes each."""
    count = len(numbers)
    return _FEW[count](*numbers) if count < FEW else array("Q", numbers).tobytes()


def read_words(data: bytes, at: int, count: int) -> list[int]:
    """Raises Garbled."""
    return _read("I", data, at, 4 * count)


def read_longs(data: bytes, at: int, count: int) -> list[int]:
    """Raises Garbled."""
    return _read("Q", data, at, 8 * count)


def _read(form: str, data: bytes, at: int, size: int) -> list[int]:
    part = data[at : at + size]
    if len(part) != size:
        raise Garbled("a column is cut off")
    return array(form, part).tolist()


_FEW = [Struct(f"={count}Q").pack for count in range(FEW)]
