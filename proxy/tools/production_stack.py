"""Import of the router of vLLM's production stack: its command line, and its dynamic configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from proxy.tools import presets
from proxy.tools.imported import Converted, Imported, InvalidDocument, converted, items, mapping, read, read_flags

Values = dict[str, Any]
"""The values of a dynamic configuration, with keys in snake case."""

_SWITCHES = ("static_backend_health_checks", "enable_batch_api", "log_stats", "otel_secure")
_FILES = ("dynamic_config_yaml", "dynamic_config_json")
_NEEDLESS = {
    "k8s_watcher_timeout_seconds": "watches are renewed by themselves",
    "static_models": "pods are asked for their models",
    "static_model_types": "health is asked at /health; see reliability.health.inference for a request",
    **dict.fromkeys(
        ("engine_stats_interval", "request_stats_window"),
        "pods are scraped four times a second, and in-flight requests counted here",
    ),
    **dict.fromkeys(("log_stats", "log_stats_interval"), "all figures are at /metrics"),
    "request_rewriter": "requests go up as they come",
    **dict.fromkeys(
        ("lmcache_controller_port", "lmcache_health_check_interval", "lmcache_worker_timeout"),
        "caches are known from KV events or responses, not from a controller",
    ),
    **dict.fromkeys(
        ("kv_aware_threshold", "prefix_min_match_length"), "what a cached prefix saves is weighed against load"
    ),
}
_MISSING = {
    "callbacks": "write a plugin: see writing-plugins.md",
    **dict.fromkeys(
        ("enable_batch_api", "file_storage_class", "file_storage_path", "batch_processor"), "there is no batch API"
    ),
    "feature_gates": "there is no semantic cache, and there are no guards against personal data",
    **dict.fromkeys(
        ("sentry_dsn", "sentry_traces_sample_rate", "sentry_profile_session_sample_rate"),
        "there is no Sentry; errors are in the log and at /metrics",
    ),
    **dict.fromkeys(
        ("otel_endpoint", "otel_service_name", "otel_secure"),
        "set telemetry.tracing.endpoint: OTLP over HTTP, which collectors mostly take on port 4318",
    ),
}
_LEVELS = {"critical": "error", "trace": "debug"}
_SET: Mapping[str, Converted] = {
    "host": ("listen.host", str),
    "port": ("listen.port", int),
    "log_level": ("telemetry.logLevel", lambda level: _LEVELS.get(level, level)),
    "max_instance_failover_reroute_attempts": ("reliability.retries.attempts", lambda count: int(count) + 1),
    "backend_health_check_timeout_seconds": ("reliability.health.timeout", lambda seconds: f"{seconds}s"),
}
_READ_HERE = (
    "service_discovery",
    "k8s_port",
    "k8s_namespace",
    "k8s_label_selector",
    "k8s_service_discovery_type",
    "routing_logic",
    "session_key",
    "static_backends",
    "static_aliases",
    "static_model_labels",
    "prefill_model_labels",
    "decode_model_labels",
    "static_backend_health_checks",
    *_FILES,
)
_KNOWN = (*_SET, *_NEEDLESS, *_MISSING, *_READ_HERE)


def production_stack(words: Sequence[str]) -> Imported:
    """Import a command line, or only the file of a dynamic configuration. The command line takes precedence over the
    file that it names. Raise InvalidDocument, and ValueError for an invalid value."""
    if len(words) == 1 and not words[0].startswith("--"):
        dynamic = _dynamic(Path(words[0]))
        if dynamic and not any(key in _KNOWN for key in dynamic):
            advice = "; of a chart's values, give the router's command line" if "routerSpec" in dynamic else ""
            raise InvalidDocument(f"{words[0]} has no setting of the router{advice}")
        return imported(dynamic)
    arities = {f"--{key.replace('_', '-')}": 0 if key in _SWITCHES else 1 for key in _KNOWN}
    found, unknown = read_flags(words, arities)
    values: Values = {}
    for flag, uses in {**found, **unknown}.items():
        values[flag.removeprefix("--").replace("-", "_")] = " ".join(uses[-1]) if uses[-1] else True
    for key in _FILES:
        if key in values:
            values = {**_dynamic(Path(values[key])), **values}
    return imported(values)


def imported(values: Values) -> Imported:
    made = Imported("production-stack")
    for key, value in values.items():
        if key in _SET:
            made.put_converted(_SET[key], value, key)
        elif key in _NEEDLESS:
            made.needs_no(f"{key} {value}", _NEEDLESS[key])
        elif key in _MISSING:
            made.lacks(key if key == "sentry_dsn" else f"{key} {value}", _MISSING[key])
        elif key not in _READ_HERE:
            made.lacks(key, "is not known to this import")
    _pods(made, values)
    if pairs := [pair.partition(":") for pair in _listed(values.get("static_aliases"))]:
        made.put("models.aliases", {alias: model for alias, _, model in pairs})
    _placement(made, values)
    return made


def _pods(made: Imported, values: Values) -> None:
    prefill, decode = (_listed(values.get(f"{role}_model_labels")) for role in ("prefill", "decode"))
    labels = _listed(values.get("static_model_labels"))
    urls = _listed(values.get("static_backends"))
    for at, url in enumerate(urls):
        label = labels[at] if at < len(labels) else ""
        role = "prefill" if label in prefill else "decode" if label in decode else ""
        made.pod(url, role=role, labels={"model": label} if label and not role else {})
    selector = str(values.get("k8s_label_selector") or "")
    if selector:
        port = values.get("k8s_port")
        port = None if port is None else converted(int, port, "k8s_port")
        made.cluster(selector, port, values.get("k8s_namespace"))
    if values.get("k8s_service_discovery_type") == "service-name":
        made.lacks(
            "k8s_service_discovery_type service-name", "pods are found, not Services: see pods.kubernetes.service"
        )
    if not urls and not selector:
        made.note("it names no pods: list them, or see pods.kubernetes and pods.dns")
    if values.get("static_backend_health_checks"):
        made.put("reliability.health.inference", {"interval": "60s"})


def _placement(made: Imported, values: Values) -> None:
    logic = values.get("routing_logic", "")
    if logic == "roundrobin":
        made.put("scheduling", presets.picked_by("round-robin-picker"))
    elif logic == "session":
        header = str(values.get("session_key") or "x-session-id")
        made.put("scheduling", presets.session(header))
        made.note(f"session_key {header}: it is read from headers only, not from bodies")
    elif logic == "kvaware":
        made.put("scheduling", presets.exact())
        made.note("install kvlane[precise], and have the engines publish KV events: see exact.md")
    elif logic in ("disaggregated_prefill", "disaggregated_prefill_orchestrated"):
        made.put("disaggregation.connector", "nixl")
        made.put("scheduling", presets.disaggregated(needs_pair=False))
        made.note("set disaggregation.connector if the engines have another one than NIXL")
    elif logic in ("prefixaware", "loadaware"):
        made.needs_no(f"routing_logic {logic}", "cached prefixes and load are what placement goes by anyway")
    elif logic:
        made.lacks(f"routing_logic {logic}", "placement is by predicted time instead; for priorities see flowControl")


def _dynamic(path: Path) -> Values:
    """Return the values of a dynamic configuration, in which YAML may list the backends below their models."""
    values = dict(mapping(read(path), str(path)))
    if isinstance(models := values.get("static_models"), Mapping):
        found = [mapping(model, "static_models").get("static_backends") for model in models.values()]
        backends = [url for urls in found for url in items(urls, "static_backends")]
        values = {
            **values,
            "static_backends": ",".join(map(str, backends)),
            "static_models": ",".join(map(str, models)),
        }
    if isinstance(aliases := values.get("static_aliases"), Mapping):
        values["static_aliases"] = ",".join(f"{alias}:{model}" for alias, model in aliases.items())
    return values


def _listed(text: Any) -> list[str]:
    return [part.strip() for part in str(text or "").split(",") if part.strip()]
