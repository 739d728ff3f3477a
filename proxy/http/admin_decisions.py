"""/debug: why requests went where they went, and where one would go."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from aiohttp import web

from proxy.http.admin_answers import json_answer, json_body


class Explained(Protocol):
    """What is known of decisions, ready for JSON; `composition.dry_run.OwnDecisions` is one."""

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raises BadRequest."""

    async def shown(self, name: str) -> Mapping[str, Any]:
        """By the id of a decision or of a request. Raises NotFound."""

    async def imagined(self, asked: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raises RequestError."""


class DecisionRoutes:
    def __init__(self, explained: Explained) -> None:
        self._explained = explained

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/debug/decisions", self.list)
        router.add_get("/debug/decisions/{name}", self.show)
        router.add_post("/debug/explain", self.imagine)

    async def list(self, request: web.Request) -> web.Response:
        """Those that are kept, the newest first; `?request=`, `pod`, `tenant`, `model`, `pool`, `outcome`, `slow`,
        `asked` and `limit` say which."""
        return _uncached(json_answer(await self._explained.listed(request.query)))

    async def show(self, request: web.Request) -> web.Response:
        return _uncached(json_answer(await self._explained.shown(request.match_info["name"])))

    async def imagine(self, request: web.Request) -> web.Response:
        """Of a request that is sent here it is said where it would go; it goes nowhere."""
        return _uncached(json_answer(await self._explained.imagined(await json_body(request), request.query)))


def _uncached(answer: web.Response) -> web.Response:
    answer.headers["cache-control"] = "no-store"
    return answer
