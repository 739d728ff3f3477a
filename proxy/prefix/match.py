"""The part of a prompt that each endpoint holds: the request data of the prefix producers, for both indexes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import repeat
from math import gcd
from typing import TYPE_CHECKING, Any, Protocol

from proxy.core.endpoint import Endpoint
from proxy.core.plugin import reads
from proxy.core.request import BYTES_PER_TOKEN, DataKey, Prompt
from proxy.prefix.hashing import Chain, ConversationTurn, chained, namespace

if TYPE_CHECKING:
    from proxy.prefix.exact import ExactIndex
    from proxy.prefix.index import PrefixIndex


class PrefixMatch(Protocol):
    """The hash chain of a prompt; matching reads the index at the time of the call."""

    __slots__ = ()

    block_size: int
    """Tokens per block."""
    total: int
    """Blocks of the prompt (all prompts of a batch). The last hash counts in full even if it is partial: one block, or
    1/32 of a long prompt at most."""

    def matched(self, endpoints: Sequence[Endpoint]) -> Sequence[int]:
        """Return the leading blocks that each endpoint holds without a gap, in the order of the endpoints."""

    def blocks_on(self, endpoint: Endpoint) -> int:
        """Return `matched` of one endpoint."""
        (blocks,) = self.matched((endpoint,))
        return blocks

    def lengths(self, endpoints: Sequence[Endpoint]) -> Sequence[int]:
        """Return `matched` in tokens."""
        size = self.block_size
        return [blocks * size for blocks in self.matched(endpoints)]

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> Sequence[int]:
        """Return the tokens of the blocks that each endpoint lacks, and of the prompt beyond its blocks."""
        size, total, missing = self.block_size, self.total, []
        cold = total * size
        if prompt_tokens > cold:
            cold = prompt_tokens
        for held in self.matched(endpoints):
            missing.append(cold - size * (held if held < total else total))  # noqa: PERF401  # a frame less
        return missing

    def lacks(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> Lacks:
        """Return the uncached tokens of the prompt for callers that go through the endpoints once. Here the first
        number is 0, and the units are what `missing` returns, so each counts -1."""
        return 0, -1, dict(zip(endpoints, self.missing(endpoints, prompt_tokens), strict=True))


Lacks = tuple[int, int, Mapping[Endpoint, int]]
"""(uncached tokens of an endpoint without a match, tokens per counted unit, units of each endpoint with a match). The
units of a prompt whose last block is partial may be more than its tokens: what is left counts as 0."""


def most_cached(prompt_tokens: int, block_size: int) -> int:
    """Return the tokens of a prompt that an engine can have cached: whole blocks, or tokens if
    `block_size` is 0 (unknown), and never the last token, which is always computed."""
    size = block_size or 1
    return (prompt_tokens - 1) // size * size if prompt_tokens > 0 else 0


PREFIX_MATCH: DataKey[PrefixMatch] = DataKey("PrefixCacheMatchInfo", value_type=PrefixMatch)


def reads_prefix_match() -> Any:
    """Declare the field of a plugin with the key of the prefix matches that it reads."""
    doc = "producer whose prefix matches are read; empty: the first one"
    return reads(PREFIX_MATCH, "prefixMatchInfoProducerName", doc)


def requires_prefix_match() -> Any:
    """Declare the field of a plugin with the key of prefix matches that only others read."""
    doc = "required producer of prefix matches"
    return reads(PREFIX_MATCH, "prefixMatchInfoProducerName", doc, if_named=True)


TOKENIZED_PROMPT: DataKey[Prompt] = DataKey("TokenizedPrompt", value_type=Prompt)

TOKEN_IDS: DataKey[Prompt] = DataKey("TokenIds", value_type=Prompt)
"""The token ids exactly as the engine's tokenizer produces them; absent where they are uncertain."""


class ChainMatch(PrefixMatch):
    """The match of one request. Once `frozen` it does not change: a request's own blocks are no hits."""

    def __init__(self, index: PrefixIndex, chains: tuple[Chain, ...], block_size: int) -> None:
        self.block_size = block_size
        self.chains = chains
        self.total = index.depth_of(len(chains[0])) if len(chains) == 1 else sum(index.depth_of(len(c)) for c in chains)
        self.frozen = False
        self.turn: ConversationTurn | None = None
        """Where the single prompt of a conversation continues."""
        self._index = index
        self._version = -1
        self._depths: dict[Endpoint, int] = {}

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        self._match()
        return [self._depths.get(endpoint, 0) for endpoint in endpoints]

    def blocks_on(self, endpoint: Endpoint) -> int:
        if self._version != self._index.version:
            self._match()
        return self._depths.get(endpoint, 0)

    def lacks(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> Lacks:
        self._match()
        return prompt_tokens, self.block_size, self._depths

    def _match(self) -> None:
        """Match again if the index has changed."""
        index = self._index
        if self._version != index.version and not self.frozen:
            self._version = index.version
            self._depths = index.match(self.chains[0]) if len(self.chains) == 1 else self._summed()
            if self.turn is not None:
                index.add_response(self._depths, self.turn)

    def _summed(self) -> dict[Endpoint, int]:
        summed: dict[Endpoint, int] = {}
        for chain in self.chains:
            for endpoint, depth in self._index.match(chain).items():
                summed[endpoint] = summed.get(endpoint, 0) + depth
        return summed


Kind = tuple[int, str]
"""Tokens per block, and the LoRA adapter on the pod that serves the request's model."""


class ExactMatch(PrefixMatch):
    """The match of one request. Once `frozen` it does not change: a request's own blocks are no hits.

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
        """Return whether all blocks of the endpoint are known."""
        return self._index.is_sure(endpoint)

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> list[int]:
        """`prompt_tokens` is an estimate; here the tokens are counted."""
        tokens, size = self.tokens, self.block_size
        return [tokens - blocks * size for blocks in self.matched(endpoints)]

    def reserved(self, endpoint: Endpoint) -> list[tuple[Chain, int]]:
        """Return all whole blocks of each part, and how many of them the endpoint has or expects."""
        kind = next((kind for kind, members in self._kinds.items() if endpoint in members), None)
        if kind is None:
            return []
        return [(chain, self._index.depths(chain, (endpoint,))[0]) for chain in self._chained(kind)]

    def _meet(self, endpoints: Sequence[Endpoint]) -> dict[Kind, list[Endpoint]]:
        """Return the kinds of these endpoints and cache them."""
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
            size *= BYTES_PER_TOKEN
            chains = self._chains[kind] = [
                chained(map(BytesIO(part).read, repeat(size, len(part) // size)), seed) for part in self._prompt.parts
            ]
        return chains


def _hits(part: bytes, block_size: int) -> int:
    """Return the largest number of blocks of a prompt that a pod can have cached."""
    return max(0, len(part) // BYTES_PER_TOKEN - 1) // block_size


class ExactOrApproxMatch(PrefixMatch):
    """An exact match in its blocks; for pods that are not fully known, at least what is known exactly."""

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
