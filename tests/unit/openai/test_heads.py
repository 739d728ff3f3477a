"""System prompts as requests of their own."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.openai.parse import parse
from proxy.openai.prompts import PromptHead, head

CHAT = "/v1/chat/completions"
SYSTEM = {"role": "system", "content": "You are the help desk of a bank. " * 20}
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "Looks it up. " * 30}}]


def of(path: str = CHAT, model: str = "m", **fields: Any) -> PromptHead | None:
    return head(path, model, orjson.dumps({"model": "alias", **fields}))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_it_is_a_request_for_one_token_without_user_messages() -> None:
    found = of(messages=[SYSTEM, user("My PIN is 1234"), SYSTEM], tools=TOOLS, user="bob", temperature=1, stream=True)
    assert found is not None
    assert orjson.loads(found.body) == {
        "model": "m",
        "tools": TOOLS,
        "messages": [SYSTEM, user(".")],
        "max_tokens": 1,
    }


def test_equal_system_prompts_give_equal_bytes() -> None:
    assert of(messages=[SYSTEM, user("one")]) == of(messages=[SYSTEM, user("two"), user("three")], seed=3)
    assert of(messages=[SYSTEM, user("one")]) != of(messages=[SYSTEM, user("one")], model="other")


def test_its_prompt_starts_like_the_original_ones() -> None:
    body = orjson.dumps({"model": "m", "tools": TOOLS, "messages": [SYSTEM, user("one")]})
    found = head(CHAT, "m", body)
    assert found is not None
    (mine,), (its,) = parse(CHAT, found.body).prompt.parts, parse(CHAT, body).prompt.parts
    common = next(at for at, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b)
    assert common > len(its) - 10


def test_messages_of_anthropic_have_a_separate_system_prompt() -> None:
    found = of("/v1/messages", system=SYSTEM["content"], messages=[user("one")], max_tokens=100)
    assert found is not None
    assert orjson.loads(found.body) == {
        "model": "m",
        "system": SYSTEM["content"],
        "messages": [user(".")],
        "max_tokens": 1,
    }


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [user("no system prompt " * 50)]},
        {"messages": [SYSTEM, user("one")], "cache_salt": "mine"},
        {"messages": [{"role": "system", "content": "short"}, user("one")]},
        {"messages": "none"},
        {"messages": ["none"]},
        {},
    ],
)
def test_requests_without_a_shared_system_prompt_give_none(fields: dict[str, Any]) -> None:
    assert of(**fields) is None


@pytest.mark.parametrize(
    ("path", "model", "body"), [("/v1/completions", "m", b"{}"), (CHAT, "", b"{}"), (CHAT, "m", b"[")]
)
def test_other_apis_and_invalid_bodies_give_none(path: str, model: str, body: bytes) -> None:
    assert head(path, model, body) is None
