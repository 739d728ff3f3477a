"""Usage that kvlane requests for a client: inserted into the request, removed from the stream."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.request import InferenceRequest
from proxy.openai.bodies import LARGE
from proxy.openai.events import OPTIONS, DropUsage, with_include_usage, with_usage

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def asks_for_usage(body: str | bytes, path: str = CHAT) -> str | None:
    made = with_include_usage(body.encode() if isinstance(body, str) else body, path)
    return None if made is None else made.decode()


@pytest.mark.parametrize(
    ("body", "made"),
    [
        ('{"stream":true}', '{"stream":true,"stream_options":{"include_usage":true}}'),
        ('{ "stream" : true\n}\r\n ', '{ "stream" : true\n,"stream_options":{"include_usage":true}}\r\n '),
        ('{"stream":true,"n":1}', '{"stream":true,"n":1,"stream_options":{"include_usage":true}}'),
        ('{"n": null, "stream":true}', '{"n": null, "stream":true,"stream_options":{"include_usage":true}}'),
        ('{"stream_options" : {} ,"a":1}', '{"stream_options" : {"include_usage":true} ,"a":1}'),
        ('{"stream_options":{ \n}}', '{"stream_options":{"include_usage":true \n}}'),
        ('{"stream_options": null}', '{"stream_options": {"include_usage":true}}'),
        (
            '{"stream_options":{"x":{"y":"}"}}}',
            '{"stream_options":{"include_usage":true,"x":{"y":"}"}}}',
        ),
        ('{"stream_options":{"include_usage" : false}}', '{"stream_options":{"include_usage" : true}}'),
        ('{"stream_options":{"include_usage":null}}', '{"stream_options":{"include_usage":true}}'),
        (
            '{"stream_options":{"include_usage":false,"continuous_usage_stats":false}}',
            '{"stream_options":{"include_usage":true,"continuous_usage_stats":false}}',
        ),
        (
            '{"a":{"stream_options":{}},"stream_options":{},"b":{"stream_options":{}}}',
            '{"a":{"stream_options":{}},"stream_options":{"include_usage":true},"b":{"stream_options":{}}}',
        ),
        (
            '{"stream_options":{"include_usage":true},"stream_options":{}}',
            '{"stream_options":{"include_usage":true},"stream_options":{"include_usage":true}}',
        ),
        (
            '{"messages":[{"content":"\\"stream_options\\":{} }\\\\"}]}',
            '{"messages":[{"content":"\\"stream_options\\":{} }\\\\"}],"stream_options":{"include_usage":true}}',
        ),
        (
            '{"metadata":{"stream_options":{"include_usage":false}}}',
            '{"metadata":{"stream_options":{"include_usage":false}},"stream_options":{"include_usage":true}}',
        ),
        ('{"x":"caf\\u00e9"}', '{"x":"caf\\u00e9","stream_options":{"include_usage":true}}'),
        ('{"x":NaN,"stream_options":{}}', '{"x":NaN,"stream_options":{"include_usage":true}}'),
        ('{"x":"\\ud800"}', '{"x":"\\ud800","stream_options":{"include_usage":true}}'),
    ],
)
def test_the_option_is_inserted_and_all_other_bytes_stay(body: str, made: str) -> None:
    assert asks_for_usage(body) == made


@pytest.mark.parametrize(
    "body",
    [
        '{"stream_options":{"include_usage":true}}',
        '{"stream_options":{"include_usage":1}}',
        '{"stream_options":{"continuous_usage_stats":true}}',
        '{"stream_options":{"include_usage":false,"continuous_usage_stats":true}}',
        '{"stream_options":[]}',
        '{"stream_options":"x"}',
        '{"stream_options":{},"stream_options":{"include_usage":true}}',
        '{"stream\\u005foptions":{}}',
        '{"stream\\u005foptions":{"include_usage":true}}',
        '{"stream_options":{"include\\u005fusage":false}}',
        '{"n":2}',
        '{"\\u006e":2}',
        '{"n":"2"}',
    ],
)
def test_bodies_with_the_option_and_unsafe_ones_are_unchanged(body: str) -> None:
    assert asks_for_usage(body) is None


def test_a_body_in_another_encoding_is_unchanged() -> None:
    for encoding in ("utf-16", "utf-16-be", "utf-16-le", "utf-32"):
        assert with_include_usage('{"stream":true}'.encode(encoding), CHAT) is None


@pytest.mark.parametrize(
    ("prompt", "one"),
    [
        ('"a"', True),
        ('["a"]', True),
        ("[1, 2]", True),
        ("[[1, 2]]", True),
        ('["a","b"]', False),
        ("[[1],[2]]", False),
        ("[]", False),
        ("null", False),
    ],
)
def test_several_prompts_have_several_choices(prompt: str, one: bool) -> None:
    assert (asks_for_usage(f'{{"prompt": {prompt}}}', TEXT) is not None) is one
    assert (asks_for_usage(f'{{"prompt": {prompt},"x":{{"prompt":"decoy"}}}}', TEXT) is not None) is one


def test_a_large_body_is_changed_only_without_parsing() -> None:
    large = '"messages":["' + "x" * LARGE + '"]}'
    assert asks_for_usage("{" + large) is not None
    assert asks_for_usage('{"n":1,' + large) is None
    assert asks_for_usage('{"stream_options":{},' + large) is None


keys = st.sampled_from(["stream_options", "include_usage", "n", "a", 'quo"te', "prompt", "é"])
leaves = st.one_of(
    st.none(), st.booleans(), st.integers(-5, 5), st.sampled_from(["", "}", '"stream_options":{}', "\\"])
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3))
separators = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", " :\t")])


@given(st.dictionaries(keys, values, max_size=5), separators, st.booleans(), st.sampled_from(["", "\n", " \r\n"]))
def test_only_the_option_changes(fields: dict[str, Any], seps: tuple[str, str], escaped: bool, behind: str) -> None:
    fields = {**fields, "stream": True}
    body = json.dumps(fields, separators=seps, ensure_ascii=escaped) + behind
    made = asks_for_usage(body)
    if made is None:
        options = fields.get("stream_options")
        assert options is not None or fields.get("n") not in (None, 1) or "prompt" in fields
        return
    options = fields.get("stream_options") or {}
    assert options.get("include_usage") in (None, False)
    assert json.loads(made) == {**fields, "stream_options": {**options, "include_usage": True}}
    ahead = shared(body, made)
    after = shared(body[ahead:][::-1], made[ahead:][::-1])
    assert len(body) - ahead - after <= len("false")
    assert len(made) - len(body) <= len(OPTIONS) + 1


def shared(one: str, other: str) -> int:
    """Characters at the beginning of both."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def request(path: str = CHAT, stream: bool = True, body: bytes = b'{"stream":true}') -> InferenceRequest:
    return InferenceRequest("1", path, "m", body=body, stream=stream)


