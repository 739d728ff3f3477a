"""Templates render as engines render them, and say what they want of messages."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jinja2", reason="needs the extra: pip install 'kvlane[precise]'")

from proxy.prefix.chat import Uncertain
from proxy.prefix.tokenizer import ChatTemplate

SHOW = "{% macro show(c) %}{% for p in c %}{{ p }}{% endfor %}{% endmacro %}"

IN_PARTS = [
    "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "{% set rest = messages[1:] %}{% for m in rest %}{% for p in m['content'] | list %}{{ p }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set body = m.content %}{% for p in body %}{{ p }}{% endfor %}{% endfor %}",
    "{% for m in messages %}{% set content = m.content %}{% for p in content %}{{ p }}{% endfor %}{% endfor %}",
    SHOW + "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
    SHOW + "{% for m in messages %}{{ show(c=m.content) }}{% endfor %}",
]

AS_TEXT = [
    "{% for m in messages %}{{ m.content }}{% endfor %}",
    "{% for m in messages %}{% for call in m.tool_calls %}{{ call }}{% endfor %}{{ m['content'] | trim }}{% endfor %}",
    "{% for tool in tools %}{{ tool }}{% endfor %}{{ messages[0]['content'] }}",
]


def template(source: str, **variables: Any) -> ChatTemplate:
    return ChatTemplate(source, lambda: 86400.0 * 365, "auto", variables)


def rendered(source: str, *messages: Any, **variables: Any) -> str:
    given = {"messages": list(messages), "tools": None, "add_generation_prompt": True, "continue_final_message": False}
    return template(source, bos_token="<s>").render({**given, **variables})


@pytest.mark.parametrize("source", IN_PARTS)
def test_a_template_that_iterates_parts_gets_parts(source: str) -> None:
    assert template(source).in_parts


@pytest.mark.parametrize("source", AS_TEXT)
def test_other_templates_get_texts(source: str) -> None:
    assert not template(source).in_parts


def test_the_configuration_takes_precedence() -> None:
    assert ChatTemplate(AS_TEXT[0], lambda: 0.0, "openai", {}).in_parts
    assert not ChatTemplate(IN_PARTS[0], lambda: 0.0, "string", {}).in_parts


def test_special_tokens_are_available_and_json_is_unescaped() -> None:
    source = "{{ bos_token }}{{ tools[0] | tojson }}{{ tools | tojson(indent=2) | length }}{{ documents == none }}"
    assert rendered(source, tools=[{"a": "<ü>"}]) == '<s>{"a": "<ü>"}26True'


def test_lines_with_only_tags_leave_nothing() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert rendered(source, {"role": "user", "content": "a"}) == "a\n"


def test_loop_controls_and_generation_tags_are_supported() -> None:
    source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}{% break %}{% endfor %}"
    assert rendered(source, {"role": "user", "content": "a"}, {"role": "user", "content": "b"}) == "a"


def test_the_date_comes_from_the_clock() -> None:
    assert rendered("{{ strftime_now('%Y') }}") == "1971"


def test_a_template_that_refuses_makes_the_prompt_uncertain() -> None:
    for source in ("{{ raise_exception('roles must alternate') }}", "{{ messages[5].content.x }}", "{{ 1 / 0 }}"):
        with pytest.raises(Uncertain):
            rendered(source, {"role": "user", "content": "a"})
    with pytest.raises(Uncertain):
        rendered("{{ messages }}", continue_final_message=True)


def test_templates_cannot_reach_out_of_their_sandbox() -> None:
    with pytest.raises(Uncertain):
        rendered("{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_developers_are_renamed_only_where_they_are_not_known() -> None:
    talk = {"role": "developer", "content": "a"}
    assert rendered("{% for m in messages %}{{ m.role }}{% endfor %}", talk) == "system"
    source = "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{% endfor %}"
    assert rendered(source, talk) == "D"
