"""Model names: from what a client sends to a model, a priority, a tenant and fallbacks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import xxhash

from proxy.core.attempt import CRASHES
from proxy.core.endpoint import LIGHT_SLEEP, Endpoint, EndpointState
from proxy.core.errors import (
    AllFailed,
    BadRequest,
    NoEndpoints,
    Reason,
    RequestError,
    Saturated,
    UnknownModel,
    UpstreamFailed,
)
from proxy.core.ports import CHARGED, IDENTITY, Clock, Identity, Poster, Random, allows
from proxy.core.request import CycleState, InferenceRequest, Naming, changed
from proxy.core.tasks import Tasks
from proxy.models.settings import ModelSettings, Rewrite, Target
from proxy.openai import multipart
from proxy.openai.bodies import with_model
from proxy.telemetry.metrics import Catalogue

if TYPE_CHECKING:
    from proxy.fleet.store import Fleet

log = logging.getLogger(__name__)


OBJECTIVE = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
REWRITE = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
"""Headers of llm-d, the new name and the old one."""

MOST_TENANT_CHARACTERS = 256
"""Characters of a tenant in a header; tenants are remembered after their requests."""

ALIAS, HEADER, ANY = "alias", "header", "any"
"""Names in metrics of rewrites without a rule, or by a rule without a name."""


class Resolver:
    """Resolves model names. Without an identity, headers may name the tenant, the objective and the model. An identity
    decides itself, and a header may only name an objective that the key permits."""

    def __init__(
        self,
        settings: ModelSettings,
        random: Random,
        catalogue: Catalogue | None = None,
        waker: Waker | None = None,
        pools: Collection[str] = (),
        sessions: Sequence[str] = (),
    ) -> None:
        """`catalogue` has the metrics of rewrites; None counts nothing. `pools` that a fallback may name; `sessions`
        are headers, in lower case, that tell tenants apart where none is named."""
        self._pools = pools
        self._sessions = sessions
        self._tenant_headers = (*FAIRNESS, *sessions)
        self._random = random
        self._catalogue = catalogue
        self._waker = waker
        self.settings = settings

    @property
    def settings(self) -> ModelSettings:
        """Where they change, new requests follow."""
        return self._settings

    @settings.setter
    def settings(self, settings: ModelSettings) -> None:
        self._settings = settings
        self._rules = sorted(settings.rewrites, key=lambda rule: not rule.model)

    def unheard(self) -> Resolver:
        """Return a resolver for dry runs: it counts nothing and wakes no pods."""
        return Resolver(self._settings, self._random, None, None, self._pools, self._sessions)

    def resolve(self, request: InferenceRequest, identity: Identity | None) -> InferenceRequest:
        """Raise UnknownModel for a model that the key may not use, BadRequest for a body that cannot name another."""
        if identity is not None and not allows(identity.models, request.model):
            raise UnknownModel(request.model)
        model, pool = self._target(request, identity) if request.model or request.body else ("", "")
        fallbacks = self._settings.fallbacks.get(model, ())
        is_named = model != request.model or pool or fallbacks or self._waker is not None
        return changed(
            request,
            model=model,
            body=request.body if model == request.model else _rewritten(request, model),
            priority=self._priority(request.headers, identity),
            tenant=_first(request.headers, self._tenant_headers) if identity is None else identity.tenant,
            naming=Naming(request.model, tuple(fallbacks), self._waker is not None, pool) if is_named else None,
        )

    async def try_each(self, request: InferenceRequest, send: Callable[[InferenceRequest], Awaitable[None]]) -> None:
        """Send the request under each of its models in turn, until a pod serves it. Raise the last error, in the words
        of the client, except that an unknown fallback does not hide why another model could not be served."""
        naming = request.naming
        failure: RequestError | None = None
        while naming is not None:
            try:
                await send(request)
                return
            except (NoEndpoints, UnknownModel, Saturated, AllFailed) as error:
                if error.reason is Reason.EVICTED_PRIORITY:
                    raise
                if failure is None or not isinstance(error, UnknownModel):
                    failure = _in_words_of(naming, request, error)
            request = await self._instead(request, naming, failure)
            naming = request.naming
        await send(request)

    def listed(self, cards: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the cards of /v1/models and a card for each alias or rewritten name."""
        known = {card["id"]: card for card in cards}
        names = {name: {**known[model], "id": name} for name, model in self._names() if model in known}
        return [*cards, *(card for name, card in names.items() if name not in known)]

    async def _instead(self, request: InferenceRequest, naming: Naming, error: RequestError) -> InferenceRequest:
        """Return the request to try after `error`. Raise `error` if there is no fallback."""
        if self._waker is not None and isinstance(error, NoEndpoints):
            woken = self._waker.wake(request.model, naming.pool) and naming.may_wait and not naming.fallbacks
            if woken and await self._waker.awake(request.model, request.deadline, naming.pool):
                return changed(with_fresh_state(request), naming=replace(naming, may_wait=False))
        if not naming.fallbacks:
            raise error
        name, *others = naming.fallbacks
        model, pool = self._placed(name)
        try:
            body = request.body if model == request.model else _rewritten(request, model)
        except BadRequest:
            raise error from None
        if self._catalogue is not None:
            self._catalogue.fallbacks.cell(request.model, name).add()
        naming = replace(naming, fallbacks=tuple(others), pool=pool)
        return changed(with_fresh_state(request), model=model, body=body, naming=naming)

    def _names(self) -> Iterable[tuple[str, str]]:
        """Yield names of clients with the model that each stands for."""
        for rule in self._rules:
            if rule.model and not rule.headers:
                yield from ((rule.model, target.model) for target in rule.targets)
        yield from self._settings.aliases.items()

    def _priority(self, headers: Mapping[str, str], identity: Identity | None) -> int:
        name = _first(headers, OBJECTIVE)
        if not name or (identity is not None and not allows(identity.objectives, name)):
            name = "default"
        objective = self._settings.objectives.get(name)
        return objective.priority if objective is not None else 0

    def _placed(self, name: str) -> tuple[str, str]:
        """Return model and pool of a fallback. Without such a pool the @ belongs to the model."""
        model, _, pool = name.rpartition("@")
        return (model, pool) if model and pool in self._pools else (name, "")

    def _target(self, request: InferenceRequest, identity: Identity | None) -> tuple[str, str]:
        """Return the model, and the only pool that may serve it; empty: any pool."""
        named = _first(request.headers, REWRITE) if identity is None else ""
        if named:
            self._count_rewrite(HEADER, "")
            return named, ""
        model = self._settings.aliases.get(request.model, request.model)
        for rule in self._rules:
            has_headers = all(request.headers.get(name) == value for name, value in rule.headers.items())
            if has_headers and rule.model in ("", model, request.model):
                drawn = self._draw(rule, request.headers)
                self._count_rewrite(rule.name or rule.model or ANY, drawn.model)
                return drawn.model, drawn.pool
        if model != request.model:
            self._count_rewrite(ALIAS, model)
        return model, ""

    def _count_rewrite(self, rule: str, model: str) -> None:
        if self._catalogue is not None:
            self._catalogue.rewrites.cell(rule, model).add()

    def _draw(self, rule: Rewrite, headers: Mapping[str, str]) -> Target:
        """Draw a target by weight. If any target has a weight, targets without one or with 0 are never drawn."""
        who = headers.get(rule.sticky, "") if rule.sticky else ""
        share = (
            xxhash.xxh3_64_intdigest(who.encode("utf-8", "surrogateescape")) / 2**64 if who else self._random.random()
        )
        targets = [target for target in rule.targets if target.weight]
        targets = targets or [target for target in rule.targets if target.weight is None] or list(rule.targets)
        weights = [target.weight or 1.0 for target in targets]
        at = share * sum(weights)
        for target, weight in zip(targets, weights, strict=True):
            at -= weight
            if at < 0.0:
                return target
        return targets[-1]


