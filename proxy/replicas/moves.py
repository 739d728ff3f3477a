"""What a process did to its prefix index while a batch was gathered, as bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from struct import Struct
from struct import error as StructError

from proxy.prefix.depth import DEPTHS
from proxy.replicas.columns import longs, read_longs, read_words, words
from proxy.replicas.wire import Garbled

_HEAD = Struct("<IIIIII")
"""Tag of the index, and how many there are: settled, reserved, pods, hashes, settled at last."""


@dataclass(slots=True)
class Moves:
    """First some are settled that were reserved in earlier batches, then chains are reserved, then some of these are
    settled. Lives for a batch.

    `settled` and `settled_last` are twice the number of a reservation, and 1 if the pod has computed it. Of each chain
    that is reserved there are three numbers: twice that of the reservation, and 1 if it goes on from a chain that all
    know, whose last hash is then the first of these; which of `pods` it is on; how many of `hashes`, which come in any
    pieces. A pod is its number, and its capacity in blocks.
    """

    settled: list[int] = field(default_factory=list)
    reserved: list[int] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    pods: list[tuple[int, int]] = field(default_factory=list)
    settled_last: list[int] = field(default_factory=list)

    def packed(self, tag: int) -> bytes:
        return packed_moves(tag, self.settled, self.reserved, self.hashes, self.pods, self.settled_last)

    @staticmethod
    def read(body: bytes) -> Moves:
        """Raises Garbled."""
        try:
            _, settled, reserved, pods, hashes, last = _HEAD.unpack_from(body)
        except StructError:
            raise Garbled("the head of moves is cut off") from None
        at = _HEAD.size + 8 * hashes
        numbers = read_longs(body, at, pods)
        found = read_words(body, at + 8 * pods, settled + reserved + pods + last)
        rest = settled + reserved
        capacities = found[rest : rest + pods]
        moves = Moves(
            found[:settled],
            found[settled:rest],
            [body[_HEAD.size : at]],
            list(zip(numbers, capacities, strict=True)),
            found[rest + pods :],
        )
        moves._check()
        return moves

    def _check(self) -> None:
        places, lengths = self.reserved[1::3], self.reserved[2::3]
        if len(self.reserved) % 3 or 8 * sum(lengths) != len(self.hashes[0]) or not all(lengths):
            raise Garbled("a chain is cut off")
        if places and (max(places) >= len(self.pods) or max(lengths) >= len(DEPTHS)):
            raise Garbled("a chain on no pod, or longer than any")


def packed_moves(
    tag: int,
    settled: Sequence[int],
    reserved: Sequence[int],
    hashes: Sequence[bytes],
    pods: Sequence[tuple[int, int]],
    last: Sequence[int],
) -> bytes:
    """As `Moves` are, without making any: this is done for every batch."""
    told = b"".join(hashes)
    head = _HEAD.pack(tag, len(settled), len(reserved), len(pods), len(told) >> 3, len(last))
    numbers = words([*settled, *reserved, *[capacity for _, capacity in pods], *last])
    return b"".join((head, told, longs([number for number, _ in pods]), numbers))
