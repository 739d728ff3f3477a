"""What `kvlane explain` is told: a configuration, a request, and pods with their metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, lcm, log
from typing import Any

from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Load, Metrics
from proxy.core.errors import BadRequest, Problem
from proxy.core.params import Invalid, param
from proxy.core.request import BYTES_PER_TOKEN, InferenceRequest, Prompt
from proxy.openai.parse import parse
from proxy.prefix.keys import PrefixMatch

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
    requests: int = param(0, "requests this proxy has in flight on the pod", at_least=0)
    tokens: int = param(0, "their uncached prompt tokens", at_least=0)


@dataclass(frozen=True, slots=True)
class StatedMatch:
    blocks: int = param(0, "blocks of the prompt that the pod has cached, from its start on", at_least=0)
    total: int = param(0, "blocks of the prompt", at_least=0)
    block_size: int = param(64, "tokens per block", at_least=0)

    def missing(self, prompt_tokens: int) -> int:
        """Tokens of the blocks the pod lacks, and those of the prompt beyond its blocks."""
        beyond = max(0, prompt_tokens - self.total * self.block_size)
        return max(0, self.total - self.blocks) * self.block_size + beyond


@dataclass(frozen=True, slots=True)
class StatedEndpoint:
    name: str = param(doc="name of the pod")
    labels: Mapping[str, str] = param({}, "labels of the pod")
    weight: float = param(1.0, "share of traffic where nothing else decides", more_than=0)
    metrics: StatedMetrics = param(StatedMetrics(), "its last scrape")
    attributes: Mapping[str, float] = param({}, "custom values of its last scrape")
    inflight: StatedLoad = param(StatedLoad(), "what this proxy has in flight on it")
    prefix_match: StatedMatch | None = param(None, "what it has cached of the prompt")

    def endpoint(self, now: float) -> Endpoint:
        """A ready pod, just scraped, whose recent work is what it has in flight."""
        metrics = Metrics(
            waiting=self.metrics.waiting,
            running=self.metrics.running,
            kv_usage=self.metrics.kv_usage,
            active_models=self.metrics.active_models,
            waiting_models=self.metrics.waiting_models,
            max_active_models=self.metrics.max_active_models,
            attributes=self.attributes,
            scraped_at=now,
            freshness=Freshness.FRESH,
        )
        work = (self.inflight.requests + self.inflight.tokens) / self.weight
        recent = log(work) if work else -inf
        load = Load(requests=self.inflight.requests, tokens=self.inflight.tokens, recent=recent)
        labels, ready = dict(self.labels), EndpointState.READY
        return Endpoint(self.name, labels=labels, weight=self.weight, state=ready, metrics=metrics, load=load)


@dataclass(frozen=True, slots=True)
class StatedRequest:
    model: str = param("", "model or LoRA adapter")
    headers: Mapping[str, str] = param({}, "request headers, in any case")
    prompt: Any = param(None, "prompt of a completion")
    messages: Any = param(None, "messages of a chat")
    prompt_tokens: int | None = param(None, "a prompt of so many tokens", at_least=0)

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.prompt, self.messages, self.prompt_tokens)) > 1:
            raise ValueError("prompt, messages and promptTokens exclude each other")

    def request(self) -> InferenceRequest:
        """Raises Invalid for a prompt or for messages that no API would take."""
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
    scheduling: Any = param(None, "the `scheduling` section; the default profile unless given")
    request: StatedRequest = field(default_factory=StatedRequest)
    endpoints: tuple[StatedEndpoint, ...] = param((), "the pods")

    def __post_init__(self) -> None:
        names = [endpoint.name for endpoint in self.endpoints]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"two endpoints are named {', '.join(twice)}")

    def prefix_match(self) -> PrefixMatch | None:
        """None where no pod states one."""
        stated = {endpoint.name: endpoint.prefix_match for endpoint in self.endpoints if endpoint.prefix_match}
        return ToldMatch(stated) if stated else None


class ToldMatch(PrefixMatch):
    """Stated instead of looked up, for each pod in blocks of its own; a pod that states none knows nothing of the
    prompt. `matched` counts in parts of the prompt that all can be counted in, `total` of them."""

    def __init__(self, stated: Mapping[str, StatedMatch]) -> None:
        totals = [match.total for match in stated.values() if match.total]
        self._stated = stated
        self.total = lcm(*totals) if totals else 0
        self.block_size = max(match.block_size for match in stated.values())

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        said = map(self._of, endpoints)
        return [match.blocks * self.total // match.total if match.total else 0 for match in said]

    def lengths(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [match.blocks * match.block_size for match in map(self._of, endpoints)]

    def missing(self, endpoints: Sequence[Endpoint], prompt_tokens: int) -> list[int]:
        return [match.missing(prompt_tokens) for match in map(self._of, endpoints)]

    def _of(self, endpoint: Endpoint) -> StatedMatch:
        return self._stated.get(endpoint.name, _NOTHING)


_NOTHING = StatedMatch()


def _body(**fields: Any) -> bytes:
    return json.dumps(fields, default=str).encode()
