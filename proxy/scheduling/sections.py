"""Sections of an EndpointPickerConfig that configure other packages: scraping, discovery, parsing and flow control."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from proxy.core.params import LARGEST, Duration, Size, param


@dataclass(frozen=True, slots=True)
class HttpSource:
    """How a pod is asked; None means as its URL or the `pods` section says."""

    scheme: Literal["http", "https"] | None = param(None, "scheme of the scrape; default: that of the pod's URL")
    path: str | None = param(None, "path of the scrape")
    port: int | None = param(None, "port of the scrape; default: the port of the pod", at_least=1, at_most=65535)
    interval: Duration | None = param(None, "time between two scrapes of one pod", more_than=0)
    insecure_skip_verify: bool = param(
        True, "accepted and without effect: certificates are verified, unless pods.tls.insecureSkipVerify is true"
    )
    ca_cert_path: str | None = param(
        None, "file of the certificate authorities of the pods, for requests too; default: pods.tls.ca"
    )
    client_cert_path: str | None = param(
        None, "file of the client certificate, for requests too; default: pods.tls.cert"
    )
    client_key_path: str | None = param(
        None, "file of the key of the client certificate, for requests too; default: pods.tls.key"
    )
    families: tuple[str, ...] = param((), "accepted and without effect: only the metrics that are used are parsed")


@dataclass(frozen=True, slots=True)
class DcgmSource:
    scheme: Literal["http", "https"] = param("http", "scheme of the exporter's URL")
    path: str = param("/metrics", "path of the exporter's metrics")
    port: int = param(9400, "port of the exporter", at_least=1, at_most=65535)
    insecure_skip_verify: bool = param(True, "accepted and without effect: certificates are verified as for pods")
    use_node_address: bool = param(False, "scrape the node of the pod instead of the pod")
    interval: Duration | None = param(None, "time between two scrapes of one exporter", more_than=0)


@dataclass(frozen=True, slots=True)
class CustomMetric:
    attribute_key: str = param(doc="name of the endpoint attribute")
    metric_spec: str = param(doc="`name` or `name{label=value}`")
    optional: bool = param(False, "accepted and without effect: any metric may be missing")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The metric names of an engine. Specs are `name` or `name{label=value}`; None means not scraped."""

    name: str = param(doc="value of the engine label")
    queued_requests_spec: str | None = param(None, "waiting requests")
    running_requests_spec: str | None = param(None, "running requests")
    kv_usage_spec: str | None = param(None, "share of the KV cache in use", key="kvUsageSpec")
    lora_spec: str | None = param(None, "LoRA adapters")
    cache_info_spec: str | None = param(None, "KV capacity, in labels")
    cache_block_size_label_name: str | None = param(None, "label of cacheInfoSpec with the block size")
    cache_num_blocks_label_name: str | None = param(None, "label of cacheInfoSpec with the number of blocks")
    cache_block_size_spec: str | None = param(None, "tokens per block")
    cache_num_blocks_spec: str | None = param(None, "number of blocks")
    custom_metrics: tuple[CustomMetric, ...] = param((), "further metrics, kept as attributes")

    def __post_init__(self) -> None:
        if self.name == "default":
            raise ValueError("the name 'default' is reserved")
        if self.cache_info_spec and (self.cache_block_size_spec or self.cache_num_blocks_spec):
            raise ValueError("cacheInfoSpec excludes cacheBlockSizeSpec and cacheNumBlocksSpec")


@dataclass(frozen=True, slots=True)
class CoreMetrics:
    default_engine: str = param(
        "vllm", "dialect of pods with neither a known engine label nor an `engine` other than vllm"
    )
    engine_label_key: str = param("llm-d.ai/engine-type", "label that names a pod's engine")
    engine_configs: tuple[EngineConfig, ...] = param(
        (), "dialects besides the built-in ones; one with the name of a built-in dialect replaces it"
    )

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engine_configs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"engineConfigs names {', '.join(twice)} twice")


@dataclass(frozen=True, slots=True)
class FileDiscovery:
    path: str = param(doc="file with the list of endpoints")
    watch_file: bool = param(False, "watch the file for changes")


@dataclass(frozen=True, slots=True)
class NoParameters:
    """The parameters of a type that is accepted by name and has no settings."""


@dataclass(frozen=True, slots=True)
class NotificationSource:
    version: str = param(doc="accepted and without effect, as group and kind: a change of any pod is noticed")
    kind: str = param(doc="kind of the resources")
    group: str = param("", "API group of the resources")


