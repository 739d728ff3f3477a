"""The prefix index as one would write it without a thought for cost: every pod remembers every block by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

Prefix = tuple[int, ...]


@dataclass
class Block:
    pins: int = 0
    used_at: float | None = None
    turn: int = 0
    response: int = 0
    """The blocks of the pod's response to the prompt that ends here."""
    identity: object = None
    """A new object for each response; a response that replaces another keeps its object."""


@dataclass
class Pod:
    depths: Sequence[int]
    capacity: int = 0
    blocks: dict[Prefix, Block] = field(default_factory=dict)
    horizon: float = -math.inf

    def size(self, prefix: Prefix) -> int:
        """Return the size of its last element, in blocks."""
        return self.depths[len(prefix)] - self.depths[len(prefix) - 1]

    @property
    def used(self) -> int:
        return sum(map(self.size, self.blocks))

    @property
    def responses(self) -> int:
        return sum(block.response for block in self.blocks.values())

    @property
    def pinned(self) -> int:
        return sum(self.size(prefix) for prefix, block in self.blocks.items() if block.pins)

    def idle(self) -> list[Prefix]:
        """Return the unpinned prefixes, the longest unused first."""
        return sorted((p for p, b in self.blocks.items() if not b.pins), key=lambda p: self.blocks[p].turn)


@dataclass
class Claim:
    pod: Pod
    spans: list[Prefix]
    behind: tuple[Prefix, object] | None = None
    """The prompt before the response that this one continues, and that response."""


class NaiveIndex:
    """A prefix index without optimisations.

    Chains are tuples of contents, so a block is the tuple up to its end. The n-th block is as large as the difference
    of its depths."""

    def __init__(self, max_siblings: int, ttl: float, depths: Sequence[int]) -> None:
        self.depths = depths
        self.max_siblings = max_siblings
        self.ttl = ttl
        self.now = 0.0
        self.pods: dict[str, Pod] = {}
        self.answerers: dict[Prefix, Block] = {}
        self.turns = count()

    def match(self, chain: Prefix, name: str) -> int:
        blocks = self.pods[name].blocks if name in self.pods else {}
        depth = 0
        while depth < len(chain) and (block := blocks.get(chain[: depth + 1])) and self.counts(block):
            depth += 1
        return self.depths[depth]

    def counts(self, block: Block) -> bool:
        return block.used_at is not None or block.pins < self.max_siblings

    def match_turn(self, before: Prefix, chain: Prefix, name: str, end: int) -> int:
        """Match a conversation that continues the response to `before`, which ends at `end` blocks."""
        depth, pod = self.match(chain, name), self.pods.get(name)
        block = pod.blocks.get(before) if pod else None
        known = block is not None and block.response and self.answerers.get(before) is block
        return max(depth, end) if known and depth >= self.depths[len(before)] else depth

    def responded(self, claim: Claim, chain: Prefix, blocks: int) -> None:
        if self.alive(claim) and claim.spans == [chain]:
            self.answerers[chain] = block = claim.pod.blocks[chain]
            block.identity = block.identity if block.response else object()
            block.response = blocks

    def go_on(self, claim: Claim, before: Prefix) -> None:
        block = claim.pod.blocks.get(before)
        if block and block.response and self.answerers.get(before) is block:
            claim.behind = before, block.identity

    def prove(self, claim: Claim) -> None:
        for span in claim.spans if self.alive(claim) else ():
            for depth in range(len(span), 0, -1):
                block = claim.pod.blocks[span[:depth]]
                block.used_at = self.now if block.used_at is None else block.used_at

    def distrust(self, name: str) -> None:
        """Drop the idle blocks of a pod that had none of the expected ones."""
        if pod := self.pods.get(name):
            idle = [pod.blocks[prefix].used_at or 0.0 for prefix in pod.idle()]
            pod.horizon = max(idle, default=pod.horizon)

    def alive(self, claim: Claim) -> bool:
        return any(pod is claim.pod for pod in self.pods.values())

    def reserve(self, chains: Sequence[Prefix], name: str, capacity: int) -> Claim:
        pod = self.pods.setdefault(name, Pod(self.depths))
        pod.capacity = capacity
        claim = Claim(pod, [self.claim(pod, chain) for chain in chains])
        self.tidy(pod)
        return claim

    def claim(self, pod: Pod, chain: Prefix) -> Prefix:
        for depth in range(len(chain)):
            prefix = chain[: depth + 1]
            block = pod.blocks.get(prefix)
            if (block is None or not block.pins) and pod.pinned + pod.size(prefix) > pod.capacity:
                return chain[:depth]
            pod.blocks.setdefault(prefix, Block()).pins += 1
        return chain

    def settle(self, claim: Claim, computed: bool) -> None:
        if not self.alive(claim):
            return
        if computed and claim.behind:
            before, identity = claim.behind
            if (block := claim.pod.blocks.get(before)) and block.identity is identity:
                block.response = 0
        for span in claim.spans:
            for depth in range(len(span), 0, -1):
                self.free(claim.pod, span[:depth], computed)
        self.tidy(claim.pod)

    def free(self, pod: Pod, prefix: Prefix, computed: bool) -> None:
        block = pod.blocks[prefix]
        block.pins -= 1
        if computed or (block.used_at is not None and not block.pins):
            block.used_at = self.now
        block.turn = next(self.turns)
        if block.used_at is None and not block.pins:
            del pod.blocks[prefix]

    def forget(self, name: str) -> None:
        self.pods.pop(name, None)

    def tidy(self, pod: Pod) -> None:
        for prefix in pod.idle():
            if pod.used + pod.responses > pod.capacity:
                pod.blocks[prefix].response = 0
            if pod.used + pod.responses > pod.capacity:
                del pod.blocks[prefix]
        for other in self.pods.values():
            for prefix in other.idle():
                used_at = other.blocks[prefix].used_at
                if used_at is not None and (self.now - used_at >= self.ttl or used_at <= other.horizon):
                    del other.blocks[prefix]
