"""Which pod holds which blocks: matched for all pods at once, reserved before an attempt, confirmed after it.

A chain of hashes is stored as segments, not block by block: a new segment starts where chains part, where a pod's
capacity ends, and where eviction removed the end of one. A segment of n hashes costs 8 n bytes and a constant. A match
reads each segment of its chain once and bisects in the last. Inserting or forgetting a segment costs much the same for
any length.

A hash stands for one block near the start of a prompt and for several blocks further down. Positions in a chain and
lengths of segments count hashes; what pods hold, match and may hold counts blocks, which all have one size.

The text that a pod generates is in its cache too, and the next turn of a conversation starts with prompt and response.
A response has no hashes; the index stores its pod and its length with the last hash of the prompt.

Every pod has a bit of its own. Forgetting a pod makes the bit void at once. Its segments are cleared a few at a time,
and the bit is given to another pod only after that, so no pod inherits what another one held.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from proxy.core.endpoint import Endpoint
from proxy.core.ports import Clock
from proxy.prefix.feedback import WORK, IndexEviction, are_kept
from proxy.prefix.forest import CachedResponse, Forest, Holding, PodMemory, Reservation, Span, shared
from proxy.prefix.hashing import DEPTHS, Chain, ConversationTurn

MAX_SIBLINGS = 16
"""Number of requests that may wait on one pod for the same blocks before a match ignores these blocks."""

TTL = 3600.0
"""Seconds after its last use after which a block is forgotten. Pods evict by the size of their cache and report it, so
this only limits unused blocks."""


class PrefixIndex:
    """Lives as long as its producer. `match` changes nothing. Everything else belongs in hooks, except `prove`, which
    the producer calls in `derive`, for prompts whose responses have started.

    `max_siblings` requests may wait for the same provisional blocks of a pod before a match ignores these. `ttl` is in
    seconds and is enforced by the calls that change something, at most once a second. `max_bytes` bounds the sum of
    upper bounds: beyond it, what was used longest ago goes, whichever pod has it; while all there is belongs to
    requests in flight, nothing is added. So it is exceeded by one request's blocks at most. `depths` are the blocks
    that the first n hashes of any chain stand for.
    """

    def __init__(
        self,
        clock: Clock,
        max_siblings: int = MAX_SIBLINGS,
        ttl: float = TTL,
        max_bytes: float = math.inf,
        depths: Sequence[int] = DEPTHS,
    ) -> None:
        self._now = clock.now
        self._max_siblings = max_siblings
        self._forest = Forest(depths)
        self._depths = depths
        self.depth_of = self._forest.depth_of
        """The blocks that a number of leading hashes of a chain stand for."""
        self._pods: dict[Endpoint, PodMemory] = {}
        self._eviction = IndexEviction(self._forest, self._pods, ttl, max_bytes)
        self.version = 0
        """Changes whenever a match could change; not for requests whose blocks are known."""
        self.is_crowded = False
        """Whether a match ignores provisional blocks because many requests wait for them: `prove` may help."""

    @property
    def max_bytes(self) -> float:
        """The memory limit. After a change the next operations evict the excess."""
        return self._eviction.max_bytes

    @max_bytes.setter
    def max_bytes(self, max_bytes: float) -> None:
        self._eviction.max_bytes = max_bytes
        self._eviction.expire_soon()
        self.version += 1

    def match(self, chain: Chain) -> dict[Endpoint, int]:
        """Return the leading blocks of the chain that each pod holds without a gap; pods without any are left out."""
        forest = self._forest
        segments, active, total = forest.segments, forest.living, len(chain)
        found: dict[Endpoint, int] = {}
        at = 0
        while at < total:
            segment = segments.get(chain[at])
            if segment is None:
                break
            still = active & segment.open
            if still != active:
                if at:
                    found |= dict.fromkeys(forest.endpoints_of(active ^ still), self._depths[at])
                if not still:
                    return found
                active = still
            hashes = segment.hashes
            end = at + len(hashes)
            if end > total or hashes[-1] != chain[end - 1]:
                at += shared(hashes, chain, at, total - at)
                break
            at = end
        if at and active:
            rest = dict.fromkeys(forest.endpoints_of(active), self._depths[at])
            found = found | rest if found else rest
        return found

    def add_response(self, found: dict[Endpoint, int], turn: ConversationTurn) -> None:
        """Add to a match the response that the prompt continues, for the pod that gave it."""
        response = self._forest.responses.get(turn.key)
        if response is not None and _fits(response, turn) and are_kept(response):
            endpoint = response.pod.endpoint
            blocks = found.get(endpoint, 0)
            if self._depths[turn.hashes] <= blocks < turn.blocks:
                found[endpoint] = turn.blocks

    def reserve(self, chains: Sequence[Chain], endpoint: Endpoint, capacity: int) -> Reservation:
        """Pin what the pod holds of the chains and add the rest provisionally, up to `capacity` blocks."""
        pod = self._pods.get(endpoint) or self._admit(endpoint)
        if pod.capacity != capacity:
            pod.capacity = capacity
            self._eviction.due_at = -math.inf
        spans = [self._claim(pod, chains[0])] if len(chains) == 1 else [self._claim(pod, chain) for chain in chains]
        reservation = Reservation(pod, spans)
        now = self._now()
        if now >= self._eviction.due_at:
            self._tidy(pod, now)
        return reservation

    def hide(self, reservation: Reservation) -> None:
        """Exclude the added blocks from matches until they are proved or confirmed, because they come from another
        pod."""
        bit = reservation.pod.bit
        for holding in reservation.unproven(self._forest):
            holding.segment.open &= ~bit
            self.is_crowded = True
        self.version += 1

    def note_turn(self, reservation: Reservation, turn: ConversationTurn) -> None:
        """Note that the prompt is the next turn of a conversation: once computed, it contains the pod's earlier
        response, if it gave one."""
        response = self._forest.responses.get(turn.key)
        if response is not None and response.pod is reservation.pod and _fits(response, turn):
            reservation.response, reservation.expected = response, turn.blocks

    def record_response(self, reservation: Reservation, tokens: int, blocks: int) -> None:
        """Record the length of the response to the prompt of a reservation that is not settled yet."""
        spans, pod = reservation.spans, reservation.pod
        if len(spans) != 1 or pod.retired:
            return
        ((chain, length, _, path),) = spans
        if length < len(chain):
            return
        holding = path[-1]
        response = holding.response
        # The usual prompt gets its first response: only what a match could see changes the version.
        if response is None or response.tokens != tokens or self._forest.responses.get(chain[-1]) is not response:
            self._forest.record_response(pod, holding, chain[-1], tokens, blocks)
            self.version += 1

    def prove(self, reservation: Reservation) -> None:
        """Record that the response has started, so the prompt is computed: other requests need not wait for its end."""
        pod, now = reservation.pod, self._now()
        for holding in reservation.unproven(self._forest):
            holding.used_at = now
            holding.segment.open |= pod.bit
            self.version += 1

    def is_stuck(self, reservation: Reservation) -> bool:
        """Return whether a match ignores its blocks because many requests wait for them."""
        bit = reservation.pod.bit
        return any(not holding.segment.open & bit for holding in reservation.unproven(self._forest))

    def lost(self, endpoint: Endpoint) -> None:
        """Forget a pod that has lost its cache."""
        self.forget(endpoint)

    def observe(self, reservation: Reservation, prompt_tokens: int, cached_tokens: int) -> bool:
        """Learn from the usage of a prompt that is about to be confirmed. Return False if it proved that the pod lost
        its cache; the pod is then forgotten, including this prompt."""
        if self._eviction.learn(reservation, prompt_tokens, cached_tokens):
            return True
        self.lost(reservation.pod.endpoint)
        return False

    def forget_share(self, endpoint: Endpoint, share: float) -> None:
        """Record that only this share of the predicted hits occurred."""
        if pod := self._pods.get(endpoint):
            self._eviction.forget_share(pod, share)

    def confirm(self, reservation: Reservation) -> None:
        """Record that the pod has computed the prompt and holds it."""
        self.settle(reservation, computed=True)

    def release(self, reservation: Reservation) -> None:
        """Record that the pod did not compute the prompt. Blocks that no other request confirmed or waits for are
        removed."""
        self.settle(reservation, computed=False)

    def settle(self, reservation: Reservation, computed: bool) -> None:
        """Confirm or release the reservation unless that was done."""
        pod, now = reservation.pod, self._now()
        if pod.retired or reservation.settled:
            return
        reservation.settled = True
        response = reservation.response
        if computed and response is not None and response.holding.response is response:
            self._forest.drop_response(response)  # It is a part of the computed prompt now.
            self.version += 1
        for chain, length, _, path in reservation.spans:
            left = length
            for holding in path:
                left -= len(holding.segment.hashes)
            if left:  # Some were cut meanwhile.
                path = self._forest.path(pod, chain, length)
            for holding in reversed(path):
                holding.pins -= 1
                if holding.used_at is None and not self._settle_provisional(pod, holding, computed, now):
                    continue
                if not holding.pins:
                    pod.pinned -= holding.segment.blocks
                    holding.used_at = now
                    if pod.ring.older is not holding:
                        pod.make_newest(holding)
        if now >= self._eviction.due_at or pod.blocks + pod.response_blocks > pod.limit:
            self._tidy(pod, now)

    def forget(self, endpoint: Endpoint) -> None:
        """Forget the pod at once; its reservations become void."""
        pod = self._pods.pop(endpoint, None)
        if pod is not None:
            self.version += 1
            self._forest.retire(pod)
            if not self._forest.clear(WORK):
                self._eviction.due_at = -math.inf

    def prediction_error(self, endpoint: Endpoint) -> float:
        """Return the recent mean difference of the cached tokens that were predicted and that responses reported, as a
        share of the prompts."""
        pod = self._pods.get(endpoint)
        return pod.wrong_tokens / max(1.0, pod.prompt_tokens) if pod is not None else 0.0

    def blocks(self, endpoint: Endpoint) -> int:
        """Return the number of blocks that the pod is assumed to hold, including provisional ones."""
        pod = self._pods.get(endpoint)
        return pod.blocks if pod is not None else 0

    @property
    def memories(self) -> Collection[PodMemory]:
        """The state per pod, read-only."""
        return self._pods.values()

    @property
    def pairs(self) -> int:
        """(block, pod) pairs in memory, including the pairs of forgotten pods until they are cleared."""
        return self._forest.pairs

    @property
    def bytes(self) -> int:
        """Upper bound of the memory in use."""
        return self._forest.bytes

    def _memory_of(self, endpoint: Endpoint, capacity: int) -> PodMemory:
        pod = self._pods.get(endpoint) or self._admit(endpoint)
        if pod.capacity != capacity:
            pod.capacity = capacity
            self._eviction.due_at = -math.inf
        return pod

    def _admit(self, endpoint: Endpoint) -> PodMemory:
        pod = self._pods[endpoint] = self._forest.admit(endpoint)
        self._eviction.due_at = -math.inf
        return pod

    def _claim(self, pod: PodMemory, chain: Chain) -> Span:
        """Pin the whole segments that the pod is known to hold, which is all of most chains."""
        segments, held, total = self._forest.segments, pod.held, len(chain)
        path: list[Holding] = []
        at = 0
        while at < total:
            segment = segments.get(chain[at])
            if segment is None:
                break
            holding = held.get(segment)
            if holding is None or holding.used_at is None:
                break
            hashes = segment.hashes
            end = at + len(hashes)
            if end > total or hashes[-1] != chain[end - 1]:
                break
            if not holding.pins:
                pinned = pod.pinned + segment.blocks
                if pinned > pod.capacity:
                    break
                pod.pinned = pinned
            holding.pins += 1
            path.append(holding)
            at = end
        return (chain, at, at, path) if at == total else self._extend(pod, chain, at, path)

    def _extend(self, pod: PodMemory, chain: Chain, at: int, path: list[Holding]) -> Span:
        """Continue down the chain: pin existing segments, cut to size, and add missing ones while there is capacity."""
        forest, depths, total, known = self._forest, self._depths, len(chain), at
        full = forest.bytes >= self._eviction.max_bytes
        while at < total:
            segment = forest.segments.get(chain[at])
            holding = pod.held.get(segment) if segment is not None else None
            fitting = total - at
            if (holding is None or not holding.pins) and depths[total] - depths[at] > pod.capacity - pod.pinned:
                fitting = forest.fitting(at, pod.capacity - pod.pinned)
            if fitting <= 0 or (full and holding is None):
                break
            if segment is None:
                segment = forest.store(chain, at, at + fitting)
            elif (common := shared(segment.hashes, chain, at, fitting)) < len(segment.hashes):
                segment = forest.split(segment, common)
            if holding is None:
                holding = forest.hold(pod, segment)
            else:
                holding = pod.held[segment]
                known += len(segment.hashes) if holding.used_at is not None else 0
            if not holding.pins:
                pod.pinned += holding.segment.blocks
            holding.pins += 1
            if holding.used_at is None and holding.pins >= self._max_siblings:
                holding.segment.open &= ~pod.bit
                self.is_crowded = True
            path.append(holding)
            at += len(segment.hashes)
        self._eviction.due_at = -math.inf
        return chain, at, known, path

    def _settle_provisional(self, pod: PodMemory, holding: Holding, computed: bool, now: float) -> bool:
        """Confirm provisional blocks if they are `computed`; else remove them if no request waits for them. Return
        whether they are confirmed."""
        if computed:
            holding.used_at = now
        elif not holding.pins:
            pod.pinned -= holding.segment.blocks
            self._forest.drop(pod, holding)
            self.version += 1
            return False
        if not holding.segment.open & pod.bit and (computed or holding.pins < self._max_siblings):
            holding.segment.open |= pod.bit
            self.version += 1
        return computed

    def _tidy(self, pod: PodMemory, now: float) -> None:
        """Handle a change that a match could see."""
        self.version += 1
        self._eviction.run(pod, now)


def _fits(response: CachedResponse, turn: ConversationTurn) -> bool:
    """Return whether it may be the response in the prompt, which can be shorter, for example without its reasoning.
    A token has at least one byte, so a response with more tokens than these bytes cannot be the one in the prompt."""
    return not response.pod.retired and response.tokens <= turn.response_bytes
