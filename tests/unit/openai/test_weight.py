from __future__ import annotations

import math

import orjson
import pytest

from proxy.openai.bodies import LARGE, MOST_VALUES, bounded_int, has_many_values, is_light
from proxy.openai.parse import parse

SIZE = LARGE - 1024


def filled(unit: bytes, head: bytes, tail: bytes) -> bytes:
    return head + unit * ((SIZE - len(head) - len(tail)) // len(unit)) + tail


@pytest.mark.parametrize(
    "body",
    [
        filled(b"[],", b'{"messages":[],"metadata":[', b"0]}"),
        filled(b"[NaN],", b'{"messages":[],"metadata":[', b"0]}"),
        filled(b"NaN,", b'{"messages":[],"metadata":[', b"0]}"),
        filled(b'{"a":1},', b'{"messages":[],"metadata":[', b"0]}"),
        filled(b"[", b'{"messages":[],"metadata":', b""),
        filled(b"12345,", b'{"prompt":[', b"0]}"),
        filled(b'"a",', b'{"prompt":[', b'"a"]}'),
        filled(b'{"role":"user","content":"a"},', b'{"messages":[', b"{}]}"),
        filled(b'{"type":"image","image":1},', b'{"messages":[{"role":"user","content":[', b"{}]}]}"),
        filled(b'{"type":"function"},', b'{"messages":[],"tools":[', b"{}]}"),
        filled(b"[],", b'{"user":"\\"","metadata":[', b'0],"a":"b"}'),
        filled(b"[],", b'{"user":"\\\\","metadata":[', b'0],"a":"b"}'),
        filled(b"[],", b'{"user":"' + b'\\"' * 200 + b'","metadata":[', b'0],"a":"b"}'),
        filled(b"[\0]\0,\0", '{"user":"\u2200","metadata":['.encode("utf-16"), '0],"a":"b"}'.encode("utf-16-le")),
    ],
)
def test_bodies_of_many_values_are_not_parsed_on_the_event_loop(body: bytes) -> None:
    assert len(body) < LARGE
    assert not is_light(body)


def test_forms_are_parsed_on_the_event_loop_because_they_are_bounded() -> None:
    assert is_light(filled(b"\r\n--X\r\n", b"", b""), "multipart/form-data; boundary=X")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        filled(b"A sentence, as people write them. ", b'{"messages":[{"role":"user","content":"', b'"}]}'),
        filled(b"\\u00e9", b'{"messages":[{"role":"user","content":"', b'"}]}'),
        filled(b'He said: \\"[1,2]\\". ' * 9 + b"word " * 1000, b'{"messages":[{"role":"user","content":"', b'"}]}'),
        filled(b"[1,2],", b'{"messages":[{"role":"user","content":"', b'"}]}'),
        orjson.dumps({"messages": [{"role": "user", "content": "x" * 500}] * 400}),
    ],
)
def test_conversations_are_parsed_on_the_event_loop(body: bytes) -> None:
    assert is_light(body)


def test_integers_beyond_engines_are_not_converted() -> None:
    assert (bounded_int("17"), bounded_int("1" * 4000)) == (17, math.inf)
    assert parse("/v1/chat/completions", b'{"messages":[],"a":[NaN,%b]}' % (b"1" * 5000)).model is None


@pytest.mark.parametrize("unit", [b"[],", b"1,", b"{},", b'"a",', b'"a\\"b",', b'"\\\\",', b'{"a":[1,2]},'])
def test_bodies_with_very_many_values_are_distinguished(unit: bytes) -> None:
    assert has_many_values(b'{"prompt":[' + unit * (MOST_VALUES + 1) + b"0]}")
    assert not has_many_values(b'{"prompt":[' + unit * (MOST_VALUES // 7) + b"0]}" + b" " * 2 * MOST_VALUES)


@pytest.mark.parametrize("text", [b"a, b, [c] {d}. ", b'\\", {[', b"\\\\,", b"base64"])
def test_punctuation_in_text_is_not_counted(text: bytes) -> None:
    assert not has_many_values(b'{"messages":[{"role":"user","content":"' + text * (MOST_VALUES // 2) + b'"}]}')
    assert not has_many_values(b'{"prompt":[' + b"1234," * (MOST_VALUES // 2) + b'0],"user":"' + text * 100_000 + b'"}')
