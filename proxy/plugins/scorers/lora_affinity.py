"""Prefer pods that have the LoRA adapter loaded, or a free slot for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from proxy.core.attempt import Attempt
from proxy.core.decision import ProfileRun
from proxy.core.endpoint import Endpoint
from proxy.core.params import Duration, param
from proxy.core.plugin import EndpointRemoved, PostResponse, PreRequest, Scorer, plugin
from proxy.core.ports import Clock
from proxy.core.request import InferenceRequest
from proxy.core.state import PluginState
from proxy.plugins.sessions import Rebalance

LOADED, SOON, FREE_SLOT, WAITS, FULL = 1.0, 0.9, 0.8, 0.6, 0.0
"""Scores. `SOON` is the score of a waiting adapter if hot adapters are spread by load, `WAITS` otherwise."""

MOST_PLAIN = 1000
"""Largest number of remembered model names that are not adapters."""


@dataclass(frozen=True, slots=True)
class AdapterRebalance(Rebalance):
    """When a request may leave the pods with its adapter. Loading an adapter takes a second or more."""

    seconds: float = param(
        1.0, "predicted seconds by which the pods with the adapter may be slower than one with a free slot", at_least=0
    )
    requests: int = param(
        8, "the same as a number of running and waiting requests, where no prediction exists", at_least=0
    )


@plugin("lora-affinity-scorer")
@dataclass
class LoraAffinityScorer(Scorer, PreRequest, PostResponse, EndpointRemoved):
    """1 where the adapter is active, 0.8 where a slot is free, 0.6 where it waits to be loaded, else 0.

    With `rebalance` it is 0.9 where it waits, and pods with a free slot get 1 as soon as all pods with the adapter,
    loaded or about to be, are too far behind; these then get 0.8 and 0.6. With `remember` an adapter counts as active
    from the moment a request of it is sent, and stays so for a while after the last one: engines name adapters only
    while requests of them run, and keep them loaded until others take their slots.
    """

    clock: Clock
    state: PluginState
    rebalance: AdapterRebalance | None = param(None, "load a hot adapter on a second pod; without it load is ignored")
    remember: Duration = param(
        Duration(0.0),
        "time after its last request for which an adapter counts as loaded; 0: trust the pods' reports",
        at_least=0,
    )

    def __post_init__(self) -> None:
        self._slots: dict[Endpoint, OrderedDict[str, float]] = self.state.get("slots", dict)
        """The adapters that were sent to each pod, up to its number of slots, the most recently used last."""
        self._plain: dict[str, None] = self.state.get("plain models", dict)
        """Models that ran and were not adapters."""

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> list[float]:
        model = request.model
        scores = [self._score(model, endpoint) for endpoint in endpoints]
        if self.rebalance is None:
            return scores
        having = [endpoint for endpoint, score in zip(endpoints, scores, strict=True) if score in (LOADED, WAITS)]
        with_slot = [endpoint for endpoint, score in zip(endpoints, scores, strict=True) if score == FREE_SLOT]
        spreads = having and self.rebalance.is_behind(request, having, with_slot)
        worth = {LOADED: FREE_SLOT, FREE_SLOT: LOADED} if spreads else {WAITS: SOON}
        return [worth.get(score, score) for score in scores]

    def pre_request(self, attempt: Attempt, endpoint: Endpoint) -> None:
        most, model = endpoint.metrics.max_active_models, attempt.request.model
        if not self.remember or not most or model in self._plain:
            return
        slots = self._slots.setdefault(endpoint, OrderedDict())
        slots[model] = self.clock.now()
        slots.move_to_end(model)
        while len(slots) > most:
            slots.popitem(last=False)

    def post_response(self, attempt: Attempt, endpoint: Endpoint) -> None:
        """Learn names of models that are not adapters: a pod that was scraped while the request ran, and listed no such
        adapter, serves it as a model of its own."""
        metrics, model, began = endpoint.metrics, attempt.request.model, attempt.first_byte_at
        if not self.remember or began is None or not began < metrics.scraped_at:
            return
        if model in metrics.active_models or model in metrics.waiting_models:
            self._plain.pop(model, None)
        elif attempt.last_byte_at is not None and metrics.scraped_at < attempt.last_byte_at:
            self._slots.get(endpoint, OrderedDict()).pop(model, None)
            if len(self._plain) < MOST_PLAIN:
                self._plain[model] = None

    def endpoint_removed(self, endpoint: Endpoint) -> None:
        self._slots.pop(endpoint, None)

    def _score(self, model: str, endpoint: Endpoint) -> float:
        metrics = endpoint.metrics
        if model in metrics.active_models:
            return LOADED
        taken = len(metrics.active_models) + len(metrics.waiting_models)
        if self.remember:
            slots: Mapping[str, float] = self._slots.get(endpoint, {})
            if model in slots and self.clock.now() - slots[model] < self.remember:
                return LOADED
            known = metrics.active_models | metrics.waiting_models
            taken += sum(name not in known for name, at in slots.items() if at >= metrics.scraped_at)
        if taken < metrics.max_active_models:
            return FREE_SLOT
        return WAITS if model in metrics.waiting_models else FULL
