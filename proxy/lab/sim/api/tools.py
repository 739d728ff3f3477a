"""Tool calls that follow from the tool's schema alone."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.lab.sim.api import fields
from proxy.lab.sim.api.errors import BadRequest

EXAMPLES: dict[str, Any] = {"string": "sim", "integer": 1, "number": 0.5, "boolean": True, "null": None, "array": []}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """`arguments` is JSON in ASCII."""

    name: str
    arguments: bytes


def forced_call(body: fields.Body) -> ToolCall | None:
    """The call that `tool_choice` demands: of the function it names, or of the first; None where it demands none."""
    tools = body.get("tools") or []
    choice = body.get("tool_choice")
    if choice == "required" and tools:
        return _call(tools[0])
    if not isinstance(choice, Mapping):
        return None
    wanted = choice.get("function", choice).get("name")
    for tool in tools:
        if _function(tool).get("name") == wanted:
            return _call(tool)
    raise BadRequest("The tool specified in `tool_choice` does not match any of the specified `tools`")


def _call(tool: Mapping[str, Any]) -> ToolCall:
    function = _function(tool)
    example = _example(function.get("parameters") or {"type": "object"})
    return ToolCall(str(function.get("name")), json.dumps(example).encode())


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    function: Mapping[str, Any] = tool.get("function", tool)
    return function


def _example(schema: Mapping[str, Any]) -> Any:
    """The smallest value that fits: required properties only."""
    if enum := schema.get("enum"):
        return enum[0]
    if "properties" in schema or schema.get("type") == "object":
        properties = schema.get("properties", {})
        return {name: _example(properties.get(name, {})) for name in schema.get("required", ())}
    return EXAMPLES.get(str(schema.get("type")), "sim")
