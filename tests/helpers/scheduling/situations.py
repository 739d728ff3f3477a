"""Pods, requests and plugins for the tests of this package."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proxy.core.decision import Decision, ProfileResult, ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint, EndpointState, Freshness, Load, Metrics
from proxy.core.plugin import Filter, Picker, ProfileHandler, Scorer
from proxy.core.ports import Clock, ManualClock, Random
from proxy.core.registry import PluginFaults, Ports, Registry
from proxy.core.request import InferenceRequest, Prompt
from proxy.scheduling.build import Scheduling, build
from proxy.scheduling.document import read
from proxy.scheduling.profile import GuardedFilter, GuardedPicker, GuardedScorer, Profile

RUN = ProfileRun("default")
REGISTRY = Registry.discover()


def pod(name: str, *, weight: float = 1.0, recent: float = 0.0, **metrics: Any) -> Endpoint:
    scrape = Metrics(freshness=Freshness.FRESH, **metrics)
    return Endpoint(name, weight=weight, state=EndpointState.READY, metrics=scrape, load=Load(recent=recent))


def request(tokens: int = 0, **headers: str) -> InferenceRequest:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return InferenceRequest("id", "/v1/completions", "model", Prompt((bytes(4 * tokens),)), headers=named)


def ports(seed: int = 0) -> Ports:
    return {Clock: ManualClock(), Random: random.Random(seed)}


def counted(seen: list[tuple[str, str]]) -> PluginFaults:
    """Puts every fault, as plugin and kind, into the list."""
    return PluginFaults(ManualClock(), lambda name, fault: seen.append((name, fault)))


def scheduling(document: Any, **options: Any) -> Scheduling:
    """Of all plugins there are."""
    return build(read(document), REGISTRY, ports(), **options)


def names(endpoints: Sequence[Endpoint]) -> list[str]:
    return [endpoint.name for endpoint in endpoints]


def ranking(decision: Decision) -> list[str]:
    return names(list(decision.candidates()))


@dataclass(frozen=True, slots=True)
class Keep(Filter):
    """Keeps the pods of these names."""

    kept: tuple[str, ...]

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if endpoint.name in self.kept]


@dataclass(frozen=True, slots=True)
class KeepIdle(Keep):
    """As `Keep`, for a reason that passes."""

    exhausts: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Fixed(Scorer):
    """Gives each pod the score of its name."""

    scores: Mapping[str, float]

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        return [self.scores[endpoint.name] for endpoint in endpoints]


@dataclass(frozen=True, slots=True)
class BestFirst(Picker):
    """Highest score first, then by name."""

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> list[ScoredEndpoint]:
        return sorted(scored, key=lambda one: (-one.score, one.endpoint.name))


@dataclass(frozen=True, slots=True)
class Dialogue(ProfileHandler):
    """A handler that is just its generator."""

    talk: Callable[[InferenceRequest], Generator[str, ProfileResult, Decision]]

    def plan(self, request: InferenceRequest) -> Generator[str, ProfileResult, Decision]:
        return self.talk(request)


def profile(
    name: str,
    *filters: tuple[str, Filter],
    scorers: Sequence[tuple[Scorer, float]] = (),
    picker: Picker | None = None,
    shadow: bool = False,
    faults: PluginFaults | None = None,
) -> Profile:
    """Of scorers with their shares; the best score wins, then the name. Plugins are guarded, as `build` has them."""
    faults = faults or counted([])
    guards = [GuardedScorer(scorer, "mine", faults) for scorer, _ in scorers]
    shares = tuple(share for _, share in scorers)
    steps = [GuardedFilter(each, its_name, faults) for its_name, each in filters]
    guarded = GuardedPicker(picker or BestFirst(), "picker", faults)
    return Profile(name, steps, guards, shares, guarded, shadow)