UNUSED = "accepted and without effect: the proxy itself sends each stage to its pod"

TOPOLOGY = {
    "hostname": "kubernetes.io/hostname",
    "rack": "topology.kubernetes.io/rack",
    "zone": "topology.kubernetes.io/zone",
    "region": "topology.kubernetes.io/region",
}


@dataclass(frozen=True, slots=True)
class DisaggHeaders:
    prefill_profile: str = param("prefill", UNUSED)
    encode_profile: str = param("encode", UNUSED)


@dataclass(frozen=True, slots=True)
class TopologyLabels:
    hostname: str = param("", "label of a pod's host")
    rack: str = param("", "label of its rack")
    zone: str = param("", "label of its zone")
    region: str = param("", "label of its region")

    def __post_init__(self) -> None:
        for level, usual in TOPOLOGY.items():
            if getattr(self, level) not in ("", usual):
                raise ValueError(f"{level}: another label than {usual} is not yet supported")


@dataclass(frozen=True, slots=True)
class PeerSource:
    prefix_match_info_producer_name: str = param("", "accepted and without effect")
    min_cached_token_delta: int = param(1, "accepted and without effect", at_least=1)
    prefill_profile_name: str = param("", "accepted and without effect")


@dataclass(frozen=True, slots=True)
class Reporter:
    attributes: Any = param(None, "accepted and without effect")


@dataclass(frozen=True, slots=True)
class DataLayer:
    """Settings of scraping and discovery; None if the document does not mention them."""

    metrics: HttpSource | None = None
    core: CoreMetrics | None = None
    gpus: DcgmSource | None = None
    discovery: FileDiscovery | None = None


@dataclass(frozen=True, slots=True)
class SectionType:
    """A plugin type that configures another package. `role` is the name of the type in messages about references,
    `field` the field of DataLayer with its parameters, `value` its name in the section `flowControl`."""

    parameters: type[Any]
    role: str
    field: str = ""
    value: str = ""
    remark: str = ""


BY_REPLICAS = "has no effect: the section `replicas` makes proxies share their state"

GRPC_PARSERS = ("vertexai-parser", "vllmgrpc-parser")

SETTINGS_TYPES: Mapping[str, SectionType] = {
    "metrics-data-source": SectionType(HttpSource, "data source", "metrics"),
    "models-data-source": SectionType(HttpSource, "data source"),
    "dcgm-data-source": SectionType(DcgmSource, "data source", "gpus"),
    "dcgm-extractor": SectionType(NoParameters, "extractor"),
    "core-metrics-extractor": SectionType(CoreMetrics, "extractor", "core"),
    "models-data-extractor": SectionType(NoParameters, "extractor"),
    "topology-extractor": SectionType(TopologyLabels, "extractor"),
    "disagg-headers-handler": SectionType(DisaggHeaders, "request hook"),
    "prefill-header-handler": SectionType(DisaggHeaders, "request hook"),
    "request-attribute-reporter": SectionType(
        Reporter,
        "request hook",
        remark="has no effect: see the token counts of /metrics and of the access log",
    ),
    "outlen-bucket": SectionType(
        NoParameters, "request hook", remark="has no effect: the length of responses is estimated from their limits"
    ),
    "models-responder": SectionType(NoParameters, "request hook"),
    "p2p-source-producer": SectionType(
        PeerSource,
        "request hook",
        remark="has no effect: pods compute what they do not have cached, and pull no blocks from other pods",
    ),
    **dict.fromkeys(
        ("cross-replica-publisher", "local-syncer"), SectionType(NoParameters, "syncer", remark=BY_REPLICAS)
    ),
    "endpoint-notification-source": SectionType(NoParameters, "data source"),
    "k8s-notification-source": SectionType(NotificationSource, "data source"),
    "file-discovery": SectionType(FileDiscovery, "discovery", "discovery"),
    "openai-parser": SectionType(NoParameters, "parser"),
    "anthropic-parser": SectionType(NoParameters, "parser"),
    "vllmhttp-parser": SectionType(NoParameters, "parser"),
    "sglanghttp-parser": SectionType(NoParameters, "parser"),
    "passthrough-parser": SectionType(NoParameters, "parser"),
    **dict.fromkeys(
        GRPC_PARSERS, SectionType(NoParameters, "parser", remark="has no effect: gRPC requests are not served")
    ),
}


