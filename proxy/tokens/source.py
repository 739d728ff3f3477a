"""Where plugins get their tokens from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.core.ports import Tokenizers, Tokens
from proxy.core.state import Draft
from proxy.core.tokens import LocalModel, RemoteTokenizer
from proxy.tokens.remote import RemoteTokens

MISSING = "needs the package {name}: pip install 'kvlane[precise]'"


@dataclass(frozen=True, slots=True)
class TokenSource(Tokenizers):
    """`wall` is the time that templates may show. What is opened belongs to the plugin that asked for it."""

    wall: Callable[[], float]
    draft: Draft = field(compare=False)

    def local(self, model: LocalModel) -> Tokens:
        try:
            from proxy.tokens.local import LocalTokens  # needs an extra
        except ImportError as error:
            raise ValueError(MISSING.format(name=error.name)) from None
        return self.draft.get(object(), lambda: LocalTokens(model, self.wall))

    def remote(self, tokenizer: RemoteTokenizer) -> Tokens:
        return self.draft.get(object(), lambda: RemoteTokens(tokenizer))
