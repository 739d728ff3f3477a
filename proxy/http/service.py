"""Serve one request independently of its transport: a pod responds, kvlane responds, or the request is refused."""

from __future__ import annotations

import logging
import re
from asyncio import CancelledError
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar
from urllib.parse import unquote

import orjson

import proxy
from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import NO_POD, NoEndpoints, Reason, RequestError, ShuttingDown, UnknownModel, UpstreamFailed
from proxy.core.ports import ClientRequest, Identity, allows
from proxy.http.guards import CLOSED_AFTER, CountClosed, count_nothing
from proxy.http.head import Pairs, encode_pairs
from proxy.http.paths import METHODS, PathKind, Paths
from proxy.http.relay import TrackedRelay
from proxy.http.request import HttpRequest
from proxy.openai.errors import render

if TYPE_CHECKING:
    from proxy.http.server import DataPortConfig

log = logging.getLogger(__name__)


OPEN_PATHS = ("/health", "/ping")
"""Paths for load balancers, which need no key."""

CREDENTIALS = frozenset((b"authorization", b"x-api-key", b"api-key"))
"""Header fields that are not relayed: they authenticate to kvlane, not to a pod."""


ANY = "*"
MAX_AGE = "600"
"""Seconds for which a browser caches a preflight response."""

EXPOSED = "x-request-id, x-kvlane-endpoint, x-kvlane-reason, retry-after"
"""Response fields that a web page may read in addition to the safelisted ones."""

Serve = Callable[[HttpRequest], Coroutine[Any, Any, None]]

_NAMES = re.compile(r"[\w!#$%&'*+.^`|~-]+(?:[ \t]*,[ \t]*[\w!#$%&'*+.^`|~-]+)*", re.ASCII)


class Cors:
    """Cross-origin requests, if origins are configured. Runs before `serve`, because browsers send preflight requests
    without a key. Cookies are never allowed: keys come in headers."""

    def __init__(self, origins: Sequence[str], serve: Serve, done: Callable[[HttpRequest], None]) -> None:
        """`done` ends a request that was responded to here."""
        self._any = ANY in origins
        self._origins = frozenset(origins)
        self._serve = serve
        self._done = done

    def serve(self, client_request: HttpRequest) -> Coroutine[Any, Any, None]:
        origin = client_request.headers.get("origin")
        if origin is None or not (self._any or origin in self._origins):
            return self._serve(client_request)
        field = "access-control-allow-origin"
        allowed = [(field, ANY)] if self._any else [(field, origin), ("vary", "origin")]
        client_request.response_lines = encode_pairs([*allowed, ("access-control-expose-headers", EXPOSED)])
        if client_request.method == "OPTIONS" and "access-control-request-method" in client_request.headers:
            return self._permit(client_request)
        return self._serve(client_request)

    async def _permit(self, client_request: HttpRequest) -> None:
        wanted = client_request.headers.get("access-control-request-headers", "")
        fields = [("access-control-allow-methods", ", ".join(METHODS)), ("access-control-max-age", MAX_AGE)]
        if _NAMES.fullmatch(wanted):
            fields.append(("access-control-allow-headers", wanted))
        client_request.respond(200, fields, b"")
        self._done(client_request)


CLIENT_LEFT = 499
INTERNAL = Reason.INTERNAL
JSON = [("content-type", "application/json")]


class IncomingRequest(ClientRequest, Protocol):
    """A request and the way to respond to it."""

    raw_headers: tuple[tuple[bytes, bytes], ...]
    """The header fields that are relayed to a pod."""
    identity: Identity | None
    retained: int
    """Bytes of the memory budget that its body holds."""
    closing: bool
    """Whether the connection closes after the response."""
    refusal: str

    sent_status: int
    """The status that was sent; 0: none."""
    sent: int
    """Bytes of the body of kvlane's own response."""

    @property
    def has_left(self) -> bool:
        """Return whether the client has disconnected."""

    def respond(self, status: int, headers: Pairs, body: bytes) -> None:
        """Send a complete response."""

    def abort(self) -> None:
        """Abort the connection, so that a partial response does not look complete."""

    def end(self) -> None:
        """End the request; called once, last."""


C = TypeVar("C", bound=IncomingRequest)
Taken = TypeVar("Taken", bound=IncomingRequest, contravariant=True)


class Bodies(Protocol[Taken]):
    """Reads the bodies of requests under a memory budget."""

    def acquire_complete(self, client_request: Taken) -> bool:
        """Take memory for a complete body. Return False if the body must be `read`."""

    async def read(self, client_request: Taken) -> None:
        """Read the body. Raise RequestError."""

    def give_back(self, size: int) -> None:
        """Return the memory of the body to the budget."""


