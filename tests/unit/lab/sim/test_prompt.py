from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.lab.sim.sequence import cache_root, from_token_ids, render_chat, token_ids


def test_tools_come_first_then_messages_with_their_roles() -> None:
    rendered = render_chat([{"role": "user", "content": "hi"}], [{"name": "f"}])
    assert rendered == b'<|tools|>[{"name":"f"}]\n<|user|>hi\n<|assistant|>'


def test_a_message_to_be_continued_is_the_beginning_of_the_response() -> None:
    question = {"role": "user", "content": "hi"}
    begun = {"role": "assistant", "content": " the sea"}
    assert render_chat([question, begun], continue_final_message=True) == render_chat([question]) + b" the sea"


def test_parts_of_a_message_are_its_text_and_the_json_of_the_rest() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:x"}}
    content = [{"type": "text", "text": "see: "}, image]
    assert b'see: {"type":"image_url","image_url":{"url":"data:x"}}' in render_chat(
        [{"role": "user", "content": content}]
    )


@given(st.binary(max_size=50).filter(lambda text: not text.endswith(b"\0")))
def test_tokens_decode_to_the_text(text: bytes) -> None:
    assert from_token_ids(token_ids(text)).rstrip(b"\0") == text


@pytest.mark.parametrize("other", [("b", None), ("a", "salt"), ("a", "b")])
def test_models_and_salts_have_their_own_roots(other: tuple[str, str | None]) -> None:
    assert cache_root(*other) != cache_root("a", None)
