"""A pod with a given behaviour, on a real socket."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any

from aiohttp import web

from tests.helpers.ports import free_port


def exposition(running: int = 0, waiting: int = 0, started: float = 1000.0, queries: float = 0.0) -> str:
    return (
        f"process_start_time_seconds {started}\n"
        f'vllm:num_requests_running{{engine="0"}} {running}.0\n'
        f'vllm:num_requests_waiting{{engine="0"}} {waiting}.0\n'
        f'vllm:prefix_cache_queries_total{{engine="0"}} {queries}\n'
    )


def models(*ids: str, **extra: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": model, "object": "model", **extra} for model in ids]}


class FakePod:
    """A pod that sends the body of each path, or 404; `hang` makes a path silent, `status` sets another status."""

    def __init__(self) -> None:
        self.bodies: dict[str, str] = {"/metrics": exposition(), "/v1/models": json.dumps(models("m")), "/health": ""}
        self.hang: set[str] = set()
        self.status: dict[str, int] = {}
        self.requested: list[str] = []
        self.authorization: str | None = None
        self.while_answering: Callable[[str], None] = lambda path: None
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Comes back on the port it had."""
        server = web.Server(self._respond)
        self._runner = web.ServerRunner(server, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def __aenter__(self) -> FakePod:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.stop()

    async def _respond(self, request: web.BaseRequest) -> web.StreamResponse:
        self.requested.append(request.path)
        self.authorization = request.headers.get("Authorization")
        if request.path in self.hang:
            await asyncio.sleep(3600)
        self.while_answering(request.path)
        if request.path not in self.bodies:
            return web.Response(status=404)
        return web.Response(text=self.bodies[request.path], status=self.status.get(request.path, 200))