def test_only_streams_of_apis_with_usage_on_request_are_changed() -> None:
    assert with_usage(request()).usage_added
    assert with_usage(request(TEXT, body=b'{"prompt":"a","stream":true}')).usage_added
    for other in (request(stream=False), request("/v1/messages"), request("/v1/responses"), request("/v1/embeddings")):
        assert with_usage(other) is other
    own = request(body=b'{"stream":true,"stream_options":{"include_usage":true}}')
    assert with_usage(own) is own


def test_inserting_twice_inserts_once() -> None:
    once = with_usage(request())
    assert with_usage(once) is once


def event(*, finish: str | None = None, fingerprint: str | None = None, text: str = "x") -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": finish}
    stamped = {} if fingerprint is None else {"system_fingerprint": fingerprint}
    return b"data: " + json.dumps({"choices": [choice], **stamped}, separators=(",", ":")).encode() + b"\n\n"


def usage(fingerprint: str | None = None) -> bytes:
    fields: dict[str, Any] = {
        "choices": [],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
        "system_fingerprint": fingerprint,
    }
    return b"data: " + json.dumps(fields, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


def taken(*events: bytes) -> bytes:
    return b"".join(DropUsage().process(list(events), True))


def test_usage_is_removed_and_the_fingerprint_moves_back() -> None:
    first, last = event(), event(finish="stop")
    assert taken(first, last, usage("fp-1"), DONE) == first + event(finish="stop", fingerprint="fp-1") + DONE
    assert taken(first, last, usage(None), DONE) == first + last + DONE
    own = event(finish="stop", fingerprint="own")
    assert taken(own, usage("fp-1"), DONE) == own + DONE


def test_timings_that_an_engine_sends_with_the_usage_move_back() -> None:
    timings = b',"timings":{"prompt_n":4,"prompt_ms":1.5}'
    last = event(finish="stop")
    with_timings = usage(None).replace(b"}\n\n", timings + b"}\n\n")
    assert taken(last, with_timings, DONE) == last.replace(b"}\n\n", timings + b"}\n\n") + DONE


def test_text_that_resembles_usage_stays() -> None:
    body = event(text='"usage": {"prompt_tokens": 1}, "choices": [], "finish_reason":"stop"')
    none = b'data: {"choices":[{"finish_reason":null}],"usage":null}\n\n'
    noise = b'data: {"usage":{ not JSON\n\n'
    for odd in (body, none, noise, b": keep-alive\n\n", b"\n\n", b'data: ["usage",{}]\n\n'):
        stage = DropUsage()
        assert stage.process([odd], False) == [odd]
        assert stage.process([], True) == []


def test_only_a_last_chunk_waits_for_the_next() -> None:
    stage = DropUsage()
    assert stage.process([event()], False) == [event()]
    assert stage.process([event(finish="stop")], False) == []
    assert stage.process([DONE], False) == [event(finish="stop"), DONE]


def test_usage_that_an_engine_always_sends_stays() -> None:
    tells = b'data: {"choices":[{"finish_reason":null}],"usage":{"prompt_tokens":4}}\n\n'
    stage = DropUsage()
    stream = [event(), tells, event(finish="stop"), usage(), DONE]
    assert [stage.process([each], False) for each in stream] == [[each] for each in stream]
    assert taken(*stream) == b"".join(stream)
