"""What one leg pins on one pod."""

from __future__ import annotations

from operator import itemgetter

from proxy.prefix.forest import Forest
from proxy.prefix.hashing import Chain
from proxy.prefix.holdings import Answer, Holding, PodMemory

Span = tuple[Chain, int, int, list[Holding]]
"""A chain, how many of its hashes are pinned, how many of these an earlier answer had confirmed, and what they were
pinned as, from the start on."""


class Reservation:
    """Of one leg, until it is confirmed or released."""

    expected = 0
    """Blocks up to the end of the answer."""

    def __init__(self, pod: PodMemory, spans: list[Span]) -> None:
        self.pod = pod
        self.spans = spans
        self.settled = False
        self.answer: Answer | None = None
        """Of the pod, if the prompt goes on behind it."""

    @property
    def chains(self) -> list[Chain]:
        return list(map(_CHAIN, self.spans))

    def unproven(self, forest: Forest) -> list[Holding]:
        """What it pins that no answer has confirmed."""
        if self.pod.retired or self.settled:
            return []
        ways = [forest.way(self.pod, chain, length) for chain, length, _, _ in self.spans]
        return [holding for way in ways for holding in way if holding.used_at is None]


_CHAIN = itemgetter(0)
