"""Segments of hash chains, the pods that hold them, and the order in which each pod evicts them."""

from __future__ import annotations

import heapq
import math
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from typing import cast

from proxy.core.endpoint import Endpoint
from proxy.prefix.hashing import Chain


@dataclass(slots=True, eq=False, repr=False)
class Segment:
    """A run of consecutive hashes of a chain that the same pods hold completely. A hash identifies everything before
    it, so a segment is found by its first hash. `start` is the number of hashes before it, `blocks` the blocks that its
    hashes stand for. Bit masks have one bit per pod. `open` are the holders on which a match may count: all except
    those where too many requests wait for its unconfirmed blocks."""

    hashes: array[int]
    start: int
    blocks: int
    holders: int = 0
    open: int = 0


@dataclass(slots=True, eq=False, repr=False)
class Holding:
    """One segment on one pod; between `older` and `newer` in the pod's ring from the first time that no request in
    flight pins it. `used_at` is None while it is provisional: reserved and not confirmed by any response. `response`
    is the pod's response to a prompt that ends with this segment."""

    segment: Segment
    used_at: float | None = None
    pins: int = 0
    response: CachedResponse | None = None
    older: Holding | None = None
    newer: Holding | None = None


@dataclass(slots=True, eq=False, repr=False)
class CachedResponse:
    """The last response of a pod to a prompt, which is still in its cache: its number of the engine's `tokens`, which
    occupy `blocks`. `key` is the last hash of the prompt. Removed with the holding."""

    pod: PodMemory
    holding: Holding
    key: int
    tokens: int = 0
    blocks: int = 0


@dataclass(slots=True, eq=False, repr=False)
class PodMemory:
    """Lives from a pod's first reservation until it is forgotten; a pod that comes back gets a new one.

    Pinning and freeing a segment applies to all segments before it in its chain; freeing starts with the deepest. So
    nothing in the ring is older than its continuation, and the oldest holding is always the end of a chain. A pinned
    holding keeps its place in the ring, without effect, until the last request that pins it makes it the newest.

    `blocks` counts the blocks of prompts that the pod holds, `response_blocks` the blocks of responses, `pinned` the
    blocks of prompts in flight. `capacity` is the number of blocks that fit into the pod, `limit` the number that it
    may hold beside the responses in progress. The pod has evicted what was last used at `horizon` or before, and may
    have evicted what was last used at `suspect` or before. `keeps` is the recent share of responses that were still
    cached when their conversation continued. `wrong_tokens` of the recent `prompt_tokens` were cached and not predicted
    or the reverse.
    """

    endpoint: Endpoint
    number: int
    bit: int = field(init=False)
    held: dict[Segment, Holding] = field(default_factory=dict)
    blocks: int = 0
    response_blocks: int = 0
    pinned: int = 0
    capacity: int = 0
    limit: float = 0.0
    horizon: float = -math.inf
    suspect: float | None = None
    keeps: float = 1.0
    retired: bool = False
    prompt_tokens: float = 0.0
    wrong_tokens: float = 0.0
    misses: int = 0
    ring: Holding = field(init=False)

    def __post_init__(self) -> None:
        self.bit = 1 << self.number
        self.ring = ring = Holding(Segment(array("Q"), 0, 0))
        ring.older = ring.newer = ring

    @property
    def oldest(self) -> Holding | None:
        """Return what is evicted next; None if everything is pinned."""
        first = self.ring.newer
        if first is not None and first.pins:
            first = self._behind_the_pinned()
        return first if first is not self.ring else None

    def idle(self) -> Iterator[Holding]:
        """Yield unpinned holdings, least recently used first."""
        holding = self.ring.newer
        while holding is not None and holding is not self.ring:
            if not holding.pins:
                yield holding
            holding = holding.newer

    def make_newest(self, holding: Holding) -> None:
        """Move to the end of the ring in one step, because it happens to everything that a request uses."""
        older, newer, ring = holding.older, holding.newer, self.ring
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
        newest = ring.older
        assert newest is not None
        holding.older, holding.newer = newest, ring
        newest.newer = ring.older = holding

    def split(self, head: Segment, tail: Segment) -> None:
        """Split the holding of `tail` into two pieces with the same age and pins."""
        whole = self.held[tail]
        piece = self.held[head] = Holding(head, whole.used_at, whole.pins)
        newer = whole.newer
        if newer is not None and not whole.pins:
            piece.older, piece.newer = whole, newer
            whole.newer = newer.older = piece

    def _behind_the_pinned(self) -> Holding | None:
        """Move pinned holdings to the end of the ring, so that the next call does not meet them."""
        for _ in range(len(self.held) if self.pinned < self.blocks else 0):
            first = self.ring.newer
            if first is None or not first.pins:
                return first
            self.make_newest(first)
        return None


