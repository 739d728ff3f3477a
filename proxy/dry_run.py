"""Decide on a request that no client has sent, on the live fleet, without side effects."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from proxy.core.decision import Decision, DecisionRecord
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, ConfigError, RequestError
from proxy.core.params import suggestion
from proxy.core.plugin import DataProducer, PreRequest
from proxy.core.ports import Identity
from proxy.core.request import CycleState, InferenceRequest, changed
from proxy.core.state import Draft
from proxy.fleet.bindings import steer
from proxy.openai.parse import Parsed, parse
from proxy.parsing import request_of
from proxy.pool import Pool, Producers
from proxy.scheduling.build import Scheduling
from proxy.scheduling.document import Document, PluginEntry, PluginRef, ProfileEntry, read
from proxy.scheduling.explained_decision import DecisionEntry, imagined, short
from proxy.scheduling.layout import declares
from proxy.scheduling.scheduler import Scheduler
from proxy.serving import Process, narrowing

PATHS: Mapping[str, str] = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "input": "/v1/responses",
}
"""Default path of a body with this field."""

_FIELDS = ("request", "path", "headers", "pool", "profile", "scheduling", "weights")


@dataclass(frozen=True, slots=True)
class DryRunQuery:
    """`body` is what the client would send. `profile` decides alone; `scheduling` is a section that replaces the one in
    effect; `weights` are weights of scorers, by name, in all profiles."""

    path: str
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    pool: str = ""
    profile: str = ""
    scheduling: Any = None
    weights: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, trial: Any, query: Mapping[str, str]) -> DryRunQuery:
        """Parse `{"request": …}` with its options, or the bare request. Raise BadRequest."""
        if not isinstance(trial, Mapping):
            raise BadRequest("The body must be an object: a request, or what has one in `request`.")
        given = dict(trial) if "request" in trial else {"request": trial}
        for name in given:
            if name not in _FIELDS:
                raise BadRequest(f"There is no '{name}' beside the request{suggestion(name, _FIELDS)}.", param=name)
        given.update({name: query[name] for name in ("pool", "profile") if name in query})
        return cls(
            _path(given),
            _body(given["request"]),
            _headers(given.get("headers") or {}),
            _text(given, "pool"),
            _text(given, "profile"),
            given.get("scheduling"),
            _weights(given.get("weights") or {}),
        )


def _body(request: Any) -> bytes:
    try:
        return orjson.dumps(request)
    except TypeError:  # values of JSON that it cannot write are nested too deeply
        raise BadRequest("The request is nested too deeply.", param="request") from None


def reweighed(document: Document, made: Scheduling, weights: Mapping[str, float]) -> Document:
    """Return the document with other weights of some scorers. Raise BadRequest."""
    scorers = sorted({name for of_profile in made.shares().values() for name in of_profile})
    for name in weights:
        if name not in scorers:
            advice = f"{suggestion(name, scorers) or '.'} The configuration has {', '.join(scorers)}."
            raise BadRequest(f"No profile has the scorer '{name}'{advice}", param=f"weights.{name}")
    written = {entry.label for entry in document.plugins}
    injected = [PluginEntry(one.type, one.name) for one in made.effective.plugins if one.name not in written]
    profiles = []
    for profile in made.effective.profiles:
        refs = tuple(PluginRef(use.ref, weights.get(use.ref, use.weight)) for use in profile.uses)
        profiles.append(ProfileEntry(profile.name, refs, profile.shadow, f"schedulingProfiles.{profile.name}"))
    return replace(document, plugins=(*document.plugins, *injected), profiles=tuple(profiles))


def _path(given: Mapping[str, Any]) -> str:
    if given.get("path"):
        return _text(given, "path")
    request = given["request"]
    for name, path in PATHS.items():
        if isinstance(request, Mapping) and name in request:
            return path
    raise BadRequest("The request has none of messages, prompt and input; name its `path`.", param="path")


def _headers(given: Any) -> Mapping[str, str]:
    if not isinstance(given, Mapping) or not all(isinstance(value, str) for value in given.values()):
        raise BadRequest("headers must be an object of texts.", param="headers")
    return {"content-type": "application/json", **{name.lower(): value for name, value in given.items()}}


def _text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name) or ""
    if not isinstance(value, str):
        raise BadRequest(f"{name} must be text.", param=name)
    return value


def _weights(given: Any) -> Mapping[str, float]:
    if not isinstance(given, Mapping):
        raise BadRequest("weights must be an object with a number for each scorer.", param="weights")
    for name, weight in given.items():
        if not isinstance(weight, int | float) or isinstance(weight, bool) or weight < 0:
            raise BadRequest(f"weights.{name} must be a number of 0 or more.", param=f"weights.{name}")
    return {name: float(weight) for name, weight in given.items()}


ID = "dry-run"


@dataclass(slots=True)
class UnsentRequest:
    """A request that no client has sent. Implements `core.ports.ClientRequest`."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    received_at: float
    id: str = ID
    method: str = "POST"
    query: str = ""
    identity: Identity | None = None
    upload: object | None = None
    refusal: str = ""
    model: str = ""


