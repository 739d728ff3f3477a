"""Which pod holds which blocks, by the KV events of the pods: exact where no event was missed.

Engines name blocks by hashes of their own, which may differ from process to process. Each event also has the tokens, so
every block gets a chained hash of ours, and a table per pod translates; nothing depends on how an engine hashes.

All pods share one table from hash to a mask, with a bit for each tier of each rank of each pod, and one per pod for
what it will hold soon. So a prompt is looked up once for all of them, without a step of Python per block.
"""

from __future__ import annotations

import heapq
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from itertools import repeat, takewhile
from operator import or_

from proxy.core.endpoint import Endpoint
from proxy.core.ports import AllCleared, BlockHash, BlocksRemoved, BlocksStored, Clock, KvEvent
from proxy.core.request import BYTES_PER_TOKEN
from proxy.prefix.hashing import Chain, chained, namespace

log = logging.getLogger(__name__)


Masks = dict[int, int]
"""Chained hash of a block -> a bit for every shelf that has it."""


@dataclass(slots=True, eq=False)
class TierBlocks:
    """The blocks of one tier of one rank. `own` maps the engine's hashes to kvlane's; `copies` counts the additional
    copies of a block."""

    bit: int
    weight: float
    own: dict[BlockHash, int] = field(default_factory=dict)
    copies: dict[BlockHash, int] = field(default_factory=dict)

    def put(self, names: Sequence[BlockHash], hashes: Chain, masks: Masks) -> None:
        own = self.own
        if not own.keys().isdisjoint(names):
            for name in names:
                if name in own:
                    self.copies[name] = self.copies.get(name, 0) + 1
        own.update(zip(names, hashes, strict=True))
        # Item by item, but in C: a busy pod publishes thousands of blocks per second.
        masks.update(zip(hashes, map(or_, map(masks.get, hashes, repeat(0)), repeat(self.bit)), strict=False))

    def remove(self, names: Iterable[BlockHash], masks: Masks) -> list[int]:
        """Remove blocks, and return the hashes without another copy."""
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


@dataclass(slots=True, eq=False)
class Rank:
    """One cache of a pod: its shelves by medium, and their bits. `complete`: no event was missed; `weighed`: not all
    shelves count the same. `block_size` is 0 before the first block; `group` is the one kind of layers whose blocks
    count, since others have their own for the same tokens."""

    shelves: dict[str, TierBlocks] = field(default_factory=dict)
    block_size: int = 0
    complete: bool = False
    group: int | None = None
    bits: int = 0
    weighed: bool = False

    def open(self, medium: str, bit: int, weight: float) -> TierBlocks:
        shelf = self.shelves[medium] = TierBlocks(bit, weight)
        self.bits |= bit
        self.weighed = any(other.weight != 1.0 for other in self.shelves.values())
        return shelf

    def holds(self, name: BlockHash) -> int | None:
        """Return our hash of a block that a tier has."""
        for shelf in self.shelves.values():
            found = shelf.own.get(name)
            if found is not None:
                return found
        return None

    def hashes(self, event: BlocksStored) -> Chain | None:
        """Return our hashes of the blocks of an event; None if the block that they follow is unknown."""
        if not event.tokens:
            known = [self.holds(name) for name in event.hashes]
            return [found for found in known if found is not None] if None not in known else None
        keys, salt = event.keys, ""
        if event.parent is not None:
            parent = self.holds(event.parent)
        else:
            if (
                keys and (first := keys[0]) and isinstance(first[-1], str)
            ):  # The cache_salt is the last text among them.
                salt, keys = first[-1], [first[:-1], *keys[1:]]
            parent = namespace(event.lora, salt)
        if parent is None:
            return None
        pieces = list(map(BytesIO(event.tokens).read, repeat(event.block_size * BYTES_PER_TOKEN, len(event.hashes))))
        if any(keys):  # A block with media differs from everything that kvlane tokenises.
            pieces = [
                piece + repr(more).encode("utf-8", "surrogatepass") if more else piece
                for piece, more in zip(pieces, keys, strict=True)
            ]
        return chained(pieces, parent)

    def belongs(self, event: BlocksStored | BlocksRemoved) -> bool:
        """Return whether an event is about the layers that count, which the first event names."""
        if self.group is None and isinstance(event, BlocksStored):
            self.group = event.group
        return event.group == self.group


