"""What one pod holds: segments of hash chains, and the order in which it would forget them."""

from __future__ import annotations

from array import array

from proxy.core.endpoint import Endpoint


class Segment:
    """A run of consecutive blocks of a chain that the same pods hold, all of it each.

    A hash names everything before it, so a segment is found by the hash of its first block, whatever led to it.
    Bit masks have one bit per pod. `open` are the holders on which a match may count on it: all but those where too
    many requests wait already for blocks that no answer has confirmed.
    """

    __slots__ = ("hashes", "holders", "open")

    def __init__(self, hashes: array[int], holders: int = 0, open_: int = 0) -> None:
        self.hashes = hashes
        self.holders = holders
        self.open = open_


class Holding:
    """One segment on one pod; between `older` and `newer` in the pod's ring while no request in flight pins it.

    `used_at` is None while it is provisional: reserved, and not confirmed by any answer.
    """

    __slots__ = ("newer", "older", "pins", "segment", "used_at")

    def __init__(self, segment: Segment, used_at: float | None = None, pins: int = 0) -> None:
        self.segment = segment
        self.used_at = used_at
        self.pins = pins
        self.older: Holding | None = None
        self.newer: Holding | None = None


class PodMemory:
    """Lives from a pod's first reservation until it is forgotten; a pod that comes back gets a new one.

    Whatever pins or frees a segment does so for the whole way from the start of the chain, deepest first when freeing.
    So nothing in the ring is older than what continues it, and the oldest holding always ends its chain.
    `blocks` are all it holds, `pinned` those of requests in flight, `capacity` how many it may hold.
    """

    __slots__ = (
        "_ring",
        "actual_tokens",
        "bit",
        "blocks",
        "capacity",
        "endpoint",
        "held",
        "misses",
        "number",
        "pinned",
        "predicted_tokens",
        "retired",
    )

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self.endpoint = endpoint
        self.number = number
        self.bit = 1 << number
        self.held: dict[Segment, Holding] = {}
        self.blocks = 0
        self.pinned = 0
        self.capacity = 0
        self.retired = False
        self.predicted_tokens = 0.0
        self.actual_tokens = 0.0
        self.misses = 0
        self._ring = Holding(Segment(array("Q")))
        self._ring.older = self._ring.newer = self._ring

    @property
    def oldest(self) -> Holding | None:
        """What is forgotten next; None if all is pinned."""
        first = self._ring.newer
        return first if first is not self._ring else None

    def add(self, segment: Segment) -> Holding:
        holding = self.held[segment] = Holding(segment)
        self.blocks += len(segment.hashes)
        return holding

    def remove(self, holding: Holding) -> None:
        _unlink(holding)
        del self.held[holding.segment]
        self.blocks -= len(holding.segment.hashes)

    def take_any(self) -> Segment:
        """Removes some holding, for a pod that is being cleared."""
        segment, holding = self.held.popitem()
        _unlink(holding)
        return segment

    def pin(self, holding: Holding) -> None:
        if not holding.pins:
            self.pinned += len(holding.segment.hashes)
            _unlink(holding)
        holding.pins += 1

    def unpin(self, holding: Holding, now: float) -> None:
        """The last one out leaves what is confirmed in the ring; what is not, the caller removes."""
        holding.pins -= 1
        if not holding.pins:
            self.pinned -= len(holding.segment.hashes)
            if holding.used_at is not None:
                holding.used_at = now
                _link(holding, after=self._ring.older)

    def split(self, head: Segment, tail: Segment) -> None:
        """What was held as `tail` is held in two pieces: same age, same pins."""
        whole = self.held[tail]
        piece = self.held[head] = Holding(head, whole.used_at, whole.pins)
        if not whole.pins:
            _link(piece, after=whole)


def _link(holding: Holding, after: Holding | None) -> None:
    assert after is not None
    newer = after.newer
    assert newer is not None
    holding.older, holding.newer = after, newer
    after.newer = newer.older = holding


def _unlink(holding: Holding) -> None:
    older, newer = holding.older, holding.newer
    if older is not None and newer is not None:
        older.newer, newer.older = newer, older
        holding.older = holding.newer = None
