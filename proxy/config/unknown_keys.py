"""Advice for unknown keys: the sections that have the key, in place of all keys that are known here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from proxy.config.schema import Schema, schema
from proxy.core.errors import Problem
from proxy.core.params import join, unknown_key
from proxy.core.registry import Registry

MOST = 5
"""Largest number of unknown keys of one mapping that are reported: a file of another program has many."""

FEW = 3
"""Largest number of sections that are named for a key."""

_KNOWN = re.compile(r"; (known are .*|it has no fields)$")
_INDEX = re.compile(r"\[\d+\]")
_POOL = re.compile(r"^pools\.[^.]+\.?")


def advised(problems: Sequence[Problem]) -> list[Problem]:
    """Return the problems. An unknown key of another section names that section, the known keys of a mapping are listed
    once, and at most MOST unknown keys of a mapping are listed."""
    unknown = Counter(problem.path for problem in problems if unknown_key(problem))
    if not unknown:
        return list(problems)
    sections, seen, found = _sections(schema(Registry.discover())), Counter[str](), []
    listed = set[str]()
    for problem in problems:
        if key := unknown_key(problem):
            seen[problem.path] += 1
            if seen[problem.path] > MOST:
                if seen[problem.path] == unknown[problem.path]:
                    found.append(Problem(problem.path, f"{unknown[problem.path] - MOST} more unknown fields"))
                continue
            problem = _advised(problem, sections.get(key, []), listed)
        found.append(problem)
    return found


def _advised(problem: Problem, sections: Sequence[str], listed: set[str]) -> Problem:
    if not (known := _KNOWN.search(problem.message)):
        return problem
    if near := _nearest(problem.path, sections):
        more = ", …" if len(near) > FEW else ""
        return replace(problem, message=f"{_without(problem, known)}; it belongs to {', '.join(near[:FEW])}{more}")
    if problem.path in listed:
        return replace(problem, message=_without(problem, known))
    listed.add(problem.path)
    return problem


def _without(problem: Problem, known: re.Match[str]) -> str:
    return problem.message[: known.start()]


def _nearest(path: str, sections: Sequence[str]) -> list[str]:
    """Return the sections below the path; without any, the sections of its top-level section, or all. `sections` are
    ordered by depth."""
    here = _INDEX.sub("[]", _POOL.sub("", path))
    below = [section for section in sections if section.startswith((f"{here}.", f"{here}["))] if here else []
    first = here.split(".")[0]
    return below or [section for section in sections if section.split(".")[0] == first] or list(sections)


def _sections(root: Schema) -> dict[str, list[str]]:
    """Return the paths of the mappings that have a key, by key."""
    found: dict[str, list[str]] = {}
    for path, key in sorted(dict.fromkeys(_keys(root, root, "", ())), key=lambda one: one[0].count(".")):
        found.setdefault(key, []).append(path or "the top level")
    return found


def _keys(node: Any, root: Schema, path: str, inside: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the path of each mapping with each of its keys. `inside` are the definitions around the node."""
    if not isinstance(node, Mapping):
        return
    if (ref := node.get("$ref")) and ref not in inside:
        yield from _keys(root["$defs"][ref.rpartition("/")[2]], root, path, (*inside, ref))
    for one in node.get("anyOf", ()):
        yield from _keys(one, root, path, inside)
    for one in node.get("allOf", ()):  # the parameters of each type of plugin, without nested ones
        of_type = f"{path.removesuffix('[]')}.{one['if']['properties']['type']['const']}.parameters"
        parameters = one["then"]["properties"]["parameters"]
        yield from ((at, key) for at, key in _keys(parameters, root, of_type, inside) if at == of_type)
    for key, one in node.get("properties", {}).items():
        yield path, key
        if key != "pools":  # they have the sections of the top level
            yield from _keys(one, root, join(path, key), inside)
    yield from _keys(node.get("items"), root, f"{path}[]", inside)
    yield from _keys(node.get("additionalProperties"), root, f"{path}.*", inside)
