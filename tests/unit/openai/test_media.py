"""Media are found wherever an API has them, and told apart by what they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proxy.openai.prompts import media_in

CAT, DOG = "data:image/png;base64,Y2F0", "http://pictures/dog.png"


def of(*parts: Any, **fields: Any) -> frozenset[str]:
    return media_in(json.dumps({"messages": [{"role": "user", "content": list(parts)}], **fields}).encode())


def image(url: str, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}, **more}


def test_each_medium_counts_once() -> None:
    text = {"type": "text", "text": "what is this?"}
    assert len(of(image(CAT), text, image(CAT, uuid="1"), image(DOG))) == 2
    assert of(image(CAT)) == of(text, image(CAT), model="another")
    assert of(text) == frozenset()


@pytest.mark.parametrize(
    "body",
    [
        {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": CAT}]}]},
        {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "YQ=="}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": DOG}}]}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image", "source": {}}]}]}
            ]
        },
        {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": CAT}]}]},
        {"input": [image(CAT)]},
    ],
)
def test_media_of_every_api_are_found(body: Any) -> None:
    assert len(media_in(json.dumps(body).encode())) == 1


def test_deep_nesting_is_handled() -> None:
    assert len(media_in(b'{"input":' + b"[" * 900 + json.dumps(image(CAT)).encode() + b"]" * 900 + b"}")) == 1


@pytest.mark.parametrize("body", [b"", b"[]", b'{"type": "image_url"', b'[{"type": "image_url"}]', b"--x\r\nimage"])
def test_a_body_without_messages_has_no_media(body: bytes) -> None:
    assert media_in(body) == frozenset()
