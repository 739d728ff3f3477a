"""Offline scheduling: the result of every filter and scorer for a described request and described pods."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from proxy.core import params
from proxy.core.decision import Decision, DecisionRecord, ProfileRecord
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Load, Metrics
from proxy.core.errors import BadRequest, ConfigError, Problem, RequestError
from proxy.core.params import Invalid, param
from proxy.core.ports import Clock
from proxy.core.registry import PluginFaults, Ports, Registry
from proxy.core.request import BYTES_PER_TOKEN, InferenceRequest, Prompt
from proxy.openai.parse import parse
from proxy.prefix.match import PREFIX_MATCH, PrefixMatch
from proxy.scheduling.build import Effective, Scheduling, build
from proxy.scheduling.document import read
from proxy.scheduling.layout import ProfileLayout

log = logging.getLogger(__name__)


async def explain(data: Any, registry: Registry, ports: Ports) -> dict[str, Any]:
    """Return `profiles` and either `decision` or `error`, ready for JSON; `faults` of plugins, if any. Raise
    ConfigError with every fault of the input, and for a profile handler without a decision."""
    record, faults = DecisionRecord(), _Faults(ports[Clock])
    state, request, scheduling = _load(data, registry, ports, faults)
    endpoints = [stated.endpoint(ports[Clock].now()) for stated in state.endpoints]
    await _produce(scheduling, request, endpoints, state.prefix_match())
    try:
        decision = scheduling.scheduler.schedule(request, endpoints, record)
        outcome = {"decision": _described(decision)}
    except RequestError as error:
        outcome = {"error": {"type": error.type, "message": error.message}}
    handler = scheduling.effective.handler
    if problems := [Problem(f"scheduling.plugins.{name}", text) for name, text in faults.found if name == handler]:
        raise ConfigError(problems)
    reported = {"faults": [{"plugin": name, "message": text} for name, text in faults.found]} if faults.found else {}
    return {"profiles": _report(record.runs, scheduling.effective), **reported, **outcome}


class _Faults(PluginFaults):
    """A collector of plugin faults for the explanation, instead of the log."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self.found: list[tuple[str, str]] = []

    def report(self, name: str, fault: str, complaint: str, error: BaseException | None = None) -> None:
        self.found.append((name, f"{complaint}: {error!r}" if error else complaint))


def _described(decision: Decision) -> dict[str, Any]:
    stages = {"prefill": decision.prefill, "encode": decision.encode}
    names = {stage: [pod.name for pod in pods] for stage, pods in stages.items() if pods}
    return {
        "target": decision.target.name,
        **names,
        **({"why": decision.split_outcome} if decision.split_outcome else {}),
    }


def _load(
    data: Any, registry: Registry, ports: Ports, faults: PluginFaults
) -> tuple[ExplainState, InferenceRequest, Scheduling]:
    problems: list[Problem] = []
    state = request = scheduling = None
    try:
        state = params.build(ExplainState, data, "")
        request = state.request.request()
    except Invalid as invalid:
        problems.extend(invalid.problems)
    section = data.get("scheduling") if isinstance(data, Mapping) else None
    try:
        scheduling = build(read(section, "scheduling"), registry, ports, faults)
    except ConfigError as error:
        problems.extend(error.problems)
    if state is None or request is None or scheduling is None:
        raise ConfigError(problems)
    return state, request, scheduling


async def _produce(
    scheduling: Scheduling, request: InferenceRequest, endpoints: Sequence[Endpoint], match: PrefixMatch | None
) -> None:
    """Set the described prefix match, under the name of every producer of it; no index is read."""
    for producer in scheduling.producers:
        stated = [key for key in producer.provides if key.kind == PREFIX_MATCH.kind]
        if stated and match is not None:
            request.state.write(stated[0], match)
        elif not stated:
            try:
                await producer.produce(request, endpoints)
            except Exception:
                log.exception("producer %s failed", producer.plugin_type)
    if match is not None and request.state.read(PREFIX_MATCH) is None:
        request.state.write(PREFIX_MATCH, match)


def _report(records: Sequence[ProfileRecord], effective: Effective) -> dict[str, Any]:
    """Return the runs by profile, in their order."""
    profiles = {profile.name: profile for profile in effective.profiles}
    return {record.profile: _run(record, profiles[record.profile]) for record in records}


def _run(record: ProfileRecord, profile: ProfileLayout) -> dict[str, Any]:
    weights = {use.ref: use.weight for use in profile.uses}
    names = [endpoint.name for endpoint in record.scored]
    return {
        **({"shadow": True} if record.shadow else {}),
        "filters": [{"name": name, "removed": removed} for name, removed in record.filters.items()],
        "scorers": [
            {"name": name, "weight": weights[name], "scores": dict(zip(names, scores, strict=True))}
            for name, scores in record.scores.items()
        ],
        "totals": dict(zip(names, record.totals, strict=True)),
        "ranked": [endpoint.name for endpoint in record.ranked],
    }


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass(frozen=True, slots=True)
class StatedMetrics:
    """The load of a pod as scorers see it."""

    waiting: int = param(0, "waiting requests", at_least=0)
    running: int = param(0, "running requests", at_least=0)
    kv_usage: float = param(0.0, "share of the KV cache in use")
    active_models: frozenset[str] = param(frozenset(), "LoRA adapters that are loaded")
    waiting_models: frozenset[str] = param(frozenset(), "LoRA adapters that wait to be loaded")
    max_active_models: int = param(0, "LoRA adapters that fit")