def with_fresh_state(request: InferenceRequest) -> InferenceRequest:
    """Return the request without the data that were produced for another model. The identity stays, and that the
    request is charged and which pods it crashed."""
    state = CycleState()
    if request.state.read(CHARGED):
        state.write(CHARGED, True)
    if identity := request.state.read(IDENTITY):
        state.write(IDENTITY, identity)
    if crashes := request.state.read(CRASHES):
        state.write(CRASHES, crashes)
    return changed(request, state=state)


def _in_words_of(naming: Naming, request: InferenceRequest, error: RequestError) -> RequestError:
    """Return the error with the model name that the client sent."""
    if isinstance(error, UnknownModel):
        unknown = UnknownModel(naming.requested)
        unknown.__cause__ = error.__cause__
        return unknown
    error.message = error.message.replace(f"`{request.model}`", f"`{naming.requested}`")
    error.args = (error.message,)
    return error


def _first(headers: Mapping[str, str], names: Sequence[str]) -> str:
    return next((value[:MOST_TENANT_CHARACTERS] for name in names if (value := headers.get(name))), "")


def _rewritten(request: InferenceRequest, model: str) -> bytes:
    content_type = request.headers.get("content-type", "")
    if multipart.is_multipart(content_type):
        body = multipart.with_model(request.body, content_type, model)
    else:
        body = with_model(request.body, model)
    if body is None:
        raise BadRequest(
            f"'{request.model}' is an alias of another model, which this request has no field for;"
            " name the model in a JSON body, or in a field of the form.",
            param="model",
        )
    return body


