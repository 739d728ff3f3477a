"""What an EndpointPickerConfig says about scraping, discovery and parsing, for those who do it.

The types below are names that users know; here they are no plugins but settings of other rooms.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from proxy.core.params import param
from proxy.core.units import Duration


@dataclass(frozen=True, slots=True)
class HttpSource:
    """How a pod is asked; None means as its URL or the `pods` section says."""

    scheme: Literal["http", "https"] | None = param(None, "of the pod's own URL unless set")
    path: str | None = param(None, "path that is asked")
    port: int | None = param(None, "port that is asked, if it is not the pod's own", at_least=1, at_most=65535)
    interval: Duration | None = param(None, "time between two scrapes of one pod", more_than=0)
    insecure_skip_verify: bool = param(True, "accept any certificate")
    ca_cert_path: str | None = param(None, "certificate authority to verify pods with")
    client_cert_path: str | None = param(None, "client certificate")
    client_key_path: str | None = param(None, "key of the client certificate")


@dataclass(frozen=True, slots=True)
class DcgmSource:
    scheme: Literal["http", "https"] = param("http", "the exporter is asked by")
    path: str = param("/metrics", "path that is asked")
    port: int = param(9400, "port that is asked", at_least=1, at_most=65535)
    insecure_skip_verify: bool = param(True, "accepted and without effect: certificates are looked at as those of pods")
    use_node_address: bool = param(False, "ask the node of the pod, not its own address")
    interval: Duration | None = param(None, "time between two scrapes of one exporter", more_than=0)


@dataclass(frozen=True, slots=True)
class CustomMetric:
    attribute_key: str = param(doc="name of the endpoint attribute")
    metric_spec: str = param(doc="`name` or `name{label=value}`")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Where an engine says what; specs are `name` or `name{label=value}`, None means not scraped."""

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
    default_engine: str = param("vllm", "dialect of pods without the engine label")
    engine_label_key: str = param("llm-d.ai/engine-type", "label that names a pod's engine")
    engine_configs: tuple[EngineConfig, ...] = param((), "dialects besides the built-in ones")

    def __post_init__(self) -> None:
        names = [engine.name for engine in self.engine_configs]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"engineConfigs names {', '.join(twice)} twice")


@dataclass(frozen=True, slots=True)
class FileDiscovery:
    path: str = param(doc="file with the list of endpoints")
    watch_file: bool = param(False, "follow its changes")


@dataclass(frozen=True, slots=True)
class NoParameters:
    """Of a type that is accepted by name and has nothing to set."""


UNUSED = "accepted and without effect: pods are told by the proxy itself who does what"

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
class DataLayer:
    """What the document does not mention is None; `parsers` are the types of the parsers it lists, empty for all there
    are."""

    metrics: HttpSource | None = None
    core: CoreMetrics | None = None
    models: HttpSource | None = None
    gpus: DcgmSource | None = None
    discovery: FileDiscovery | None = None
    parsers: tuple[str, ...] = ()
    inject_defaults: bool = True


@dataclass(frozen=True, slots=True)
class SettingsType:
    """`role` is what references call it, `field` the field of DataLayer that its parameters become."""

    parameters: type[Any]
    role: str
    field: str = ""


SETTINGS_TYPES: Mapping[str, SettingsType] = MappingProxyType(
    {
        "metrics-data-source": SettingsType(HttpSource, "data source", "metrics"),
        "models-data-source": SettingsType(HttpSource, "data source", "models"),
        "dcgm-data-source": SettingsType(DcgmSource, "data source", "gpus"),
        "dcgm-extractor": SettingsType(NoParameters, "extractor"),
        "core-metrics-extractor": SettingsType(CoreMetrics, "extractor", "core"),
        "models-data-extractor": SettingsType(NoParameters, "extractor"),
        "topology-extractor": SettingsType(TopologyLabels, "extractor"),
        "disagg-headers-handler": SettingsType(DisaggHeaders, "request hook"),
        "prefill-header-handler": SettingsType(DisaggHeaders, "request hook"),
        "endpoint-notification-source": SettingsType(NoParameters, "data source"),
        "k8s-notification-source": SettingsType(NoParameters, "data source"),
        "file-discovery": SettingsType(FileDiscovery, "discovery", "discovery"),
        "openai-parser": SettingsType(NoParameters, "parser"),
        "anthropic-parser": SettingsType(NoParameters, "parser"),
        "vllmhttp-parser": SettingsType(NoParameters, "parser"),
        "sglanghttp-parser": SettingsType(NoParameters, "parser"),
        "passthrough-parser": SettingsType(NoParameters, "parser"),
    }
)


NOTIFIED = frozenset(
    {
        "precise-prefix-cache-producer",
        "precise-prefix-cache-scorer",
        "inflight-load-producer",
        "mm-embeddings-cache-producer",
    }
)
"""Plugins that a document may name as extractors of a notification source: here they are told of pods anyway."""


@dataclass(frozen=True, slots=True)
class Ref:
    plugin_ref: str = param(doc="name of a plugin")


@dataclass(frozen=True, slots=True)
class SourceRef:
    plugin_ref: str = param(doc="name of a data source")
    extractors: tuple[Ref, ...] = param((), "names of extractors")


@dataclass(frozen=True, slots=True)
class DataLayerSection:
    inject_defaults: bool = param(True, "scrape the core metrics even where no source is listed")
    sources: tuple[SourceRef, ...] = param((), "what is scraped")
    discovery: Ref | None = param(None, "where pods come from")
    peer_discovery: Any = param(None, "not yet supported")
    cross_replica_syncer_plugin_ref: Any = param(None, "not yet supported")
    cross_replica_sync_interval: Any = param(None, "not yet supported")


@dataclass(frozen=True, slots=True)
class RequestHandlerSection:
    parsers: tuple[Ref, ...] = field(default=(), metadata={"doc": "APIs that are understood"})
