"""Bodies of requests that a gateway sends in pieces: whole, under the budget of the process."""

from __future__ import annotations

import asyncio

from proxy.core.errors import BadRequest
from proxy.extproc.call import EnvoyCall
from proxy.http.body import Budget, body_timed_out, too_large
from proxy.http.settings import Listen


class StreamedBodies:
    """Implements `http.service.Bodies`."""

    def __init__(self, settings: Listen, budget: Budget) -> None:
        self._settings = settings
        self._budget = budget

    def is_here(self, call: EnvoyCall) -> bool:
        return False

    async def read(self, call: EnvoyCall) -> None:
        """Raises BadRequest, BodyTooLarge, BodyTimeout or Saturated."""
        if "upgrade" in call.headers:
            raise BadRequest("Connections are not upgraded here: ask kvlane itself, not the gateway.")
        pieces: list[bytes] = []
        await self._reserve(call, int(call.headers.get("content-length") or 0))
        body, size = aiter(call.stream.body()), 0
        try:
            while True:
                async with asyncio.timeout(self._settings.body_timeout):
                    piece = await anext(body, None)
                if piece is None:
                    break
                size += len(piece)
                await self._reserve(call, size)
                pieces.append(piece)
        except TimeoutError:
            raise body_timed_out() from None
        call.body = b"".join(pieces)

    def give_back(self, size: int) -> None:
        self._budget.give(size)

    async def _reserve(self, call: EnvoyCall, size: int) -> None:
        """As much as that is of a body: all of it where its length is declared, for bodies that each hold half would
        wait for each other."""
        if size > self._settings.max_body:
            raise too_large(self._settings.max_body)
        if size > call.retained:
            more = size - call.retained
            await self._budget.take(more, call.retained)
            call.retained += more
