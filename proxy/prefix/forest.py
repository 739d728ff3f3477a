"""The segments of all chains and the pods that hold them: the bookkeeping below the prefix index, without its rules."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import compress
from typing import cast

from proxy.core.endpoint import Endpoint
from proxy.prefix.hashing import Chain
from proxy.prefix.holdings import Answer, Holding, PodMemory, Segment

SEGMENT_BYTES = 340
"""Upper bound of a segment without its hashes: object, array, key, and its share of a dictionary at its emptiest."""

HOLDING_BYTES = 240
"""Upper bound of one segment on one pod, likewise."""

ANSWER_BYTES = 320
"""Upper bound of an answer, likewise."""

POD_BYTES = 1200

HASH_BYTES = 8


class Forest:
    """`living` is the mask of the pods that are not retired, `pairs` counts the (block, pod) pairs held, and `bytes` is
    an upper bound of the memory in use."""

    def __init__(self, depths: Sequence[int]) -> None:
        """`depths` are the blocks that the first n hashes of any chain stand for."""
        self._depths = depths
        self.segments: dict[int, Segment] = {}
        self.answers: dict[int, Answer] = {}
        """The latest to each prompt, by the prompt's last hash; the pod may be retired."""
        self.living = 0
        self.pairs = 0
        self.bytes = 0
        self._segment_bytes = SEGMENT_BYTES
        self._by_number: list[PodMemory | None] = []
        self._free_numbers: list[int] = []
        self._retired: deque[PodMemory] = deque()
        self.endpoints_of = lru_cache(maxsize=64)(self._endpoints_of)
        """The endpoints of the living pods whose bits are set; few sets of pods hold what most requests ask for."""

    def pods_of(self, mask: int) -> Iterable[PodMemory]:
        """The pods whose bits are set, at least one."""
        pods = cast("list[PodMemory]", self._by_number)
        if not mask & (mask - 1):
            return (pods[mask.bit_length() - 1],)
        return compress(pods, bin(mask)[:1:-1].encode().translate(_ZEROS_AND_ONES))

    def admit(self, endpoint: Endpoint) -> PodMemory:
        """A pod with the lowest bit that nobody has, not even one whose segments are still being cleared."""
        if self._free_numbers:
            number = heapq.heappop(self._free_numbers)
        else:
            number = len(self._by_number)
            self._by_number.append(None)
            self._count_pod()
        pod = self._by_number[number] = PodMemory(endpoint, number)
        self.living |= pod.bit
        return pod

    def retire(self, pod: PodMemory) -> None:
        """Its bit means nothing from here on; `clear` takes it off the segments."""
        pod.retired = True
        self.living ^= pod.bit
        self.endpoints_of.cache_clear()
        self._retired.append(pod)

    def clear(self, work: int) -> bool:
        """Takes up to `work` segments from retired pods; False if some are left."""
        while self._retired:
            pod = self._retired[0]
            while pod.held:
                if not work:
                    return False
                self._let_go(pod, pod.take_any())
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
        return pod.add(segment)

    def drop(self, pod: PodMemory, holding: Holding) -> None:
        pod.remove(holding)
        self._let_go(pod, holding)

    def answer(self, pod: PodMemory, holding: Holding, key: int, tokens: int, blocks: int) -> None:
        """What the pod said to the prompt that ends with this holding; what anybody said to it before is forgotten."""
        answer = holding.answer
        if answer is None:
            answer = holding.answer = Answer(pod, holding, key)
            self.bytes += ANSWER_BYTES
        pod.answered += blocks - answer.blocks
        answer.tokens, answer.blocks = tokens, blocks
        self.answers[key] = answer

    def drop_answer(self, answer: Answer) -> None:
        answer.holding.answer = None
        answer.pod.answered -= answer.blocks
        self.bytes -= ANSWER_BYTES
        if self.answers.get(answer.key) is answer:
            del self.answers[answer.key]

    def split(self, tail: Segment, at: int) -> Segment:
        """Cuts a segment after `at` hashes and returns the head; the object itself is the tail from here on."""
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

    def way(self, pod: PodMemory, chain: Chain, length: int) -> list[Holding]:
        """The holdings that make up the pinned start of a chain: pinned ones stay, and are only ever cut smaller."""
        way: list[Holding] = []
        at = 0
        while at < length:
            segment = self.segments[chain[at]]
            way.append(pod.held[segment])
            at += len(segment.hashes)
        return way

    def fitting(self, start: int, room: int) -> int:
        """How many hashes from `start` on stand for at most `room` blocks; 0 or less for none."""
        return bisect_right(self._depths, self._depths[start] + room) - 1 - start

    def _endpoints_of(self, mask: int) -> tuple[Endpoint, ...]:
        return tuple(pod.endpoint for pod in self.pods_of(mask))

    def _let_go(self, pod: PodMemory, holding: Holding) -> None:
        segment = holding.segment
        if holding.answer is not None:
            self.drop_answer(holding.answer)
        segment.holders &= ~pod.bit
        segment.open &= ~pod.bit
        self.pairs -= segment.blocks
        self.bytes -= HOLDING_BYTES
        if not segment.holders:
            del self.segments[segment.hashes[0]]
            self.bytes -= self._segment_bytes + len(segment.hashes) * HASH_BYTES

    def _count_pod(self) -> None:
        """Beyond small integers, which exist anyway, a longer mask is a larger object; a segment has two."""
        pods = len(self._by_number)
        larger = SEGMENT_BYTES + (2 * (32 + pods // 30 * 4) if pods > 8 else 0)
        self.bytes += POD_BYTES + (larger - self._segment_bytes) * len(self.segments)
        self._segment_bytes = larger


def shared(hashes: array[int], chain: Chain, start: int, limit: int) -> int:
    """How many of a segment's hashes the chain has from `start` on, at most `limit`; the first is known to be one.
    Equal hashes have equal pasts, so the last pair that is equal can be bisected for."""
    size = min(len(hashes), limit)
    if hashes[size - 1] == chain[start + size - 1]:
        return size
    return bisect_left(range(1, size), True, key=lambda at: hashes[at] != chain[start + at]) + 1


_ZEROS_AND_ONES = bytes.maketrans(b"01", b"\0\1")
