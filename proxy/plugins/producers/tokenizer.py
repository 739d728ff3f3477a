"""The deprecated name of token-producer with exact token ids."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.core.plugin import plugin
from proxy.core.ports import PromptTokenizer, RemoteTokenizer
from proxy.plugins.producers.token import TokenProducer


@plugin("tokenizer")
@dataclass
class Tokenizer(TokenProducer):
    """As token-producer, but without a mode it requests token ids from the pods. Deprecated: use token-producer."""

    def _opened(self) -> PromptTokenizer | None:
        chosen = super()._opened()
        return self.tokenizers.remote(RemoteTokenizer("", self.model_name, 0.3)) if chosen is None else chosen
