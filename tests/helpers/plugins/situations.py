"""Pods, requests and plugins for the tests of this package."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from proxy.core.attempt import Attempt
from proxy.core.decision import Decision, ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Load, Metrics
from proxy.core.errors import Problem
from proxy.core.params import Invalid
from proxy.core.ports import (
    Clock,
    Deciders,
    InstanceName,
    KvEvents,
    ManualClock,
    ProfileNames,
    Random,
    Timer,
    Tokenizers,
    Unconnected,
)
from proxy.core.registry import Registry, make_plugin
from proxy.core.request import InferenceRequest, Prompt
from proxy.core.state import PluginState
from proxy.latency.forecast import LatencyForecast
from proxy.plugins.deciders.prefix_based import PrefixBasedPdDecider
from proxy.prefix.match import PrefixMatch

RUN = ProfileRun("default")
REGISTRY = Registry.discover()


def pod(name: str = "pod", *, labels: Mapping[str, str] | None = None, weight: float = 1.0, **scraped: Any) -> Endpoint:
    """`requests`, `tokens` and `recent` are its load; whatever else is scraped."""
    load = Load(**{key: scraped.pop(key) for key in ("requests", "tokens", "recent") if key in scraped})
    metrics = Metrics(freshness=Freshness.FRESH, **scraped)
    return Endpoint(name, labels=labels or {}, weight=weight, state=EndpointState.READY, metrics=metrics, load=load)


def request(tokens: int = 0, *, model: str = "model", max_tokens: int = 0, **headers: str) -> InferenceRequest:
    """Underscores in header names become dashes."""
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    prompt = Prompt((bytes(4 * tokens),))
    return InferenceRequest("id", "/v1/completions", model, prompt, headers=named, max_tokens=max_tokens)


def make(
    type_name: str,
    *,
    clock: ManualClock | None = None,
    timer: Timer | None = None,
    seed: int = 0,
    name: str = "",
    state: PluginState | None = None,
    **parameters: Any,
) -> Any:
    """An instance with its YAML parameters."""
    cls = REGISTRY.get(type_name)
    assert cls is not None, type_name
    ports = {
        Clock: clock or ManualClock(),
        Random: random.Random(seed),
        KvEvents: Unconnected(),
        Tokenizers: Unconnected(),
        Timer: timer or Unconnected(),
        InstanceName: InstanceName(name or type_name),
        ProfileNames: ProfileNames(("default",)),
        PluginState: state or PluginState(),
        Deciders: Deciders({"prefix-based-pd-decider": PrefixBasedPdDecider()}),
    }
    return make_plugin(cls, parameters, type_name, ports)


def fault(type_name: str, **parameters: Any) -> str:
    """The message for invalid parameters."""
    try:
        make(type_name, **parameters)
    except Invalid as invalid:
        problem: Problem = invalid.problems[0]
        return str(problem)
    raise AssertionError(f"{type_name} accepts {parameters}")


def score(type_name: str, endpoints: Sequence[Endpoint], incoming: InferenceRequest | None = None, **given: Any) -> Any:
    return make(type_name, **given).score(RUN, incoming or request(), endpoints)


def kept(
    type_name: str, endpoints: Sequence[Endpoint], incoming: InferenceRequest | None = None, **given: Any
) -> list[str]:
    survivors = make(type_name, **given).filter(RUN, incoming or request(), endpoints)
    return [endpoint.name for endpoint in survivors]


def scored(endpoints: Sequence[Endpoint], scores: Sequence[float] | None = None) -> list[ScoredEndpoint]:
    return list(map(ScoredEndpoint, endpoints, scores or [0.5] * len(endpoints)))


def attempt(
    incoming: InferenceRequest, target: Endpoint, *others: Endpoint, profile: str = "", number: int = 0
) -> Attempt:
    decision = Decision(target, others, profile)
    return Attempt(incoming, decision, target, number, started_at=0.0)


@dataclass(frozen=True)
class Held(PrefixMatch):
    """A PrefixMatch that knows how many blocks each pod holds."""

    total: int
    blocks: Mapping[str, int]
    block_size: int = 16

    def matched(self, endpoints: Sequence[Endpoint]) -> list[int]:
        return [self.blocks.get(endpoint.name, 0) for endpoint in endpoints]


class Foretold(LatencyForecast):
    """A forecast in seconds, by pod: of the cost, of the first token and, unless `paces` are given, of each other
    alike; `delays` are nothing unless they are given. Of an uncached token the work is `WORK`."""

    WORK = 1e-3

    def __init__(
        self,
        seconds: Mapping[str, float],
        *,
        delays: Mapping[str, float] | None = None,
        paces: Mapping[str, float] | None = None,
        output: float = 1.0,
    ) -> None:
        self._seconds = seconds
        self._paces = seconds if paces is None else paces
        self._output = output
        self._delays = delays or {}

    def costs(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self._seconds[endpoint.name] for endpoint in endpoints]

    def ttfts(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return self.costs(endpoints)

    def tpots(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self._paces.get(endpoint.name, 0.0) for endpoint in endpoints]

    def delays(self, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self._delays.get(endpoint.name, 0.0) for endpoint in endpoints]

    def work(self, endpoint: Endpoint, uncached: float) -> float:
        return self.WORK * uncached

    @property
    def output(self) -> float:
        return self._output
