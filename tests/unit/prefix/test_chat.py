"""A body becomes what the engine hands its template; what cannot be known from the body is not guessed."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.prefix.chat import Uncertain, arguments, conversation, without_developers


def seen(*messages: Any, in_parts: bool = False) -> list[dict[str, Any]]:
    return conversation(list(messages), in_parts)


def test_contents_are_text_or_parts_as_the_template_requires() -> None:
    text = {"role": "user", "content": "Hello"}
    parts = {"role": "user", "content": [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}, "there"]}
    assert seen(text, parts) == [text, {"role": "user", "content": "Hello\nyou\nthere"}]
    assert [message["content"] for message in seen(text, parts, in_parts=True)] == [
        [{"type": "text", "text": "Hello"}],
        [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}, {"type": "text", "text": "there"}],
    ]
    assert seen({"role": "assistant", "content": None}) == [{"role": "assistant", "content": ""}]


def test_the_arguments_of_calls_are_objects() -> None:
    def call(given: Any) -> dict[str, Any]:
        return {"type": "function", "id": "1", "function": {"name": "f", "arguments": given}}

    given = ['{"a": [1]}', {"a": 2}, "", None, "[]", "{broken"]
    (message,) = seen({"role": "assistant", "content": "", "tool_calls": [call(one) for one in given]})
    assert [one["function"]["arguments"] for one in message["tool_calls"]] == [{"a": [1]}, {"a": 2}, {}, {}, {}, {}]
    assert list(message["tool_calls"][0]) == ["id", "function", "type"]
    assert "tool_calls" not in seen({"role": "assistant", "content": "", "tool_calls": []})[0]


def test_tool_results_are_texts_for_any_template() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}], "surprise": 1}
    assert seen(result, in_parts=True) == [{"role": "tool", "content": "rain", "tool_call_id": "1"}]


def test_reasoning_and_names_are_rendered_and_other_fields_are_not() -> None:
    message = {"role": "assistant", "content": "x", "name": "bot", "reasoning": "hm", "audio": None, "weight": 3}
    expected = {"role": "assistant", "content": "x", "name": "bot", "reasoning": "hm", "reasoning_content": "hm"}
    assert seen(message) == [expected]


def test_a_billing_line_is_removed_from_the_system_prompt_as_in_engines() -> None:
    line = "x-anthropic-billing-header: cch=1"
    system = {
        "role": "system",
        "content": [{"type": "text", "text": line}, {"type": "text", "text": f"{line}\nBe kind"}],
    }
    assert seen(system) == [{"role": "system", "content": "Be kind"}]
    assert seen({"role": "user", "content": line}) == [{"role": "user", "content": line}]


def test_tools_have_the_fields_known_to_engines() -> None:
    tool = {"type": "function", "function": {"parameters": {"x": 1}, "name": "f", "more": 1}, "more": 2}
    strict = {"type": "function", "function": {"name": "g", "strict": True}}
    variables = arguments({"messages": [{"role": "user", "content": ""}], "tools": [tool, strict]}, False, False)
    assert variables["tools"] == [
        {"type": "function", "function": {"name": "f", "description": None, "parameters": {"x": 1}}},
        {"type": "function", "function": {"name": "g", "description": None, "parameters": None, "strict": True}},
    ]
    assert list(variables["tools"][0]["function"]) == ["name", "description", "parameters"]


def test_tools_that_must_not_be_called_are_left_out_as_in_the_engine() -> None:
    fields = {"messages": [{"role": "user", "content": ""}], "tools": [], "tool_choice": "none"}
    assert arguments(fields, False, exclude_tools=True)["tools"] is None
    assert arguments(fields, False, exclude_tools=False)["tools"] == []


def test_template_arguments_of_the_request_are_passed_on() -> None:
    fields = {"messages": [{"role": "user", "content": ""}], "chat_template_kwargs": {"enable_thinking": False}}
    assert arguments(fields, False, False)["enable_thinking"] is False
    assert arguments(fields, False, False)["add_generation_prompt"] is True
    effort = {"messages": fields["messages"], "reasoning_effort": "none", "add_generation_prompt": False}
    variables = arguments(effort, False, False)
    assert (variables["reasoning_effort"], variables["enable_thinking"]) == ("none", False)
    assert variables["add_generation_prompt"] is False


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": None},
        {"messages": []},
        {"messages": ["text"]},
        {"messages": [{"content": "no role"}]},
        {"messages": [{"role": "user", "content": 7}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": ["x"]}]},
        {"tools": ["x"]},
        {"tools": [{"type": "custom"}]},
        {"tools": [{"type": "function", "function": {"name": "f", "defer_loading": True}}]},
        {"chat_template": "{{ messages }}"},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": "x"},
        {"truncate_prompt_tokens": 5},
        {"mm_processor_kwargs": {}},
        {"add_generation_prompt": "yes"},
    ],
    ids=str,
)
def test_ambiguous_requests_are_uncertain(fields: dict[str, Any]) -> None:
    with pytest.raises(Uncertain):
        arguments({"messages": [{"role": "user", "content": "Hello"}], **fields}, False, False)


def test_a_developer_message_is_the_system_prompt_for_older_templates() -> None:
    talk = seen(
        {"role": "system", "content": "One"},
        {"role": "user", "content": "Hello"},
        {"role": "developer", "content": "Two", "tools": []},
    )
    assert without_developers(talk) == [
        {"role": "system", "content": "One\n\nTwo"},
        {"role": "user", "content": "Hello"},
    ]
    alone = seen({"role": "developer", "content": "One"}, {"role": "user", "content": "Hello"})
    assert [message["role"] for message in without_developers(alone)] == ["system", "user"]