@dataclass(frozen=True, slots=True)
class StatedLoad:
    requests: int = param(0, "requests of all proxies in flight on the pod", at_least=0)
    tokens: int = param(0, "uncached prompt tokens of these requests", at_least=0)


@dataclass(frozen=True, slots=True)
class StatedMatch:
    blocks: int = param(0, "number of blocks of the prompt, from its start, that the pod has cached", at_least=0)
    total: int = param(0, "blocks of the prompt", at_least=0)
    block_size: int = param(64, "tokens per block", at_least=0)

    def missing(self, prompt_tokens: int) -> int:
        """Return the tokens of the missing blocks, and of the prompt beyond its blocks."""
        beyond = max(0, prompt_tokens - self.total * self.block_size)
        return max(0, self.total - self.blocks) * self.block_size + beyond


@dataclass(frozen=True, slots=True)
class StatedEndpoint:
    name: str = param(doc="name of the pod")
    labels: Mapping[str, str] = param({}, "labels of the pod")
    weight: float = param(1.0, "relative share of the traffic where no scorer prefers a pod", more_than=0)
    metrics: StatedMetrics = param(StatedMetrics(), "values of its last scrape")
    attributes: Mapping[str, float] = param({}, "custom values of its last scrape")
    inflight: StatedLoad = param(StatedLoad(), "requests of all proxies in flight on the pod")
    prefix_match: StatedMatch | None = param(None, "cached part of the prompt")

    def endpoint(self, now: float) -> Endpoint:
        """Return a ready pod with fresh metrics, whose recent work is its requests in flight."""
        stated = asdict(self.metrics)
        metrics = Metrics(**stated, attributes=self.attributes, scraped_at=now, freshness=Freshness.FRESH)
        work = (self.inflight.requests + self.inflight.tokens) / self.weight
        recent = math.log(work) if work else -math.inf
        load = Load(requests=self.inflight.requests, tokens=self.inflight.tokens, recent=recent)
        labels, ready = dict(self.labels), EndpointState.READY
        return Endpoint(self.name, labels=labels, weight=self.weight, state=ready, metrics=metrics, load=load)


@dataclass(frozen=True, slots=True)
class StatedRequest:
    model: str = param("", "model or LoRA adapter")
    headers: Mapping[str, str] = param({}, "request headers, in upper or lower case")
    prompt: Any = param(None, "prompt of a completion")
    messages: Any = param(None, "messages of a chat")
    prompt_tokens: int | None = param(None, "length in tokens of an invented prompt", at_least=0)

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.prompt, self.messages, self.prompt_tokens)) > 1:
            raise ValueError("prompt, messages and promptTokens exclude each other")

    def request(self) -> InferenceRequest:
        """Return the request. Raise Invalid for a prompt or messages that no API would accept."""
        headers = {key.lower(): value for key, value in self.headers.items()}
        path = CHAT if self.messages is not None else COMPLETIONS
        return InferenceRequest(id="explain", path=path, model=self.model, prompt=self._prompt(), headers=headers)

    def _prompt(self) -> Prompt:
        if self.prompt_tokens is not None:
            return Prompt((bytes(BYTES_PER_TOKEN * self.prompt_tokens),))
        try:
            if self.messages is not None:
                return parse(CHAT, _body(messages=self.messages)).prompt
            return parse(COMPLETIONS, _body(prompt=self.prompt)).prompt
        except BadRequest as error:
            raise Invalid(Problem("request", error.message)) from None


@dataclass(frozen=True, slots=True)
class ExplainState:
    scheduling: Any = param(None, "the `scheduling` section; default: the default profile")
    request: StatedRequest = field(default_factory=StatedRequest)
    endpoints: tuple[StatedEndpoint, ...] = param((), "the pods")

    def __post_init__(self) -> None:
        names = [endpoint.name for endpoint in self.endpoints]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two endpoints are named {', '.join(twice)}")

    def prefix_match(self) -> PrefixMatch | None:
        """Return the match; None if no pod describes one."""
        stated = {endpoint.name: endpoint.prefix_match for endpoint in self.endpoints if endpoint.prefix_match}
        return StatedPrefixMatch(stated) if stated else None


class StatedPrefixMatch(PrefixMatch):
    """The stated matches, for each pod in blocks of its own; a pod without one has nothing of the prompt. `matched`
    counts parts of the prompt in which the blocks of all pods can be counted; there are `total` of them."""

    def __init__(self, stated: Mapping[str, StatedMatch]) -> None:
        totals = [match.total for match in stated.values() if match.total]
        self._stated = stated
        self.total = math.lcm(*totals) if totals else 0
        self.block_size = max(match.block_size for match in stated.values())

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        matches = map(self._of, endpoints)
        return [match.blocks * self.total // match.total if match.total else 0 for match in matches]

    def lengths(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [match.blocks * match.block_size for match in map(self._of, endpoints)]

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> list[int]:
        return [match.missing(prompt_tokens) for match in map(self._of, endpoints)]

    def _of(self, endpoint: Endpoint) -> StatedMatch:
        return self._stated.get(endpoint.name, _NOTHING)


_NOTHING = StatedMatch()


def _body(**fields: Any) -> bytes:
    return json.dumps(fields, default=str).encode()
