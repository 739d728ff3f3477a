"""Usage that includes the cached tokens of the pod that computed the prompt."""

from __future__ import annotations

import orjson
import pytest

from proxy.openai.events import telling


@pytest.mark.parametrize(
    ("usage", "path"),
    [
        ({"prompt_tokens": 9, "completion_tokens": 1}, ("prompt_tokens_details", "cached_tokens")),
        ({"prompt_tokens": 9, "prompt_tokens_details": None}, ("prompt_tokens_details", "cached_tokens")),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 9, "audio_tokens": 1}},
         ("prompt_tokens_details", "cached_tokens")),
        ({"input_tokens": 9, "input_tokens_details": {"cached_tokens": 0}}, ("input_tokens_details", "cached_tokens")),
        ({"input_tokens": 9, "cache_read_input_tokens": 0}, ("cache_read_input_tokens",)),
    ],
)  # fmt: skip
def test_cached_tokens_are_written_for_every_api(usage: dict[str, object], path: tuple[str, ...]) -> None:
    body = orjson.dumps({"id": "1", "usage": usage})
    payload = orjson.loads(telling(4)(body))
    value = payload["usage"]
    for name in path:
        value = value[name]
    assert value == 4
    kept = {name for name in usage if name != path[0]}
    assert {name: payload["usage"][name] for name in kept} == {name: usage[name] for name in kept}


def test_other_details_stay() -> None:
    body = b'{"usage":{"prompt_tokens":9,"prompt_tokens_details":{"cached_tokens":9,"audio_tokens":1}}}'
    assert b'"audio_tokens":1' in telling(0)(body)


@pytest.mark.parametrize(
    "body",
    [
        b'data: {"choices":[{"delta":{"content":"\\"usage\\":{\\"prompt_tokens\\":1}"}}],"usage":null}\n\n',
        b'{"usage":{"total":3}}',
        b'{"usage":{"prompt_tokens":1,}}',
        b"data: [DONE]\n\n",
    ],
)
def test_responses_without_prompt_usage_are_unchanged(body: bytes) -> None:
    assert telling(4)(body) == body
