"""What the routes of the admin port share: authentication, host check, audit log, JSON bodies."""

from __future__ import annotations

import hmac
import logging
from collections.abc import Awaitable, Callable, Collection
from typing import Any

import orjson
from aiohttp import web

from proxy.auth.authenticator import Authenticator
from proxy.core.errors import Forbidden, InvalidJson, MisdirectedRequest, Unauthorized
from proxy.http.settings import host_name
from proxy.http.upstream.pool import is_address
from proxy.telemetry.logs import AUDIT

audit = logging.getLogger(AUDIT)

DOORSTEPS = ("/", "/dashboard/")
"""Paths that redirect to the dashboard."""

METRICS = "/metrics"
PROBES = ("/healthz", "/readyz")

OPEN_PATHS = (METRICS, *PROBES, "/dashboard", *DOORSTEPS)
"""Paths that need no key: for orchestrators, Prometheus, and the dashboard page, which is empty until its user enters a
key. All other paths need one, including unknown ones."""

OPEN_FOLDER = "/dashboard/assets/"
"""Files of the dashboard page."""

LONGEST_SHOWN_HOST = 100
"""Characters of a refused host name that the error repeats."""

UNKNOWN = "a stranger"
WHO = web.RequestKey("who", str)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


Keys = Callable[[], tuple[str | None, Authenticator | None]]
"""Return the key of the settings and the authenticator of further keys. Called for every request."""

Hosts = Callable[[], Collection[str]]
"""Return the host names of the settings, normalised by `host_name`. Called for every request."""


def serving_hosts(hosts: Hosts, keys: Keys) -> Any:
    """Return a middleware that refuses requests whose `Host` is neither an IP address, `localhost` nor one of `hosts`.

    A page of another site can make its own DNS name resolve to this port (DNS rebinding). The browser then treats the
    port as part of that site, but still sends the site's name as `Host`. Probes are exempt: load balancers send any
    name, and the responses hold only states and counts. Where a key is configured, only `/metrics` is checked: such a
    page has no key, and the files of the dashboard hold nothing of this installation."""

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in PROBES and (request.path == METRICS or not any(keys())):
            for name in request.headers.getall("host", [""]):  # not `request.host`, which has a default
                host = host_name(name)
                if host != "localhost" and host not in hosts() and not is_address.__wrapped__(host):
                    raise MisdirectedRequest(
                        f"The admin port does not serve the host name {name[:LONGEST_SHOWN_HOST]!r}. Use an IP address "
                        "or localhost, or add the name to admin.hosts in the configuration."
                    )
        return await handler(request)

    return check


def requiring(keys: Keys) -> Any:
    """Return a middleware that requires one of the keys. Without any key everything is open, which is for loopback
    only."""

    async def name_of(request: web.Request) -> str:
        api_key, admins = keys()
        if api_key is not None and _holds(api_key.encode(), request):
            return "admin.apiKey"
        if admins is not None:
            return (await admins.authenticate(request.headers, "admin")).name
        if api_key is not None:
            raise Unauthorized("The admin port needs its key: send `Authorization: Bearer <admin.apiKey>`.")
        return "anybody"

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in OPEN_PATHS and not request.path.startswith(OPEN_FOLDER):
            request[WHO] = await name_of(request)
        # Browsers name the site of a page; without a key, any page could send requests to loopback.
        origin = request.headers.get("origin")
        if _changes(request) and origin is not None and origin.rpartition("//")[2] != request.host:
            raise Forbidden("A page of another site may not change anything here.")
        return await handler(request)

    return check


@web.middleware
async def audited(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Log each change. This middleware is outside of the ones that refuse requests, so refused changes are logged too.
    The path is logged as sent, which contains no line break."""
    result = "broke off"
    try:
        response = await handler(request)
        result = str(response.status)
        return response
    finally:
        if _changes(request):
            who = request.get(WHO, UNKNOWN)
            audit.info("%s %s by %r from %s: %s", request.method, request.raw_path, who, request.remote, result)


def _changes(request: web.Request) -> bool:
    return request.method not in ("GET", "HEAD")


def _holds(expected: bytes, request: web.Request) -> bool:
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("utf-8", "replace"), expected)


def json_response(value: Any, status: int = 200) -> web.Response:
    """Return indented JSON, for users of curl."""
    body = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE | orjson.OPT_NON_STR_KEYS)
    return web.Response(status=status, body=body, content_type="application/json")


async def json_body(request: web.Request) -> Any:
    """Raise InvalidJson."""
    body = await request.read()
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError as error:
        what = f"is not valid JSON: {error}" if body else "is empty"
        raise InvalidJson(f"The request body {what}.") from None
