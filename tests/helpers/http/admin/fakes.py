"""An admin port on a real socket, with a real fleet behind it and pods that behave as told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from proxy.auth.authenticator import Authenticator
from proxy.autoscale.scaled_pool import ScaledPool
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, Conflict, Problem
from proxy.core.ports import ManualClock
from proxy.fleet.settings import PodSettings
from proxy.fleet.store import Fleet
from proxy.http.admin import BODY_TIMEOUT, admin_application
from proxy.http.settings import AdminSettings
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Exposition

Client = TestClient[web.Request, web.Application]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass
class Port:
    """`stopping` and `config` are read by the port at every request."""

    client: Client
    fleet: Fleet
    stopping: bool = False
    config: Any = field(default_factory=dict)

    def add(self, name: str, url: str = "", **settings: Any) -> Endpoint:
        endpoint = self.fleet.add(PodSettings(url=url or f"http://{name}:8000", name=name, **settings))
        self.fleet.reached(endpoint)
        return endpoint

    async def json(self, method: str, path: str, expected: int = 200, **options: Any) -> Any:
        async with self.client.request(method, path, **options) as response:
            assert response.status == expected, await response.text()
            assert response.content_type == "application/json"
            return await response.json()

    async def error(self, method: str, path: str, expected: int, **options: Any) -> dict[str, Any]:
        response = await self.json(method, path, expected, **options)
        assert set(response) == {"error"}
        fields: dict[str, Any] = response["error"]
        assert set(fields) == {"message", "type", "param", "code"}
        return fields


class Fixed:
    """A configuration that never changes."""

    def described(self) -> dict[str, Any]:
        return {"number": 1}

    def written(self) -> dict[str, Any]:
        return {"listen": {"port": 8000}, "admin": {"apiKey": "secret"}}

    async def propose(self, text: str, dry_run: bool, expands: bool) -> dict[str, Any]:
        raise ConfigError([Problem("listen.port", f"{text!r} is no port")])

    async def roll_back(self) -> dict[str, Any]:
        raise Conflict("There is no earlier configuration.")


@asynccontextmanager
async def admin_port(
    api_key: str | None = None,
    admins: Authenticator | None = None,
    scaled: Mapping[str, ScaledPool] | None = None,
    hosts: Sequence[str] = (),
    body_timeout: float = BODY_TIMEOUT,
) -> AsyncIterator[Port]:
    clock = ManualClock()
    fleet = Fleet(clock)
    catalogue = Catalogue("test")
    async with aiohttp.ClientSession() as session:
        app = admin_application(
            fleet=fleet,
            exposition=Exposition(catalogue, EndpointSeries(catalogue, fleet, clock)),
            config=lambda: port.config,
            session=session,
            stopping=lambda: port.stopping,
            keys=lambda: (api_key, admins),
            hosts=lambda: AdminSettings(hosts=tuple(hosts)).host_names,
            configurations=Fixed(),
            scaled=lambda: scaled or {},
            body_timeout=body_timeout,
        )
        async with TestClient(TestServer(app)) as client:
            assert client.server.handler is not None
            client.server.handler.handler_cancellation = False  # as in AdminServer
            port = Port(client, fleet)
            yield port


@asynccontextmanager
async def engine(handler: Handler) -> AsyncIterator[str]:
    """The URL of a server that responds to everything in the same way."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    async with TestServer(app) as server:
        yield str(server.make_url("")).rstrip("/")
