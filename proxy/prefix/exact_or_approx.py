"""Two matches of one prompt in one: what pods say where that is all there is to say, and a guess elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.endpoint import Endpoint
from proxy.prefix.exact_match import ExactMatch
from proxy.prefix.keys import PrefixMatch


class ExactOrApproxMatch(PrefixMatch):
    """In the exact one's blocks. Of a pod that is not fully known, what it said is the least it has."""

    __slots__ = ("_approx", "_exact", "block_size", "total")

    def __init__(self, exact: ExactMatch, approx: PrefixMatch) -> None:
        self._exact = exact
        self._approx = approx
        self.block_size = exact.block_size
        self.total = exact.total

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        exact, total = self._exact.matched(endpoints), self.total
        sure = list(map(self._exact.is_sure, endpoints))
        if all(sure) or not self._approx.total:
            return exact
        share = total / self._approx.total
        guessed = self._approx.matched(endpoints)
        return [
            blocks if known else max(blocks, min(total, int(guess * share)))
            for blocks, known, guess in zip(exact, sure, guessed, strict=True)
        ]

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> list[int]:
        tokens, size = self._exact.tokens, self.block_size
        return [tokens - blocks * size for blocks in self.matched(endpoints)]
