"""What one pod holds: segments of hash chains, and the order in which it would forget them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator

from proxy.core.endpoint import Endpoint


class Segment:
    """A run of consecutive hashes of a chain that the same pods hold, all of it each.

    A hash names everything before it, so a segment is found by its first hash, whatever led to it. `start` hashes are
    before it, `blocks` are what its own stand for.
    Bit masks have one bit per pod. `open` are the holders on which a match may count on it: all but those where too
    many requests wait already for blocks that no answer has confirmed.
    """

    __slots__ = ("blocks", "hashes", "holders", "open", "start")

    def __init__(self, hashes: array[int], start: int, blocks: int, holders: int = 0, open_: int = 0) -> None:
        self.hashes = hashes
        self.start = start
        self.blocks = blocks
        self.holders = holders
        self.open = open_


class Holding:
    """One segment on one pod; between `older` and `newer` in the pod's ring from the first time that no request in
    flight pins it.

    `used_at` is None while it is provisional: reserved, and not confirmed by any answer. `answer` is what the pod said
    to a prompt that ends with this segment.
    """

    __slots__ = ("answer", "newer", "older", "pins", "segment", "used_at")

    def __init__(self, segment: Segment, used_at: float | None = None, pins: int = 0) -> None:
        self.segment = segment
        self.used_at = used_at
        self.pins = pins
        self.answer: Answer | None = None
        self.older: Holding | None = None
        self.newer: Holding | None = None


class Answer:
    """What a pod said last to a prompt, and still has in its cache: so many of the engine's `tokens`, which take the
    room of `blocks`. `key` is the last hash of the prompt. Goes with the holding."""

    __slots__ = ("blocks", "holding", "key", "pod", "tokens")

    def __init__(self, pod: PodMemory, holding: Holding, key: int) -> None:
        self.pod = pod
        self.holding = holding
        self.key = key
        self.tokens = self.blocks = 0


class PodMemory:
    """Lives from a pod's first reservation until it is forgotten; a pod that comes back gets a new one.

    Whatever pins or frees a segment does so for the whole way from the start of the chain, deepest first when freeing.
    So nothing in the ring is older than what continues it, and the oldest holding always ends its chain. What is pinned
    stays in the ring where it was, meaning nothing, until the last request that pins it makes it the newest.
    `blocks` are all it holds of prompts, `answered` those of answers, `pinned` those of prompts in flight. `capacity`
    is how many the pod has room for, `limit` how many it may hold while it answers what it answers.
    What was used last at `horizon` or before is gone from the pod; what was used last at `suspect` may be. `keeps` is
    the share of answers that were found again, lately, where a conversation went on.
    """

    __slots__ = (
        "actual_tokens",
        "answered",
        "bit",
        "blocks",
        "capacity",
        "endpoint",
        "held",
        "horizon",
        "keeps",
        "limit",
        "misses",
        "number",
        "pinned",
        "predicted_tokens",
        "prompt_tokens",
        "retired",
        "ring",
        "suspect",
        "wrong_tokens",
    )

    def __init__(self, endpoint: Endpoint, number: int) -> None:
        self.endpoint = endpoint
        self.number = number
        self.bit = 1 << number
        self.held: dict[Segment, Holding] = {}
        self.blocks = 0
        self.answered = 0
        self.pinned = 0
        self.capacity = 0
        self.limit = 0.0
        self.horizon = -math.inf
        self.suspect: float | None = None
        self.keeps = 1.0
        self.retired = False
        self.predicted_tokens = 0.0
        self.actual_tokens = 0.0
        self.wrong_tokens = 0.0
        self.prompt_tokens = 0.0
        self.misses = 0
        self.ring = Holding(Segment(array("Q"), 0, 0))
        self.ring.older = self.ring.newer = self.ring

    @property
    def oldest(self) -> Holding | None:
        """What is forgotten next; None if all is pinned."""
        first = self.ring.newer
        if first is not None and first.pins:
            first = self._behind_the_pinned()
        return first if first is not self.ring else None

    def idle(self) -> Iterator[Holding]:
        """What no request uses, longest unused first."""
        holding = self.ring.newer
        while holding is not None and holding is not self.ring:
            if not holding.pins:
                yield holding
            holding = holding.newer

    def add(self, segment: Segment) -> Holding:
        holding = self.held[segment] = Holding(segment)
        self.blocks += segment.blocks
        return holding

    def remove(self, holding: Holding) -> None:
        _unlink(holding)
        del self.held[holding.segment]
        self.blocks -= holding.segment.blocks

    def take_any(self) -> Holding:
        """Removes some holding, for a pod that is being cleared."""
        _, holding = self.held.popitem()
        _unlink(holding)
        return holding

    def make_newest(self, holding: Holding) -> None:
        """Out of the ring, if it is there, and in at its end in one go: this happens to all that a request uses."""
        older, newer, ring = holding.older, holding.newer, self.ring
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
        newest = ring.older
        assert newest is not None
        holding.older, holding.newer = newest, ring
        newest.newer = ring.older = holding

    def split(self, head: Segment, tail: Segment) -> None:
        """What was held as `tail` is held in two pieces: same age, same pins."""
        whole = self.held[tail]
        piece = self.held[head] = Holding(head, whole.used_at, whole.pins)
        newer = whole.newer
        if newer is not None and not whole.pins:
            piece.older, piece.newer = whole, newer
            whole.newer = newer.older = piece

    def _behind_the_pinned(self) -> Holding | None:
        """Those in the way go to the end of the ring, so that the next call does not meet them."""
        for _ in range(len(self.held) if self.pinned < self.blocks else 0):
            first = self.ring.newer
            if first is None or not first.pins:
                return first
            self.make_newest(first)
        return None


def _unlink(holding: Holding) -> None:
    older, newer = holding.older, holding.newer
    if older is not None and newer is not None:
        older.newer, newer.older = newer, older
        holding.older = holding.newer = None
