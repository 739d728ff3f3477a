"""Rows of numbers as bytes: column by column, so that a batch takes the same few calls whatever is in it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from proxy.replicas.wire import Garbled

MOST = 0xFFFFFFFF


def words(numbers: Sequence[int]) -> bytes:
    """Four bytes each; what is more than fits is the most that does, and less than nothing is nothing."""
    try:
        return array("I", numbers).tobytes()
    except OverflowError:
        return array("I", [min(max(number, 0), MOST) for number in numbers]).tobytes()


def longs(numbers: Sequence[int]) -> bytes:
    """Eight bytes each."""
    return array("Q", numbers).tobytes()


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
