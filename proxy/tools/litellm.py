"""Import of a LiteLLM configuration: the part that is about vLLM servers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from proxy.tools import presets
from proxy.tools.imported import Converted, Imported, InvalidDocument, converted, items, mapping, read

PROVIDERS = ("hosted_vllm", "openai", "text-completion-openai")
"""Prefixes of models that a vLLM server may serve, if an api_base is set."""
MASTER_KEY = "LITELLM_MASTER_KEY"

_ENVIRONMENT = re.compile(r"os\.environ/(\w+)")
_NO_KEYS = ("", "none", "empty", "fake-key", "dummy")
_ELSEWHERE = ("openai.com", "openai.azure.com")
_PER_DEPLOYMENT = "pods have no rates of their own: limits are per key, see security.limits"
_OF_SETTINGS = {
    **dict.fromkeys(
        ("redis_host", "redis_port", "redis_password", "redis_url"),
        "several proxies share what they know as the section replicas says",
    ),
    "database_url": "keys are in the file, or in security.apiKeysFile; there is no database",
    "store_model_in_db": "there is no database; POST /admin/pods adds pods",
    **dict.fromkeys(
        ("success_callback", "failure_callback", "callbacks"),
        "there are no callbacks: see /metrics and the access log",
    ),
    **dict.fromkeys(("cache", "cache_params"), "responses are not cached; pods cache prefixes"),
    "context_window_fallbacks": "models.fallbacks are for models without room, not for prompts that are too long",
    "content_policy_fallbacks": "models.fallbacks are for models without room",
    "drop_params": "requests go up as they come",
    "enable_pre_call_checks": "pods refuse prompts that are too long, in their own words",
    "stream_timeout": "see reliability.timeouts.firstByte and idle",
}
_SET: Mapping[str, Converted] = {
    "num_retries": ("reliability.retries.attempts", lambda count: int(float(count)) + 1),
    "timeout": ("reliability.timeouts.request", lambda seconds: f"{float(seconds):g}s"),
    "request_timeout": ("reliability.timeouts.request", lambda seconds: f"{float(seconds):g}s"),
    "allowed_fails": ("reliability.breaker.failures", lambda count: int(float(count)) + 1),
    "cooldown_time": ("reliability.breaker.open", lambda seconds: f"{float(seconds):g}s"),
}
_STRATEGIES: Mapping[str, Mapping[str, float]] = {
    "least-busy": {"active-request-scorer": 1, "queue-scorer": 1},
    "usage-based-routing": {"token-load-scorer": 1},
    "usage-based-routing-v2": {"token-load-scorer": 1},
}

Section = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Deployment:
    """One deployment. `name` is the model name for clients, `model` the name on the pod."""

    name: str
    model: str
    weight: float | None


def litellm(path: Path) -> Imported:
    """Import a configuration. Raise InvalidDocument, and ValueError for an invalid value."""
    data = read(path)
    if not isinstance(data, Mapping) or not isinstance(data.get("model_list"), list):
        raise InvalidDocument(f"{path} has no model_list")
    made = Imported("a LiteLLM configuration")
    made.put("pods.static", [])
    names = _models(made, list(_deployments(made, data["model_list"])))
    for section in ("router_settings", "litellm_settings", "general_settings"):
        for key, value in mapping(data.get(section), section).items():
            _setting(made, section, key, value, names)
    for section in data:
        if section not in ("model_list", "router_settings", "litellm_settings", "general_settings"):
            made.lacks(str(section), "has no equivalent here; set variables where kvlane is started")
    return made


def _deployments(made: Imported, entries: Sequence[Any]) -> Iterator[_Deployment]:
    for entry in (mapping(one, "an entry of model_list") for one in entries):
        name = str(entry.get("model_name") or "")
        params = mapping(entry.get("litellm_params"), f"litellm_params of {name}")
        provider, _, model = str(params.get("model") or "").partition("/")
        base = str(params.get("api_base") or "")
        host = urlsplit(base).hostname or ""
        if provider not in PROVIDERS or not base or host.endswith(_ELSEWHERE):
            made.lacks(f"model {name} ({params.get('model')})", "is not on a vLLM server; keep LiteLLM in front of it")
            continue
        if "*" in name or "*" in model:
            made.lacks(f"model {name}", "a wildcard: all models that pods serve are served under their own names")
            model = ""
        made.pod(base, apiKey=_key(made, params.get("api_key")))
        for key in params:
            if key in ("rpm", "tpm", "max_parallel_requests"):
                made.lacks(f"{key} of {name}", _PER_DEPLOYMENT)
            elif key not in ("model", "api_base", "api_key", "weight"):
                made.lacks(f"{key} of {name}", "is not set by deployment: clients send what they want")
        weight = params.get("weight")
        yield _Deployment(name, model, None if weight is None else converted(float, weight, f"weight of {name}"))


def _models(made: Imported, deployments: Sequence[_Deployment]) -> Mapping[str, str]:
    """Set aliases for names with one model, rewrites for names with several. Return the names for fallbacks."""
    names: dict[str, dict[str, float | None]] = {}
    for one in deployments:
        if one.model:
            models = names.setdefault(one.name, {})
            shares = [share for share in (models.get(one.model), one.weight) if share is not None]
            models[one.model] = sum(shares) if shares else None
    aliases = {name: next(iter(models)) for name, models in names.items() if len(models) == 1 and name not in models}
    if aliases:
        made.put("models.aliases", aliases)
    several = {name: models for name, models in names.items() if len(models) > 1}
    if several:
        rewrites = []
        for name, models in several.items():
            weighted = any(weight is not None for weight in models.values())
            targets = [
                {"model": model} | ({"weight": 1.0 if weight is None else weight} if weighted else {})
                for model, weight in models.items()
            ]
            rewrites.append({"name": name, "model": name, "targets": targets})
        made.put("models.rewrites", rewrites)
    if any(one.weight is not None for one in deployments) and not several:
        made.note("weights between pods of one model are pods.static[].weight, and count where random-picker decides")
    return {name: next(iter(models)) if len(models) == 1 else name for name, models in names.items()}


def _setting(made: Imported, section: str, key: str, value: Any, names: Mapping[str, str]) -> None:
    if key in _SET:
        made.put_converted(_SET[key], value, key)
        if key == "allowed_fails":
            made.put("reliability.breaker.window", "1m")
    elif key in ("max_parallel_requests", "global_max_parallel_requests") and section != "router_settings":
        made.put("flowControl.maxConcurrent", int(converted(float, value, key)))
    elif key == "fallbacks":
        _fallbacks(made, value, names)
    elif key == "model_group_alias":
        aliases = made.settings.setdefault("models", {}).setdefault("aliases", {})
        for alias, group in mapping(value, key).items():
            group = group.get("model") if isinstance(group, Mapping) else group
            aliases[str(alias)] = names.get(str(group), str(group))
    elif key == "routing_strategy":
        _strategy(made, str(value))
    elif key == "master_key":
        made.put("security.apiKeys", [{"name": "master", "key": _key(made, value, MASTER_KEY)}])
    else:
        made.lacks(f"{section}.{key}", _OF_SETTINGS.get(key, "is not known to this import"))


def _fallbacks(made: Imported, value: Any, names: Mapping[str, str]) -> None:
    entries = [mapping(one, "an entry of fallbacks") for one in items(value, "fallbacks")]
    pairs = {str(name): items(others, "fallbacks") for one in entries for name, others in one.items()}
    if pairs.pop("*", None) is not None:
        made.lacks("fallbacks of *", "each model has fallbacks of its own")
    found: dict[str, list[str]] = {}
    for name, others in pairs.items():
        for other in map(str, others):
            if name in names and other in names:
                found.setdefault(names[name], []).append(names[other])
            else:
                made.lacks(f"fallback of {name} to {other}", "one of them is not on a vLLM server")
    if found:
        made.put("models.fallbacks", found)


def _strategy(made: Imported, strategy: str) -> None:
    if strategy == "simple-shuffle":
        made.put("scheduling", presets.picked_by("random-picker"))
        made.note("simple-shuffle is taken over; leave out the section scheduling to place by cache and load instead")
    elif strategy in _STRATEGIES:
        made.put("scheduling", presets.scored_by(_STRATEGIES[strategy]))
    elif strategy == "latency-based-routing":
        made.needs_no(f"routing_strategy {strategy}", "placement is by predicted latency anyway")
    else:
        made.lacks(f"routing_strategy {strategy}", "placement is by predicted latency instead")


def _key(made: Imported, value: Any, name: str = "POD_API_KEY") -> str:
    """Return a reference to the environment, because secrets are not written; empty if the value is not a key."""
    text = str(value or "")
    if text.lower() in _NO_KEYS:
        return ""
    found = _ENVIRONMENT.fullmatch(text)
    if not found:
        made.note(f"put the key that stands in the original into the variable {name}")
    return f"${{{found[1] if found else name}}}"
