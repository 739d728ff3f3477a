"""One pod as it is asked over HTTP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from proxy import outbound
from proxy.core.ports import Clock


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    headers: Mapping[str, str]
    seconds: float

    @property
    def ok(self) -> bool:
        return self.status == 200

    @property
    def json(self) -> Mapping[str, Any]:
        """Empty if it is no JSON object."""
        try:
            found = orjson.loads(self.body)
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}


class Asking:
    """Raises aiohttp.ClientError and TimeoutError, as aiohttp does."""

    def __init__(self, url: str, session: aiohttp.ClientSession, api_key: str, clock: Clock) -> None:
        self.url = url
        self.clock = clock
        self._session = session
        self._headers = outbound.bearer(api_key)

    async def get(self, path: str) -> Answer:
        return await self._ask("GET", path, None)

    async def post(self, path: str, body: Mapping[str, Any]) -> Answer:
        return await self._ask("POST", path, body)

    async def begin(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        """An answer that is not read yet; the caller closes it."""
        return await self._session.post(self.url + path, json=body, headers=self._headers)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None) -> Answer:
        begun = self.clock.now()
        status, read, headers = await outbound.send(
            self._session, method, self.url + path, json=body, headers=self._headers
        )
        return Answer(status, read, headers, self.clock.now() - begun)
