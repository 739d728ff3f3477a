"""The paths of the data port: relayed or served here; any other path is a 404."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from proxy.core.errors import MethodNotAllowed, NotFound


class PathKind(Enum):
    """How a request is handled."""

    RELAY = "relay"
    HEALTH = "health"
    MODELS = "models"
    MODEL = "model"
    VERSION = "version"


@dataclass(frozen=True, slots=True)
class Route:
    kind: PathKind
    methods: tuple[str, ...]


_POST = Route(PathKind.RELAY, ("POST",))
_GET = Route(PathKind.RELAY, ("GET",))
_MODEL = Route(PathKind.MODEL, ("GET", "HEAD"))
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""Methods of the paths in `security.relayPaths`; the other paths have some of them."""

_ANY = Route(PathKind.RELAY, METHODS)

INFERENCE = (
    "/v1/chat/completions",
    "/v1/chat/completions/batch",
    "/v1/chat/completions/render",
    "/v1/chat/completions/derender",
    "/v1/completions",
    "/v1/completions/render",
    "/v1/completions/derender",
    "/v1/embeddings",
    "/v2/embed",
    "/v1/responses",
    "/v1/responses/render",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/messages/render",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
    "/v1/score",
    "/score",
    "/generative_scoring",
    "/classify",
    "/pooling",
    "/tokenize",
    "/detokenize",
    "/v1/audio/transcriptions",
    "/v1/audio/translations",
    "/v1/audio/speech",
    "/inference/v1/generate",
    "/generate",
    "/invocations",
)

ROUTES = {
    **dict.fromkeys(INFERENCE, _POST),
    "/v1/realtime": _GET,
    "/v1/models": Route(PathKind.MODELS, ("GET", "HEAD")),
    "/health": Route(PathKind.HEALTH, ("GET", "HEAD")),
    "/ping": Route(PathKind.HEALTH, ("GET", "HEAD", "POST")),
    "/version": Route(PathKind.VERSION, ("GET", "HEAD")),
}

PATTERNS = (
    (re.compile(r"/v1/responses/[A-Za-z0-9][\w.~-]*"), Route(PathKind.RELAY, ("GET", "DELETE"))),
    (re.compile(r"/v1/responses/[A-Za-z0-9][\w.~-]*/cancel"), _POST),
    (re.compile(r"/v1/responses/[A-Za-z0-9][\w.~-]*/input_items"), _GET),
    (re.compile(r"/v1/models/.+"), _MODEL),
)
"""Matched against the path as sent: an encoded slash or dot does not count as one here, so no pod can read it as
one."""

CONTROL = frozenset(
    (
        "/metrics",
        "/load",
        "/server_info",
        "/openapi.json",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/pause",
        "/resume",
        "/is_paused",
        "/scale_elastic_ep",
        "/is_scaling_elastic_ep",
        "/collective_rpc",
        "/kv_event_sources",
        "/start_profile",
        "/stop_profile",
        "/inference/v1/abort_requests",
        "/abort_requests",
    )
)
"""Paths that control an engine. They are never relayed, whatever `relayPaths` says; the admin port reaches them per
pod."""

_ADMIN = frozenset(("/metrics", "/dashboard", "/healthz", "/readyz"))
_LONGEST_TYPO = 64
"""Characters of a path up to which similar ones are looked for, which takes time with the length."""


class Paths:
    """The table of paths, extended by `security.relayPaths`."""

    def __init__(self, extensions: Sequence[str] = ()) -> None:
        exact = [path for path in extensions if not path.endswith("/*")]
        self._routes = {**dict.fromkeys(exact, _ANY), **ROUTES}
        self._prefixes = tuple(path[:-1] for path in extensions if path.endswith("/*"))
        self.relayed = frozenset(
            (method, path)
            for path, route in self._routes.items()
            if route.kind is PathKind.RELAY
            for method in route.methods
        )
        """The (method, path) pairs of most requests, for which `route` returns RELAY."""

    def route(self, method: str, path: str) -> Route:
        """Raise NotFound or MethodNotAllowed. `path` is as sent, without the query."""
        route = self._routes.get(path) or self._pattern(path)
        if method not in route.methods:
            allowed = ", ".join(route.methods)
            raise MethodNotAllowed(f"Method {method} is not allowed for {path}; use {allowed}.", route.methods)
        return route

    def _pattern(self, path: str) -> Route:
        for pattern, route in PATTERNS:
            if pattern.fullmatch(path):
                return route
        if self._prefixes and path.startswith(self._prefixes) and _is_plain(path) and path.rstrip("/") not in CONTROL:
            return _ANY
        raise NotFound(f"No such path: {path}. {self._advice(path)}")

    def _advice(self, path: str) -> str:
        """Return advice on an unknown path: the base URL lacks /v1 or has two, a typo, or a path of the admin port."""
        if path in _ADMIN:
            return "It is on the admin port; only inference paths are served here."
        near = next((one for one in ("/v1" + path, path.removeprefix("/v1")) if one in self._routes), None)
        if near is None and len(path) <= _LONGEST_TYPO:
            near = next(iter(difflib.get_close_matches(path, self._routes, 1, cutoff=0.85)), None)
        if near is None and path.rstrip("/") in CONTROL:
            return "It controls a pod; only inference paths are served here."
        return f"Did you mean {near}?" if near else "It is not relayed to pods unless security.relayPaths names it."


def faults_of_extension(path: str) -> Iterator[str]:
    """Yield why the path cannot be one of `security.relayPaths`."""
    if not path.startswith("/") or "?" in path or not _is_plain(path.removesuffix("/*")):
        yield f"{path!r} must start with / and hold neither a query, '%', '//' nor '..'"
    elif path.rstrip("/") in CONTROL:
        yield f"{path} controls an engine; it is reached through the admin port only"


@lru_cache(maxsize=64)  # of up to 64 KiB each
def split_target(target: str) -> tuple[str, str]:
    """Return the path and the query with its `?`, both as sent; of an absolute URL, without its authority."""
    if not target.startswith("/") and target.lower().startswith(("http://", "https://")):
        rest = target[target.index("//") + 2 :]
        authority = re.match("[^/?]*", rest)
        rest = rest[len(authority[0]) :] if authority else rest
        target = rest if rest.startswith("/") else "/" + rest
    path, mark, query = target.partition("?")
    return path, mark + query


def _is_plain(path: str) -> bool:
    return "%" not in path and "//" not in path and "\\" not in path and ".." not in path.split("/")