Span = tuple[Chain, int, int, list[Holding]]
"""A chain, the number of its pinned hashes, the number of these that were confirmed before, and the segments that were
pinned."""


@dataclass(slots=True, eq=False, repr=False)
class Reservation:
    """The reservation of one attempt, until it is confirmed or released."""

    pod: PodMemory
    spans: list[Span]
    settled: bool = False
    response: CachedResponse | None = None
    """The pod's response that the prompt continues, if there is one."""
    expected: int = 0
    """Blocks up to the end of the response."""

    @property
    def chains(self) -> list[Chain]:
        return [chain for chain, _, _, _ in self.spans]

    def unproven(self, forest: Forest) -> list[Holding]:
        """Return the pinned segments that no response has confirmed."""
        if self.pod.retired or self.settled:
            return []
        paths = [forest.path(self.pod, chain, length) for chain, length, _, _ in self.spans]
        return [holding for path in paths for holding in path if holding.used_at is None]


SEGMENT_BYTES = 340
"""Upper bound of a segment without its hashes: object, array, key, and its share of a dictionary at its emptiest."""

HOLDING_BYTES = 240
"""Upper bound of one segment on one pod; likewise."""

RESPONSE_BYTES = 320
"""Upper bound of a response; likewise."""

POD_BYTES = 1200

HASH_BYTES = 8


