"""What the session affinity filter and scorer have in common: finding, and keeping, the pod of a session."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from proxy.core.cycle_state import DataKey
from proxy.core.endpoint import Endpoint
from proxy.core.exchange import Exchange
from proxy.core.params import param
from proxy.core.plugin import EndpointRemoved, PreRequest
from proxy.core.ports import Clock
from proxy.core.request import InferenceRequest
from proxy.plugins.session_table import SessionTable

NAMESPACE = "default"
TOKEN_HEADER = "x-session-token"
ID_HEADER = "x-session-id"


@dataclass(frozen=True, slots=True)
class TokenConfig:
    header: str = param(TOKEN_HEADER, "request and response header with the token")


@dataclass(frozen=True, slots=True)
class SessionSource:
    """Where a session id comes from."""

    header: str = param("", "a request header")
    attribute: str = param("", "a datum of the request, `kind` or `kind/producer`, as SessionID/session-id-producer")

    def __post_init__(self) -> None:
        if bool(self.header) == bool(self.attribute):
            raise ValueError("a source is either a header or an attribute")

    @property
    def key(self) -> DataKey[str] | None:
        if not self.attribute:
            return None
        kind, _, producer = self.attribute.partition("/")
        return DataKey(kind, producer)

    def read(self, request: InferenceRequest) -> str:
        key = self.key
        if key is None:
            return request.headers.get(self.header.lower(), "").strip()
        return request.state.read(key) or ""


@dataclass(frozen=True, slots=True)
class SessionIdConfig:
    sources: tuple[SessionSource, ...] = param((), f"first that has an id; the header {ID_HEADER} unless given")
    eviction_ttl_seconds: float = param(300.0, "a session unused for so long is forgotten", at_least=0)
    eviction_sweep_seconds: float = param(10.0, "how often memory is freed", at_least=0)


@dataclass(frozen=True, slots=True)
class SessionAffinity(PreRequest, EndpointRemoved):
    """With `encoded_endpoint_header` every response carries a token, base64 of `namespace/name`, which the client
    sends back; with `session_id` the proxy remembers the pod of each session, and moves a session only when its pod
    is no candidate any more."""

    clock: Clock
    strategy: Literal["encoded_endpoint_header", "session_id"] = param(
        "encoded_endpoint_header", "who remembers: the client, by a token, or the proxy, by the session's id"
    )
    encoded_endpoint_header_config: TokenConfig | None = param(None, "of that strategy")
    header_name: str = param("", "older spelling of encodedEndpointHeaderConfig.header")
    profile_name: str = param("", "answers of other profiles carry no token; empty: all do")
    session_id_config: SessionIdConfig = param(SessionIdConfig(), "of that strategy")
    _table: SessionTable = field(init=False)

    def __post_init__(self) -> None:
        config = self.session_id_config
        table = SessionTable(config.eviction_ttl_seconds, config.eviction_sweep_seconds)
        object.__setattr__(self, "_table", table)

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        if self.strategy != "session_id":
            return ()
        return tuple(source.key for source in self.session_id_config.sources if source.key)

    def bound(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Endpoint | None:
        """The session's pod if it is among the endpoints."""
        if self.strategy == "session_id":
            endpoint = self._table.get(self._session(request), self.clock.now())
            return endpoint if endpoint in endpoints else None
        name = decode(request.headers.get(self._header, ""))
        return next((endpoint for endpoint in endpoints if qualified(endpoint) == name), None) if name else None

    def pre_request(self, exchange: Exchange, endpoint: Endpoint) -> None:
        if self.strategy == "session_id":
            self._remember(exchange, endpoint)
        elif not self.profile_name or exchange.decision.profile == self.profile_name:
            token = (self._header, encode(endpoint))
            if token not in exchange.response_headers:
                exchange.response_headers.append(token)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._table.forget(endpoint)

    @property
    def _header(self) -> str:
        config = self.encoded_endpoint_header_config
        return (config.header if config else self.header_name or TOKEN_HEADER).lower()

    def _session(self, request: InferenceRequest) -> str:
        sources = self.session_id_config.sources or (SessionSource(header=ID_HEADER),)
        return next((session for source in sources if (session := source.read(request))), "")

    def _remember(self, exchange: Exchange, endpoint: Endpoint) -> None:
        session = self._session(exchange.request)
        if session:
            bound = self.bound(exchange.request, list(exchange.decision.candidates()))
            self._table.bind(session, bound or endpoint, self.clock.now())


def qualified(endpoint: Endpoint) -> str:
    return endpoint.name if "/" in endpoint.name else f"{NAMESPACE}/{endpoint.name}"


def encode(endpoint: Endpoint) -> str:
    return b64encode(qualified(endpoint).encode()).decode()


def decode(token: str) -> str:
    """The name in a token; empty for what is no token."""
    try:
        return b64decode(token.strip(), validate=True).decode()
    except ValueError:
        return ""