NOTIFIED = {
    *("precise-prefix-cache-producer", "precise-prefix-cache-scorer", "inflight-load-producer"),
    "mm-embeddings-cache-producer",
}
"""Plugins that a document may name as extractors of a notification source; the proxy notifies them in any case."""


@dataclass(frozen=True, slots=True)
class Ref:
    plugin_ref: str = param(doc="name of a plugin")


@dataclass(frozen=True, slots=True)
class SourceRef:
    plugin_ref: str = param(doc="name of a data source")
    extractors: tuple[Ref, ...] = param((), "names of extractors")


NO_PEERS = "accepted and without effect: see the section replicas"


@dataclass(frozen=True, slots=True)
class Discovery:
    """Where pods come from. Since `llm-d.ai/v1` the reference is in `endpoints`."""

    plugin_ref: str = param("", "older spelling of endpoints.pluginRef")
    endpoints: Ref | None = param(None, "name of a discovery")
    peers: Any = param(None, NO_PEERS)


@dataclass(frozen=True, slots=True)
class DataLayerSection:
    inject_defaults: bool = param(True, "scrape the core metrics even where no source is listed")
    sources: tuple[SourceRef, ...] = param((), "what is scraped")
    discovery: Discovery | None = param(None, "where pods come from")
    peer_discovery: Any = param(None, NO_PEERS)
    cross_replica: Any = param(None, NO_PEERS)
    cross_replica_syncer_plugin_ref: Any = param(None, NO_PEERS)
    cross_replica_sync_interval: Any = param(None, NO_PEERS)
    cross_replica_publish_timeout: Any = param(None, NO_PEERS)


@dataclass(frozen=True, slots=True)
class RequestHandlerSection:
    parsers: tuple[Ref, ...] = param((), "APIs that are understood")
    propagate_priority: bool = param(False, "accepted and without effect: requests are sent without a priority")


SHEDDABLE = -1
"""The highest priority of requests that may be dropped in favour of others."""

NO_TIMEOUT = Duration(86400.0)
"""Stands for no own timeout: `reliability.timeouts.request` limits the request in any case."""

DEFAULT_TTL = Duration(60.0)

NO_CEILING = 1e9

STEEP = 1e9
"""Exponent of a saturation with which nothing is refused below 1, and everything from 1 on."""

ADMITTER = "admitter"

DETECTOR = "saturation detector"

PROGRAM_AWARE = "program-aware-fairness"

UTILIZATION, MAX_SATURATION = "utilization-detector", "max-saturation-detector"


@dataclass(frozen=True, slots=True)
class FullPod:
    queue_depth_threshold: int = param(5, "number of waiting requests at which a pod is full", at_least=1)
    kv_cache_util_threshold: float = param(
        0.8, "used share of the KV cache at which a pod is full", more_than=0, at_most=1
    )

    def limits(self) -> dict[str, Any]:
        return {"queueDepth": self.queue_depth_threshold, "kvUsage": self.kv_cache_util_threshold}


@dataclass(frozen=True, slots=True)
class UtilizationDetector(FullPod):
    metrics_staleness_threshold: Duration | None = param(
        None, "accepted and without effect: three missed scrapes make a pod count as full"
    )
    staleness_policy: str = param("", "accepted and without effect, as metricsStalenessThreshold")
    headroom: float = param(
        0.0, "share above the limits up to which a profile with the detector keeps a pod", at_least=0
    )

    def saturation(self) -> dict[str, Any]:
        return {"detector": "utilization", **self.limits()}

    def as_filter(self) -> dict[str, Any]:
        """Return the parameters of the utilization-filter that keeps the pods below the limits, or else all."""
        waiting = {"metric": "waiting-queue", "maxValue": _below(_raised(self.queue_depth_threshold, self.headroom))}
        usage = math.nextafter(_raised(self.kv_cache_util_threshold, self.headroom), 0)
        cache = {"metric": "kv-cache-utilization", "maxValue": min(usage, 1.0)}
        return {"conditions": [waiting, cache], "fallbackOnEmpty": True, "keepStale": False}


