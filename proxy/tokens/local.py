"""Token ids made here: at once for what is short, beside the event loop for what is not."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from proxy.core.clock import SystemClock
from proxy.core.endpoint import Endpoint
from proxy.core.ports import Tokens
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.tokens import LocalModel
from proxy.offload import Answer, OffloadPool, serve
from proxy.telemetry.lines import guard_standard_error
from proxy.tokens.chat import Uncertain
from proxy.tokens.model import Model

log = logging.getLogger(__name__)

AT_ONCE = 2048
"""Characters of text that no cache has: they take a millisecond. More go through a thread, since the tokenizer lets go
of the interpreter."""

LARGE = 64 * 1024
"""Bytes of a body that is read and rendered here. JSON and templates hold the interpreter, so what is larger goes to a
process of its own."""

MOST_WAITING = 4
"""Large bodies before one that is not waited for: their producers' time would be up."""


class LocalTokens(Tokens):
    """Raises ValueError, when made, for a model that cannot be read. The process for large bodies is started by the
    first one; it ends with `async with`."""

    def __init__(self, model: LocalModel, wall: Callable[[], float]) -> None:
        self._model = Model(model, wall)
        self._threads = ThreadPoolExecutor(1, "tokens")
        self._pool = OffloadPool("proxy.tokens.local", model)

    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        body = request.body
        parts = await (self._parts(request.path, body) if len(body) <= LARGE else self._apart(request.path, body))
        return Prompt(parts, request.prompt.salt) if parts else None

    async def __aenter__(self) -> LocalTokens:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._pool.close()
        self._threads.shutdown(wait=False)

    async def _parts(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        model = self._model
        try:
            rendered = model.render(path, body)
        except Uncertain as reason:
            log.debug("a prompt that is not tokenised: %s", reason)
            return None
        pieces, found, new = model.known(rendered)
        if new <= AT_ONCE:
            return model.parts(rendered, pieces, found)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, model.parts, rendered, pieces, found)

    async def _apart(self, path: str, body: bytes) -> tuple[bytes, ...] | None:
        if self._pool.pending >= MOST_WAITING:
            return None
        answered = await self._pool.ask(path, body)
        return tuple(answered[1]) if answered else None


def main() -> None:
    """Run the process that tokenises large bodies."""
    guard_standard_error()
    serve(_prepared)


def _prepared(settings: LocalModel) -> Answer:
    model = Model(settings, SystemClock().wall)

    def answer(path: str, body: bytes) -> tuple[None, tuple[bytes, ...]]:
        return None, model.parts_of(path, body) or ()

    return answer


if __name__ == "__main__":
    main()
