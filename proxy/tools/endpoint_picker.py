"""Import of an EndpointPickerConfig of llm-d or of the Gateway API inference extension."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from proxy.core.errors import ConfigError, Problem
from proxy.scheduling.document import KIND
from proxy.tools.imported import Imported, InvalidDocument, parse, read_all
from proxy.tools.older_picker_config import current

MOST = 200
"""Largest number of faulty pieces that are left out before the import fails."""

_KEYS = ("plugins", "schedulingProfiles")
_STEP = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_UNKNOWN = re.compile(r"unknown field '([^']+)'")

Document = dict[str, Any]


def endpoint_picker(path: Path) -> Imported:
    """Import a file that is or contains an EndpointPickerConfig: a ConfigMap, values of a Helm chart, an object of
    KServe, or manifests that include one of these. Raise ConfigError and Unreadable."""
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
    for _ in range(MOST):
        made.settings = {"scheduling": document}
        try:
            made.check()
            break
        except ConfigError as error:
            document = _without(document, error.problems[0], made)
    if "dataLayer" not in document or "discovery" not in (document["dataLayer"] or {}):
        made.note("it names no pods: name its InferencePool under pods.kubernetes.inferencePool, or list them")
    if not made.missing and not changes:
        made.note("optional: the document also works as it is, as kvlane serve -c FILE")
    return made


def _inside(data: Any, source: str) -> Iterator[Mapping[str, Any]]:
    """Yield all nested documents, as mappings or as texts. Raise Unreadable for a text that is not YAML."""
    if isinstance(data, str):
        inner = parse(data, source) if f"kind: {KIND}" in data else None
        if not isinstance(inner, str):
            yield from _inside(inner, source)
    elif isinstance(data, Mapping) and (data.get("kind") == KIND or any(key in data for key in _KEYS)):
        yield data
    elif isinstance(data, Mapping | list):
        for item in data.values() if isinstance(data, Mapping) else data:
            yield from _inside(item, source)


def _without(document: Document, problem: Problem, made: Imported) -> Document:
    """Return the document without the faulty piece, or without the plugin or profile that lacks the piece. Raise
    ConfigError if neither can be found."""
    document = copy.deepcopy(document)
    head, _, where = problem.path.partition(".")
    unknown = _UNKNOWN.match(problem.message)
    where = ".".join(part for part in (where, unknown[1] if unknown else "") if part)
    where = where.removesuffix(".pluginRef")
    dropped = where
    while head == "scheduling" and dropped:
        if _drop(document, dropped):
            made.lacks(where, problem.message)
            return document
        dropped = dropped.rpartition(".")[0] if dropped.count(".") > 1 else ""
    raise ConfigError([problem])


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
                place = item.get("parameters") if key == "plugins" else item
                return _delete(place, rest.removeprefix(f"{_label(item)}."))
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