class Service(Generic[C]):
    """Serves requests under one configuration. While `stopping`, health checks report that no new requests are
    accepted."""

    def __init__(self, config: DataPortConfig, bodies: Bodies[C], count_closed: CountClosed = count_nothing) -> None:
        self.stopping = False
        self._gateway, self.listeners, self._authenticator = config.gateway, config.listeners, config.authenticator
        self._bodies = bodies
        self._count_closed = count_closed
        self._paths = Paths(config.security.relay_paths)
        self._relayed = self._paths.relayed

    def authenticate_now(self, client_request: C) -> bool:
        """Authenticate a request for a pod by its head, before its body has come. Return False for other requests, and
        for requests that need waiting or are refused: `serve` authenticates them."""
        if (client_request.method, client_request.path) not in self._relayed:
            return False
        if self._authenticator is None:
            return True
        try:
            identity = self._authenticator.find(client_request.headers)
        except RequestError:
            return False
        if identity is not None:
            _identify(client_request, identity)
        return identity is not None

    async def serve(self, client_request: C, relay: TrackedRelay) -> None:
        if self.stopping:
            client_request.closing = True
        outcome: Ending | Reason = INTERNAL
        method, path, authenticator = client_request.method, client_request.path, self._authenticator
        try:
            if authenticator is not None and client_request.identity is None and path not in OPEN_PATHS:
                _identify(client_request, await authenticator.authenticate(client_request.headers))
            kind = None if (method, path) in self._relayed else self._paths.route(method, path).kind
            if kind is None or kind is PathKind.RELAY:
                if not self._bodies.acquire_complete(client_request):
                    await self._bodies.read(client_request)
                await self._gateway.serve(client_request, relay)
                attempt = relay.attempt
                if attempt is None or attempt.ending is None:
                    raise RuntimeError("served, but not relayed")
                outcome = attempt.ending
            else:
                self._respond(client_request, kind)
                outcome = Ending.COMPLETE
        except RequestError as error:
            attempt = relay.attempt
            if client_request.sent_status and attempt is not None and attempt.ending is not None:
                outcome = attempt.ending
                relay.end(error)
            else:
                outcome = error.reason
                if outcome is INTERNAL:
                    log.error("request %s failed: %s", client_request.id, error.message)
                self.refuse(client_request, error)
        except CancelledError:
            outcome = self._cancelled(client_request, relay)
            raise
        except Exception:
            log.exception("request %s failed", client_request.id)
            self.refuse(client_request, RequestError("Internal error; the log of the proxy says more."))
        finally:
            self._bodies.give_back(client_request.retained)
            try:
                self.ended(client_request, outcome, relay.attempt)
            finally:
                client_request.end()

    def unserved(self, client_request: C, why: RequestError | Ending) -> None:
        """End a request that `serve` did not receive."""
        client_request.closing = True
        self._bodies.give_back(client_request.retained)
        if isinstance(why, RequestError):
            self.refuse(client_request, why)
        outcome = why.reason if isinstance(why, RequestError) else why
        self.ended(client_request, outcome, None)

    def ended(self, client_request: C, outcome: Ending | Reason, attempt: Attempt | None) -> None:
        """Call the listeners. `attempt` is the last one, if there was any."""
        for listener in self.listeners.request_ended:
            try:
                listener(
                    client_request, client_request.sent_status or CLIENT_LEFT, outcome, attempt, client_request.sent
                )
            except Exception:  # noqa: BLE001  # the other listeners are still called
                self.listeners.failed(listener, client_request.id)

    def refuse(self, client_request: C, error: RequestError) -> None:
        cause = error.__cause__
        client_request.refusal = str(cause) if isinstance(cause, UpstreamFailed) else error.message
        if (why := CLOSED_AFTER.get(type(error))) is not None:
            self._count_closed(why, 1)
        if client_request.sent_status:
            client_request.abort()
        else:
            client_request.respond(*render(error, client_request.path, client_request.id))

    def _cancelled(self, client_request: C, relay: TrackedRelay) -> Ending | Reason:
        """End the request of a client that disconnected or of a proxy that stops. A client without a response gets an
        error that asks it to retry."""
        has_left, sent_status, attempt = client_request.has_left, client_request.sent_status, relay.attempt
        relay.end(ShuttingDown())
        client_request.closing = True
        if has_left:
            is_complete = sent_status and attempt is not None and attempt.ending is Ending.COMPLETE
            return Ending.COMPLETE if is_complete else Ending.CLIENT_GONE
        if sent_status:
            return Ending.EVICTED
        self.refuse(client_request, ShuttingDown())
        return ShuttingDown.reason

    def _respond(self, client_request: C, kind: PathKind) -> None:
        """Respond to a request that needs no pod. Raise RequestError."""
        if kind is PathKind.HEALTH:
            if self.stopping:
                raise ShuttingDown
            if not self._gateway.health():
                raise NoEndpoints(NO_POD)
            client_request.respond(200, [("x-request-id", client_request.id)], b"")
            return
        permitted = None if client_request.identity is None else client_request.identity.models
        cards = [card for card in self._gateway.models() if allows(permitted, card["id"])]
        if kind is PathKind.VERSION:
            content: dict[str, Any] = {"version": proxy.__version__}
        elif kind is PathKind.MODELS:
            content = {"object": "list", "data": cards}
        else:
            name = unquote(client_request.path.removeprefix("/v1/models/"))
            found = next((card for card in cards if card["id"] == name), None)
            if found is None:
                raise UnknownModel(name)
            content = found
        client_request.respond(200, [("x-request-id", client_request.id), *JSON], orjson.dumps(content))


def _identify(client_request: IncomingRequest, identity: Identity) -> None:
    client_request.identity = identity
    client_request.raw_headers = tuple(
        header for header in client_request.raw_headers if header[0].lower() not in CREDENTIALS
    )
