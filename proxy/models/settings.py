"""The `models` section."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from proxy.core.errors import Problem
from proxy.core.params import Duration, param
from proxy.kubernetes.settings import ApiServer


@dataclass(frozen=True, slots=True)
class Target:
    model: str = param("", "model of the pods")
    weight: float | None = param(None, "share of the requests; null everywhere: equal shares", at_least=0)
    pool: str = param("", "pool that serves it; empty: every pool with the model")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A rule that replaces a model. Rules that name a model go first, then the order of the file decides."""

    name: str = param("", "name in metrics; default: the model")
    model: str = param("", "model that clients request; empty: any")
    headers: Mapping[str, str] = param({}, "headers with the values that a request must have")
    targets: tuple[Target, ...] = param((), "models; each request gets one, drawn by weight")
    sticky: str = param("", "header: requests with the same value get the same target; empty: each request draws")

    def __post_init__(self) -> None:
        if not self.targets:
            raise ValueError("targets: at least one is required")
        if any(not target.model for target in self.targets):
            raise ValueError("each target needs a model")
        if all(target.weight == 0 for target in self.targets):
            raise ValueError("the weights of all targets are 0: one must have more, or none")


@dataclass(frozen=True, slots=True)
class Objective:
    priority: int = param(0, "higher is more urgent; below 0 a request may be dropped for others")


@dataclass(frozen=True, slots=True)
class Wake:
    enabled: bool = param(False, "wake a sleeping pod for a request whose model only sleeping pods serve")
    timeout: Duration = param(Duration(60.0), "longest time that a request waits for a pod to wake", more_than=0)


@dataclass(frozen=True, slots=True)
class ClusterObjects(ApiServer):
    """InferenceObjectives and InferenceModelRewrites of a Kubernetes cluster."""

    group: str = param(
        "llm-d.ai",
        "API group of the objects, version v1alpha2; releases before llm-d use inference.networking.x-k8s.io",
    )
    inference_pool: str = param(
        "", "InferencePool that the objects must refer to; default: all objects of the namespace"
    )


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """Aliases, rewrites, fallbacks and objectives."""

    aliases: Mapping[str, str] = param({}, "further name -> model; listed at /v1/models while the model is served")
    rewrites: tuple[Rewrite, ...] = param((), "rules that replace the requested model")
    objectives: Mapping[str, Objective] = param(
        {},
        "name -> {priority}: values of the header x-llm-d-inference-objective; `default` applies to requests "
        "without the header",
    )
    fallbacks: Mapping[str, tuple[str, ...]] = param(
        {},
        "model -> models to try in order where no pod has capacity for it; model@pool restricts one to a pool",
    )
    wake: Wake = param(Wake(), "waking of sleeping pods")
    kubernetes: ClusterObjects | None = param(
        None, "read objectives and rewrites from objects of a cluster; those in this file take precedence"
    )

    def astray(self, pools: Collection[str]) -> Iterator[Problem]:
        """Yield a problem for every target in an unknown pool."""
        for at, rule in enumerate(self.rewrites):
            for number, target in enumerate(rule.targets):
                if target.pool and target.pool not in pools:
                    path = f"models.rewrites[{at}].targets[{number}].pool"
                    yield Problem(path, f"there is no pool '{target.pool}'; pools are {', '.join(pools)}")

    def __post_init__(self) -> None:
        for alias, model in self.aliases.items():
            if model in self.aliases:
                raise ValueError(f"aliases.{alias}: '{alias}' stands for '{model}', which is an alias itself")
        for model, others in self.fallbacks.items():
            if model in others:
                raise ValueError(f"fallbacks.{model}: '{model}' is its own fallback")
            if model in self.aliases:
                raise ValueError(f"fallbacks.{model}: '{model}' is an alias; write '{self.aliases[model]}'")
