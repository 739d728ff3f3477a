"""What one pod holds of blocks, as its engine tells it: by tier and by data-parallel rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import BytesIO
from itertools import repeat
from operator import or_
from typing import Any

from xxhash import xxh3_64_intdigest

from proxy.core.kv import BlockHash, BlocksRemoved, BlocksStored
from proxy.core.request import BYTES_PER_TOKEN
from proxy.prefix.hashing import Chain, namespace

Masks = dict[int, int]
"""Hash of a block, chained -> a bit for every shelf that has it."""


class Shelf:
    """One tier of one rank. `own` has our chained hash for each hash of the engine's; `copies` what is there more than
    once, and how many times more."""

    __slots__ = ("bit", "copies", "own", "weight")

    def __init__(self, bit: int, weight: float) -> None:
        self.bit = bit
        self.weight = weight
        self.own: dict[BlockHash, int] = {}
        self.copies: dict[BlockHash, int] = {}

    def put(self, names: Sequence[BlockHash], hashes: Chain, masks: Masks) -> None:
        own = self.own
        if not own.keys().isdisjoint(names):
            for name in names:
                if name in own:
                    self.copies[name] = self.copies.get(name, 0) + 1
        own.update(zip(names, hashes, strict=True))
        # Item by item, but in C: what a busy pod says is thousands of blocks per second.
        masks.update(zip(hashes, map(or_, map(masks.get, hashes, repeat(0)), repeat(self.bit)), strict=False))

    def take(self, names: Iterable[BlockHash], masks: Masks) -> list[int]:
        """The hashes of the blocks that are no longer there."""
        gone: list[int] = []
        for name in names:
            more = self.copies.pop(name, 0)
            if more > 1:
                self.copies[name] = more - 1
            if more or name not in self.own:
                continue
            gone.append(self.own.pop(name))
        clear(gone, self.bit, masks)
        return gone

    def empty(self, masks: Masks) -> None:
        clear(self.own.values(), self.bit, masks)
        self.own.clear()
        self.copies.clear()


class Rank:
    """One cache of a pod: its shelves by medium, and their bits. `complete` says that all it holds was told, `weighed`
    that not all shelves count the same. `block_size` is 0 until a block was named; `group` is the one kind of layer
    whose blocks count, since others have their own for the same tokens."""

    __slots__ = ("bits", "block_size", "complete", "group", "shelves", "weighed")

    def __init__(self) -> None:
        self.shelves: dict[str, Shelf] = {}
        self.block_size = 0
        self.complete = False
        self.group: int | None = None
        self.bits = 0
        self.weighed = False

    def open(self, medium: str, bit: int, weight: float) -> Shelf:
        shelf = self.shelves[medium] = Shelf(bit, weight)
        self.bits |= bit
        self.weighed = any(other.weight != 1.0 for other in self.shelves.values())
        return shelf

    def holds(self, name: BlockHash) -> int | None:
        """Our hash of a block that some tier has."""
        for shelf in self.shelves.values():
            found = shelf.own.get(name)
            if found is not None:
                return found
        return None

    def hashes(self, event: BlocksStored) -> Chain | None:
        """Our hashes of the blocks of an event. None if what they follow was never told."""
        if not event.tokens:
            known = [self.holds(name) for name in event.hashes]
            return [found for found in known if found is not None] if None not in known else None
        keys, salt = event.keys, ""
        if event.parent is None:
            salt, keys = _salt_apart(keys)
            parent: int | None = namespace(event.lora, salt)
        else:
            parent = self.holds(event.parent)
        if parent is None:
            return None
        pieces = list(map(BytesIO(event.tokens).read, repeat(event.block_size * BYTES_PER_TOKEN, len(event.hashes))))
        if any(keys):
            pieces = [_told_apart(piece, more) for piece, more in zip(pieces, keys, strict=True)]
        return chained(pieces, parent)

    def takes(self, event: BlocksStored | BlocksRemoved) -> bool:
        """Whether an event is about the layers that count: the first that were heard of."""
        if self.group is None and isinstance(event, BlocksStored):
            self.group = event.group
        return event.group == self.group


def chained(pieces: Iterable[bytes], seed: int) -> Chain:
    """As `hashing.chain`, of what is cut already."""
    hashes = [seed]
    hashes.extend(map(xxh3_64_intdigest, pieces, hashes))
    del hashes[0]
    return hashes


def clear(hashes: Iterable[int], bit: int, masks: Masks) -> None:
    """Nobody's hashes are forgotten."""
    keep = ~bit
    for own in hashes:
        left = masks.get(own, 0) & keep
        if left:
            masks[own] = left
        else:
            masks.pop(own, None)


def _salt_apart(keys: Sequence[Sequence[Any] | None]) -> tuple[str, Sequence[Sequence[Any] | None]]:
    """The cache_salt is the last text among the keys of a prompt's first block."""
    first = keys[0] if keys else None
    if not first or not isinstance(first[-1], str):
        return "", keys
    return first[-1], [first[:-1], *keys[1:]]


def _told_apart(piece: bytes, keys: Sequence[Any] | None) -> bytes:
    """Blocks with media in them; nothing that we tokenise is ever equal to them."""
    return piece if not keys else piece + repr(keys).encode("utf-8", "surrogatepass")
