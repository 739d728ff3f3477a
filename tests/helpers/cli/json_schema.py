"""The part of JSON Schema (2020-12) that the settings' schema is written in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_TYPES: Mapping[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_ANNOTATIONS = {"$schema", "title", "description", "default", "deprecated", "$defs"}
"""Words that judge nothing."""


class Judge:
    """Knows one document; a word that it does not know is an error, so that nothing is taken for checked."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root

    def faults(self, value: Any, schema: Mapping[str, Any] | None = None, path: str = "") -> list[str]:
        found = []
        for word, rule in (self._root if schema is None else schema).items():
            if word not in _ANNOTATIONS and word != "then" and (word != "additionalProperties" or rule is not False):
                found += list(self._judge(word, rule, value, self._root if schema is None else schema, path))
        return found

    def _judge(self, word: str, rule: Any, value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        if word == "$ref":
            yield from self.faults(value, self._root["$defs"][rule.removeprefix("#/$defs/")], path)
        elif word == "anyOf":
            every = [self.faults(value, choice, path) for choice in rule]
            if all(every):
                yield from max(every, key=lambda faults: max(len(fault.split(":")[0]) for fault in faults))
        elif word == "allOf":
            for part in rule:
                yield from self.faults(value, part, path)
        elif word == "if":
            if not self.faults(value, rule, path):
                yield from self.faults(value, schema["then"], path)
        elif word == "properties":
            yield from self._properties(rule, value, schema, path)
        elif word == "additionalProperties":
            for key, item in value.items() if isinstance(value, dict) else ():
                yield from self.faults(item, rule, f"{path}.{key}")
        elif word == "items":
            if isinstance(value, list):
                for at, item in enumerate(value):
                    yield from self.faults(item, rule, f"{path}[{at}]")
        elif not self._holds(word, rule, value):
            yield f"{path}: {value!r} against {word} {rule}"

    def _properties(self, rule: Any, value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
        for key, item in value.items() if isinstance(value, dict) else ():
            if key in rule:
                yield from self.faults(item, rule[key], f"{path}.{key}")
            elif schema.get("additionalProperties") is False:
                yield f"{path}.{key}: is not known"

    def _holds(self, word: str, rule: Any, value: Any) -> bool:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        match word:
            case "type":
                return any(_is(value, name) for name in ([rule] if isinstance(rule, str) else rule))
            case "enum":
                return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in rule)
            case "const":
                return bool(value == rule)
            case "pattern":
                return not isinstance(value, str) or re.search(rule, value) is not None
            case "minimum":
                return not is_number or value >= rule
            case "maximum":
                return not is_number or value <= rule
            case "exclusiveMinimum":
                return not is_number or value > rule
            case "required":
                return not isinstance(value, dict) or set(rule) <= set(value)
        raise AssertionError(f"this schema says {word}")


def _is(value: Any, name: str) -> bool:
    if name == "integer":
        return isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    return isinstance(value, _TYPES[name]) and (name == "boolean" or not isinstance(value, bool))
