"""Import of an EndpointPickerConfig of llm-d, also of an earlier release, or of the Gateway API inference extension."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from proxy.core.errors import ConfigError, Problem
from proxy.core.params import unknown_key
from proxy.scheduling.document import API_VERSIONS, FLOW_CONTROL, KIND, OLDER_API_VERSIONS, RENAMED_TYPES
from proxy.tools.imported import Imported, InvalidDocument, LeftOut, documents, read_all

MOST = 200
"""Largest number of faulty pieces that are left out before the import fails."""

ALIKE = 0.85
"""Smallest similarity of a misspelt word and the word that was meant, of 1."""

_KEYS = ("plugins", "schedulingProfiles")
LEFT = "which is left out"
_FOREIGN = re.compile(
    rf"unknown (field|plugin type|feature gate) |('\S+' )?(is not (yet )?supported|was renamed|no longer)|.*{LEFT}$"
)
"""Messages about pieces that llm-d may have and kvlane does not have. Others are about mistakes."""
_SUGGESTED = re.compile(r"'([^']+)'; did you mean '([^']+)'")
_MISSING = re.compile(r"no plugin is named '([^']+)'")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")

Document = dict[str, Any]


def endpoint_picker(path: Path) -> Imported:
    """Import a file that is or contains an EndpointPickerConfig: a ConfigMap, values of a Helm chart, an object of
    KServe, or manifests that include one of these. Raise ConfigError and InvalidDocument."""
    found = list(_inside(read_all(path), str(path)))
    if not found:
        raise InvalidDocument(f"{path} holds no {KIND}")
    first, *others = [one for one in found if one.get("kind") == KIND] or found
    document, changes = current(first)
    made = Imported("an EndpointPickerConfig")
    for change in changes:
        made.note(f"check {change}")
    if others:
        made.note(f"it holds {len(others) + 1} such documents; this is the first, the others are left out")
    names = {_label(entry) for entry in _plugins(document)}
    for _ in range(MOST):
        made.settings = {"scheduling": document}
        try:
            made.check()
            break
        except ConfigError as error:
            document = _without(document, _named(error.problems[0], names), made)
    if "dataLayer" not in document or "discovery" not in (document["dataLayer"] or {}):
        made.note("it names no pods: name its InferencePool under pods.kubernetes.inferencePool, or list them")
    if not made.incomplete and not changes:
        made.note("optional: the document also works as it is, as kvlane serve -c FILE")
    return made


def _inside(data: Any, source: str) -> Iterator[Mapping[str, Any]]:
    """Yield all nested documents, as mappings or as texts. Raise InvalidDocument for a text that is not YAML."""
    if isinstance(data, str):
        for inner in documents(data, source) if f"kind: {KIND}" in data else ():
            if not isinstance(inner, str):
                yield from _inside(inner, source)
    elif isinstance(data, Mapping) and (data.get("kind") == KIND or any(key in data for key in _KEYS)):
        yield data
    elif isinstance(data, Mapping | list):
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from _inside(item, source)


def _named(problem: Problem, names: Collection[str]) -> Problem:
    """Return the problem; for a reference to a plugin of the original, the problem that the plugin is left out."""
    missing = _MISSING.match(problem.message)
    return Problem(problem.path, f"refers to '{missing[1]}', {LEFT}") if missing and missing[1] in names else problem


def _without(document: Document, problem: Problem, made: Imported) -> Document:
    """Return the document without the faulty piece, or without the plugin or profile that lacks the piece. Raise
    ConfigError if neither can be found."""
    document = copy.deepcopy(document)
    head, _, where = problem.path.partition(".")
    where = ".".join(part for part in (where, unknown_key(problem)) if part)
    where = where.removesuffix(".pluginRef")
    dropped = where
    while head == "scheduling" and dropped:
        if _drop(document, dropped):
            is_foreign = _FOREIGN.match(problem.message) and not _is_typo(problem.message)
            (made.missing if is_foreign else made.faulty).append(LeftOut(where, problem.message))
            return document
        dropped = dropped.rpartition(".")[0] if dropped.count(".") > 1 else ""
    raise ConfigError([problem])


def _is_typo(message: str) -> bool:
    """Return whether the word differs from the suggestion by a few letters: many types end in -scorer."""
    words = _SUGGESTED.search(message)
    return words is not None and SequenceMatcher(None, words[1], words[2]).ratio() > ALIKE


def _drop(document: Document, where: str) -> bool:
    """Remove a piece. Plugins and profiles are found by name, all other pieces by position."""
    for key in _KEYS:
        items = document.get(key)
        if not where.startswith(f"{key}.") or not isinstance(items, list):
            continue
        rest = where.removeprefix(f"{key}.")
        for item in sorted((one for one in items if isinstance(one, dict)), key=lambda one: -len(_label(one))):
            if rest == _label(item):
                items.remove(item)
                return True
            if rest.startswith(f"{_label(item)}."):
                return _delete(item, rest.removeprefix(f"{_label(item)}."))
    return _delete(document, where)


def _label(item: Mapping[str, Any]) -> str:
    return str(item.get("name") or item.get("type") or "")


def _delete(place: Any, where: str) -> bool:
    steps: list[str | int] = [name or int(index) for name, index in _STEP.findall(where)]
    try:
        for step in steps[:-1]:
            place = place[step]
        del place[steps[-1]]
    except (KeyError, IndexError, TypeError):
        return False
    return True


# The current format of a document of an earlier release.

BYTES_PER_TOKEN = 4

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
LATENCY = {
    "headroomTTFTWeight": "ttftWeight",
    "headroomTPOTWeight": "tpotWeight",
    "headroomSelectionStrategy": "headroomSelectionStrategy",
}
"""Parameters of the scorer by predictions, which was also their producer in earlier releases, and their names now."""
DETECTOR = ("queueDepthThreshold", "kvCacheUtilThreshold", "metricsStalenessThreshold")
"""Fields of the saturation detector, which was not a plugin in earlier releases."""

Changes = list[Problem]


def current(document: Mapping[str, Any]) -> tuple[Document, Changes]:
    """Return the document in the current format, and the changes. Invalid pieces are left unchanged."""
    draft, changes = copy.deepcopy(dict(document)), Changes()
    for rule in _RULES:
        rule(draft, changes)
    return (draft if changes else dict(document)), changes


def _top_level(draft: Document, changes: Changes) -> None:
    if draft.get("apiVersion") in OLDER_API_VERSIONS:
        changes.append(Problem("apiVersion", f"{draft.pop('apiVersion')!r} is {API_VERSIONS[0]} now"))
        draft["apiVersion"] = API_VERSIONS[0]
    if isinstance(draft.get("metadata"), dict):
        del draft["metadata"]
        changes.append(Problem("metadata", "is not part of the document now"))
    if "data" in draft and "dataLayer" not in draft:
        draft["dataLayer"] = draft.pop("data")
        changes.append(Problem("data", "is dataLayer now"))


def _gates(draft: Document, changes: Changes) -> None:
    gates = draft.get("featureGates")
    if isinstance(gates, list):
        draft["featureGates"] = [gate for gate in gates if str(gate).partition("=")[0] not in GATES]
        for gate in gates:
            if gate not in draft["featureGates"]:
                changes.append(Problem("featureGates", f"'{gate}' was removed; the feature is always on"))


def _latency_scorers(draft: Document, changes: Changes) -> None:
    """Rename the weights of headroom. The other parameters configured predictions, which need none."""
    for entry in _plugins(draft, "predicted-latency-scorer"):
        given = _parameters(entry)
        kept = {new: given[old] for old, new in LATENCY.items() if old in given}
        if left_out := ", ".join(sorted(set(given) - set(LATENCY))):
            changes.append(Problem(_path(entry), f"{left_out}: have no equivalent; predictions need no parameters"))
        entry["parameters"] = kept


def _types(draft: Document, changes: Changes) -> None:
    """Rename types; plugins keep the names by which others refer to them."""
    for entry in _plugins(draft, *RENAMED_TYPES):
        new = RENAMED_TYPES[entry["type"]]
        changes.append(Problem(_path(entry), f"'{entry['type']}' is {new} now"))
        entry.update(name=_label(entry), type=new)


def _scorers_of_indexes(draft: Document, changes: Changes) -> None:
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


def _precise_indexes(draft: Document, changes: Changes) -> None:
    for entry in _plugins(draft, PRECISE, "precise-prefix-cache-producer"):
        indexer = _parameters(entry).get("indexerConfig")
        if isinstance(indexer, dict) and "tokenProcessorConfig" in indexer:
            inner = indexer.pop("tokenProcessorConfig")
            _parameters(entry).setdefault("tokenProcessorConfig", inner)
            changes.append(Problem(_path(entry), "indexerConfig.tokenProcessorConfig is tokenProcessorConfig now"))
        if isinstance(indexer, dict) and "speculativeIndexing" in indexer:
            _parameters(entry).setdefault("speculativeIndexing", indexer.pop("speculativeIndexing"))
            changes.append(Problem(_path(entry), "indexerConfig.speculativeIndexing is speculativeIndexing now"))


def _tokenizers(draft: Document, changes: Changes) -> None:
    for entry in _plugins(draft, "token-producer"):
        server = _parameters(entry).get("vllm")
        if isinstance(server, dict) and "http" in server and "url" not in server:
            server["url"] = server.pop("http")
            changes.append(Problem(_path(entry), "vllm.http is vllm.url now"))


def _thresholds(draft: Document, changes: Changes) -> None:
    """Move the threshold of the handler, in bytes of the uncached prompt, to a decider."""
    for entry in _plugins(draft, "pd-profile-handler"):
        given = _parameters(entry)
        is_older = not _plugins(draft, "prefix-based-pd-decider")  # which the current handler needs
        in_bytes = given.pop("threshold", 0 if is_older else None)
        given.pop("hashBlockSize", None)
        if not isinstance(in_bytes, int | float) or "deciderPluginName" in given:
            continue
        tokens = int(in_bytes) // BYTES_PER_TOKEN
        name = "prefix-based-pd-decider" if tokens else "always-disagg-pd-decider"
        _declare(draft, name, name, {"nonCachedTokens": tokens} if tokens else {})
        given["deciderPluginName"] = name
        changes.append(Problem(_path(entry), f"threshold is nonCachedTokens of prefix-based-pd-decider, {tokens}, now"))


def _detectors(draft: Document, changes: Changes) -> None:
    flow = draft.get(FLOW_CONTROL)
    for section in (draft, flow if isinstance(flow, dict) else {}):
        detector = section.get("saturationDetector")
        if isinstance(detector, dict) and "pluginRef" not in detector and set(detector) & set(DETECTOR):
            _declare(draft, "utilization-detector", "utilization-detector", detector)
            section["saturationDetector"] = {"pluginRef": "utilization-detector"}
            changes.append(Problem("saturationDetector", "is the plugin utilization-detector now"))


def _plugins(draft: Document, *types: str) -> list[Document]:
    entries = draft.get("plugins")
    return [
        entry
        for entry in (entries if isinstance(entries, list) else [])
        if isinstance(entry, dict) and isinstance(entry.get("type"), str) and (not types or entry["type"] in types)
    ]


def _parameters(entry: Document) -> Document:
    """Return the parameters of an entry for modification, new ones if it has none; {} if they are not a mapping."""
    if entry.get("parameters") is None:
        entry["parameters"] = {}
    given = entry["parameters"]
    return given if isinstance(given, dict) else {}


def _declare(draft: Document, name: str, type_name: str, parameters: Document) -> None:
    """Add a plugin, or add parameters to the plugin of this name; its existing parameters take precedence."""
    plugins = draft.setdefault("plugins", [])
    if not isinstance(plugins, list):
        return
    for entry in _plugins(draft):
        if _label(entry) == name:
            _parameters(entry).update({**parameters, **_parameters(entry)})
            return
    plugins.append({"name": name, "type": type_name, "parameters": dict(parameters)})


def _path(entry: Document) -> str:
    return f"plugins.{_label(entry)}"


_RULES: tuple[Callable[[Document, Changes], None], ...] = (
    _top_level,
    _gates,
    _latency_scorers,
    _types,
    _scorers_of_indexes,
    _precise_indexes,
    _tokenizers,
    _thresholds,
    _detectors,
)