@dataclass(frozen=True, slots=True)
class ConcurrencyDetector:
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = param("requests", "what is counted")
    max_concurrency: int = param(100, "number of requests in flight at which a pod is full", at_least=1)
    max_token_concurrency: int = param(1_000_000, "uncached prompt tokens in flight at which a pod is full", at_least=1)
    headroom: float = param(
        0.0, "share above the limit up to which a profile with the detector keeps a pod", at_least=0
    )
    fail_open: bool = param(False, "whether a profile with the detector keeps all pods if all are full")
    in_flight_load_producer_name: str = param("", "accepted and without effect: the proxy counts by itself")

    def saturation(self) -> dict[str, Any]:
        mode = self.concurrency_mode
        return {
            "detector": "concurrency",
            "requests": None if mode == "tokens" else self.max_concurrency,
            "tokens": None if mode == "requests" else self.max_token_concurrency,
        }

    def as_filter(self) -> dict[str, Any]:
        """Return the parameters of the utilization-filter that keeps the pods below the limits."""
        limits = {"active-requests": self.max_concurrency, "active-tokens": self.max_token_concurrency}
        counted = {"requests": ["active-requests"], "tokens": ["active-tokens"]}.get(
            self.concurrency_mode, list(limits)
        )
        most = {metric: _below(int(_raised(limits[metric], self.headroom))) for metric in counted}
        conditions = [{"metric": metric, "maxValue": value} for metric, value in most.items()]
        return {"conditions": conditions, "fallbackOnEmpty": self.fail_open}


@dataclass(frozen=True, slots=True)
class MaxSaturationDetector:
    """The higher saturation of two detectors, one of each kind."""

    detectors: tuple[str, ...] = param(
        doc="names of a utilization-detector and a concurrency-detector, or of one of them"
    )
    stages: Any = param(None, "not yet supported: saturation is measured over all pods")

    def __post_init__(self) -> None:
        if not self.detectors:
            raise ValueError("detectors: must not be empty")
        if self.stages:
            raise ValueError("stages: is not yet supported")

    def of(self, children: Sequence[Any]) -> dict[str, Any]:
        """Return the saturation of the children, which differ in kind."""
        found: dict[str, Any] = {}
        for child in children:
            found |= child.saturation()
        return found | ({"detector": "highest"} if len(children) > 1 else {})


def _raised(limit: float, headroom: float) -> float:
    """Return the limit with a share above it."""
    return min(limit * (1 + headroom), LARGEST)


def _below(limit: float) -> int:
    """Return the largest whole number below the limit."""
    return math.ceil(limit) - 1


@dataclass(frozen=True, slots=True)
class StaticCeiling:
    threshold: float = param(1.0, "saturation at which requests of any priority wait", more_than=0)

    @property
    def ceiling(self) -> float:
        return self.threshold

    def limits(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True, slots=True)
class Holdback:
    min_ceiling: float = param(doc="saturation at which requests of the lowest priority wait", at_least=0)
    max_ceiling: float = param(1.0, "of the highest", at_most=1)
    domain: Literal["rank", "value"] = param("rank", "whether ceilings in between follow the order or the numbers")
    shape: Literal["linear"] = param("linear", "of the ceilings in between")
    ceiling: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        if self.min_ceiling >= self.max_ceiling:
            raise ValueError("minCeiling must be less than maxCeiling")

    def limits(self) -> dict[str, Any]:
        values = {"minCeiling": self.min_ceiling, "maxCeiling": self.max_ceiling, "domain": self.domain}
        return {"holdback": values}


@dataclass(frozen=True, slots=True)
class ReflectiveCeiling:
    """A ceiling that follows the saturation, so bands have no ceilings of their own."""

    ceiling: ClassVar[float] = 1.0

    def limits(self) -> dict[str, Any]:
        return {"ceilings": "reflective"}


@dataclass(frozen=True, slots=True)
class Probability(FullPod):
    power: float = param(5.0, "exponent of the saturation in the probability of a refusal", more_than=0)
    k: float = param(300.0, "factor of the probability", more_than=0)

    def shedding(self) -> dict[str, Any]:
        return {"byLoad": {**self.limits(), "power": self.power, "k": self.k}}


@dataclass(frozen=True, slots=True)
class LatencyObjectives:
    latency_prediction_info_producer_name: str = param("", "accepted and without effect: there is one producer")

    def shedding(self) -> dict[str, Any]:
        return {"missedObjectives": True}


