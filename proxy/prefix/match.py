"""The hash chains of one request, matched against the index whenever a scorer asks."""

from __future__ import annotations

from collections.abc import Sequence

from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange
from proxy.prefix.hashing import Chain
from proxy.prefix.index import PrefixIndex, Reservation
from proxy.prefix.keys import PrefixMatch


class ChainMatch(PrefixMatch):
    """And what the legs of its request have reserved; lives as long as the request.

    From the first reservation on it answers with what was there before: a request's own blocks are no hits.
    """

    __slots__ = ("_depths", "_frozen", "_index", "_reservations", "_version", "block_size", "chains", "total")

    def __init__(self, index: PrefixIndex, chains: tuple[Chain, ...], block_size: int) -> None:
        self.block_size = block_size
        self.chains = chains
        self.total = sum(map(len, chains))
        self._index = index
        self._version = -1
        self._frozen = False
        self._depths: dict[Endpoint, int] = {}
        self._reservations: dict[Exchange, Reservation] = {}

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        if not self._frozen and self._version != self._index.version:
            self._version = self._index.version
            self._depths = self._look_up()
        depths = self._depths
        return [depths.get(endpoint, 0) for endpoint in endpoints] if depths else [0] * len(endpoints)

    def reserve(self, exchange: Exchange, endpoint: Endpoint, capacity: int) -> int:
        """For one leg; returns the blocks that were there before the request."""
        (before,) = self.matched((endpoint,))
        self._frozen = True
        self._reservations[exchange] = self._index.reserve(self.chains, endpoint, capacity)
        return before

    def take_reservation(self, exchange: Exchange) -> Reservation | None:
        """The leg's, once: it is the caller's to settle."""
        return self._reservations.pop(exchange, None)

    def _look_up(self) -> dict[Endpoint, int]:
        if len(self.chains) == 1:
            return self._index.match(self.chains[0])
        summed: dict[Endpoint, int] = {}
        for chain in self.chains:
            for endpoint, depth in self._index.match(chain).items():
                summed[endpoint] = summed.get(endpoint, 0) + depth
        return summed
