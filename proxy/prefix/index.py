"""Which pod holds which blocks: matched for all pods at once, reserved before the leg, settled after it.

A chain of block hashes is kept as the few segments in which pods differ, not block by block: a segment of n blocks
costs 8 n bytes and some constant, a match looks at each segment of its way once and bisects in the last, and inserting
or forgetting a segment costs much the same for any length. Segments are cut where chains part, where a pod's room
ends, and where eviction takes the end of one.

The index gives a bit of its own to every pod it hears of. Forgetting a pod makes the bit void at once; its segments
are cleared a few at a time, and only then can the bit be given to another pod. So nothing is ever inherited.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.prefix.forest import Forest, shared
from proxy.prefix.hashing import Chain
from proxy.prefix.holdings import Holding, PodMemory

WORK = 1500
"""Holdings that one call clears or evicts at most for one reason: some 2 ms."""

EVIDENCE_BLOCKS = 4
"""A prediction of fewer blocks proves nothing: engines cache whole blocks of theirs only, and never a prompt's end."""

MISSES_UNTIL_FORGOTTEN = 3
"""Answers in a row, each with less than a tenth of the hits that were predicted, after which a pod counts as new."""


@dataclass(slots=True, eq=False)
class Reservation:
    """What one leg pins on one pod, until it is confirmed or released.

    `spans` are chains with the number of blocks pinned of each; `known` counts the blocks that an earlier answer had
    confirmed, of `total`.
    """

    pod: PodMemory
    total: int
    known: int
    spans: list[tuple[Chain, int]]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Prompt tokens, as the engine counts them, that a pod was expected to have cached, and those it had; over the
    answers that reported them."""

    predicted_tokens: float = 0.0
    actual_tokens: float = 0.0


class PrefixIndex:
    """Lives as long as its producer. `match` changes nothing; everything else belongs in hooks.

    `max_siblings` requests may wait for the same provisional blocks of a pod before a match ignores these. `ttl` is in
    seconds and is enforced by the calls that change something, at most once a second. `max_bytes` bounds the sum of
    upper bounds: beyond it, what was used longest ago goes, whichever pod has it; while all there is belongs to
    requests in flight, nothing is added. So it is exceeded by one request's blocks at most.
    """

    def __init__(self, clock: Clock, max_siblings: int, ttl: float = math.inf, max_bytes: float = math.inf) -> None:
        self._clock = clock
        self._max_siblings = max_siblings
        self._ttl = ttl
        self._max_bytes = max_bytes
        self._forest = Forest()
        self._pods: dict[Endpoint, PodMemory] = {}
        self._expire_at = -math.inf
        self.version = 0
        """Changes whenever a match could."""

    def match(self, chain: Chain) -> dict[Endpoint, int]:
        """Blocks each pod holds from the start of the chain without a gap; pods that hold none are left out."""
        forest = self._forest
        segments, active, total = forest.segments, forest.living, len(chain)
        depths: dict[Endpoint, int] = {}
        depth = 0
        while depth < total and active:
            segment = segments.get(chain[depth])
            if segment is None:
                break
            still = active & segment.open
            if depth and still != active:
                for pod in forest.pods_of(active ^ still):
                    depths[pod.endpoint] = depth
            active = still
            common = shared(segment.hashes, chain, depth, total - depth)
            depth += common
            if common < len(segment.hashes):
                break
        if depth and active:
            for pod in forest.pods_of(active):
                depths[pod.endpoint] = depth
        return depths

    def reserve(self, chains: Sequence[Chain], endpoint: Endpoint, capacity: int) -> Reservation:
        """Pins what the pod holds of the chains and adds the rest provisionally, as far as `capacity` blocks go."""
        now = self._clock.now()
        self.version += 1
        pod = self._pods.get(endpoint)
        if pod is None:
            pod = self._pods[endpoint] = self._forest.admit(endpoint)
        pod.capacity = capacity
        reservation = Reservation(pod, sum(map(len, chains)), 0, [])
        for chain in chains:
            self._claim(reservation, chain)
        self._tidy(pod, now)
        return reservation

    def confirm(self, reservation: Reservation) -> None:
        """The pod has computed the prompt: it holds it from here on."""
        self._settle(reservation, computed=True)

    def release(self, reservation: Reservation) -> None:
        """The pod did not compute the prompt: what nobody else confirmed or still waits for is taken back."""
        self._settle(reservation, computed=False)

    def observe(self, reservation: Reservation, prompt_tokens: int, cached_tokens: int) -> bool:
        """What the engine says of a prompt whose reservation is settled. False if that proved the pod to have lost
        its memory: it is then forgotten, this prompt included."""
        pod = reservation.pod
        predicted = prompt_tokens * reservation.known / max(1, reservation.total)
        pod.predicted_tokens += predicted
        pod.actual_tokens += cached_tokens
        if reservation.known >= EVIDENCE_BLOCKS:
            pod.misses = pod.misses + 1 if cached_tokens < predicted / 10 else 0
        if pod.retired or pod.misses < MISSES_UNTIL_FORGOTTEN:
            return True
        self.forget(pod.endpoint)
        return False

    def forget(self, endpoint: Endpoint) -> None:
        """Void at once; reservations on the pod become void too."""
        pod = self._pods.pop(endpoint, None)
        if pod is not None:
            self.version += 1
            self._forest.retire(pod)
            self._forest.clear(WORK)

    def prediction(self, endpoint: Endpoint) -> Prediction:
        """Since the pod was first reserved or last forgotten."""
        pod = self._pods.get(endpoint)
        return Prediction(pod.predicted_tokens, pod.actual_tokens) if pod is not None else Prediction()

    def blocks(self, endpoint: Endpoint) -> int:
        """Blocks the pod is believed to hold, the provisional ones included."""
        pod = self._pods.get(endpoint)
        return pod.blocks if pod is not None else 0

    @property
    def pairs(self) -> int:
        """(block, pod) pairs in memory, those of forgotten pods included until they are cleared."""
        return self._forest.pairs

    @property
    def bytes(self) -> int:
        """Upper bound of the memory in use."""
        return self._forest.bytes

    def _claim(self, reservation: Reservation, chain: Chain) -> None:
        """Walks down the chain, pinning on the pod what is there and adding what is not, while there is room."""
        forest, pod, total = self._forest, reservation.pod, len(chain)
        full = forest.bytes >= self._max_bytes
        depth = 0
        while depth < total:
            segment = forest.segments.get(chain[depth])
            holding = pod.held.get(segment) if segment is not None else None
            room = total - depth
            if holding is None or not holding.pins:
                room = min(room, pod.capacity - pod.pinned)
            if room <= 0 or (full and holding is None):
                break
            if segment is None:
                segment = forest.store(chain[depth : depth + room])
            elif (common := shared(segment.hashes, chain, depth, room)) < len(segment.hashes):
                segment = forest.split(segment, common)
            if holding is None:
                holding = forest.hold(pod, segment)
            else:
                holding = pod.held[segment]
                reservation.known += len(segment.hashes) if holding.used_at is not None else 0
            self._pin(pod, holding)
            depth += len(segment.hashes)
        reservation.spans.append((chain, depth))

    def _pin(self, pod: PodMemory, holding: Holding) -> None:
        pod.pin(holding)
        if holding.used_at is None and holding.pins >= self._max_siblings:
            holding.segment.open &= ~pod.bit

    def _settle(self, reservation: Reservation, computed: bool) -> None:
        pod, now = reservation.pod, self._clock.now()
        if pod.retired:
            return
        self.version += 1
        for chain, length in reservation.spans:
            for holding in reversed(self._way(pod, chain, length)):
                if computed:
                    holding.used_at = now
                self._unpin(pod, holding, now)
        reservation.spans.clear()
        self._tidy(pod, now)

    def _way(self, pod: PodMemory, chain: Chain, length: int) -> list[Holding]:
        """The holdings that make up the pinned start of a chain: pinned ones stay, and are only ever cut smaller."""
        way: list[Holding] = []
        depth = 0
        while depth < length:
            segment = self._forest.segments[chain[depth]]
            way.append(pod.held[segment])
            depth += len(segment.hashes)
        return way

    def _unpin(self, pod: PodMemory, holding: Holding, now: float) -> None:
        pod.unpin(holding, now)
        if holding.used_at is None and not holding.pins:
            self._forest.drop(pod, holding)
        elif not holding.segment.open & pod.bit and (holding.used_at is not None or holding.pins < self._max_siblings):
            holding.segment.open |= pod.bit

    def _tidy(self, pod: PodMemory, now: float) -> None:
        """What eviction, age and the ceiling ask for, in bounded steps: what is left over is done by later calls."""
        self._forest.clear(WORK)
        if pod.blocks > pod.capacity:
            self._evict(pod, pod.capacity - min(pod.capacity // 64, 512))
        if now >= self._expire_at:
            self._expire(now)
        if self._forest.bytes > self._max_bytes:
            self._shrink()

    def _evict(self, pod: PodMemory, target: int) -> None:
        """Down to somewhat below the capacity, so that few segments are cut and most calls find nothing to do."""
        for _ in range(WORK):
            excess, holding = pod.blocks - target, pod.oldest
            if excess <= 0 or holding is None:
                return
            if excess < len(holding.segment.hashes):
                self._forest.split(holding.segment, len(holding.segment.hashes) - excess)
            self._forest.drop(pod, holding)

    def _expire(self, now: float) -> None:
        work = WORK
        for pod in self._pods.values():
            while (oldest := pod.oldest) is not None and now - _age(pod) >= self._ttl:
                if not work:
                    return
                self._forest.drop(pod, oldest)
                work -= 1
        self._expire_at = now + min(1.0, self._ttl)

    def _shrink(self) -> None:
        """In batches from the pod with the oldest holding, since looking for that pod takes a step per pod."""
        for _ in range(8):
            victim = min(self._pods.values(), key=_age)
            for _ in range(WORK // 8):
                oldest = victim.oldest
                if oldest is None or self._forest.bytes <= self._max_bytes:
                    return
                self._forest.drop(victim, oldest)


def _age(pod: PodMemory) -> float:
    """When what the pod forgets next was used."""
    oldest = pod.oldest
    return oldest.used_at if oldest is not None and oldest.used_at is not None else math.inf