def clear(hashes: Iterable[int], bit: int, masks: Masks) -> None:
    """Clear a bit, and forget hashes without bits."""
    keep = ~bit
    for own in hashes:
        left = masks.get(own, 0) & keep
        if left:
            masks[own] = left
        else:
            masks.pop(own, None)


PAIR_BYTES = 200
"""Bytes of a block on a pod: two integers and their share of a dictionary that has just grown; measured, rounded up."""

HASH_BYTES = 170
"""Bytes of a block in the common table, including its mask; likewise."""

DEFAULT_BLOCK = 16

MOST_MEDIA = 8
"""Largest number of tiers of a rank. Each has a bit in the masks of all pods."""

WRONG_UNTIL_UNKNOWN = 3
"""Responses in a row whose cached tokens differ from the prediction."""


@dataclass(slots=True, eq=False)
class ExactReservation:
    """Blocks that a pod will hold when it has computed a prompt, without blocks of earlier reservations."""

    pod: PodBlocks
    blocks: Chain


@dataclass(slots=True, eq=False, repr=False)
class PodBlocks:
    """What is known of one pod. `expected` are the blocks that no event has confirmed yet, under `bit`."""

    bit: int
    ranks: defaultdict[int, Rank] = field(default_factory=lambda: defaultdict(Rank))
    expected: dict[int, ExactReservation] = field(default_factory=dict)
    wrong: int = 0


