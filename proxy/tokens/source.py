"""Where plugins get their tokens from; closed with the proxy."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from proxy.core.ports import Tokenizers, Tokens
from proxy.core.tokens import LocalModel, RemoteTokenizer
from proxy.tokens.remote import RemoteTokens

MISSING = "needs the package {name}: pip install 'kvlane[precise]'"


class _Closable(Protocol):
    async def close(self) -> None: ...


class TokenSource(Tokenizers):
    """`wall` is the time that templates may show. `async with` it while what it opened is used."""

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._opened: list[_Closable] = []

    def local(self, model: LocalModel) -> Tokens:
        try:
            from proxy.tokens.local import LocalTokens  # needs an extra
        except ImportError as error:
            raise ValueError(MISSING.format(name=error.name)) from None
        tokens = LocalTokens(model, self._wall)
        self._opened.append(tokens)
        return tokens

    def remote(self, tokenizer: RemoteTokenizer) -> Tokens:
        tokens = RemoteTokens(tokenizer)
        self._opened.append(tokens)
        return tokens

    async def keep(self, wanted: Callable[[object], bool]) -> None:
        """Closes those that are not wanted any more."""
        closed = [tokens for tokens in self._opened if not wanted(tokens)]
        self._opened = [tokens for tokens in self._opened if tokens not in closed]
        for tokens in closed:
            await tokens.close()

    async def __aenter__(self) -> TokenSource:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for tokens in self._opened:
            await tokens.close()
