"""/admin/logging: how much each room says in the log, from now on."""

from __future__ import annotations

from aiohttp import web

from proxy.http.admin_answers import json_answer, json_body
from proxy.telemetry.log_levels import LogLevels


class LoggingRoutes:
    def __init__(self, levels: LogLevels) -> None:
        self._levels = levels

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/admin/logging", self.show)
        router.add_post("/admin/logging", self.change)

    async def show(self, request: web.Request) -> web.Response:
        return json_answer(self._levels.shown())

    async def change(self, request: web.Request) -> web.Response:
        """Answers as GET does then."""
        self._levels.change(await json_body(request))
        return json_answer(self._levels.shown())
