"""The hash chains of one request, matched against the index whenever a scorer asks."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.endpoint import Endpoint
from proxy.prefix.hashing import Chain, Turn
from proxy.prefix.index import PrefixIndex
from proxy.prefix.keys import Lacks, PrefixMatch


class ChainMatch(PrefixMatch):
    """Lives as long as the request. Once `frozen` it keeps its answers: a request's own blocks are no hits."""

    def __init__(self, index: PrefixIndex, chains: tuple[Chain, ...], block_size: int) -> None:
        self.block_size = block_size
        self.chains = chains
        self.total = index.depth_of(len(chains[0])) if len(chains) == 1 else sum(index.depth_of(len(c)) for c in chains)
        self.frozen = False
        self.turn: Turn | None = None
        """Where the one prompt of a conversation goes on."""
        self._index = index
        self._version = -1
        self._depths: dict[Endpoint, int] = {}

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        self._look()
        return [self._depths.get(endpoint, 0) for endpoint in endpoints]

    def blocks_on(self, endpoint: Endpoint) -> int:
        if self._version != self._index.version:
            self._look()
        return self._depths.get(endpoint, 0)

    def lacks(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> Lacks:
        self._look()
        size, cold = self.block_size, self.total * self.block_size
        return (cold if cold > prompt_tokens else prompt_tokens), size, self._depths

    def _look(self) -> None:
        """Into the index, if anything has changed there."""
        index = self._index
        if self._version != index.version and not self.frozen:
            self._version = index.version
            self._depths = index.match(self.chains[0]) if len(self.chains) == 1 else self._summed()
            if self.turn is not None:
                index.add_answer(self._depths, self.turn)

    def _summed(self) -> dict[Endpoint, int]:
        summed: dict[Endpoint, int] = {}
        for chain in self.chains:
            for endpoint, depth in self._index.match(chain).items():
                summed[endpoint] = summed.get(endpoint, 0) + depth
        return summed