class ExactIndex:
    """The index of one producer. `weights`: the value of a block on a tier, by medium; `ttl`: seconds that a pod may
    take to confirm the blocks of a response that has ended. At `max_pairs` further blocks are not remembered, and their
    pods are no longer exact."""

    def __init__(
        self, clock: Clock, ttl: float, max_pairs: int, weights: Mapping[str, float] | None = None, block_size: int = 0
    ) -> None:
        self._now = clock.now
        self._ttl = ttl
        self._max_pairs = max_pairs
        self._weights = weights or {}
        self._block_size = block_size
        self._pods: dict[Endpoint, PodBlocks] = {}
        self._masks: Masks = {}
        self._bits = 0
        self._free_bits: list[int] = []
        self._ended: deque[tuple[float, ExactReservation]] = deque()
        self.pairs = 0
        self.orphans = 0
        """Blocks that followed an unknown block."""
        self.version = 0

    @property
    def bytes(self) -> int:
        """Upper bound of the memory in use."""
        return self.pairs * PAIR_BYTES + len(self._masks) * HASH_BYTES

    # Events of pods.

    def published(self, endpoint: Endpoint, rank: int, events: Sequence[KvEvent]) -> None:
        pod = self._pods.get(endpoint) or self._admit(endpoint)
        cache = pod.ranks[rank]
        for event in events:
            if isinstance(event, BlocksStored):
                self._store(pod, cache, event)
            elif isinstance(event, BlocksRemoved):
                self._remove(pod, cache, event)
            elif isinstance(event, AllCleared):
                self._empty(cache)
        self.version += 1

    def lost(self, endpoint: Endpoint, rank: int) -> None:
        pod = self._pods.get(endpoint)
        cache = pod.ranks.get(rank) if pod else None
        if cache is not None:
            self._empty(cache)
            cache.complete, cache.group, cache.block_size = False, None, 0
            self.version += 1

    def complete(self, endpoint: Endpoint, rank: int, known: bool) -> None:
        (self._pods.get(endpoint) or self._admit(endpoint)).ranks[rank].complete = known

    def restarted(self, endpoint: Endpoint) -> None:
        """Forget what a pod held before a restart that other signals have shown."""
        pod = self._pods.get(endpoint)
        for rank, cache in pod.ranks.items() if pod else ():
            if not cache.complete:
                self.lost(endpoint, rank)

    def gone(self, endpoint: Endpoint) -> None:
        pod = self._pods.pop(endpoint, None)
        if pod is None:
            return
        for cache in pod.ranks.values():
            self._empty(cache)
            for shelf in cache.shelves.values():
                heapq.heappush(self._free_bits, shelf.bit)
        clear(pod.expected, pod.bit, self._masks)
        pod.expected.clear()
        heapq.heappush(self._free_bits, pod.bit)
        self.version += 1

    # What schedulers ask.

    def is_sure(self, endpoint: Endpoint) -> bool:
        """Return whether all blocks of the pod are known, and recent responses agree."""
        pod = self._pods.get(endpoint)
        if pod is None or not pod.ranks or pod.wrong >= WRONG_UNTIL_UNKNOWN:
            return False
        return all(cache.complete for cache in pod.ranks.values())

    def block_size(self, endpoint: Endpoint) -> int:
        """Return the tokens per block: of its events, else of its metrics, else as configured."""
        pod = self._pods.get(endpoint)
        if pod is not None:
            for cache in pod.ranks.values():
                if cache.block_size:
                    return cache.block_size
        return endpoint.metrics.block_size or self._block_size or DEFAULT_BLOCK

    def depths(self, chain: Chain, endpoints: Sequence[Endpoint]) -> list[int]:
        """Return how many blocks of the chain, from its start and without a gap, each endpoint has or will have soon;
        a block on a slower tier counts for its weight. Of several ranks of a pod, the one with the most counts."""
        masks = list(takewhile(bool, map(self._masks.get, chain, repeat(0))))
        count = len(masks)
        if not count:
            return [0] * len(endpoints)
        first = dict(zip(reversed(masks), range(count - 1, -1, -1), strict=True))
        pods = map(self._pods.get, endpoints)
        return [0 if pod is None else self._depth(pod, masks, first) for pod in pods]

    def blocks(self, endpoint: Endpoint) -> int:
        """Return the number of blocks that the pod holds by its events; a block on two tiers counts twice."""
        pod = self._pods.get(endpoint)
        ranks = pod.ranks.values() if pod is not None else ()
        return sum(len(shelf.own) for rank in ranks for shelf in rank.shelves.values())

    def expects(self, endpoint: Endpoint) -> bool:
        """Return whether the pod will hold blocks soon that it has not confirmed."""
        pod = self._pods.get(endpoint)
        return pod is not None and bool(pod.expected)

    # What requests do.

    def reserve(self, chain: Chain, endpoint: Endpoint, depth: int) -> ExactReservation:
        """Expect the chain on a pod that has `depth` blocks of it."""
        self.sweep()
        pod = self._pods.get(endpoint) or self._admit(endpoint)
        new = chain[depth:]
        reservation = ExactReservation(pod, new)
        if new:
            masks = self._masks
            if pod.expected:
                new = reservation.blocks = [own for own in new if own not in pod.expected]
            pod.expected.update(zip(new, repeat(reservation)))
            masks.update(zip(new, map(or_, map(masks.get, new, repeat(0)), repeat(pod.bit)), strict=False))
            self.version += 1
        return reservation

    def release(self, reservation: ExactReservation, computed: bool) -> None:
        """End the attempt of a reservation. A pod that has computed the prompt may still confirm it."""
        if not reservation.pod.expected:
            return
        if computed:
            self._ended.append((self._now() + self._ttl, reservation))
        else:
            self._withdraw(reservation)

    def sweep(self) -> None:
        """Withdraw what no pod confirmed in time."""
        if self._ended:
            now = self._now()
            while self._ended and self._ended[0][0] <= now:
                self._withdraw(self._ended.popleft()[1])

    def judge(self, endpoint: Endpoint, was_right: bool) -> bool:
        """Note whether a response agreed with the prediction. Return whether the pod counts as unknown from now on."""
        pod = self._pods.get(endpoint)
        if pod is None:
            return False
        pod.wrong = 0 if was_right else pod.wrong + 1
        return pod.wrong == WRONG_UNTIL_UNKNOWN

    # Below: how.

    def _admit(self, endpoint: Endpoint) -> PodBlocks:
        pod = self._pods[endpoint] = PodBlocks(self._bit())
        return pod

    def _bit(self) -> int:
        if self._free_bits:
            return heapq.heappop(self._free_bits)
        self._bits += 1
        return 1 << (self._bits - 1)

    def _store(self, pod: PodBlocks, cache: Rank, event: BlocksStored) -> None:
        if not cache.belongs(event):
            return
        hashes = cache.hashes(event)
        if hashes is None or len(hashes) != len(event.hashes):
            self.orphans += len(event.hashes)
            return
        if not hashes:
            return
        if self.pairs + len(hashes) > self._max_pairs:
            self._overflow(cache, f"the index has {self.pairs} blocks")
            return
        shelf = cache.shelves.get(event.medium)
        if shelf is None:
            if len(cache.shelves) >= MOST_MEDIA:
                self._overflow(cache, f"a pod names more than {MOST_MEDIA} media")
                return
            shelf = cache.open(event.medium, self._bit(), self._weights.get(event.medium, 1.0))
        before = len(shelf.own)
        shelf.put(event.hashes, hashes, self._masks)
        self.pairs += len(shelf.own) - before
        if event.tokens and event.block_size > cache.block_size:
            cache.block_size = event.block_size
        self._confirm(pod, hashes)

    def _remove(self, pod: PodBlocks, cache: Rank, event: BlocksRemoved) -> None:
        shelf = cache.shelves.get(event.medium)
        if shelf is None or not cache.belongs(event):
            return
        gone = shelf.remove(event.hashes, self._masks)
        self.pairs -= len(gone)
        self._confirm(pod, gone)

    def _confirm(self, pod: PodBlocks, hashes: Chain) -> None:
        """Expect these blocks no longer: the pod has published them."""
        expected = pod.expected
        if expected and (known := expected.keys() & hashes):
            clear(known, pod.bit, self._masks)
            for own in known:
                del expected[own]

    def _withdraw(self, reservation: ExactReservation) -> None:
        pod = reservation.pod
        left = [own for own in pod.expected.keys() & reservation.blocks if pod.expected[own] is reservation]
        if left:
            clear(left, pod.bit, self._masks)
            for own in left:
                del pod.expected[own]
            self.version += 1

    def _empty(self, cache: Rank) -> None:
        for shelf in cache.shelves.values():
            self.pairs -= len(shelf.own)
            shelf.empty(self._masks)

    def _overflow(self, cache: Rank, why: str) -> None:
        if cache.complete:
            cache.complete = False
            log.warning("exact prefix index: %s; ignoring further blocks", why)

    def _depth(self, pod: PodBlocks, masks: Sequence[int], first: Mapping[int, int]) -> int:
        expected, most = pod.bit, 0
        for cache in pod.ranks.values():
            length = _length(cache.bits | expected, masks, first)
            if cache.weighed and length:
                length = _worth(cache, masks[:length])
            if length > most:
                most = length
        return most if pod.ranks else _length(expected, masks, first)


def _length(bits: int, masks: Sequence[int], first: Mapping[int, int]) -> int:
    """Return the number of blocks before the first one without any of the bits. `first` is where each mask occurs
    first: pods agree about long runs, so there are few masks."""
    return min([at for mask, at in first.items() if not mask & bits], default=len(masks))


def _worth(cache: Rank, masks: Sequence[int]) -> int:
    """Return the value of blocks that the cache has or will have soon: each counts as in its best tier. An expected
    block will be in the best one."""
    shelves = sorted(cache.shelves.values(), key=lambda shelf: shelf.weight, reverse=True)
    weights = [next((shelf.weight for shelf in shelves if mask & shelf.bit), 1.0) for mask in masks]
    return int(sum(weights) + 1e-9)
