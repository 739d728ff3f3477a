"""What an EndpointPickerConfig says of waiting requests, in the words of the `flowControl` section."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from proxy.core.params import param
from proxy.core.units import Duration, Size
from proxy.scheduling.data_layer import NoParameters, Ref

SHEDDABLE = -1
"""The highest priority of requests that may be dropped for others."""

NO_TIMEOUT = Duration(86400.0)
"""A request has no more time than `reliability.timeouts.request` anyway."""

NO_CEILING = 1e9

ADMITTER = "admitter"

PROGRAM_AWARE = "program-aware-fairness"


@dataclass(frozen=True, slots=True)
class UtilizationDetector:
    queue_depth_threshold: int = param(5, "waiting requests of a pod that is full", at_least=1)
    kv_cache_util_threshold: float = param(
        0.8, "used share of the KV cache of a pod that is full", more_than=0, at_most=1
    )
    metrics_staleness_threshold: Duration | None = param(
        None, "accepted and without effect: three missed scrapes make a pod count as full"
    )
    headroom: float = param(0.0, "accepted and without effect: pods are not filtered by it", at_least=0)

    def saturation(self) -> dict[str, Any]:
        return {
            "detector": "utilization",
            "queueDepth": self.queue_depth_threshold,
            "kvUsage": self.kv_cache_util_threshold,
        }


@dataclass(frozen=True, slots=True)
class ConcurrencyDetector:
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = param("requests", "what is counted")
    max_concurrency: int = param(100, "requests in flight on a pod that is full", at_least=1)
    max_token_concurrency: int = param(1_000_000, "uncached prompt tokens in flight on a pod that is full", at_least=1)
    headroom: float = param(0.0, "accepted and without effect: pods are not filtered by it", at_least=0)
    in_flight_load_producer_name: str = param("", "accepted and without effect: the proxy counts by itself")

    def saturation(self) -> dict[str, Any]:
        mode = self.concurrency_mode
        return {
            "detector": "concurrency",
            "requests": None if mode == "tokens" else self.max_concurrency,
            "tokens": None if mode == "requests" else self.max_token_concurrency,
        }


@dataclass(frozen=True, slots=True)
class StaticCeiling:
    threshold: float = param(1.0, "saturation at which requests of any priority wait", more_than=0)

    def ceilings(self, priorities: Sequence[int]) -> list[float]:
        return [self.threshold for _ in priorities]


@dataclass(frozen=True, slots=True)
class Holdback:
    min_ceiling: float = param(doc="saturation at which requests of the lowest priority wait", at_least=0)
    max_ceiling: float = param(1.0, "of the highest", at_most=1)
    domain: Literal["rank", "value"] = param("rank", "whether ceilings in between follow the order or the numbers")
    shape: Literal["linear"] = param("linear", "of the ceilings in between")

    def __post_init__(self) -> None:
        if self.min_ceiling >= self.max_ceiling:
            raise ValueError("minCeiling must be less than maxCeiling")

    def ceilings(self, priorities: Sequence[int]) -> list[float]:
        """For priorities in descending order."""
        low, span = self.min_ceiling, self.max_ceiling - self.min_ceiling
        if len(priorities) == 1:
            return [self.max_ceiling]
        if self.domain == "rank":
            return [self.max_ceiling - place * span / (len(priorities) - 1) for place in range(len(priorities))]
        least, most = priorities[-1], priorities[0]
        return [low + (priority - least) / (most - least) * span for priority in priorities]


@dataclass(frozen=True, slots=True)
class ReflectiveCeiling:
    """It follows the saturation, so bands have none of their own."""

    def ceilings(self, priorities: Sequence[int]) -> list[float]:
        return [1.0 for _ in priorities]


@dataclass(frozen=True, slots=True)
class Probability:
    queue_depth_threshold: int = param(5, "waiting requests of a pod that is full", at_least=1)
    kv_cache_util_threshold: float = param(
        0.8, "used share of the KV cache of a pod that is full", more_than=0, at_most=1
    )
    power: float = param(5.0, "of the saturation, on which the chance to be refused depends", more_than=0)
    k: float = param(300.0, "factor of it", more_than=0)

    def shedding(self) -> dict[str, Any]:
        said = {"queueDepth": self.queue_depth_threshold, "kvUsage": self.kv_cache_util_threshold}
        return {"byLoad": {**said, "power": self.power, "k": self.k}}


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    latency_prediction_info_producer_name: str = param("", "accepted and without effect: there is one producer")

    def shedding(self) -> dict[str, Any]:
        return {"missedObjectives": True}


@dataclass(frozen=True, slots=True)
class ProgramAware:
    strategy: Literal["las"] = param("las", "least attained service, the only one there is")
    las_weight_service: float = param(0.8, "of how little a tenant has had", at_least=0)
    las_weight_head_wait: float = param(0.2, "of how long its first request waits", at_least=0)
    las_half_life_seconds: float = param(
        60.0, "after which what it has had counts half; 0: it always counts", at_least=0
    )
    eviction_ttl_seconds: float = param(3600.0, "after its last answer it has had nothing; 0: never", at_least=0)
    eviction_sweep_seconds: float = param(
        300.0, "accepted and without effect: tenants are forgotten when others are answered", more_than=0
    )

    def least_service(self) -> dict[str, Any]:
        return {
            "weight": self.las_weight_service,
            "waitWeight": self.las_weight_head_wait,
            "halfLife": Duration(self.las_half_life_seconds),
            "forgetAfter": Duration(self.eviction_ttl_seconds),
        }


@dataclass(frozen=True, slots=True)
class FlowType:
    """`role` is what references call it, `value` what the section calls it."""

    parameters: type[Any]
    role: str
    value: str = ""


FLOW_TYPES: Mapping[str, FlowType] = MappingProxyType(
    {
        "global-strict-fairness-policy": FlowType(NoParameters, "fairness policy", "strict"),
        PROGRAM_AWARE: FlowType(ProgramAware, "fairness policy", "least-service"),
        "round-robin-fairness-policy": FlowType(NoParameters, "fairness policy", "round-robin"),
        "fcfs-ordering-policy": FlowType(NoParameters, "ordering policy", "fcfs"),
        "edf-ordering-policy": FlowType(NoParameters, "ordering policy", "edf"),
        "slo-deadline-ordering-policy": FlowType(NoParameters, "ordering policy", "slo-deadline"),
        "static-usage-limit-policy": FlowType(StaticCeiling, "usage limit policy"),
        "soft-reflective-ceiling-policy": FlowType(ReflectiveCeiling, "usage limit policy", "reflective"),
        "priority-holdback-policy": FlowType(Holdback, "usage limit policy"),
        "utilization-detector": FlowType(UtilizationDetector, "saturation detector"),
        "concurrency-detector": FlowType(ConcurrencyDetector, "saturation detector"),
        "probabilistic-admitter": FlowType(Probability, ADMITTER),
        "latency-slo-admitter": FlowType(LatencyObjectives, ADMITTER),
        "sheddable-eviction-filter": FlowType(NoParameters, "eviction filter"),
        "priority-then-time-eviction-order-policy": FlowType(NoParameters, "eviction order"),
    }
)


@dataclass(frozen=True, slots=True)
class DefaultBand:
    max_bytes: Size | None = param(None, "bodies that may wait")
    max_requests: Size | None = param(None, "requests that may wait")
    fairness_policy_ref: str | None = param(None, "name of a fairness policy")
    ordering_policy_ref: str | None = param(None, "name of an ordering policy")


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityBand(DefaultBand):
    priority: int = param(doc="of the objective")


@dataclass(frozen=True, slots=True)
class FlowControlSection:
    max_bytes: Size | None = param(None, "bodies that may wait in all")
    max_requests: Size | None = param(None, "requests that may wait in all")
    default_request_ttl: Duration | None = param(
        None, "that a request may wait; 0 is no limit", key="defaultRequestTTL"
    )
    no_endpoint_request_ttl: Duration | None = param(
        None, "accepted and without effect: where no pod is ready nobody waits", key="noEndpointRequestTTL"
    )
    saturation_detector: Ref | None = param(None, "name of a saturation detector")
    usage_limit_policy_plugin_ref: str | None = param(None, "name of a usage limit policy")
    enable_eviction: bool = param(False, "end sheddable requests for others")
    default_priority_band: DefaultBand = field(default_factory=DefaultBand)
    default_negative_priority_band: DefaultBand | None = param(None, "of priorities below 0 that are not listed")
    priority_bands: tuple[PriorityBand, ...] = param((), "bands by priority")

    def refs(self) -> list[tuple[str, str | None, str]]:
        """(path, name, role) of all references; a name may be missing."""
        detector = self.saturation_detector
        found = [
            ("saturationDetector.pluginRef", detector.plugin_ref if detector else None, "saturation detector"),
            ("usageLimitPolicyPluginRef", self.usage_limit_policy_plugin_ref, "usage limit policy"),
        ]
        bands: list[tuple[str, DefaultBand | None]] = [
            ("defaultPriorityBand", self.default_priority_band),
            ("defaultNegativePriorityBand", self.default_negative_priority_band),
            *((f"priorityBands[{at}]", band) for at, band in enumerate(self.priority_bands)),
        ]
        for path, band in bands:
            if band is not None:
                found.append((f"{path}.fairnessPolicyRef", band.fairness_policy_ref, "fairness policy"))
                found.append((f"{path}.orderingPolicyRef", band.ordering_policy_ref, "ordering policy"))
        return found


Named = Mapping[str, tuple[str, Any]]
"""Type and parameters of the flow types of the document, by name."""


def settings(section: FlowControlSection, named: Named, is_on: bool) -> dict[str, Any]:
    """Values of the `flowControl` section; all names that this one refers to are `named`, and of the right kind.
    Without the feature gate only a detector counts: what is sheddable is refused while pods are full, and nobody waits.
    """
    shed = {"shedding": shedding} if (shedding := _shedding(named)) else {}
    if not is_on:
        return {**(_refusing(section, named) if section.saturation_detector else {}), **shed}
    bands = _bands(section)
    ceilings = _parameters(named, section.usage_limit_policy_plugin_ref, StaticCeiling()).ceilings(list(bands))
    said = {
        "saturation": _saturation(section, named),
        "maxQueued": section.max_requests or None,
        "maxQueuedBytes": section.max_bytes or None,
        "queueTimeout": NO_TIMEOUT if section.default_request_ttl == Duration(0.0) else section.default_request_ttl,
        "ceilings": _value(named, section.usage_limit_policy_plugin_ref, "") or None,
        "leastService": next((each.least_service() for kind, each in named.values() if kind == PROGRAM_AWARE), None),
        "evictSheddable": section.enable_eviction or None,
        "bands": [
            _band(priority, band, named, ceiling)
            for (priority, band), ceiling in zip(bands.items(), ceilings, strict=True)
        ],
    }
    return {key: value for key, value in said.items() if value is not None} | shed


def _shedding(named: Named) -> dict[str, Any]:
    """Admitters work wherever they are among the plugins."""
    said: dict[str, Any] = {}
    for kind, parameters in named.values():
        if FLOW_TYPES[kind].role == ADMITTER:
            said |= parameters.shedding()
    return said


def _refusing(section: FlowControlSection, named: Named) -> dict[str, Any]:
    bands = [{"priority": 0, "ceiling": NO_CEILING}, {"priority": SHEDDABLE, "maxQueued": 0}]
    return {"saturation": _saturation(section, named), "bands": bands}


def _saturation(section: FlowControlSection, named: Named) -> dict[str, Any]:
    name = section.saturation_detector.plugin_ref if section.saturation_detector else None
    said: dict[str, Any] = _parameters(named, name, UtilizationDetector()).saturation()
    return said


def _bands(section: FlowControlSection) -> dict[int, DefaultBand]:
    """The highest first. There is one of priority 0, and one for what is sheddable where that is said to be other."""
    bands: dict[int, DefaultBand] = {band.priority: band for band in section.priority_bands}
    bands.setdefault(0, section.default_priority_band)
    if section.default_negative_priority_band is not None:
        bands.setdefault(SHEDDABLE, section.default_negative_priority_band)
    return dict(sorted(bands.items(), reverse=True))


def _band(priority: int, band: DefaultBand, named: Named, ceiling: float) -> dict[str, Any]:
    return {
        "priority": priority,
        "maxQueued": band.max_requests or None,
        "maxQueuedBytes": band.max_bytes or None,
        "fairness": _value(named, band.fairness_policy_ref, "strict"),
        "ordering": _value(named, band.ordering_policy_ref, "fcfs"),
        "ceiling": ceiling,
    }


def _value(named: Named, name: str | None, default: str) -> str:
    return FLOW_TYPES[named[name][0]].value if name is not None else default


def _parameters(named: Named, name: str | None, default: Any) -> Any:
    return named[name][1] if name is not None else default
