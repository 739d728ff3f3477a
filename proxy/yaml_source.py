"""YAML text to plain values: no key twice, `${ENV}` and `${ENV:-default}` expanded in values."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from typing import Any

import yaml

from proxy.core.errors import ConfigError, Problem
from proxy.core.params import FromEnvironment, join

_VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)(?::-(?P<default>[^}]*))?\})")


def read(text: str, source: str, environ: Mapping[str, str]) -> Any:
    """Raises ConfigError, for a syntax error with its line and column."""
    try:
        values = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{source}:{mark.line + 1}:{mark.column + 1}" if mark else source
        raise ConfigError([Problem(where, str(error.problem or error.context or error))]) from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError([Problem(source, str(error))]) from None
    problems: list[Problem] = []
    expanded = _expand(values, "", environ, problems)
    if problems:
        raise ConfigError(problems)
    return expanded


class _StrictLoader(yaml.SafeLoader):
    """A key that stands twice in one mapping is an error; YAML would let the last win."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                why = "a key must be text; a value that begins with { needs quotes"
                raise yaml.constructor.ConstructorError(None, None, why, key.start_mark)
            if key.value in seen and key.tag != "tag:yaml.org,2002:merge":
                raise yaml.constructor.ConstructorError(None, None, f"key '{key.value}' stands twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _expand(value: Any, path: str, environ: Mapping[str, str], problems: list[Problem]) -> Any:
    if isinstance(value, Mapping):
        return {key: _expand(item, join(path, str(key)), environ, problems) for key, item in value.items()}
    if isinstance(value, list):
        return [_expand(item, f"{path}[{index}]", environ, problems) for index, item in enumerate(value)]
    if isinstance(value, str) and "$" in value:
        return _expand_text(value, path, environ, problems)
    return value


def _expand_text(text: str, path: str, environ: Mapping[str, str], problems: list[Problem]) -> FromEnvironment:
    def replace(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        name: str = match["name"]
        default: str | None = match["default"]
        found = environ.get(name, default)
        if found is None:
            problems.append(
                Problem(path, f"environment variable {name} is not set; set it or write ${{{name}:-default}}")
            )
        return found or ""

    return FromEnvironment(_VARIABLE.sub(replace, text))
