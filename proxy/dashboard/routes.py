"""HTTP routes of the dashboard: the page, its assets and its events."""

from __future__ import annotations

import hashlib
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib.resources import files

from aiohttp import web

from proxy.core.errors import NotFound
from proxy.dashboard.feed import Feed

PAGE = "page.html"

TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    content_type: str
    tag: str


def load() -> dict[str, Asset]:
    """Return all assets by name."""
    found = {}
    for file in files("proxy.dashboard").joinpath("page").iterdir():
        kind = TYPES.get(file.name.rpartition(".")[2])
        if kind is not None:
            body = file.read_bytes()
            found[file.name] = Asset(body, kind, f'"{hashlib.sha256(body).hexdigest()[:16]}"')
    return found


CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-cache",
}


class DashboardRoutes:
    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._assets: dict[str, Asset] = {}

    def add_to(self, router: web.UrlDispatcher) -> None:
        self._assets = load()
        router.add_get("/dashboard", self.page)
        router.add_get("/dashboard/assets/{name}", self.asset)
        router.add_get("/dashboard/events", self.events, allow_head=False)

    async def page(self, request: web.Request) -> web.Response:
        return _asset_response(self._assets[PAGE], request)

    async def asset(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self._assets:
            raise NotFound(f"The dashboard has no {name}.")
        return _asset_response(self._assets[name], request)

    async def events(self, request: web.Request) -> web.StreamResponse:
        """Send server-sent events: `all` once, then a `change` per second."""
        response = web.StreamResponse(headers={**HEADERS, "cache-control": "no-store"})
        response.content_type = "text/event-stream"
        with suppress(ConnectionResetError):
            await self._send(response, request)
        return response

    async def _send(self, response: web.StreamResponse, request: web.Request) -> None:
        async with aclosing(self._feed.events()) as events:
            async for event in events:
                if not response.prepared:
                    await response.prepare(request)
                await response.write(event)


def _asset_response(asset: Asset, request: web.Request) -> web.Response:
    headers = {**HEADERS, "etag": asset.tag}
    if request.headers.get("if-none-match") == asset.tag:
        return web.Response(status=304, headers=headers)
    return web.Response(body=asset.body, content_type=asset.content_type, charset="utf-8", headers=headers)
