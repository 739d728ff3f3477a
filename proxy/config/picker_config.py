"""Settings of an EndpointPickerConfig that belong to other sections: scraping, engines, discovery, flow control."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.core.errors import Problem
from proxy.fleet.dialects import DEFAULT_ENGINE, DIALECTS, ENGINE_LABELS, Dialect, Dialects, Specs, specs
from proxy.scheduling.sections import CoreMetrics, DataLayer, EngineConfig

Faults = list[Problem]


def pods_section(pods: Mapping[str, Any], layer: DataLayer, faults: Faults) -> dict[str, Any]:
    """Return the `pods` section with the settings of the document. A limit that both set is a fault."""
    merged = dict(pods)
    refresh = pods.get("refresh") or {}
    given: dict[str, Any] = {}
    if (source := layer.metrics) is not None:
        files = {"ca": source.ca_cert_path, "cert": source.client_cert_path, "key": source.client_key_path}
        if tls := {key: path for key, path in files.items() if path}:
            own = pods.get("tls") or {}
            if isinstance(own, Mapping):
                faults.extend(_twice(f"pods.tls.{key}") for key in tls if key in own)
                merged["tls"] = {**tls, **own}
        found = {"interval": source.interval, "path": source.path, "port": source.port, "scheme": source.scheme}
        given = {key: value for key, value in found.items() if value is not None}
    if (gpus := layer.gpus) is not None:
        given["dcgm"] = {"scheme": gpus.scheme, "path": gpus.path, "port": gpus.port, "onNode": gpus.use_node_address}
        given["dcgm"] |= {} if gpus.interval is None else {"interval": gpus.interval}
    if given and isinstance(refresh, Mapping):
        faults.extend(_twice(f"pods.refresh.{key}") for key in given if key in refresh)
        merged["refresh"] = {**given, **refresh}
    if layer.discovery is not None:
        if pods.get("file"):
            faults.append(_twice("pods.file"))
        merged["file"] = layer.discovery.path
    return merged


def flow_control_section(own: Any, given: Mapping[str, Any], faults: Faults) -> Any:
    """Return the `flowControl` section with the settings of the document. A limit that both set is a fault."""
    if not (own is None or isinstance(own, Mapping)):
        return own
    own = own or {}
    faults.extend(_twice(f"flowControl.{key}") for key in given if key in own)
    return {**given, **own}


def dialects(core: CoreMetrics | None, faults: Faults) -> Dialects:
    """Return the built-in dialects, and the dialects that the document adds or overrides."""
    if core is None:
        return Dialects()
    by_engine = dict(DIALECTS)
    for engine in core.engine_configs:
        path = f"scheduling.plugins.core-metrics-extractor.parameters.engineConfigs.{engine.name}"
        try:
            by_engine[engine.name] = _dialect(engine)
        except ValueError as error:
            faults.append(Problem(path, str(error)))
    default = core.default_engine or DEFAULT_ENGINE
    if default not in by_engine:
        path = "scheduling.plugins.core-metrics-extractor.parameters.defaultEngine"
        faults.append(Problem(path, f"'{default}' is not one of {', '.join(by_engine)}"))
        return Dialects()
    labels = dict.fromkeys(label for label in (core.engine_label_key, *ENGINE_LABELS) if label)
    return Dialects(by_engine, tuple(labels), default)


def _dialect(engine: EngineConfig) -> Dialect:
    """Raise ValueError for an invalid spec."""
    defaults = Dialect()
    dialect = Dialect(
        waiting=_specs(engine.queued_requests_spec),
        running=_specs(engine.running_requests_spec),
        kv_usage=_specs(engine.kv_usage_spec),
        lora=_specs(engine.lora_spec),
        cache_info=_specs(engine.cache_info_spec),
        block_size_label=engine.cache_block_size_label_name or defaults.block_size_label,
        blocks_label=engine.cache_num_blocks_label_name or defaults.blocks_label,
        block_size=_specs(engine.cache_block_size_spec),
        blocks=_specs(engine.cache_num_blocks_spec),
    )
    return dialect.with_attributes({metric.attribute_key: metric.metric_spec for metric in engine.custom_metrics})


def _specs(text: str | None) -> Specs:
    return specs(text) if text else ()


def _twice(path: str) -> Problem:
    return Problem(path, "is set in scheduling too; keep one of them")