@dataclass(frozen=True, slots=True)
class ProgramAware:
    strategy: Literal["las"] = param("las", "least attained service, the only one there is")
    las_weight_service: float = param(0.8, "weight of how little service a tenant received", at_least=0)
    las_weight_head_wait: float = param(0.2, "weight of how long the first request of a tenant has waited", at_least=0)
    las_half_life_seconds: float = param(
        60.0, "time after which received service counts half; 0: it always counts fully", at_least=0
    )
    eviction_ttl_seconds: float = param(
        3600.0, "time without a response after which received service is forgotten; 0: never", at_least=0
    )
    eviction_sweep_seconds: float = param(
        300.0, "accepted and without effect: tenants are forgotten when other tenants get responses", more_than=0
    )

    def least_service(self) -> dict[str, Any]:
        return {
            "weight": self.las_weight_service,
            "waitWeight": self.las_weight_head_wait,
            "halfLife": Duration(self.las_half_life_seconds),
            "forgetAfter": Duration(self.eviction_ttl_seconds),
        }


FLOW_TYPES: Mapping[str, SectionType] = {
    "global-strict-fairness-policy": SectionType(NoParameters, "fairness policy", value="strict"),
    PROGRAM_AWARE: SectionType(ProgramAware, "fairness policy", value="least-service"),
    "round-robin-fairness-policy": SectionType(NoParameters, "fairness policy", value="round-robin"),
    "fcfs-ordering-policy": SectionType(NoParameters, "ordering policy", value="fcfs"),
    "edf-ordering-policy": SectionType(NoParameters, "ordering policy", value="edf"),
    "slo-deadline-ordering-policy": SectionType(NoParameters, "ordering policy", value="slo-deadline"),
    "static-usage-limit-policy": SectionType(StaticCeiling, "usage limit policy"),
    "soft-reflective-ceiling-policy": SectionType(ReflectiveCeiling, "usage limit policy", value="reflective"),
    "priority-holdback-policy": SectionType(Holdback, "usage limit policy"),
    UTILIZATION: SectionType(UtilizationDetector, DETECTOR),
    "concurrency-detector": SectionType(ConcurrencyDetector, DETECTOR),
    MAX_SATURATION: SectionType(MaxSaturationDetector, DETECTOR),
    "probabilistic-admitter": SectionType(Probability, ADMITTER),
    "latency-slo-admitter": SectionType(LatencyObjectives, ADMITTER),
    "sheddable-eviction-filter": SectionType(NoParameters, "eviction filter"),
    "priority-then-time-eviction-order-policy": SectionType(NoParameters, "eviction order"),
}

SECTION_TYPES: Mapping[str, SectionType] = {**SETTINGS_TYPES, **FLOW_TYPES}

SOLE_TYPES = {
    *("metrics-data-source", "models-data-source", "dcgm-data-source", "core-metrics-extractor"),
    *("file-discovery", PROGRAM_AWARE),
}
"""A document has one plugin at most of each of these types."""


