"""Admin API of the configuration, the log level and the decisions."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import yaml
from aiohttp import web

from proxy.core.errors import BadRequest, ConfigError
from proxy.http.admin_keys import Keys, json_answer, json_body
from proxy.telemetry.logs import LogLevels
from proxy.yaml_source import WITHHELD

_SECRET = re.compile(
    r"(?:^|\.)(?:\w*apiKeys?|\w*password|\w*secret|\w*token|collectorHeaders)(?:\[\d+\])?(?:\.|$)", re.IGNORECASE
)
"""Names, alone or in a path, whose values are nobody's business."""

_SHOWN_OF_A_KEY = frozenset(("name", "tenant", "models", "objectives", "scopes", "limits", "expires"))

_ABOUT = ("origin", "source")
"""What is said about a value beside it."""


class Configurations(Protocol):
    """`proxy.config.reload.Configurations` is one."""

    def described(self) -> dict[str, Any]: ...
    def written(self) -> Any: ...

    async def propose(self, text: str, dry_run: bool, expands: bool) -> dict[str, Any]:
        """Raises ConfigError."""

    async def roll_back(self) -> dict[str, Any]:
        """Raises ConfigError or Conflict."""


class ConfigRoutes:
    """`effective` gives all values, each with its origin; secrets are taken out here."""

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
        return json_answer({"version": self._configurations.described(), **redacted(self._effective())})

    async def source(self, request: web.Request) -> web.Response:
        """What was written, as YAML: with another value here and there it is what `change` takes."""
        written = yaml.safe_dump(redacted(self._configurations.written()), sort_keys=False, allow_unicode=True)
        return web.Response(text=written, content_type="application/yaml")

    async def change(self, request: web.Request) -> web.Response:
        """With `?dry_run=1` it is only checked."""
        try:
            text = (await request.read()).decode()
        except UnicodeDecodeError:
            raise BadRequest("The request body is not UTF-8.") from None
        if unknown := request.query.keys() - {"dry_run"}:
            raise BadRequest(f"Unknown in the query: {', '.join(sorted(unknown))}. There is dry_run=1.")
        dry_run = request.query.get("dry_run", "0").lower() not in ("0", "false")
        try:
            return json_answer(await self._configurations.propose(text, dry_run, any(self._keys())))
        except ConfigError as error:
            return _faults(error)

    async def roll_back(self, request: web.Request) -> web.Response:
        try:
            return json_answer(await self._configurations.roll_back())
        except ConfigError as error:
            return _faults(error)


def _faults(error: ConfigError) -> web.Response:
    """All of them, and nothing has changed."""
    problems = [{"path": problem.path, "message": problem.message} for problem in error.problems]
    message = f"The configuration has faults, and stays as it was: {error}"
    described = {"message": message, "type": "invalid_request_error", "param": None, "code": "invalid_configuration"}
    return json_answer({"error": {**described, "problems": problems}}, 400)


def redacted(value: Any, secret: bool = False) -> Any:
    """A copy in which every secret is `***`; one that is not set stays null."""
    if isinstance(value, Mapping):
        return {
            key: item if secret and key in _ABOUT else redacted(item, secret or bool(_SECRET.search(str(key))))
            for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_of_a_key(item) if secret and isinstance(item, Mapping) else redacted(item, secret) for item in value]
    return WITHHELD if secret and value is not None else value


def _of_a_key(entry: Mapping[str, Any]) -> dict[str, Any]:
    """One of `apiKeys`: who has it, and what it may."""
    return {name: redacted(item, name not in _SHOWN_OF_A_KEY) for name, item in entry.items()}


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
