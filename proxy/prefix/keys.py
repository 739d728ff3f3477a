"""Request data of this room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.request import Prompt


class PrefixMatch(Protocol):
    """The hash chain of a prompt, ready to be matched; matching reads the index at the moment of the call."""

    @property
    def block_size(self) -> int:
        """Tokens per block."""

    @property
    def total(self) -> int:
        """Blocks of the prompt (all prompts of a batch); a last partial block counts."""

    def matched(self, endpoints: Sequence[Endpoint]) -> Sequence[int]:
        """Blocks each endpoint holds from the start on, without a gap; in the order of the endpoints."""


PREFIX_MATCH: DataKey[PrefixMatch] = DataKey("PrefixCacheMatchInfo")

TOKENIZED_PROMPT: DataKey[Prompt] = DataKey("TokenizedPrompt")


def uncached_tokens(match: PrefixMatch | None, prompt_tokens: int, endpoints: Sequence[Endpoint]) -> list[int]:
    """Prompt tokens each endpoint would have to prefill; all of them where nothing is known."""
    if match is None:
        return [prompt_tokens] * len(endpoints)
    return [max(0, prompt_tokens - blocks * match.block_size) for blocks in match.matched(endpoints)]
