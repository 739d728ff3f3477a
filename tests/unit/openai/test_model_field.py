"""Where the name of the model stands, and that nothing else changes."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from proxy.openai import bodies, multipart
from proxy.openai.bodies import renamed, renaming, with_model

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.just("model"), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4), st.text(), st.text(), st.booleans())
def test_only_the_model_changes(fields: dict[str, Any], before: str, after: str, indented: bool) -> None:
    body = orjson.dumps({**fields, "model": before}, option=orjson.OPT_INDENT_2 if indented else None)
    changed = with_model(body, after)
    assert changed is not None
    assert orjson.loads(changed) == {**fields, "model": after}
    assert len(changed) == len(body) + len(orjson.dumps(after)) - len(orjson.dumps(before))


@pytest.mark.parametrize(
    ("body", "changed"),
    [
        (b"{}", b'{"model":"n"}'),
        (b' {"a":1}', b' {"model":"n","a":1}'),
        (b'{"model":null}', b'{"model":"n"}'),
        (b'{"x":"\\"model\\":\\"m\\"","model":"m"}', b'{"x":"\\"model\\":\\"m\\"","model":"n"}'),
        (b'{"x":{"model":"m"},"model":"m"}', b'{"x":{"model":"m"},"model":"n"}'),
        (b'{"model":"m","x":{"model":"m"}}', b'{"model":"n","x":{"model":"m"}}'),
        (b"[]", None),
        (b"nonsense", None),
        (b"", None),
        (b'{"model":7}', None),
        (b'{"x":{"model":"m"}}', b'{"model":"n","x":{"model":"m"}}'),
        (b'{"x":"model","y":["model"]}', b'{"model":"n","x":"model","y":["model"]}'),
        (b'{"x":"\\\\","model":"m"}', b'{"x":"\\\\","model":"n"}'),
        (b'{"x":"\\\\\\"model\\":","model":"m"}', b'{"x":"\\\\\\"model\\":","model":"n"}'),
        (b'\xef\xbb\xbf{"model":"m"}', b'\xef\xbb\xbf{"model":"n"}'),
        (b'{"model":"m","model":"k"}', b'{"model":"m","model":"n"}'),
        (b'{"mod\\u0065l":"m"}', b'{"mod\\u0065l":"n"}'),
        (b'{"model":"m","mod\\u0065l":"k"}', b'{"model":"m","mod\\u0065l":"n"}'),
        (b'{"a":["}","\\""],"model" : "m\\"\\\\" }', b'{"a":["}","\\""],"model" : "n" }'),
        ('{"model":"m"}'.encode("utf-16"), None),
    ],
)
def test_the_model_is_found_at_any_position(body: bytes, changed: bytes | None) -> None:
    assert with_model(body, "n") == changed


def test_a_name_behind_many_messages_is_found() -> None:
    messages = [{"role": "user", "content": f'a "quoted" \\ word {n}', "model": "x"} for n in range(1_000)] * 4
    body = orjson.dumps({"messages": messages + [{"role": "user", "content": "word"}] * 15_000, "model": "m"})
    assert with_model(body, "n") == body[: -len(b'"m"}')] + b'"n"}'


def test_a_body_with_too_many_keys_of_that_name_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MOST_KEYS", 100)
    for keys, is_searched in ((99, True), (100, False)):
        body = b'{"x":[' + b",".join([b'{"model":1}'] * keys) + b'],"model":"m"}'
        assert (with_model(body, "n") is not None) is is_searched


def test_a_lone_surrogate_is_written_as_an_escape() -> None:
    assert with_model(b'{"model":"m"}', "\ud83d") == b'{"model":"\\ud83d"}'
    assert renaming(frozenset(["m", "\ud83d"]), "\udc80")(b'{"model":"m"}') == b'{"model":"\\udc80"}'


def test_a_response_without_a_model_is_unchanged() -> None:
    assert renamed(b'{"data":[{"model":"m"}]}', "n") is None
    assert renamed(b"RIFF\x00\xff", "n") is None
    assert renamed(b'{"content":[{"input":{"model":"m"}}],"model":"m"}', "n") == (
        b'{"content":[{"input":{"model":"m"}}],"model":"n"}'
    )


def test_events_are_renamed_and_generated_text_is_not() -> None:
    rename = renaming(frozenset(["org/m", "caf\u00e9"]), "gpt")
    text = orjson.dumps({"model": "org/m", "content": '"model":"org/m"', "other": "org/m"})
    assert rename(text) == orjson.dumps({"model": "gpt", "content": '"model":"org/m"', "other": "org/m"})
    assert rename(b'{"model": "caf\\u00e9"}') == b'{"model": "gpt"}'
    assert rename('{"model":"caf\u00e9"}'.encode()) == b'{"model":"gpt"}'
    assert rename(b'{"model":"another"}') == b'{"model":"another"}'
    assert renaming(frozenset(["m"]), "back\\slash")(b'{"model":"m"}') == b'{"model":"back\\\\slash"}'


@given(st.text(), st.text(), st.binary(max_size=40), st.booleans())
def test_a_form_keeps_all_but_the_field(before: str, after: str, sound: bytes, file_first: bool) -> None:
    name = b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\n' + before.encode() + b"\r\n"
    file = b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\n' + sound.replace(b"-", b"") + b"\r\n"
    form = (file + name if file_first else name + file) + b"--b--\r\n"
    assume(b"\r\n--b" not in b"\r\n" + before.encode() and b"\r\n--b" not in b"\r\n" + sound)
    changed = multipart.with_model(form, "multipart/form-data; boundary=b", after)
    if "\r" in after or "\n" in after:
        assert changed is None
    else:
        assert changed == form.replace(name, name.replace(b"\r\n\r\n" + before.encode(), b"\r\n\r\n" + after.encode()))


def test_a_form_without_the_field_is_not_rewritten() -> None:
    assert multipart.with_model(b"--b\r\n", "multipart/form-data; boundary=b", "m") is None
