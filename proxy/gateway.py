"""The life of one request, from its complete body to the end of its last attempt."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from proxy.core.attempt import COMPLETE, Attempt, Ending
from proxy.core.decision import NO_SAMPLER, Decision, DecisionRecord, DecisionSampler
from proxy.core.endpoint import GONE, Endpoint
from proxy.core.errors import (
    LONGEST_NAME,
    NO_POD,
    Forbidden,
    KvlaneError,
    NoEndpoints,
    RequestError,
    UnknownModel,
    UpstreamFailed,
)
from proxy.core.ports import ClientRequest, Clock, Relay, Resolver, allows
from proxy.core.request import InferenceRequest
from proxy.fleet.bindings import Bindings, steer
from proxy.fleet.models import LONGEST_WAIT, ModelReads
from proxy.fleet.store import Fleet
from proxy.models import resolver as models
from proxy.models.resolver import with_fresh_state
from proxy.openai.bodies import SMALL
from proxy.openai.events import with_usage
from proxy.openai.parse import Parsed, response_id
from proxy.parsing import (
    BodyParser,
    is_large_form,
    may_parse_here,
    parse_here,
    parsed_form,
    request_of,
)
from proxy.pool import Pool, Pools, ServeIn
from proxy.reliability.failover import Failover

if TYPE_CHECKING:
    from proxy.disagg.transfer import SplitRequest
    from proxy.reliability.hedging import Hedge, Hedging

PUBLISHED_WITHIN = 0.1
"""Seconds until a response that another worker or proxy has relayed is known here. Its client may be faster."""

TRIES = 10

WEBSOCKET = (
    "This key may not use every model of the pods that serve this one, and a WebSocket reaches all of them. "
    "Serve the model on pods of its own, or extend the key's `models`."
)


@dataclass(slots=True)
class Gateway:
    """Sends requests to pods; `serve` is called once per request."""

    fleet: Fleet
    all_pools: Sequence[Pool]
    bindings: Bindings
    clock: Clock
    failover: Failover
    request_timeout: float = math.inf
    """Seconds that a request may take, unless its client sets less."""
    hedging: Hedging | None = None
    resolver: Resolver | None = None
    """Checks whether the key may use the model, then maps the model; see `serving`."""
    model_names: models.Resolver | None = None
    """The configured names of models: fallbacks of a request, and what /v1/models lists."""
    model_reads: ModelReads | None = None
    """None if the models of pods are not read on demand."""
    expose_endpoint: bool = True
    ask_for_usage: bool = False
    sampler: DecisionSampler = NO_SAMPLER
    parser: BodyParser = field(default_factory=BodyParser)
    pools: Pools = field(init=False)

    def __post_init__(self) -> None:
        serve_in: ServeIn = self._serve_in_pool
        if self.hedging is not None:
            serve_in = self.hedging.around(self._serve_in_pool, self._running)
        self.pools = Pools(self.all_pools, self.bindings, serve_in)

    async def serve(self, client_request: ClientRequest, relay: Relay) -> None:
        """Serve the request. Raise RequestError: the caller sends it to the client or, if a response has started, calls
        `ClientRelay.end` with it, because no pod continues the response."""
        pinned = response_id(client_request.path)
        if pinned:
            parsed = Parsed("", client_request.body, previous_response_id=pinned)
            request = request_of(client_request, parsed, "", self.request_timeout)
            await self._wait_for_response(pinned)
            await self._serve_in_pool(self.pools.holding(pinned), request, parsed, relay, produces=False)
            return
        if len(client_request.body) <= SMALL and client_request.upload is None:
            parsed = parse_here(client_request)  # the usual body, without the checks below
        elif is_large_form(client_request):
            parsed = await parsed_form(client_request)
        elif may_parse_here(client_request):
            parsed = parse_here(client_request)
        else:
            content_type = client_request.headers.get("content-type", "")
            parsed = await self.parser.parse_apart(client_request.path, client_request.body, content_type)
        model = self.fleet.only_model() if parsed.model is None else parsed.model
        request = request_of(client_request, parsed, model, self.request_timeout)
        try:
            if self.resolver is not None:
                request = self.resolver.resolve(request, client_request.identity)
                if client_request.identity is not None and client_request.identity.models is not None:
                    self._check_models(client_request, client_request.identity.models, parsed, request)
            if self.ask_for_usage:
                request = with_usage(request)
            if self.failover.quarantine.entries:  # after all rewrites: a request without a prompt is known by its body
                self.failover.quarantine.check(request)
            if parsed.previous_response_id:
                await self._wait_for_response(parsed.previous_response_id)
            try:
                if request.naming is None:  # as in `_send`, without its frame
                    await self.pools.send(request, parsed, relay)
                else:
                    await self._send(request, parsed, relay)
                return
            except (UnknownModel, NoEndpoints):
                if parsed.previous_response_id or not await self._is_served_after_reread(request):
                    raise
            await self._send(with_fresh_state(request), parsed, relay)
        except (RequestError, asyncio.CancelledError):
            client_request.model = model[:LONGEST_NAME]
            raise

    def health(self) -> bool:
        """Return whether a pod can serve requests."""
        return self.fleet.serves

    def models(self) -> list[dict[str, Any]]:
        """Return the cards of /v1/models of all live pods, one per id."""
        cards = self.fleet.models()
        return cards if self.model_names is None else self.model_names.listed(cards)

    async def _wait_for_response(self, response_id: str) -> None:
        """Wait a moment for a response that another process may have relayed."""
        for _ in range(TRIES):
            if not self.bindings.may_appear(response_id, self.fleet.ready):
                return
            await asyncio.sleep(PUBLISHED_WITHIN / TRIES)

    def _send(self, request: InferenceRequest, parsed: Parsed, relay: Relay) -> Awaitable[None]:
        """Send the request to a pool, under each name of its model in turn if it has several."""
        if request.naming is None or self.model_names is None or parsed.previous_response_id:
            return self.pools.send(request, parsed, relay)
        return self.model_names.try_each(request, lambda one: self.pools.send(one, parsed, relay))

    def _check_models(
        self, client_request: ClientRequest, allowed: frozenset[str], parsed: Parsed, request: InferenceRequest
    ) -> None:
        """Raise UnknownModel for an adapter that the key may not use, and Forbidden for a WebSocket to a pod with
        models that the key may not use: inside it, clients name any model of the pod."""
        for adapter in parsed.adapters:
            if not allows(allowed, adapter):
                raise UnknownModel(adapter)
        if client_request.headers.get("upgrade", "").lower() == "websocket":
            names = (request.model, *(request.naming.fallbacks if request.naming is not None else ()))
            pods = [endpoint for name in names for endpoint in self.fleet.endpoints_for(name)]
            if not all(pod.models and all(m in names or allows(allowed, m) for m in pod.models) for pod in pods):
                raise Forbidden(WEBSOCKET)

    async def _is_served_after_reread(self, request: InferenceRequest) -> bool:
        """Return whether a ready pod serves the model once the models of the ready pods have been read again.

        Since they were read, an adapter may have been loaded, or a model changed. Nothing is read for a model that is
        listed by a pod that is not ready."""
        fleet, model, reads = self.fleet, request.model, self.model_reads
        if reads is None or not fleet.ready or fleet.is_listed(model) or fleet.endpoints_for(model):
            return False
        now = self.clock.now()
        end, over = min(now + LONGEST_WAIT, request.deadline), reads.next_round()
        while not over.done() and now < end and not fleet.endpoints_for(model):
            done = (over, fleet.models_change())
            await asyncio.wait(done, timeout=end - now, return_when=asyncio.FIRST_COMPLETED)
            now = self.clock.now()
        return bool(fleet.endpoints_for(model))

    async def _serve_in_pool(
        self,
        pool: Pool,
        request: InferenceRequest,
        parsed: Parsed,
        relay: Relay,
        produces: bool = True,
        sender: Hedge | SplitRequest | None = None,
    ) -> None:
        """Send the request to the chosen pod of the pool. While an attempt fails before its response started, or, for
        continued models, with a request for the rest of it (StreamInterrupted), send it to the next pod. `sender` sends
        its attempts in another way: hedged, or split among pods."""
        endpoints, producers, sampler = pool.pods.endpoints_for(request.model), pool.producers, self.sampler
        is_timed = next(sampler.timed)
        record = sampler.record(request, is_timed) if is_timed or sampler.wants is not None else None
        if produces:
            producers.derive(request, endpoints, record)
            if producers.has_coroutines:
                await producers.produce(request, endpoints, record)
            if producers.waits:
                endpoints = pool.pods.endpoints_for(request.model)
        decision = self._decide(pool, request, parsed, endpoints, record)
        if pool.split_requests is not None and (decision.split_outcome or parsed.previous_response_id):
            decision, split = pool.split_requests.of(request, decision, relay, self._running)
            sender = split or sender
        attempt = Attempt(request, decision, decision.target, 0, self.clock.now())
        attempt.record = record
        while True:
            try:
                if sender is not None:
                    await sender.run(attempt)
                    return
                # Inlined `with Running(self, pool, attempt)`, which costs 0.7 % of the instructions of a request.
                start_attempt(self, pool, attempt)
                try:
                    await relay.relay(attempt)  # returns for a failure after the start too: see `attempt.ending`
                except BaseException as error:
                    end_attempt(attempt, error)
                    raise
                end_attempt(attempt, None)
                return
            except UpstreamFailed as error:
                failure = error.with_traceback(None)  # its frames refer to the error and the body: a cycle
            attempt = await self.failover.next_attempt(failure.attempt or attempt, failure)

    def _running(self, attempt: Attempt) -> Running:
        return Running(self, self.pools.having(attempt.endpoint), attempt)

    def _decide(
        self,
        pool: Pool,
        request: InferenceRequest,
        parsed: Parsed,
        candidates: Sequence[Endpoint],
        record: DecisionRecord | None,
    ) -> Decision:
        """Return the decision. Nothing waits from here until `start_attempt` calls the ledger, the listener that
        reserves the pod, so decision and reservation are one step."""
        if parsed.previous_response_id:  # stored responses live in the memory of the pod that made them
            return Decision(self._holder(pool, request, parsed.previous_response_id))
        started = self.clock.now()
        if not candidates:
            raise self.no_pod_serves(request.model)
        for admission in pool.admissions:
            candidates = admission.narrow(request, candidates)
        try:
            decision = pool.scheduling.scheduler.schedule(request, candidates, record)
        except RequestError as error:
            for not_scheduled in pool.listeners.not_scheduled:
                try:
                    not_scheduled(request, candidates, error, record)
                except Exception:  # noqa: BLE001  # the client gets the error below
                    pool.listeners.failed(not_scheduled, request.id)
            raise
        if self.fleet.draining:
            decision = steer(request, decision, self.fleet.draining)
        for listener in pool.listeners.decided:
            try:
                listener(request, candidates, decision, started, record)
            except Exception:  # noqa: BLE001  # the request goes on
                pool.listeners.failed(listener, request.id)
        return decision

    def _holder(self, pool: Pool, request: InferenceRequest, response_id: str) -> Endpoint:
        """Return the pod that stores the response, with the rank that the client chose. Raise RequestError without one,
        or if Envoy does not allow it."""
        holder = self.bindings.pod_of(response_id, self.fleet.ready)
        ranks: Sequence[Endpoint] = holder.ranks
        for admission in pool.admissions:
            if admission.holds_for_retries:
                ranks = admission.narrow(request, ranks)
        return holder if holder in ranks else ranks[0]

    def no_pod_serves(self, model: str) -> RequestError:
        """Return the error for a request for this model without candidates."""
        if self.fleet.ready and not self.fleet.knows(model):
            return UnknownModel(model)
        return NoEndpoints(f"No pod that serves the model `{model}` is ready; try again shortly." if model else NO_POD)


@dataclass(slots=True)
class Running:
    """One attempt between its start and its end; leaving it ends the attempt in every case."""

    gateway: Gateway
    pool: Pool
    attempt: Attempt

    def __enter__(self) -> None:
        start_attempt(self.gateway, self.pool, self.attempt)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        end_attempt(self.attempt, error)


def start_attempt(gateway: Gateway, pool: Pool, attempt: Attempt) -> None:
    """Call the listeners of an attempt that starts. `end_attempt` must follow."""
    endpoint = attempt.endpoint
    if gateway.expose_endpoint:
        attempt.response_headers.append(("x-kvlane-endpoint", endpoint.name))
        if (naming := attempt.request.naming) is not None and naming.requested != attempt.request.model:
            attempt.response_headers.append(("x-kvlane-model", attempt.request.model))
    attempt.listeners = listeners = pool.listeners
    called = listeners.attempt_started
    if endpoint.is_watched:
        called += listeners.started_on_watched_pod
    for listener in called:
        try:
            listener(attempt)
        except Exception:  # noqa: BLE001  # the request goes on
            listeners.failed(listener, attempt.request.id)
    is_recorded = attempt.record is not None
    for hook in listeners.pre_request_hooks:
        try:
            if is_recorded:
                listeners.call_recorded(hook, attempt)
            else:
                hook(attempt, endpoint)
        except Exception as error:  # noqa: BLE001  # the request goes on
            listeners.hook_failed(hook, attempt, error)


def _ending_after(error: BaseException | None) -> Ending:
    """Return the ending of an attempt whose relay set none."""
    if isinstance(error, asyncio.CancelledError):
        return Ending.CLIENT_GONE
    return Ending.UPSTREAM_FAILED if isinstance(error, KvlaneError) else Ending.EVICTED


def end_attempt(attempt: Attempt, error: BaseException | None) -> None:
    """Call the listeners of an attempt that has ended. `error` is what the relay raised; None does not mean success,
    which `attempt.ending` says."""
    listeners, endpoint = attempt.listeners, attempt.endpoint
    called = listeners.attempt_ended
    if attempt.ending is None:
        attempt.ending = _ending_after(error)
    if attempt.status != 200 or attempt.ending is not COMPLETE or endpoint.is_watched:
        called = listeners.ended_with_evidence + called
        if isinstance(error, UpstreamFailed):
            attempt.error = str(error)
    if attempt.response_id:
        called = listeners.response_stored + called
    for listener in called:
        try:
            listener(attempt, error)
        except Exception:  # noqa: BLE001  # the other listeners are still called
            listeners.failed(listener, attempt.request.id)
    is_recorded = attempt.record is not None
    for hook in listeners.post_response_hooks:
        try:
            if is_recorded:
                listeners.call_recorded(hook, attempt)
            else:
                hook(attempt, endpoint)
        except Exception as raised:  # noqa: BLE001  # the other hooks are still called
            listeners.hook_failed(hook, attempt, raised)
    if endpoint.state is GONE:
        listeners.forget(endpoint)  # the hooks of the attempt have stored state of it again
