"""What an engine passes to its chat template for a request body, by vLLM's rules."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

Fields = Mapping[str, Any]


class Uncertain(Exception):
    """The body alone does not determine what the engine sees."""


_TEXTS = ("text", "input_text", "output_text", "refusal", "thinking")
"""Kinds of parts whose text counts."""

_STEERS = frozenset(
    ("truncate_prompt_tokens", "prompt_embeds", "chat_template", "mm_processor_kwargs", "media_io_kwargs")
)
"""Fields that change the prompt in ways that depend on the engine's settings."""

_OURS = frozenset(("chat_template", "tokenize", "conversation", "messages", "tools", "return_dict", "tokenizer_kwargs"))
"""Template arguments that a request cannot set, or that have another meaning."""

_BILLING = "x-anthropic-billing-header"
"""Engines remove a line that starts with this from a system text, because it differs in every request."""


def refuse_what_steers(fields: Fields) -> None:
    """Raise Uncertain for fields that change the prompt."""
    for name in _STEERS & fields.keys():
        if fields[name] is not None:
            raise Uncertain(name)


def arguments(fields: Fields, in_parts: bool, exclude_tools: bool) -> dict[str, Any]:
    """Return the variables of the template. `in_parts`: it expects contents as lists of parts. Raise Uncertain."""
    refuse_what_steers(fields)
    given = fields.get("chat_template_kwargs") or {}
    if not isinstance(given, dict) or not _OURS.isdisjoint(given):
        raise Uncertain("chat_template_kwargs")
    effort = fields.get("reasoning_effort")
    variables = dict(given)
    variables["add_generation_prompt"] = _flag(fields, "add_generation_prompt", True)
    variables["continue_final_message"] = _flag(fields, "continue_final_message", False)
    if effort is not None:
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    if fields.get("documents") is not None:
        variables["documents"] = fields["documents"]
    variables["tools"] = _tools(fields, exclude_tools)
    variables["messages"] = conversation(fields.get("messages"), in_parts)
    return variables


def conversation(messages: Any, in_parts: bool) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not messages:
        raise Uncertain("messages")
    return [_message(message, in_parts) for message in messages]


def without_developers(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages for a template that does not know the developer role: developer messages join the system
    message."""
    renamed = [
        {name: value for name, value in message.items() if name != "tools"} | {"role": "system"}
        if message["role"] == "developer"
        else message
        for message in messages
    ]
    system = [message for message in renamed if message["role"] == "system"]
    if not system or (len(system) == 1 and renamed[0] is system[0]):
        return renamed
    contents = [message["content"] for message in system]
    texts = [text for each in contents if (text := each if isinstance(each, str) else _joined(each))]
    others = [message for message in renamed if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]


def _message(message: Any, in_parts: bool) -> dict[str, Any]:
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str):
        raise Uncertain("role")
    parts = _parts(message.get("content"), in_parts)
    if role == "system":
        parts = [part for part in map(_unbilled, parts) if part is not None]
    seen: dict[str, Any] = {"role": role, "content": parts if in_parts else _joined(parts)}
    if role == "assistant":
        _add_calls(seen, message)
    elif role == "tool":
        if "tool_call_id" in message:
            seen["tool_call_id"] = message["tool_call_id"]
        seen["content"] = _joined(parts)
    elif role == "developer":
        seen["tools"] = message.get("tools")
    for name in ("name", "task"):
        if isinstance(message.get(name), str):
            seen[name] = message[name]
    return seen


def _parts(content: Any, in_parts: bool) -> list[dict[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list):
        raise Uncertain("content")
    return [_part(part) for part in content]


def _part(part: Any) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("refusal" if kind == "refusal" else "thinking" if kind == "thinking" else "text") if kind else None
    if kind not in _TEXTS or not isinstance(text, str) or part.keys() - {"type", kind, "text"}:
        raise Uncertain(f"a part of type {kind}")
    return {"type": "text", "text": text}


def _unbilled(part: dict[str, Any]) -> dict[str, Any] | None:
    if not part["text"].startswith(_BILLING):
        return part
    rest = part["text"].partition("\n")[2]
    return {"type": "text", "text": rest} if rest else None


def _joined(parts: Sequence[dict[str, Any]]) -> str:
    return "\n".join([part["text"] for part in parts])


def _add_calls(seen: dict[str, Any], message: Fields) -> None:
    calls = message.get("tool_calls")
    if calls:
        if not isinstance(calls, list):
            raise Uncertain("tool_calls")
        seen["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if reasoning is not None:
        seen["reasoning"] = seen["reasoning_content"] = reasoning


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object; invalid ones become empty. Fields are in the order of the
    engine's validation, for templates that print a call as JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise Uncertain("tool_calls")
    given = function.get("arguments")
    if isinstance(given, str):
        try:
            given = json.loads(given) if given else {}
        except ValueError:
            given = {}
    ordered = {name: function[name] for name in ("arguments", "name") if name in function}
    ordered["arguments"] = given if isinstance(given, dict) else {}
    return {name: ordered if name == "function" else call[name] for name in ("id", "function", "type") if name in call}


def _tools(fields: Fields, exclude: bool) -> list[dict[str, Any]] | None:
    tools = fields.get("tools")
    if tools is None or (exclude and fields.get("tool_choice") == "none"):
        return None
    if not isinstance(tools, list):
        raise Uncertain("tools")
    return [_tool(tool) for tool in tools]


def _tool(tool: Any) -> dict[str, Any]:
    """Return a tool with exactly the fields that engines know, in their order, including unset ones."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type", "function") != "function" or "name" not in function:
        raise Uncertain("tools")
    if tool.get("defer_loading") is not None or function.get("defer_loading") is not None:
        raise Uncertain("defer_loading")
    known: dict[str, Any] = {name: function.get(name) for name in ("name", "description", "parameters")}
    if function.get("strict") is not None:
        known["strict"] = function["strict"]
    return {"type": "function", "function": known}


def _flag(fields: Fields, name: str, default: bool) -> bool:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise Uncertain(name)
    return value
