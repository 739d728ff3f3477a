"""Media that are encoded before the prompt is computed."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.disagg.requests import encode_bodies, merged

CHAT = "/v1/chat/completions"


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def message_of(*parts: Any) -> dict[str, Any]:
    return {"model": "m", "stream": True, "max_tokens": 99, "messages": [{"role": "user", "content": list(parts)}]}


def test_each_medium_is_a_request_of_one_token_without_the_text() -> None:
    fields = message_of(
        {"type": "text", "text": "What is this?"}, image("a"), {"type": "input_audio", "input_audio": {}}
    )
    first, second = map(orjson.loads, encode_bodies(CHAT, fields))
    assert first == {
        "model": "m",
        "messages": [{"role": "user", "content": [image("a")]}],
        "max_tokens": 1,
        "max_completion_tokens": 1,
        "stream": False,
    }
    assert second["messages"][0]["content"] == [{"type": "input_audio", "input_audio": {}}]


def test_equal_media_are_encoded_once() -> None:
    assert len(encode_bodies(CHAT, message_of(image("a"), image("b"), image("a")))) == 2


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", message_of(image("a"))),
        (CHAT, {"messages": [{"role": "user", "content": "text"}]}),
        (CHAT, {"messages": "text"}),
        (CHAT, {"messages": ["text", {"content": ["text", {"type": "text"}]}]}),
        (CHAT, {}),
    ],
)
def test_requests_without_media_are_not_encoded(path: str, fields: dict[str, Any]) -> None:
    assert encode_bodies(path, fields) == []


def test_the_results_of_all_media_are_merged() -> None:
    responses: list[dict[str, Any]] = [
        {"ec_transfer_params": {"h1": {"port": 1}}},
        {"ec_transfer_params": {"h2": {"port": 2}}},
        {"id": "x"},
    ]
    assert merged(responses) == {"ec_transfer_params": {"h1": {"port": 1}, "h2": {"port": 2}}}
    assert merged([{"ec_transfer_params": None}, {}]) == {}
