"""The hash chains of one request, matched against the index whenever a scorer asks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

from proxy.core.endpoint import Endpoint
from proxy.prefix.hashing import Chain
from proxy.prefix.index import PrefixIndex
from proxy.prefix.keys import PrefixMatch


class ChainMatch(PrefixMatch):
    """Lives as long as the request. Once `frozen` it keeps its answers: a request's own blocks are no hits."""

    __slots__ = ("_depths", "_index", "_version", "block_size", "chains", "frozen", "total")
    _depths: dict[Endpoint, int]

    def __init__(self, index: PrefixIndex, chains: tuple[Chain, ...], block_size: int) -> None:
        self.block_size = block_size
        self.chains = chains
        self.total = sum(map(index.depth_of, map(len, chains)))
        self.frozen = False
        self._index = index
        self._version = -1

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        index = self._index
        if self._version != index.version and not self.frozen:
            self._version = index.version
            self._depths = index.match(self.chains[0]) if len(self.chains) == 1 else self._summed()
        return list(map(self._depths.get, endpoints, repeat(0)))

    def _summed(self) -> dict[Endpoint, int]:
        summed: dict[Endpoint, int] = {}
        for chain in self.chains:
            for endpoint, depth in self._index.match(chain).items():
                summed[endpoint] = summed.get(endpoint, 0) + depth
        return summed
