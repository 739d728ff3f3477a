"""Conversion of an EndpointPickerConfig of an earlier release of llm-d to the current format."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

from proxy.core.errors import Problem
from proxy.scheduling.document import API_VERSIONS, FLOW_CONTROL, RENAMED_TYPES

BYTES_PER_TOKEN = 4

OLDER_API_VERSIONS = ("config.x-k8s.io/v1alpha1", "config.apix.gateway-api-inference-extension.sigs.k8s.io/v1alpha1")
GATES = frozenset({"dataLayer", "enableLegacyMetrics", "prepareDataPlugins"})
"""Feature gates that were removed; their features are always on."""
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
"""Parameters of the prefix index, which was part of the scorer in earlier releases."""
DETECTOR = ("queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold")
"""Fields of the saturation detector, which was not a plugin in earlier releases."""

Draft = dict[str, Any]
Changes = list[Problem]


def current(document: Mapping[str, Any]) -> tuple[Draft, Changes]:
    """Return the document in the current format, and the changes. Invalid pieces are left unchanged."""
    draft, changes = copy.deepcopy(dict(document)), Changes()
    for rule in _RULES:
        rule(draft, changes)
    return (draft if changes else dict(document)), changes


def _top_level(draft: Draft, changes: Changes) -> None:
    if draft.get("apiVersion") in OLDER_API_VERSIONS:
        changes.append(Problem("apiVersion", f"{draft.pop('apiVersion')!r} is {API_VERSIONS[0]} now"))
        draft["apiVersion"] = API_VERSIONS[0]
    if isinstance(draft.get("metadata"), dict):
        del draft["metadata"]
        changes.append(Problem("metadata", "is not part of the document now"))
    if "data" in draft and "dataLayer" not in draft:
        draft["dataLayer"] = draft.pop("data")
        changes.append(Problem("data", "is dataLayer now"))


def _gates(draft: Draft, changes: Changes) -> None:
    gates = draft.get("featureGates")
    if isinstance(gates, list):
        draft["featureGates"] = [gate for gate in gates if str(gate).partition("=")[0] not in GATES]
        for gate in gates:
            if gate not in draft["featureGates"]:
                changes.append(Problem("featureGates", f"'{gate}' was removed; the feature is always on"))


def _types(draft: Draft, changes: Changes) -> None:
    """Rename types; plugins keep the names by which others refer to them."""
    for entry in _plugins(draft, *RENAMED_TYPES):
        new = RENAMED_TYPES[entry["type"]]
        changes.append(Problem(_path(entry), f"'{entry['type']}' is {new} now"))
        entry.update(name=_label(entry), type=new)


def _scorers_of_indexes(draft: Draft, changes: Changes) -> None:
    """Move parameters of the index from the scorer to a separate plugin, one for all scorers with equal parameters."""
    made: list[tuple[Any, str]] = []
    for entry in _plugins(draft, "prefix-cache-scorer"):
        given = _parameters(entry)
        if given.pop("mode", None) == "cache_tracking":
            entry.update(name=_label(entry), type=PRECISE)
            changes.append(Problem(_path(entry), f"with 'mode: cache_tracking' is {PRECISE} now"))
            continue
        index = {key: given.pop(key) for key in INDEX if key in given}
        if not index:
            continue
        if isinstance(in_bytes := index.pop("hashBlockSize", None), int):
            index.setdefault("blockSizeTokens", max(1, in_bytes // BYTES_PER_TOKEN))
        name = next((name for same, name in made if same == index), "")
        if not name:
            name = f"{_label(entry)}-index" if made else APPROXIMATE
            made.append((index, name))
            _declare(draft, name, APPROXIMATE, index)
        if name != APPROXIMATE:
            given.setdefault("prefixMatchInfoProducerName", name)
        changes.append(Problem(_path(entry), f"{', '.join(index)}: parameters of {APPROXIMATE} now"))


def _precise_indexes(draft: Draft, changes: Changes) -> None:
    for entry in _plugins(draft, PRECISE, "precise-prefix-cache-producer"):
        indexer = _parameters(entry).get("indexerConfig")
        if isinstance(indexer, dict) and "tokenProcessorConfig" in indexer:
            inner = indexer.pop("tokenProcessorConfig")
            _parameters(entry).setdefault("tokenProcessorConfig", inner)
            changes.append(Problem(_path(entry), "indexerConfig.tokenProcessorConfig is tokenProcessorConfig now"))


def _tokenizers(draft: Draft, changes: Changes) -> None:
    for entry in _plugins(draft, "token-producer"):
        server = _parameters(entry).get("vllm")
        if isinstance(server, dict) and "http" in server and "url" not in server:
            server["url"] = server.pop("http")
            changes.append(Problem(_path(entry), "vllm.http is vllm.url now"))


def _thresholds(draft: Draft, changes: Changes) -> None:
    """Move the threshold of the handler, in bytes of the uncached prompt, to a decider."""
    for entry in _plugins(draft, "pd-profile-handler"):
        given = _parameters(entry)
        in_bytes = given.pop("threshold", None)
        given.pop("hashBlockSize", None)
        if not isinstance(in_bytes, int | float) or "deciderPluginName" in given:
            continue
        tokens = int(in_bytes) // BYTES_PER_TOKEN
        name = "prefix-based-pd-decider" if tokens else "always-disagg-pd-decider"
        _declare(draft, name, name, {"nonCachedTokens": tokens} if tokens else {})
        given["deciderPluginName"] = name
        changes.append(Problem(_path(entry), f"threshold is nonCachedTokens of prefix-based-pd-decider, {tokens}, now"))


def _detectors(draft: Draft, changes: Changes) -> None:
    flow = draft.get(FLOW_CONTROL)
    for section in (draft, flow if isinstance(flow, dict) else {}):
        detector = section.get("saturationDetector")
        if isinstance(detector, dict) and "pluginRef" not in detector and set(detector) & set(DETECTOR):
            _declare(draft, "utilization-detector", "utilization-detector", detector)
            section["saturationDetector"] = {"pluginRef": "utilization-detector"}
            changes.append(Problem("saturationDetector", "is the plugin utilization-detector now"))


def _plugins(draft: Draft, *types: str) -> list[Draft]:
    entries = draft.get("plugins")
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("type"), str) and (not types or entry["type"] in types)
    ]


def _parameters(entry: Draft) -> Draft:
    """Return the parameters of an entry for modification. Add empty ones if it has none; ignore a value that is not a
    mapping."""
    given = entry.get("parameters")
    return given if isinstance(given, dict) else entry.setdefault("parameters", {}) if given is None else {}


def _declare(draft: Draft, name: str, type_name: str, parameters: Draft) -> None:
    """Add a plugin, or add parameters to the plugin of this name; its existing parameters take precedence."""
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


_RULES: tuple[Callable[[Draft, Changes], None], ...] = (
    _top_level,
    _gates,
    _types,
    _scorers_of_indexes,
    _precise_indexes,
    _tokenizers,
    _thresholds,
    _detectors,
)
