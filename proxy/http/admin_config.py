"""The admin API for configuration versions, decisions, logging and autoscaling."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import yaml
from aiohttp import web

from proxy.core.errors import BadRequest, ConfigError, Forbidden, NotFound
from proxy.core.params import parse_duration, suggestion
from proxy.fleet.store import Fleet
from proxy.http.admin_keys import UNKNOWN, WHO, Keys, audit, json_body, json_response
from proxy.http.admin_pods import describe, drained, named, seconds_of
from proxy.telemetry.logs import LogLevels
from proxy.yaml_source import WITHHELD

if TYPE_CHECKING:
    from proxy.autoscale.loop import Loop
    from proxy.autoscale.scaled_pool import ScaledPool

_SECRET = re.compile(
    r"(?:^|\.)(?:\w*apiKeys?|\w*password|\w*secret|\w*token|collectorHeaders)(?:\[\d+\])?(?:\.|$)", re.IGNORECASE
)
"""Names, alone or in a path, of secret values."""

_SHOWN_OF_A_KEY = frozenset(("name", "tenant", "models", "objectives", "scopes", "limits", "expires"))

_ABOUT = ("origin", "source")
"""Annotations beside a value."""


class Configurations(Protocol):
    """Versions of the configuration; implemented by `proxy.config.reload.Configurations`."""

    def described(self) -> dict[str, Any]: ...
    def written(self) -> Any: ...

    async def propose(self, text: str, dry_run: bool, expands: bool) -> dict[str, Any]:
        """Raise ConfigError."""

    async def roll_back(self) -> dict[str, Any]:
        """Raise ConfigError or Conflict."""


class ConfigRoutes:
    """`effective` returns all values with their origins; secrets are removed here."""

    def __init__(self, effective: Callable[[], Any], configurations: Configurations, keys: Keys) -> None:
        self._effective = effective
        self._configurations = configurations
        self._keys = keys

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/admin/config", self.show)
        router.add_get("/admin/config/source", self.source)
        router.add_post("/admin/config", self.change)
        router.add_post("/admin/config/rollback", self.roll_back)

    async def show(self, request: web.Request) -> web.Response:
        return json_response({"version": self._configurations.described(), **redacted(self._effective())})

    async def source(self, request: web.Request) -> web.Response:
        """Return the configuration as written, in YAML, which `change` accepts after edits."""
        written = yaml.safe_dump(redacted(self._configurations.written()), sort_keys=False, allow_unicode=True)
        return web.Response(text=written, content_type="application/yaml")

    async def change(self, request: web.Request) -> web.Response:
        """Apply a configuration; with `?dry_run=1` only check it."""
        try:
            text = (await request.read()).decode()
        except UnicodeDecodeError:
            raise BadRequest("The request body is not UTF-8.") from None
        if unknown := request.query.keys() - {"dry_run"}:
            raise BadRequest(f"Unknown in the query: {', '.join(sorted(unknown))}. There is dry_run=1.")
        dry_run = request.query.get("dry_run", "0").lower() not in ("0", "false")
        try:
            return json_response(await self._configurations.propose(text, dry_run, any(self._keys())))
        except ConfigError as error:
            return _faults(error)

    async def roll_back(self, request: web.Request) -> web.Response:
        try:
            return json_response(await self._configurations.roll_back())
        except ConfigError as error:
            return _faults(error)


def _faults(error: ConfigError) -> web.Response:
    """Return all faults; nothing has changed."""
    problems = [{"path": problem.path, "message": problem.message} for problem in error.problems]
    message = f"The configuration has faults, and stays as it was: {error}"
    described = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_configuration"}
    return json_response({"error": {**described, "problems": problems}}, 400)


def redacted(value: Any, secret: bool = False) -> Any:
    """Return a copy in which every secret is `***`; an unset one stays null."""
    if isinstance(value, Mapping):
        return {
            key: item if secret and key in _ABOUT else redacted(item, secret or bool(_SECRET.search(str(key))))
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_of_a_key(item) if secret and isinstance(item, Mapping) else redacted(item, secret) for item in value]
    return WITHHELD if secret and value is not None else value


def _of_a_key(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return one of `apiKeys` without its secret."""
    return {name: redacted(item, name not in _SHOWN_OF_A_KEY) for name, item in entry.items()}


