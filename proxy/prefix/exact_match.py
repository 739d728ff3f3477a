"""A prompt's token ids, matched against what pods say they hold."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import repeat
from math import gcd

from proxy.core.endpoint import Endpoint
from proxy.core.request import BYTES_PER_TOKEN, Prompt
from proxy.prefix.exact import ExactIndex
from proxy.prefix.hashing import Chain, namespace
from proxy.prefix.keys import PrefixMatch
from proxy.prefix.shelves import chained

Kind = tuple[int, str]
"""Tokens per block, and the LoRA adapter that the request's model is on the pod."""


class ExactMatch(PrefixMatch):
    """Lives as long as the request. Once `frozen` it keeps its answers: a request's own blocks are no hits.

    Blocks are counted as engines would: only full ones, and never the prompt's last token, which is always computed.
    Where pods have blocks of several sizes, `block_size` is the largest that divides them all.
    """

    __slots__ = (
        *("_chains", "_depths", "_index", "_kinds", "_model", "_prompt", "_version"),
        *("block_size", "frozen", "tokens", "total"),
    )

    def __init__(self, index: ExactIndex, prompt: Prompt, model: str, endpoints: Sequence[Endpoint]) -> None:
        self._index = index
        self._prompt = prompt
        self._model = model
        self._kinds: dict[Kind, list[Endpoint]] = {}
        self._meet(endpoints)
        self._chains: dict[Kind, list[Chain]] = {}
        self._depths: dict[Endpoint, int] = {}
        self._version = -1
        self.frozen = False
        self.tokens = prompt.tokens
        self.block_size = gcd(*[size for size, _ in self._kinds]) or 1
        self.total = sum([_hits(part, self.block_size) for part in prompt.parts])

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        if self._version != self._index.version and not self.frozen:
            self._version = self._index.version
            for kind, members in self._kinds.items():
                self._depths.update(zip(members, self._matched(kind, members), strict=True))
        depths = self._depths
        if not depths.keys() >= set(endpoints) and not self.frozen:
            strangers = [endpoint for endpoint in endpoints if endpoint not in depths]
            for kind, members in self._meet(strangers).items():
                depths.update(zip(members, self._matched(kind, members), strict=True))
        return list(map(depths.get, endpoints, repeat(0)))

    def is_sure(self, endpoint: Endpoint) -> bool:
        """Whether what the endpoint said is all there is."""
        return self._index.is_sure(endpoint)

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> list[int]:
        """`prompt_tokens` is an estimate; here they have been counted."""
        tokens, size = self.tokens, self.block_size
        return [tokens - blocks * size for blocks in self.matched(endpoints)]

    def reserved(self, endpoint: Endpoint) -> list[tuple[Chain, int]]:
        """All full blocks of each part, and how many of them the endpoint has or expects."""
        kind = next((kind for kind, members in self._kinds.items() if endpoint in members), None)
        if kind is None:
            return []
        return [(chain, self._index.depths(chain, (endpoint,))[0]) for chain in self._chained(kind)]

    def _meet(self, endpoints: Sequence[Endpoint]) -> dict[Kind, list[Endpoint]]:
        """The kinds of these endpoints, which are known from here on."""
        met: dict[Kind, list[Endpoint]] = {}
        for endpoint in endpoints:
            kind = (self._index.block_size(endpoint), self._model if self._model in endpoint.adapters else "")
            met.setdefault(kind, []).append(endpoint)
            self._kinds.setdefault(kind, []).append(endpoint)
        return met

    def _matched(self, kind: Kind, members: Sequence[Endpoint]) -> list[int]:
        size = kind[0]
        sums = [0] * len(members)
        for chain, part in zip(self._chained(kind), self._prompt.parts, strict=True):
            most = _hits(part, size)
            depths = self._index.depths(chain, members)
            sums = [tokens + min(depth, most) * size for tokens, depth in zip(sums, depths, strict=True)]
        return [tokens // self.block_size for tokens in sums]

    def _chained(self, kind: Kind) -> list[Chain]:
        chains = self._chains.get(kind)
        if chains is None:
            size, adapter = kind
            seed = namespace(adapter, self._prompt.salt)
            chains = self._chains[kind] = [_chain(part, seed, size * BYTES_PER_TOKEN) for part in self._prompt.parts]
        return chains


def _chain(part: bytes, seed: int, size: int) -> Chain:
    return chained(map(BytesIO(part).read, repeat(size, len(part) // size)), seed)


def _hits(part: bytes, block_size: int) -> int:
    """The most blocks of a prompt that a pod can have cached."""
    return max(0, len(part) // BYTES_PER_TOKEN - 1) // block_size