@dataclass(frozen=True, slots=True)
class OwnDecisions:
    """The decisions of this process, as `http.admin_config.Explained`. Dry runs decide with the graph that is in
    use."""

    process: Process

    async def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        return self.process.explaining.listed(query)

    async def shown(self, name: str) -> Mapping[str, Any]:
        return self.process.explaining.shown(name)

    async def imagined(self, values: Any, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the decision on a request that no client has sent. Nothing is reserved, counted or published, and no
        hook runs. Raise RequestError if the request would be refused before the decision."""
        trial = DryRunQuery.of(values, query)
        request = self._request(trial)
        pool = self._pool(trial, request)
        live = pool.scheduling
        draft = self.process.state.draft()
        try:
            tried = self._tried(trial, pool, draft)
            found = imagined(await self._decided(request, pool, tried, trial.profile))
            if tried is not live:
                now = short(await self._decided(request, pool, live))
                found["live"] = {key: now[key] for key in ("pod", "prefill", "margin", "runnerUp", "predicted")}
                found["fresh"] = _fresh(tried, live)
            return found
        finally:
            await draft.discard()

    def _request(self, trial: DryRunQuery) -> InferenceRequest:
        client_request = UnsentRequest(trial.path, trial.headers, trial.body, self.process.clock.now())
        parsed: Parsed = parse(client_request.path, client_request.body, client_request.headers.get("content-type", ""))
        if parsed.previous_response_id:
            raise BadRequest("What follows a stored response goes to the pod that has it; nothing is decided.")
        model = self.process.fleet.only_model() if parsed.model is None else parsed.model
        request, names = request_of(client_request, parsed, model, math.inf), self.process.serving.resolver
        return request if names is None else names.unheard().resolve(request, None)

    def _pool(self, trial: DryRunQuery, request: InferenceRequest) -> Pool:
        pools = self.process.serving.gateway.pools
        if not trial.pool:
            return pools.first_for(request)
        if trial.pool not in pools.names:
            raise BadRequest(f"There is no pool '{trial.pool}'{suggestion(trial.pool, pools.names)}.", param="pool")
        return pools.named(trial.pool)

    def _tried(self, trial: DryRunQuery, pool: Pool, draft: Draft) -> Scheduling:
        """Return the scheduling in use, or a temporary one for the given section."""
        if trial.scheduling is None and not trial.weights:
            return pool.scheduling
        builder = self.process.scheduling_builder
        document = self.process.serving.settings.all_pools[pool.name].scheduling
        if trial.scheduling is not None:
            document = read(trial.scheduling, "scheduling")
        try:
            tried = builder.imagined(pool.name, document, draft)
            if trial.weights:
                tried = builder.imagined(pool.name, reweighed(document, tried, trial.weights), draft)
        except ConfigError as error:
            raise BadRequest("; ".join(map(str, error.problems)), param=error.problems[0].path or None) from None
        return tried

    async def _decided(
        self, request: InferenceRequest, pool: Pool, scheduling: Scheduling, profile: str = ""
    ) -> DecisionEntry:
        request = changed(request, state=CycleState())
        producers = Producers(scheduling.producers, scheduling.raised, scheduling.name_of)
        await producers.run(request, pool.pods.endpoints_for(request.model))
        candidates = pool.pods.endpoints_for(request.model)
        is_served = bool(candidates)
        if is_served:
            candidates = narrowing(self.process.serving.flow_controls)(request, candidates)
        record = DecisionRecord()
        try:
            outcome: Decision | RequestError = self._scheduled(
                request, candidates, scheduling.scheduler, record, profile
            )
        except BadRequest:
            raise
        except RequestError as error:
            gateway = self.process.serving.gateway
            outcome = error.with_traceback(None) if is_served else gateway.no_pod_serves(request.model)
        builder = self.process.explaining.builder(scheduling, pool.name)
        return builder.entry(ID, request, candidates, record.runs, outcome)

    def _scheduled(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        scheduler: Scheduler,
        record: DecisionRecord,
        profile: str,
    ) -> Decision:
        if profile:
            return scheduler.alone(profile, request, candidates, record)
        decision = scheduler.schedule(request, candidates, record)
        return steer(request, decision, self.process.fleet.draining) if self.process.fleet.draining else decision


def _fresh(tried: Scheduling, live: Scheduling) -> list[str]:
    """Return the plugins that start without state, because the live ones have other parameters."""
    return [
        name
        for name, made in tried.instances.items()
        if made is not live.instances.get(name) and any(declares(made, point) for point in (DataProducer, PreRequest))
    ]
