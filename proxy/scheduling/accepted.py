"""What documents of llm-d say in older words, or to no effect, in the words that are read here.

They were written for other releases, and run there: so they run here. What was changed is told, as remarks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from proxy.core.errors import Problem
from proxy.scheduling.sections import FLOW_TYPES, SETTINGS_TYPES

FLOW_CONTROL = "flowControl"
BYTES_PER_TOKEN = 4

API_VERSIONS = ("config.x-k8s.io/v1alpha1", "config.apix.gateway-api-inference-extension.sigs.k8s.io/v1alpha1")
"""Older ones."""
GATES = frozenset({"dataLayer", "enableLegacyMetrics", "prepareDataPlugins"})
"""Feature gates of releases before, whose feature is always there."""
TYPES: Mapping[str, str] = {
    "by-label-selector": "label-selector-filter",
    "data-parallel-profile-handler": "single-profile-handler",
    "kv-cache-scorer": "kv-cache-utilization-scorer",
    "max-score": "max-score-picker",
    "prefix-cache": "prefix-cache-scorer",
    "single-profile": "single-profile-handler",
}
APPROXIMATE, PRECISE = "approx-prefix-cache-producer", "precise-prefix-cache-scorer"
INDEX = (
    "autoTune",
    "blockSize",
    "blockSizeTokens",
    "hashBlockSize",
    "lruCapacityPerServer",
    "maxPrefixBlocksToMatch",
    "maxPrefixTokensToMatch",
)
"""Parameters of the prefix index, which was part of its scorer."""
DETECTOR = ("queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold")
"""Fields of the saturation detector, which was no plugin."""
REFS = ("pluginRef", "fairnessPolicyRef", "orderingPolicyRef", "usageLimitPolicyPluginRef")

Draft = dict[str, Any]
Remarks = list[Problem]


def accepted(document: Mapping[Any, Any]) -> tuple[Mapping[Any, Any], Remarks]:
    """The document as it is read here, and what was changed. Pieces that are no mappings, and names that are no texts,
    are left for the reader to complain of."""
    draft, remarks = copy.deepcopy(dict(document)), Remarks()
    for rule in _RULES:
        rule(draft, remarks)
    return draft, remarks


def _top_level(draft: Draft, remarks: Remarks) -> None:
    if draft.get("apiVersion") in API_VERSIONS:
        del draft["apiVersion"]
    if isinstance(draft.get("metadata"), dict):
        del draft["metadata"]
    if "data" in draft and "dataLayer" not in draft:
        draft["dataLayer"] = draft.pop("data")
        remarks.append(Problem("data", "is dataLayer today"))


def _gates(draft: Draft, remarks: Remarks) -> None:
    gates = draft.get("featureGates")
    if isinstance(gates, list):
        draft["featureGates"] = [gate for gate in gates if str(gate).partition("=")[0] not in GATES]
        for gate in gates:
            if gate not in draft["featureGates"]:
                remarks.append(Problem("featureGates", f"'{gate}' has no effect: there is no other way any more"))


def _types(draft: Draft, remarks: Remarks) -> None:
    """Older names of types; plugins keep the names that others refer to them by."""
    for entry in _plugins(draft):
        today = TYPES.get(entry["type"])
        if today is not None:
            remarks.append(Problem(_path(entry), f"'{entry['type']}' is {today} today"))
            entry.update(name=_label(entry), type=today)
            _parameters(entry).pop("primaryPort", None)


def _by_label(draft: Draft, remarks: Remarks) -> None:
    for entry in _plugins(draft, "by-label"):
        given = _parameters(entry)
        if given.get("label") and given.get("validValues") and not given.get("allowsNoLabel"):
            wanted = {"key": given["label"], "operator": "In", "values": given["validValues"]}
            remarks.append(Problem(_path(entry), "'by-label' is label-selector-filter with matchExpressions today"))
            entry.update(name=_label(entry), type="label-selector-filter", parameters={"matchExpressions": [wanted]})


def _reporters(draft: Draft, remarks: Remarks) -> None:
    """They tell an Envoy what requests cost; here that is told by metrics and the access log."""
    for entry in _plugins(draft, "request-attribute-reporter"):
        remarks.append(Problem(_path(entry), "has no effect: see the token counts of /metrics and of the access log"))
        draft["plugins"].remove(entry)
        for profile in _mappings(draft.get("schedulingProfiles")):
            refs = profile.get("plugins")
            if isinstance(refs, list):
                profile["plugins"] = [ref for ref in refs if ref != {"pluginRef": _label(entry)}]


def _scorers_of_indexes(draft: Draft, remarks: Remarks) -> None:
    """Scorers with parameters of the index they read: it becomes a plugin of its own, one for all that say the same."""
    made: list[tuple[Any, str]] = []
    for entry in _plugins(draft, "prefix-cache-scorer"):
        given = _parameters(entry)
        if given.pop("mode", None) == "cache_tracking":
            entry.update(name=_label(entry), type=PRECISE)
            remarks.append(Problem(_path(entry), f"with 'mode: cache_tracking' is {PRECISE} today"))
            continue
        index = {key: given.pop(key) for key in INDEX if key in given}
        if not index:
            continue
        if isinstance(of_bytes := index.pop("hashBlockSize", None), int):
            index.setdefault("blockSizeTokens", max(1, of_bytes // BYTES_PER_TOKEN))
        name = next((name for same, name in made if same == index), "")
        if not name:
            name = f"{_label(entry)}-index" if made else APPROXIMATE
            made.append((index, name))
            _declare(draft, name, APPROXIMATE, index)
        if name != APPROXIMATE:
            given.setdefault("prefixMatchInfoProducerName", name)
        remarks.append(Problem(_path(entry), f"{', '.join(index)}: parameters of {APPROXIMATE} today"))


def _precise_indexes(draft: Draft, remarks: Remarks) -> None:
    for entry in _plugins(draft, PRECISE, "precise-prefix-cache-producer"):
        indexer = _parameters(entry).get("indexerConfig")
        if isinstance(indexer, dict) and "tokenProcessorConfig" in indexer:
            inner = indexer.pop("tokenProcessorConfig")
            _parameters(entry).setdefault("tokenProcessorConfig", inner)
            remarks.append(Problem(_path(entry), "indexerConfig.tokenProcessorConfig is tokenProcessorConfig today"))


def _tokenizers(draft: Draft, remarks: Remarks) -> None:
    for entry in _plugins(draft, "token-producer"):
        given = _parameters(entry)
        server = given.get("vllm")
        if isinstance(server, dict) and "http" in server and "url" not in server:
            server["url"] = server.pop("http")
            remarks.append(Problem(_path(entry), "vllm.http is vllm.url today"))
        if given.pop("estimate", None):
            remarks.append(Problem(_path(entry), "estimate has no effect: media count with fixed estimates"))
        if not any(mode in given for mode in ("local", "pod", "vllm", "uds")):
            for key in ("modelName", "models"):
                if given.pop(key, None):
                    remarks.append(Problem(_path(entry), f"{key} has no effect on estimates; choose a mode"))


def _thresholds(draft: Draft, remarks: Remarks) -> None:
    """A handler of splits that has its threshold, in bytes of a prompt that are not cached, and no decider."""
    for entry in _plugins(draft, "pd-profile-handler"):
        given = _parameters(entry)
        bytes_ = given.pop("threshold", None)
        given.pop("hashBlockSize", None)
        if not isinstance(bytes_, int | float) or "deciderPluginName" in given:
            continue
        tokens = int(bytes_) // BYTES_PER_TOKEN
        name = "prefix-based-pd-decider" if tokens else "always-disagg-pd-decider"
        _declare(draft, name, name, {"nonCachedTokens": tokens} if tokens else {})
        given["deciderPluginName"] = name
        remarks.append(Problem(_path(entry), f"threshold: nonCachedTokens of prefix-based-pd-decider, {tokens}, today"))


def _detectors(draft: Draft, remarks: Remarks) -> None:
    flow = draft.get(FLOW_CONTROL)
    for section in (draft, flow if isinstance(flow, dict) else {}):
        detector = section.get("saturationDetector")
        if isinstance(detector, dict) and "pluginRef" not in detector and set(detector) & set(DETECTOR):
            _declare(draft, "utilization-detector", "utilization-detector", detector)
            section["saturationDetector"] = {"pluginRef": "utilization-detector"}
            remarks.append(Problem("saturationDetector", "is the plugin utilization-detector today"))


def _ungated(draft: Draft, remarks: Remarks) -> None:
    """As there: without its gate the section says at most what a full pod is."""
    flow, gates = draft.get(FLOW_CONTROL), draft.get("featureGates")
    if not isinstance(flow, dict) or not isinstance(gates, list | None):
        return
    is_on = any(gate in (FLOW_CONTROL, f"{FLOW_CONTROL}=true") for gate in gates or ())
    ignored = [str(key) for key in flow if key != "saturationDetector"]
    if ignored and not is_on:
        draft[FLOW_CONTROL] = {key: value for key, value in flow.items() if key == "saturationDetector"}
        needs = f"has no effect without 'featureGates: [{FLOW_CONTROL}]': {', '.join(ignored)}"
        remarks.append(Problem(FLOW_CONTROL, needs))


def _defaults(draft: Draft, remarks: Remarks) -> None:
    """Types without need of parameters may be referred to as if they were plugins."""
    declared = {_label(entry) for entry in _plugins(draft)}
    for section in (FLOW_CONTROL, "dataLayer", "requestHandler", "parser", "saturationDetector"):
        for name in _refs(draft.get(section)):
            if name not in declared and (name in SETTINGS_TYPES or name in FLOW_TYPES):
                declared.add(name)
                _declare(draft, name, name, {})


def _refs(value: Any) -> Iterator[str]:
    """All names of plugins in a section."""
    for item in value if isinstance(value, list) else ():
        yield from _refs(item)
    for key, item in value.items() if isinstance(value, dict) else ():
        if key in REFS and isinstance(item, str):
            yield item
        yield from _refs(item)


def _plugins(draft: Draft, *types: str) -> list[Draft]:
    """The entries of these types; of none, all."""
    entries = [entry for entry in _mappings(draft.get("plugins")) if isinstance(entry.get("type"), str)]
    return [entry for entry in entries if not types or entry["type"] in types]


def _mappings(value: Any) -> list[Draft]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _parameters(entry: Draft) -> Draft:
    """Those of the entry, to be changed; of an entry without any, or with something else there, none."""
    given = entry.get("parameters")
    return given if isinstance(given, dict) else entry.setdefault("parameters", {}) if given is None else {}


def _declare(draft: Draft, name: str, type_name: str, parameters: Draft) -> None:
    """What a plugin of this name says itself counts more."""
    plugins = draft.setdefault("plugins", [])
    if not isinstance(plugins, list):
        return
    for entry in _plugins(draft):
        if _label(entry) == name:
            _parameters(entry).update({**parameters, **_parameters(entry)})
            return
    plugins.append({"name": name, "type": type_name, "parameters": dict(parameters)})


def _label(entry: Draft) -> str:
    return str(entry.get("name") or entry["type"])


def _path(entry: Draft) -> str:
    return f"plugins.{_label(entry)}"


_RULES: tuple[Callable[[Draft, Remarks], None], ...] = (
    _top_level,
    _gates,
    _types,
    _by_label,
    _reporters,
    _scorers_of_indexes,
    _precise_indexes,
    _tokenizers,
    _thresholds,
    _detectors,
    _ungated,
    _defaults,
)
