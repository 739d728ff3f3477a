"""Session affinity: the pod of each session, and the conditions for leaving it."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from proxy.core.attempt import Attempt, Stage
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.params import param
from proxy.core.plugin import EndpointRemoved, PreRequest
from proxy.core.ports import Clock
from proxy.core.request import DataKey, InferenceRequest
from proxy.core.state import PluginState
from proxy.fleet.bindings import BindingTable
from proxy.latency.forecast import LATENCY

NAMESPACE = "default"
TOKEN_HEADER = "x-session-token"
ID_HEADER = "x-session-id"

DEFAULT_TTL, DEFAULT_SWEEP = 300.0, 10.0


@dataclass(frozen=True, slots=True)
class TokenConfig:
    header: str = param(TOKEN_HEADER, "request and response header with the token")


@dataclass(frozen=True, slots=True)
class SessionSource:
    """The source of a session id."""

    header: str = param("", "a request header")
    attribute: str = param("", "a datum of the request, `kind` or `kind/producer`, as SessionID/session-id-producer")
    producer: str = param("", "producer of the attribute, if it is not part of it")

    def __post_init__(self) -> None:
        if bool(self.header) == bool(self.attribute):
            raise ValueError("a source is either a header or an attribute")
        if self.header and self.producer:
            raise ValueError("producer: a header has no producer")

    @property
    def key(self) -> DataKey[str] | None:
        if not self.attribute:
            return None
        if self.producer:
            return DataKey(self.attribute, self.producer, str)
        kind, _, producer = self.attribute.partition("/")
        return DataKey(kind, producer, str)

    def read(self, request: InferenceRequest) -> str:
        key = self.key
        if key is None:
            return request.headers.get(self.header.lower(), "").strip()
        return request.state.read(key) or ""


@dataclass(frozen=True, slots=True)
class SessionIdConfig:
    sources: tuple[SessionSource, ...] = param((), f"first that has an id; the header {ID_HEADER} unless given")
    eviction_ttl_seconds: float = param(
        DEFAULT_TTL, "time without a request after which a session is forgotten; 0: the default", at_least=0
    )
    eviction_sweep_seconds: float = param(
        DEFAULT_SWEEP, "time between two removals of forgotten sessions from memory; 0: the default", at_least=0
    )

    @property
    def times(self) -> tuple[float, float]:
        return self.eviction_ttl_seconds or DEFAULT_TTL, self.eviction_sweep_seconds or DEFAULT_SWEEP


@dataclass
class SessionAffinity(PreRequest, EndpointRemoved):
    """The parameters and the state of session-affinity-filter and session-affinity-scorer; see the scorer."""

    clock: Clock
    state: PluginState
    strategy: Literal["encoded_endpoint_header", "session_id"] = param(
        "encoded_endpoint_header",
        "encoded_endpoint_header: the client keeps a token; session_id: the proxy remembers the session",
    )
    encoded_endpoint_header_config: TokenConfig | None = param(None, "settings of the strategy encoded_endpoint_header")
    header_name: str = param("", "older spelling of encodedEndpointHeaderConfig.header")
    profile_name: str = param(
        "",
        "profile whose pod a session is bound to, with prefill/decode; empty: that of the decode pod. "
        "Requests without a pod of the profile bind nothing",
    )
    session_id_config: SessionIdConfig = param(SessionIdConfig(), "settings of the strategy session_id")
    rebalance: Rebalance | None = param(
        None, "when a session leaves a pod that is slower than the others and is bound to another; null: sessions stay"
    )

    def __post_init__(self) -> None:
        ttl, sweep = self.session_id_config.times
        self.table = self.state.get("sessions", lambda: BindingTable(ttl, sweep))
        self.state.at_commit(partial(self.table.expire_after, ttl, sweep))
        self._successors: dict[Endpoint, Endpoint] = self.state.get("successors", dict)
        """Draining pod -> pod that got the last of its sessions."""

    @property
    def requires(self) -> tuple[DataKey[Any], ...]:
        if self.strategy != "session_id":
            return ()
        return tuple(source.key for source in self.session_id_config.sources if source.key)

    def bound(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Endpoint | None:
        """Return the session's pod if it is a candidate and not too far behind."""
        home = self._home(request, endpoints)
        if home is None or self.rebalance is None:
            return home
        others = [endpoint for endpoint in endpoints if endpoint is not home]
        return None if self.rebalance.is_behind(request, (home,), others) else home

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        home = self._home_of(attempt, endpoint)
        if home is None:
            return
        if self.strategy == "session_id":
            self._remember(attempt, home)
            return
        token = (self._header, encode(home))
        if token not in attempt.response_headers:
            attempt.response_headers.append(token)

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        successor = self._successors.pop(endpoint, None)
        for pod in [pod for pod, other in self._successors.items() if other is endpoint]:
            del self._successors[pod]
        if successor is not None and endpoint.state is EndpointState.DRAINING:
            self.table.move(endpoint, successor)
        else:
            self.table.forget(endpoint)

    def _home_of(self, attempt: Attempt, endpoint: Endpoint) -> Endpoint | None:
        """Return the pod that the session returns to; it is known with the attempt that responds, of any stage."""
        decision, wanted = attempt.decision, self.profile_name
        if not attempt.for_client:
            return None
        if not wanted or decision.profile == wanted:
            return endpoint
        return decision.prefill[0] if attempt.stage is Stage.DECODE else None

    @property
    def _header(self) -> str:
        config = self.encoded_endpoint_header_config
        return (config.header if config else self.header_name or TOKEN_HEADER).lower()

    def _home(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Endpoint | None:
        if self.strategy == "session_id":
            endpoint = self.table.get(self._session(request), self.clock.now())
            if endpoint is not None and self.rebalance is not None and endpoint.state is EndpointState.DRAINING:
                endpoint = self._successors.get(endpoint)
            return endpoint if endpoint in endpoints else None
        name = decode(request.headers.get(self._header, ""))
        return next((endpoint for endpoint in endpoints if qualified(endpoint) == name), None) if name else None

    def _session(self, request: InferenceRequest) -> str:
        sources = self.session_id_config.sources or (SessionSource(header=ID_HEADER),)
        return next((session for source in sources if (session := source.read(request))), "")

    def _remember(self, attempt: Attempt, endpoint: Endpoint) -> None:
        session, now = self._session(attempt.request), self.clock.now()
        if not session:
            return
        home = self.table.get(session, now)
        if self.rebalance is None:
            decision = attempt.decision
            stays = home is not None and home in (*decision.candidates(), *decision.prefill)
            self.table.bind(session, home if home is not None and stays else endpoint, now)
            return
        if home is not None and home is not endpoint and home.state is EndpointState.DRAINING:
            self._successors[home] = endpoint
        self.table.bind(session, endpoint, now)


def qualified(endpoint: Endpoint) -> str:
    return endpoint.name if "/" in endpoint.name else f"{NAMESPACE}/{endpoint.name}"


def encode(endpoint: Endpoint) -> str:
    return b64encode(qualified(endpoint).encode()).decode()


def decode(token: str) -> str:
    """Return the name in a token; empty for an invalid token."""
    try:
        return b64decode(token.strip(), validate=True).decode()
    except ValueError:
        return ""


@dataclass(frozen=True, slots=True)
class Rebalance:
    """In seconds where there is a forecast, which includes what each pod has cached of the prompt; else in requests."""

    seconds: float = param(
        1.0, "predicted seconds by which the session's pod may be slower, with predicted-latency-producer", at_least=0
    )
    requests: int = param(
        16,
        "running and waiting requests by which the session's pod may exceed the others, without predictions",
        at_least=0,
    )

    def is_behind(self, request: InferenceRequest, held: Sequence[Endpoint], others: Sequence[Endpoint]) -> bool:
        """Return whether the best of the holders is too far behind the best of the others."""
        if not others:
            return False
        forecast = request.state.read(LATENCY)
        if forecast is not None:
            return min(forecast.costs(held)) - min(forecast.costs(others)) > self.seconds
        return _fewest(held) - _fewest(others) > self.requests


def _fewest(endpoints: Sequence[Endpoint]) -> int:
    return min(endpoint.view.waiting + endpoint.view.running for endpoint in endpoints)