WAKE_UP = "/wake_up"

AGAIN = 10.0
"""Seconds after which a pod that did not wake up is tried again."""

CHECK_INTERVAL = 0.05
"""Seconds between two checks of a pod that wakes up."""


class Waker:
    """Wakes one sleeping pod per model, however many requests wait for it."""

    def __init__(self, fleet: Fleet, poster: Poster, clock: Clock, tasks: Tasks, timeout: float) -> None:
        """`timeout`: longest wait of a request, in seconds."""
        self._fleet = fleet
        self._poster = poster
        self._clock = clock
        self._tasks = tasks
        self.timeout = timeout
        self._waking: set[Endpoint] = set()
        self._left_alone: dict[Endpoint, float] = {}
        """Pods that did not wake up, and until when they are not tried again."""

    def wake(self, model: str, pool: str = "") -> bool:
        """Start to wake a pod of the pool (empty: any) for the model. Return False if no sleeping pod serves it."""
        now = self._clock.now()
        self._left_alone = {endpoint: until for endpoint, until in self._left_alone.items() if until > now}
        asleep = [
            endpoint
            for endpoint in self._fleet.endpoints
            if endpoint is endpoint.first_rank and _sleeps(endpoint)
            if _serves(endpoint, model) and endpoint not in self._left_alone and pool in ("", endpoint.pool)
        ]
        if asleep and self._waking.isdisjoint(asleep):
            self._waking.add(asleep[0])
            self._tasks.start(self._wake(asleep[0]), f"wake-up of {asleep[0].name}")
        return bool(asleep)

    async def awake(self, model: str, deadline: float, pool: str = "") -> bool:
        """Wait until a pod of the pool (empty: any) serves the model. Return False after the timeout, or if no pod can
        be woken."""
        end = min(deadline, self._clock.now() + self.timeout)
        while not self._endpoints_for(model, pool):
            if self._clock.now() >= end or not self.wake(model, pool):
                return bool(self._endpoints_for(model, pool))
            await asyncio.sleep(CHECK_INTERVAL)
        return True

    def _endpoints_for(self, model: str, pool: str) -> Sequence[Endpoint]:
        return self._fleet.within(pool).of(model) if pool else self._fleet.endpoints_for(model)

    async def _wake(self, endpoint: Endpoint) -> None:
        log.info("waking pod %s: a request needs its model", endpoint.name)
        end = self._clock.now() + self.timeout
        try:
            status, _ = await self._poster.post(endpoint.url + WAKE_UP, b"", endpoint.api_key)
            if status >= 300:
                raise UpstreamFailed(f"/wake_up returned {status}")
            while endpoint.metrics.sleep_level:
                if self._clock.now() >= end:
                    raise UpstreamFailed("it still reports that it sleeps")
                await asyncio.sleep(CHECK_INTERVAL)
        except UpstreamFailed as error:
            log.warning("pod %s did not wake up; not trying it again for %g s: %s", endpoint.name, AGAIN, error)
            self._left_alone[endpoint] = self._clock.now() + AGAIN
        finally:
            self._waking.discard(endpoint)


def _sleeps(endpoint: Endpoint) -> bool:
    return endpoint.metrics.sleep_level == LIGHT_SLEEP and endpoint.state is not EndpointState.DRAINING


def _serves(endpoint: Endpoint, model: str) -> bool:
    return not endpoint.models or not model or model in endpoint.models