class LoggingRoutes:
    def __init__(self, levels: LogLevels) -> None:
        self._levels = levels

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/admin/logging", self.show)
        router.add_post("/admin/logging", self.change)

    async def show(self, request: web.Request) -> web.Response:
        return json_response(self._levels.shown())

    async def change(self, request: web.Request) -> web.Response:
        """Change the log levels and respond as GET does."""
        self._levels.change(await json_body(request))
        return json_response(self._levels.shown())


class Explained(Protocol):
    """Explained decisions as JSON values; implemented by `dry_run.OwnDecisions`."""

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raise BadRequest."""

    async def shown(self, name: str) -> Mapping[str, Any]:
        """Return a decision by its id or that of its request. Raise NotFound."""

    async def imagined(self, values: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raise RequestError."""


class DecisionRoutes:
    def __init__(self, explained: Explained) -> None:
        self._explained = explained

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/debug/decisions", self.list)
        router.add_get("/debug/decisions/{name}", self.show)
        router.add_post("/debug/explain", self.imagine)

    async def list(self, request: web.Request) -> web.Response:
        """Return the kept decisions, newest first; filtered by `?request=`, `pod`, `tenant`, `model`, `pool`,
        `outcome`, `slow`, `asked` and `limit`."""
        return _uncached(json_response(await self._explained.listed(request.query)))

    async def show(self, request: web.Request) -> web.Response:
        return _uncached(json_response(await self._explained.shown(request.match_info["name"])))

    async def imagine(self, request: web.Request) -> web.Response:
        """Explain where the request in the body would go, without sending it."""
        return _uncached(json_response(await self._explained.imagined(await json_body(request), request.query)))


LONGEST_ORDER = 86400.0
"""Longest validity of an operator's override, in seconds."""

LATEST = 100
"""Number of decisions of the history that are returned by default."""


