"""Objectives and rewrites that stand in a Kubernetes cluster, as objects of llm-d or of the Gateway API extension."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from proxy.core.ports import Clock, Random
from proxy.core.tasks import Tasks, run_together
from proxy.kubernetes.api import RETRY, Api, Collection, Object, Resource, text
from proxy.models.settings import ClusterObjects, ModelSettings, Objective, Rewrite, Target

VERSION = "v1alpha2"


@dataclass(frozen=True, slots=True)
class _Rules:
    """Rewrites of one object. `pool`: the InferencePool they are for; `born`: creation time, older objects first."""

    pool: str
    born: str
    rewrites: tuple[Rewrite, ...]


class ClusterNames:
    """Objectives and rewrites of a cluster. Inside `async with` they are watched; changes call `changed`."""

    def __init__(self, settings: ClusterObjects, clock: Clock, rng: Random, retry: float = RETRY) -> None:
        self.settings = settings
        self.changed: Callable[[], None] = lambda: None
        self._tasks = Tasks()
        api = Api(settings)

        def collection(name: str, read: Callable[[Object], Any]) -> Collection[Any]:
            resource = Resource(settings.group, VERSION, name)
            return Collection(api, resource, {}, read, lambda: self.changed(), clock, rng, retry)

        self._objectives: Collection[tuple[str, Objective]] = collection("inferenceobjectives", _objective)
        self._rewrites: Collection[_Rules] = collection("inferencemodelrewrites", _rules)

    async def __aenter__(self) -> ClusterNames:
        self._tasks.keep(self._run, "objectives-and-rewrites-of-the-cluster")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()

    async def _run(self) -> None:
        await run_together(self._objectives.run(), self._rewrites.run())

    def added_to(self, settings: ModelSettings) -> ModelSettings:
        """Return the settings with these added. The file takes precedence; of rewrites, older objects do."""
        objectives = {name: one for name, (pool, one) in self._objectives.objects.items() if self._counts(pool)}
        named = sorted(self._rewrites.objects.items(), key=lambda item: (item[1].born, item[0]))
        rewrites = [rule for _, rules in named if self._counts(rules.pool) for rule in rules.rewrites]
        return replace(
            settings,
            objectives={**objectives, **settings.objectives},
            rewrites=(*settings.rewrites, *rewrites),
        )

    def _counts(self, pool: str) -> bool:
        return self.settings.inference_pool in ("", pool)


def _objective(item: Object) -> tuple[str, Objective]:
    return text(item["spec"]["poolRef"], "name"), Objective(int(item["spec"].get("priority") or 0))


def _rules(item: Object) -> _Rules:
    metadata, spec = item["metadata"], item["spec"]
    rewrites = tuple(rewrite for rule in spec["rules"] for rewrite in _rewrites(metadata["name"], rule))
    return _Rules(text(spec["poolRef"], "name"), text(metadata, "creationTimestamp"), rewrites)


def _rewrites(name: str, rule: Object) -> Iterator[Rewrite]:
    """Yield a rewrite per match; without matches, one for all models."""
    targets = tuple(Target(text(one, "modelRewrite"), _weight(one)) for one in rule.get("targets") or ())
    if targets:
        for model in [text(match["model"], "value") for match in rule.get("matches") or ()] or [""]:
            yield Rewrite(name, model, targets=targets)


def _weight(target: Object) -> float | None:
    weight: object = target.get("weight")
    if weight is None or (isinstance(weight, int | float) and 0 <= weight < math.inf):
        return weight
    raise ValueError(f"weight is {weight!r:.80}")
