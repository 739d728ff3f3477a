"""Prefill a prompt on another pod if the decode pod has little of it cached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.core.endpoint import Endpoint
from proxy.core.params import param
from proxy.core.plugin import Decider, plugin
from proxy.core.request import DataKey, InferenceRequest
from proxy.prefix.match import TOKENIZED_PROMPT, PrefixMatch, reads_prefix_match


@plugin("prefix-based-pd-decider")
@dataclass(slots=True)
class PrefixBasedPdDecider(Decider):
    """Splits a request if its prompt has at least `promptTokens` and the decode pod lacks at least `nonCachedTokens` of
    them. Does not split if these are 0 or if the cached tokens are unknown."""

    uses: ClassVar[tuple[DataKey[Any], ...]] = (TOKENIZED_PROMPT,)
    non_cached_tokens: int = param(
        0, "smallest number of prompt tokens that the decode pod lacks; 0: never split", at_least=0
    )
    prompt_tokens: int = param(0, "length of the shortest prompt that is split, in tokens; 0: any", at_least=0)
    match: DataKey[PrefixMatch] = reads_prefix_match()

    def wants(self, request: InferenceRequest, decode: Endpoint) -> bool:
        least, match = self.non_cached_tokens, request.state.read(self.match)
        tokens = (request.state.read(TOKENIZED_PROMPT) or request.prompt).tokens
        if not least or match is None or tokens < self.prompt_tokens:
            return False
        return tokens - match.blocks_on(decode) * match.block_size >= least
