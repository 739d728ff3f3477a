"""THE DATA PATH: the life of one request, from the parsed HTTP head to the last hook."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import (
    BadGateway,
    BadRequest,
    GatewayTimeout,
    NoEndpoints,
    UnknownModel,
    UnknownResponse,
    UpstreamFailed,
    UpstreamTimedOut,
)
from proxy.core.exchange import Ending, Exchange
from proxy.core.ports import Call, Clock, Relay
from proxy.core.request import InferenceRequest
from proxy.fleet.bindings import Bindings
from proxy.fleet.datastore import Fleet
from proxy.fleet.ledger import Ledger
from proxy.openai.parse import Parsed, parse
from proxy.openai.paths import model_in, response_id
from proxy.parsing.reader import LARGE, BodyParser
from proxy.production import Production
from proxy.scheduling.build import Scheduling
from proxy.telemetry.observer import Observer

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Gateway:
    """Where the rooms meet. `serve` is called once per request by the rim."""

    fleet: Fleet
    scheduling: Scheduling
    ledger: Ledger
    bindings: Bindings
    observer: Observer
    clock: Clock
    attempts: int = 3
    expose_endpoint: bool = True
    stopping: bool = False
    parser: BodyParser = field(default_factory=BodyParser)
    _production: Production = field(init=False)

    def __post_init__(self) -> None:
        self._production = Production(self.scheduling.producers, self.scheduling.producer_rounds)

    async def serve(self, call: Call, relay: Relay) -> None:
        """Raises RequestError if nothing was sent to the client; what fails later has been ended by the relay."""
        pinned = response_id(call.path)
        if pinned:
            request = _request(call, Parsed("", call.body), model="")
            await self._send(request, self._to_the_pod_of(pinned), relay)
            return
        parsed = _parsed(call) if len(call.body) < LARGE else await self._parsed_apart(call)
        model = self._only_model() if parsed.model is None else parsed.model
        request = _request(call, parsed, model)
        await self._production.run(request, self.fleet.serving(model))
        await self._send(request, self._decide(request, parsed), relay)

    def health(self) -> bool:
        """Whether new requests are wanted."""
        return not self.stopping and bool(self.fleet.ready)

    def models(self) -> list[dict[str, Any]]:
        """The cards of /v1/models of all live pods, one per id."""
        return self.fleet.models()

    async def _parsed_apart(self, call: Call) -> Parsed:
        return await self.parser.parse_apart(call.path, call.body, call.headers.get("content-type", ""))

    def _only_model(self) -> str:
        """What a body gets that names none."""
        only = self.fleet.only_model()
        if only is None and self.fleet.models():
            names = ", ".join(card["id"] for card in self.fleet.models())
            raise BadRequest(f"'model' is missing, and there are several: {names}.", param="model")
        return only or ""

    def _decide(self, request: InferenceRequest, parsed: Parsed) -> Decision:
        """From here to the PreRequest hooks nothing waits, so the decision and its reservation are one step."""
        if parsed.previous_response_id:
            return self._to_the_pod_of(parsed.previous_response_id)
        started = self.clock.now()
        decision = self.scheduling.scheduler.schedule(request, self._candidates(request.model))
        self.observer.decided(decision, self.clock.now() - started)
        return decision

    def _candidates(self, model: str) -> Sequence[Endpoint]:
        endpoints = self.fleet.serving(model)
        if endpoints:
            return endpoints
        if self.fleet.ready and not self.fleet.knows(model):
            raise UnknownModel(model)
        raise NoEndpoints(f"No pod that serves the model `{model}` is ready; try again shortly." if model else _NO_POD)

    def _to_the_pod_of(self, stored: str) -> Decision:
        """Stored responses live in the memory of the pod that made them."""
        endpoint = self.bindings.find(stored)
        ready = self.fleet.ready
        if endpoint is None and len(ready) == 1:
            endpoint = ready[0]
        if endpoint is None:
            raise UnknownResponse(stored) if ready else NoEndpoints(_NO_POD)
        return Decision(endpoint)

    async def _send(self, request: InferenceRequest, decision: Decision, relay: Relay) -> None:
        """The target, then the fallbacks in rank order while nothing has reached the client."""
        failure: UpstreamFailed | None = None
        attempt = 0
        for endpoint in decision.candidates():
            if attempt and endpoint.state is not EndpointState.READY:
                continue
            if attempt == self.attempts:
                break
            try:
                with Leg(self, Exchange(request, decision, endpoint, attempt, self.clock.now())) as exchange:
                    await relay.relay(exchange)
            except UpstreamTimedOut as error:
                raise GatewayTimeout("The pod that took the request did not answer in time.") from error
            except UpstreamFailed as error:
                log.warning("request %s, attempt %d: %s failed: %s", request.id, attempt + 1, endpoint.name, error)
                failure = error
                attempt += 1
            else:
                return
        raise BadGateway(f"No pod answered; tried {attempt}. Try again shortly.") from failure


def _parsed(call: Call) -> Parsed:
    """What has no body may name no model: any pod will do then."""
    if call.method in ("GET", "HEAD", "DELETE"):
        return Parsed(model_in(call.query) or "", call.body)
    return parse(call.path, call.body, call.headers.get("content-type", ""))


def _request(call: Call, parsed: Parsed, model: str) -> InferenceRequest:
    return InferenceRequest(
        id=call.id,
        path=call.path,
        model=model,
        prompt=parsed.prompt,
        body=parsed.body,
        headers=call.headers,
        stream=parsed.stream,
        max_tokens=parsed.max_tokens,
        received_at=call.received_at,
    )


_NO_POD = "No pod is ready; try again shortly."


@dataclass(slots=True)
class Leg:
    """One exchange between PreRequest and PostResponse: whatever entered, leaves."""

    gateway: Gateway
    exchange: Exchange

    def __enter__(self) -> Exchange:
        gateway, exchange = self.gateway, self.exchange
        if gateway.expose_endpoint:
            exchange.response_headers.append(("x-kvlane-endpoint", exchange.endpoint.name))
        gateway.ledger.enter(exchange)
        for hook in next(gateway.scheduling.pre_request_rounds):
            try:
                hook.pre_request(exchange, exchange.endpoint)
            except Exception:
                log.exception("request %s: PreRequest of %s failed", exchange.request.id, hook.plugin_type)
        return exchange

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gateway, exchange = self.gateway, self.exchange
        if exchange.ending is None:
            exchange.ending = Ending.CLIENT_GONE if kind is asyncio.CancelledError else Ending.UPSTREAM_FAILED
        gateway.ledger.leave(exchange)
        if exchange.response_id and gateway.fleet.get(exchange.endpoint.name) is exchange.endpoint:
            gateway.bindings.bind(exchange.response_id, exchange.endpoint)
        for hook in next(gateway.scheduling.post_response_rounds):
            try:
                hook.post_response(exchange, exchange.endpoint)
            except Exception:
                log.exception("request %s: PostResponse of %s failed", exchange.request.id, hook.plugin_type)
        gateway.observer.leg_ended(exchange)
