"""Request data of this room."""

from __future__ import annotations

from collections.abc import Sequence
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
        size, total = self.block_size, self.total
        cold = max(prompt_tokens, total * size)
        return [cold - size * (held if held < total else total) for held in self.matched(endpoints)]


PREFIX_MATCH: DataKey[PrefixMatch] = DataKey("PrefixCacheMatchInfo")

TOKENIZED_PROMPT: DataKey[Prompt] = DataKey("TokenizedPrompt")

TOKEN_IDS: DataKey[Prompt] = DataKey("TokenIds")
"""The same, exactly as the engine's tokenizer makes it; absent where that is not certain."""