class AutoscaleRoutes:
    """`pools` are those with a policy."""

    def __init__(self, pools: Callable[[], Mapping[str, ScaledPool]], fleet: Fleet) -> None:
        self._pools = pools
        self._fleet = fleet

    def add_to(self, router: web.UrlDispatcher) -> None:
        router.add_get("/autoscale/pools", self.list)
        router.add_get("/autoscale/pools/{pool}", self.show)
        router.add_get("/autoscale/pools/{pool}/history", self.history)
        router.add_post("/autoscale/pools/{pool}/pause", self.pause)
        router.add_post("/autoscale/pools/{pool}/resume", self.resume)
        router.add_post("/autoscale/pools/{pool}/override", self.override)
        router.add_post("/autoscale/pools/{pool}/ack", self.acknowledge)
        router.add_get("/autoscale/drain/{pod}", self.drain)

    async def list(self, request: web.Request) -> web.Response:
        return json_response({"pools": list(self._pools())})

    async def show(self, request: web.Request) -> web.Response:
        """Return the latest decision; 503 before the first. An invalid one is 200 too: KEDA takes an error for a
        failure, and the last values are usable."""
        pool = self._named(request)
        decision = pool.loop.latest
        if decision is None:
            return _uncached(json_response({"pool": request.match_info["pool"], "valid": False}, 503))
        tag = f'"{decision.id}"'
        if request.headers.get("if-none-match") == tag:
            response = web.Response(status=304)
        else:
            outcomes = {role: outcome.value for role, outcome in pool.loop.outcomes.items()}
            more = {"paused": pool.loop.paused, "outcomes": outcomes, "acknowledged": _acknowledged(pool.loop)}
            response = json_response({**pool.described(decision), **more})
        response.headers["etag"] = tag
        return _uncached(response)

    async def history(self, request: web.Request) -> web.Response:
        """Return the latest `?n=` decisions, oldest first, for `kvlane autoscale replay`."""
        count = request.query.get("n", str(LATEST))
        if not count.isdecimal() or not int(count):
            raise BadRequest("n must be a whole number above 0.", param="n")
        decisions = list(self._named(request).loop.history)[-int(count) :]
        return _uncached(json_response({"decisions": [one.as_dict() for one in decisions]}))

    async def pause(self, request: web.Request) -> web.Response:
        self._named(request).loop.paused = True
        return json_response({"paused": True})

    async def resume(self, request: web.Request) -> web.Response:
        self._named(request).loop.paused = False
        return json_response({"paused": False})

    async def override(self, request: web.Request) -> web.Response:
        """Apply `{"roles": {"decode": 8}, "ttl": "30m"}`."""
        loop, body = self._named(request).loop, await json_body(request)
        seconds = _ttl(body.get("ttl") if isinstance(body, dict) else None)
        loop.override(_counts(body), seconds)
        return json_response({"overrides": loop.overrides(), "seconds": seconds})

    async def acknowledge(self, request: web.Request) -> web.Response:
        """Record `{"decision_id": 1841, "roles": {"decode": 8}}`: another controller has scaled these roles."""
        pool, body = self._named(request), await json_body(request)
        counts = _counts(body)
        decision = body.get("decision_id")
        if not isinstance(decision, int) or isinstance(decision, bool):
            raise BadRequest("decision_id must be a whole number.", param="decision_id")
        pool.acknowledge(decision, counts)
        return json_response({"acknowledged": _acknowledged(pool.loop)})

    async def drain(self, request: web.Request) -> web.Response:
        """Drain a pod; for a `preStop` hook, which can only send GET. Respond when its last request has ended, or with
        202 after `?wait=`."""
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            raise Forbidden("A page of another site may not drain pods.")
        endpoint, seconds = named(self._fleet, request.match_info["pod"]), seconds_of(request.query.get("wait", "0s"))
        audit.info("drain of pod %s by %r from %s", endpoint.name, request.get(WHO, UNKNOWN), request.remote)
        is_idle = await drained(self._fleet, endpoint, seconds)
        return _uncached(json_response(describe(endpoint), 200 if is_idle else 202))

    def _named(self, request: web.Request) -> ScaledPool:
        """Raise NotFound."""
        name, pools = request.match_info["pool"], self._pools()
        if name not in pools:
            raise NotFound(f"No pool '{name}' is scaled{suggestion(name, list(pools))}.")
        return pools[name]


def _uncached(response: web.Response) -> web.Response:
    response.headers["cache-control"] = "no-store"
    return response


def _acknowledged(loop: Loop) -> dict[str, Any] | None:
    found = loop.acknowledged
    return None if found is None else {"decision_id": found.decision, "roles": dict(found.roles), "ts": found.at}


def _counts(body: Any) -> dict[str, int]:
    """Raise BadRequest."""
    roles = body.get("roles") if isinstance(body, dict) else None
    if not isinstance(roles, dict) or not roles:
        raise BadRequest("roles must be an object with a number for at least one role.", param="roles")
    for role, count in roles.items():
        if not isinstance(count, int) or isinstance(count, bool):
            raise BadRequest(f"roles.{role} must be a whole number.", param=f"roles.{role}")
    return roles


def _ttl(written: Any) -> float:
    """Return seconds. Raise BadRequest."""
    try:
        seconds = parse_duration(written) if isinstance(written, str) else float(written)
    except (TypeError, ValueError):
        raise BadRequest("ttl must be a duration, such as 30m.", param="ttl") from None
    if not 0 < seconds <= LONGEST_ORDER:
        raise BadRequest(f"ttl must be more than 0, and {LONGEST_ORDER:g} s at most.", param="ttl")
    return seconds
