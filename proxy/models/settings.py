"""The `models` section."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from proxy.core.errors import Problem
from proxy.core.params import param
from proxy.core.units import Duration
from proxy.kubernetes.settings import Access


@dataclass(frozen=True, slots=True)
class Target:
    model: str = param("", "that pods serve")
    weight: float | None = param(None, "share of the requests; null everywhere: all the same", at_least=0)
    pool: str = param("", "whose pods alone serve it then; empty: as for requests that ask for the model")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rule that names a model goes before one that does not; then the order of the file counts."""

    name: str = param("", "what metrics call it; the model unless given")
    model: str = param("", "that clients ask for; empty: any")
    headers: Mapping[str, str] = param({}, "that a request must have, with these values")
    targets: tuple[Target, ...] = param((), "one of which the request gets, by their weights")
    sticky: str = param("", "header: requests with one value of it get one target; empty: each is drawn by itself")

    def __post_init__(self) -> None:
        """Raises ValueError for a rule that leads nowhere."""
        if not self.targets:
            raise ValueError("a rewrite needs targets")
        if any(not target.model for target in self.targets):
            raise ValueError("each target needs a model")
        if all(target.weight == 0 for target in self.targets):
            raise ValueError("the weights of all targets are 0: one must have more, or none")


@dataclass(frozen=True, slots=True)
class Objective:
    priority: int = param(0, "higher is more urgent; below 0 a request may be dropped for others")


@dataclass(frozen=True, slots=True)
class Wake:
    enabled: bool = param(False, "wake a pod when a request wants a model that only pods serve that sleep")
    timeout: Duration = param(Duration(60.0), "that requests wait for it, or less if they have less", more_than=0)


@dataclass(frozen=True, slots=True)
class ClusterObjects(Access):
    """InferenceObjectives and InferenceModelRewrites of a Kubernetes cluster."""

    group: str = param("llm-d.ai", "of their API, version v1alpha2; before llm-d it was inference.networking.x-k8s.io")
    inference_pool: str = param("", "whose objects count; all of the namespace unless given")


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What clients call models, and what stands behind the names."""

    aliases: Mapping[str, str] = param({}, "further name -> model; listed at /v1/models while the model is served")
    rewrites: tuple[Rewrite, ...] = param((), "which model a request gets in place of the one it asks for")
    objectives: Mapping[str, Objective] = param(
        {}, "name -> {priority}: what x-llm-d-inference-objective may say; `default` is for requests without one"
    )
    fallbacks: Mapping[str, tuple[str, ...]] = param(
        {},
        "model -> models that are tried in its place, one after the other, where no pod has room for it;"
        " model@pool: with the pods of that pool alone",
    )
    wake: Wake = param(Wake(), "of pods that sleep")
    kubernetes: ClusterObjects | None = param(
        None, "objects of a cluster that add objectives and rewrites; of one name, and for one model, these here count"
    )

    def astray(self, pools: Collection[str]) -> Iterator[Problem]:
        """A problem for every target in a pool that there is not."""
        for at, rule in enumerate(self.rewrites):
            for number, target in enumerate(rule.targets):
                if target.pool and target.pool not in pools:
                    path = f"models.rewrites[{at}].targets[{number}].pool"
                    yield Problem(path, f"'{target.pool}' is none of {', '.join(pools)}")

    def __post_init__(self) -> None:
        """Raises ValueError for names that cannot be told apart, or that lead in a circle."""
        for alias, model in self.aliases.items():
            if model in self.aliases:
                raise ValueError(f"aliases: '{alias}' stands for '{model}', which is an alias itself")
        for model, others in self.fallbacks.items():
            if model in others:
                raise ValueError(f"fallbacks: '{model}' is its own fallback")
            if model in self.aliases:
                raise ValueError(f"fallbacks: '{model}' is an alias; write '{self.aliases[model]}'")
