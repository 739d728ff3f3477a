"""Request data of this room."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.request import Prompt


class PrefixMatch(Protocol):
    """The hash chain of a prompt, ready to be matched; matching reads the index at the moment of the call."""

    __slots__ = ()

    block_size: int
    """Tokens per block."""
    total: int
    """Blocks of the prompt (all prompts of a batch); what is hashed last counts in full, partial or not: that is one
    block, or 1/32 of a long prompt at most."""

    def matched(self, endpoints: Sequence[Endpoint]) -> Sequence[int]:
        """Blocks each endpoint holds from the start on, without a gap; in the order of the endpoints."""

    def blocks_on(self, endpoint: Endpoint) -> int:
        """`matched` of one."""
        (blocks,) = self.matched((endpoint,))
        return blocks

    def lengths(self, endpoints: Sequence[Endpoint]) -> Sequence[int]:
        """The same in tokens."""
        size = self.block_size
        return [blocks * size for blocks in self.matched(endpoints)]

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> Sequence[int]:
        """Tokens of the blocks each endpoint lacks, and those of the prompt beyond its blocks."""
        size, total, missing = self.block_size, self.total, []
        cold = total * size
        if prompt_tokens > cold:
            cold = prompt_tokens
        for held in self.matched(endpoints):
            missing.append(cold - size * (held if held < total else total))  # noqa: PERF401  # a frame less
        return missing

    def lacks(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> Lacks:
        """What `missing` says, for those who would rather go through the endpoints once."""
        return 0, -1, dict(zip(endpoints, self.missing(endpoints, prompt_tokens), strict=True))


Lacks = tuple[int, int, Mapping[Endpoint, int]]
"""(tokens that are missing where nothing is held, how many fewer for each of what is counted, how many of these each
endpoint has that holds any)."""


def most_cached(prompt_tokens: int, block_size: int) -> int:
    """Tokens of a prompt that an engine can have cached: full blocks of its own, 0 if it does not tell their size, and
    never the last token, which is always computed."""
    size = block_size or 1
    return (prompt_tokens - 1) // size * size if prompt_tokens > 0 else 0


PREFIX_MATCH: DataKey[PrefixMatch] = DataKey("PrefixCacheMatchInfo", value_type=PrefixMatch)

TOKENIZED_PROMPT: DataKey[Prompt] = DataKey("TokenizedPrompt", value_type=Prompt)

TOKEN_IDS: DataKey[Prompt] = DataKey("TokenIds", value_type=Prompt)
"""The same, exactly as the engine's tokenizer makes it; absent where that is not certain."""