@dataclass(frozen=True, slots=True)
class DefaultBand:
    max_bytes: Size | None = param(None, "bodies that may wait")
    max_requests: Size | None = param(None, "requests that may wait")
    fairness_policy_ref: str = param("", "name of a fairness policy")
    ordering_policy_ref: str = param("", "name of an ordering policy")
    priority: int | None = param(None, "accepted and without effect: the band is of all priorities without their own")
    default_request_ttl: Duration | None = param(
        None, "that a request of the band may wait; 0 is no limit", key="defaultRequestTTL"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityBand(DefaultBand):
    priority: int = param(0, "of the objective")


@dataclass(frozen=True, slots=True)
class DetectorRef:
    plugin_ref: str = param("", "name of a saturation detector; default: utilization-detector")


@dataclass(frozen=True, slots=True)
class FlowControlSection:
    max_bytes: Size | None = param(None, "bodies that may wait in all")
    max_requests: Size | None = param(None, "requests that may wait in all")
    default_request_ttl: Duration | None = param(
        None, "that a request may wait; 0 is no limit", key="defaultRequestTTL"
    )
    no_endpoint_request_ttl: Duration | None = param(
        None,
        "that a request may wait while no pod is ready; 0 is no limit; default: defaultRequestTTL",
        key="noEndpointRequestTTL",
    )
    saturation_detector: DetectorRef | None = param(None, "the saturation detector")
    usage_limit_policy_plugin_ref: str = param("", "name of a usage limit policy")
    enable_eviction: bool = param(False, "end sheddable requests for others")
    default_priority_band: DefaultBand = field(default_factory=DefaultBand)
    default_negative_priority_band: DefaultBand | None = param(None, "of priorities below 0 that are not listed")
    priority_bands: tuple[PriorityBand, ...] = param((), "bands by priority")

    @property
    def no_endpoint_ttl(self) -> Duration:
        given = (self.no_endpoint_request_ttl, self.default_request_ttl)
        return next((ttl for ttl in given if ttl is not None), DEFAULT_TTL)

    def refs(self) -> list[tuple[str, str, str]]:
        """Return (path, name, role) of all references; a missing name is empty."""
        detector = self.saturation_detector
        found = [
            ("saturationDetector.pluginRef", detector.plugin_ref if detector else "", DETECTOR),
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
    """Return values of the `flowControl` section. All references are valid.

    Without the feature gate no request waits: sheddable requests are refused while the pods are full, if there is a
    detector. A detector with the name of the default type needs no reference, as admitters."""
    shedding: dict[str, Any] = {}
    for kind, parameters in named.values():
        if FLOW_TYPES[kind].role == ADMITTER:
            shedding |= parameters.shedding()
    shed = {"shedding": shedding} if shedding else {}
    detector = section.saturation_detector
    chosen = detector.plugin_ref if detector and detector.plugin_ref else UTILIZATION
    saturation = _saturation(named, named[chosen][1] if chosen in named else UtilizationDetector())
    if not is_on:
        return {**(_refuse_sheddable(saturation) if detector or chosen in named else {}), **shed}
    limit = section.usage_limit_policy_plugin_ref
    policy = named[limit][1] if limit else StaticCeiling()
    values = {
        "saturation": saturation,
        "maxQueued": section.max_requests or None,
        "maxQueuedBytes": section.max_bytes or None,
        "queueTimeout": _timeout(section.default_request_ttl),
        "noEndpointTimeout": _timeout(section.no_endpoint_ttl),
        **policy.limits(),
        "leastService": next((each.least_service() for kind, each in named.values() if kind == PROGRAM_AWARE), None),
        "evictSheddable": section.enable_eviction or None,
        "bands": _bands(section, named, policy.ceiling),
    }
    return {key: value for key, value in values.items() if value is not None} | shed


def sheds_while_full(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a document without the feature gate. As llm-d's default detector does, refuse sheddable
    requests while the pods are full, unless another detector does. Without queues this costs other requests nothing."""
    if "saturation" in given:
        return dict(given)
    shedding, limits = given.get("shedding", {}), UtilizationDetector().limits()
    own = shedding.get("byLoad")
    if own is None:
        return {**given, "shedding": {**shedding, "byLoad": {**limits, "power": STEEP, "k": 1.0}}}
    if own["k"] >= 1.0 and all(own[key] <= limit for key, limit in limits.items()):  # refuses them all too
        return dict(given)
    return {**given, **_refuse_sheddable(UtilizationDetector().saturation())}


def _refuse_sheddable(saturation: Mapping[str, Any]) -> dict[str, Any]:
    bands = [{"priority": 0, "ceiling": NO_CEILING}, {"priority": SHEDDABLE, "maxQueued": 0}]
    return {"saturation": saturation, "bands": bands}


def _bands(section: FlowControlSection, named: Named, ceiling: float) -> list[dict[str, Any]]:
    """Return the bands, the highest first: always one of priority 0, and one of sheddable requests if it differs."""
    bands: dict[int, DefaultBand] = {band.priority: band for band in section.priority_bands}
    bands.setdefault(0, section.default_priority_band)
    if section.default_negative_priority_band is not None:
        bands.setdefault(SHEDDABLE, section.default_negative_priority_band)
    priorities = sorted(bands, reverse=True)
    return [
        {
            "priority": priority,
            "maxQueued": bands[priority].max_requests or None,
            "maxQueuedBytes": bands[priority].max_bytes or None,
            "queueTimeout": _timeout(bands[priority].default_request_ttl),
            "fairness": _value(named, bands[priority].fairness_policy_ref, "strict"),
            "ordering": _value(named, bands[priority].ordering_policy_ref, "fcfs"),
            "ceiling": ceiling,
        }
        for priority in priorities
    ]


def _saturation(named: Named, detector: Any) -> dict[str, Any]:
    if isinstance(detector, MaxSaturationDetector):
        return detector.of([named[name][1] for name in detector.detectors])
    saturation: dict[str, Any] = detector.saturation()
    return saturation


def _timeout(ttl: Duration | None) -> Duration | None:
    return NO_TIMEOUT if ttl == Duration(0.0) else ttl


def _value(named: Named, name: str, default: str) -> str:
    return FLOW_TYPES[named[name][0]].value if name else default