class Forest:
    """`living` is the mask of the pods that are not retired, `pairs` counts the (block, pod) pairs, and `bytes` is an
    upper bound of the memory in use."""

    def __init__(self, depths: Sequence[int]) -> None:
        """`depths` are the blocks that the first n hashes of any chain stand for."""
        self._depths = depths
        self.depth_of: Callable[[int], int] = depths.__getitem__
        self.segments: dict[int, Segment] = {}
        self.responses: dict[int, CachedResponse] = {}
        """The latest response to each prompt, by the prompt's last hash; the pod may be retired."""
        self.living = 0
        self.pairs = 0
        self.bytes = 0
        self._segment_bytes = SEGMENT_BYTES
        self._by_number: list[PodMemory | None] = []
        self._free_numbers: list[int] = []
        self._retired: deque[PodMemory] = deque()
        self.endpoints_of = lru_cache(maxsize=64)(lambda mask: tuple([pod.endpoint for pod in self.pods_of(mask)]))
        """The endpoints of the living pods whose bits are set. Most requests share few sets of pods."""

    def pods_of(self, mask: int) -> Iterable[PodMemory]:
        """Return the pods whose bits are set; at least one."""
        pods = cast("list[PodMemory]", self._by_number)
        if not mask & (mask - 1):
            return (pods[mask.bit_length() - 1],)
        return compress(pods, bin(mask)[:1:-1].encode().translate(_ZEROS_AND_ONES))

    def admit(self, endpoint: Endpoint) -> PodMemory:
        """Add a pod with the lowest free bit. Bits of pods whose segments are still being cleared are not free."""
        if self._free_numbers:
            number = heapq.heappop(self._free_numbers)
        else:
            number = len(self._by_number)
            self._by_number.append(None)
            # Beyond small integers, which exist anyway, a longer mask is a larger object; a segment has two.
            larger = SEGMENT_BYTES + (2 * (32 + len(self._by_number) // 30 * 4) if number >= 8 else 0)
            self.bytes += POD_BYTES + (larger - self._segment_bytes) * len(self.segments)
            self._segment_bytes = larger
        pod = self._by_number[number] = PodMemory(endpoint, number)
        self.living |= pod.bit
        return pod

    def retire(self, pod: PodMemory) -> None:
        """Invalidate the pod's bit; `clear` removes it from the segments."""
        pod.retired = True
        self.living ^= pod.bit
        self.endpoints_of.cache_clear()
        self._retired.append(pod)

    def clear(self, work: int) -> bool:
        """Remove up to `work` segments from retired pods; return False if some are left."""
        while self._retired:
            pod = self._retired[0]
            while pod.held:
                if not work:
                    return False
                _, holding = pod.held.popitem()
                self._let_go(pod, holding)
                work -= 1
            self._retired.popleft()
            self._by_number[pod.number] = None
            heapq.heappush(self._free_numbers, pod.number)
        return True

    def store(self, chain: Chain, start: int, end: int) -> Segment:
        hashes = array("Q", chain[start:end])
        segment = self.segments[chain[start]] = Segment(hashes, start, self._depths[end] - self._depths[start])
        self.bytes += self._segment_bytes + (end - start) * HASH_BYTES
        return segment

    def hold(self, pod: PodMemory, segment: Segment) -> Holding:
        if segment.holders:
            segment.holders |= pod.bit
            segment.open |= pod.bit
        else:
            segment.holders = segment.open = pod.bit
        self.pairs += segment.blocks
        self.bytes += HOLDING_BYTES
        pod.blocks += segment.blocks
        holding = pod.held[segment] = Holding(segment)
        return holding

    def drop(self, pod: PodMemory, holding: Holding) -> None:
        del pod.held[holding.segment]
        pod.blocks -= holding.segment.blocks
        self._let_go(pod, holding)

    def record_response(self, pod: PodMemory, holding: Holding, key: int, tokens: int, blocks: int) -> None:
        """Record the pod's response to the prompt that ends with this holding; it replaces earlier ones of any pod."""
        response = holding.response
        if response is None:
            response = holding.response = CachedResponse(pod, holding, key)
            self.bytes += RESPONSE_BYTES
        pod.response_blocks += blocks - response.blocks
        response.tokens, response.blocks = tokens, blocks
        self.responses[key] = response

    def drop_response(self, response: CachedResponse) -> None:
        response.holding.response = None
        response.pod.response_blocks -= response.blocks
        self.bytes -= RESPONSE_BYTES
        if self.responses.get(response.key) is response:
            del self.responses[response.key]

    def split(self, tail: Segment, at: int) -> Segment:
        """Cut a segment after `at` hashes and return the head; the object becomes the tail."""
        start, end = tail.start, tail.start + at
        head = Segment(tail.hashes[:at], start, self._depths[end] - self._depths[start], tail.holders, tail.open)
        tail.hashes, tail.start, tail.blocks = tail.hashes[at:], end, tail.blocks - head.blocks
        self.segments[head.hashes[0]] = head
        self.segments[tail.hashes[0]] = tail
        self.bytes += self._segment_bytes
        for pod in self.pods_of(tail.holders):
            pod.split(head, tail)
            self.bytes += HOLDING_BYTES
        return head

    def path(self, pod: PodMemory, chain: Chain, length: int) -> list[Holding]:
        """Return the holdings of the pinned start of a chain. Pinned holdings stay and are only ever split."""
        path: list[Holding] = []
        at = 0
        while at < length:
            segment = self.segments[chain[at]]
            path.append(pod.held[segment])
            at += len(segment.hashes)
        return path

    def fitting(self, start: int, blocks: int) -> int:
        """Return how many hashes from `start` on stand for at most this many blocks; 0 or less for none."""
        return bisect_right(self._depths, self._depths[start] + blocks) - 1 - start

    def _let_go(self, pod: PodMemory, holding: Holding) -> None:
        older, newer, segment = holding.older, holding.newer, holding.segment
        if older is not None and newer is not None:
            older.newer, newer.older = newer, older
            holding.older = holding.newer = None
        if holding.response is not None:
            self.drop_response(holding.response)
        segment.holders &= ~pod.bit
        segment.open &= ~pod.bit
        self.pairs -= segment.blocks
        self.bytes -= HOLDING_BYTES
        if not segment.holders:
            del self.segments[segment.hashes[0]]
            self.bytes -= self._segment_bytes + len(segment.hashes) * HASH_BYTES


def shared(hashes: array[int], chain: Chain, start: int, limit: int) -> int:
    """How many of a segment's hashes the chain has from `start` on, at most `limit`; the first is known to be one.
    Equal hashes have equal pasts, so the last pair that is equal can be bisected for."""
    size = min(len(hashes), limit)
    if hashes[size - 1] == chain[start + size - 1]:
        return size
    return bisect_left(range(1, size), True, key=lambda at: hashes[at] != chain[start + at]) + 1


_ZEROS_AND_ONES = bytes.maketrans(b"01", b"\0\1")
