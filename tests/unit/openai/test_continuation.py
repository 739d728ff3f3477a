"""Requests for the rest of a broken stream, and the use of their responses."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.openai import continuation
from proxy.openai.continuation import (
    CHAT,
    COMPLETIONS,
    PartialResponse,
    RestOfResponse,
    rest,
    with_token_counts,
    without_counts,
)

DONE = b"data: [DONE]\n\n"
STAMP = {"id": "a", "object": "chunk", "created": 5, "model": "m"}
ROLE = {"role": "assistant", "content": ""}
HELLO = {"role": "user", "content": "Hello"}


def event(choices: list[Any], **fields: Any) -> bytes:
    return b"data: " + json.dumps({**STAMP, "choices": choices, **fields}).encode() + b"\n\n"


def chunk_of(text: str | None = None, finish: str | None = None, **fields: Any) -> bytes:
    delta = {} if text is None else {"content": text}
    return event([{"index": 0, "delta": delta, "finish_reason": finish}], **fields)


def opened(**fields: Any) -> bytes:
    return event([{"index": 0, "delta": ROLE, "finish_reason": None}], **fields)


def written(text: str, finish: str | None = None) -> bytes:
    return event([{"index": 0, "text": text, "finish_reason": finish}])


def used(prompt: int, completion: int, **fields: Any) -> bytes:
    usage = {"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion, **fields}
    return event([], usage=usage)


def partial(*events: bytes) -> PartialResponse:
    seen = PartialResponse()
    for each in events:
        seen.add(each)
    return seen


def continued(path: str, body: dict[str, Any], *events: bytes) -> dict[str, Any] | None:
    found = rest(path, json.dumps(body).encode(), partial(*events))
    return None if found is None else json.loads(found)


def chat(*events: bytes, **fields: Any) -> dict[str, Any] | None:
    return continued(CHAT, {"model": "m", "messages": [HELLO], "stream": True, **fields}, *events)


def test_a_chat_continues_with_the_partial_message_and_fewer_tokens() -> None:
    assert chat(opened(), chunk_of("One "), chunk_of("two"), max_tokens=10, min_tokens=1, user="me") == {
        "model": "m",
        "messages": [HELLO, {"role": "assistant", "content": "One two"}],
        "stream": True,
        "max_tokens": 8,
        "min_tokens": 0,
        "user": "me",
        "continue_final_message": True,
        "add_generation_prompt": False,
    }


def test_the_rest_is_requested_without_the_transfer() -> None:
    body = {"model": "m", "messages": [HELLO], "max_tokens": 9, "kv_transfer_params": {"remote_engine_id": "e"}}
    fields = continued(CHAT, body, opened(), chunk_of("Yes"))
    assert fields is not None
    assert "kv_transfer_params" not in fields


def test_a_completion_continues_with_its_text_after_the_prompt() -> None:
    body = {"model": "m", "prompt": "Count: ", "max_tokens": 5}
    assert continued(COMPLETIONS, body, written("é"), written(" two")) == {
        **body,
        "prompt": "Count: é two",
        "max_tokens": 3,
    }


def test_a_stream_without_text_is_requested_again() -> None:
    found = chat(opened(), max_tokens=3)
    assert found == {"model": "m", "messages": [HELLO], "stream": True, "max_tokens": 3}


def test_tokens_without_text_are_not_counted() -> None:
    """Half of a character, or what may become a stop string."""
    found = chat(opened(), chunk_of("One"), chunk_of(""), chunk_of(""), max_tokens=10)
    assert found is not None
    assert found["max_tokens"] == 9


def so_far(tokens: int, prompt: int = 7) -> dict[str, Any]:
    return {"usage": {"prompt_tokens": prompt, "total_tokens": prompt + tokens, "completion_tokens": tokens}}


def test_an_event_has_the_engines_number_of_tokens() -> None:
    cut = [
        opened(**so_far(0)),
        chunk_of("One two", **so_far(3)),
        chunk_of(" three", **so_far(4)),
        chunk_of("", **so_far(6)),
    ]
    found = chat(*cut, max_tokens=10)
    assert found is not None
    assert found["max_tokens"] == 6
    news, usage = go_on(cut, chunk_of(" four", **so_far(2, prompt=12)), used(12, 2))
    assert fields_of(news)["usage"] == so_far(6)["usage"]
    assert fields_of(usage)["usage"] == so_far(6)["usage"]


ALL_USAGE = {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(
    ("options", "counts_added", "usage_added"),
    [
        ({}, True, True),
        ({"stream_options": None}, True, True),
        ({"stream_options": {}}, True, True),
        ({"stream_options": {"include_usage": False, "continuous_usage_stats": True}}, True, True),
        ({"stream_options": {"include_usage": True}}, True, False),
        ({"stream_options": ALL_USAGE}, False, False),
    ],
    ids=str,
)
def test_counts_are_requested_from_engines(path: str, options: Any, counts_added: bool, usage_added: bool) -> None:
    own = {"messages": [HELLO]} if path == CHAT else {"prompt": "é", "max_tokens": 3}
    body = {"model": "m", "stream": True, **own, **options}
    found = with_token_counts(path, json.dumps(body).encode())
    assert found is not None
    assert json.loads(found.body) == {**body, "stream_options": ALL_USAGE}
    assert found[1:] == (counts_added, usage_added)


@pytest.mark.parametrize("options", [{}, {"include_usage": True}, None])
def test_no_request_for_counts_changes_a_long_integer(options: Any) -> None:
    body = {"messages": [HELLO], "stream": True, "metadata": {"x": 10**30}, "stream_options": options}
    found = with_token_counts(CHAT, json.dumps(body).encode())
    assert found is not None
    assert json.loads(found.body) == body
    assert found[1:] == (False, False)


def test_a_response_whose_request_has_a_long_integer_is_not_continued() -> None:
    assert chat(chunk_of("One"), metadata={"x": 10**30}) is None
    assert chat(chunk_of("One"), metadata={"x": 10**18, "text": str(10**30)}) is not None


def test_counts_are_not_requested_if_useless() -> None:
    assert with_token_counts(CHAT, b'{"messages":[],"n":2}') is None
    assert with_token_counts(CHAT, b"[]") is None
    odd = b'{"messages":[],"stream_options":7}'
    assert with_token_counts(CHAT, odd) == (odd, False, False)
    long = b'{"messages":["%b"]}' % (b"x" * 300_000)
    assert with_token_counts(CHAT, long) == (long, False, False)


@given(st.sampled_from(["", "x", ',"usage":{"a":1}', '"choices":[]', "\n\n", "é"]), st.booleans(), st.booleans())
def test_counts_are_removed_from_events_with_text(text: str, compact: bool, details: bool) -> None:
    separators = (",", ":") if compact else None
    fields: dict[str, Any] = {"id": "a", "choices": [{"delta": {"content": text}}], **so_far(3)}
    if details:
        fields["usage"]["prompt_tokens_details"] = {"cached_tokens": 1}
    fields["prompt_token_ids"] = None
    raw = b"data: %b\n\n" % json.dumps(fields, separators=separators).encode()
    del fields["usage"]
    unasked = b"data: %b\n\n" % json.dumps(fields, separators=separators).encode()
    assert without_counts(raw) == unasked
    assert without_counts(unasked) == unasked
    assert without_counts(used(7, 3)) == used(7, 3)


def test_for_a_finished_response_only_its_end_is_requested() -> None:
    found = chat(opened(), chunk_of("One"), chunk_of(" two", "length"), max_completion_tokens=2, min_tokens=2)
    assert found is not None
    assert (found["max_completion_tokens"], "min_tokens" in found) == (1, False)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"guided_json": {}},
        {"structured_outputs": {"regex": "a*"}},
        {"logprobs": True},
        {"logprobs": 0},
        {"n": 2},
        {"best_of": 2},
        {"seed": 7},
        {"seed": 7, "temperature": 0.1},
        {"presence_penalty": 0.5},
        {"stop": "ab"},
        {"stop": ["a", "bc"]},
        {"continue_final_message": True},
        {"return_token_ids": True},
        {"field_of_tomorrow": 1},
    ],
    ids=str,
)
def test_requests_whose_rest_would_differ_are_not_continued(fields: dict[str, Any]) -> None:
    assert chat(opened(), chunk_of("One"), max_tokens=10, **fields) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": None, "tool_choice": "none", "response_format": {"type": "text"}, "n": 1, "logprobs": False},
        {"seed": 7, "temperature": 0},
        {"stop": ["\n"], "presence_penalty": 0.0, "frequency_penalty": 0},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "cache_salt": "x", "add_generation_prompt": True},
        {"field_of_tomorrow": None},
    ],
    ids=str,
)
def test_plain_requests_are_continued(fields: dict[str, Any]) -> None:
    assert chat(opened(), chunk_of("One"), **fields) is not None


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": ["a", "b"], "max_tokens": 5},
        {"prompt": [1, 2], "max_tokens": 5},
        {"prompt": "a"},
        {"prompt": "a", "max_tokens": 5, "echo": True},
        {"prompt": "a", "max_tokens": 5, "suffix": "b"},
        {"prompt": "a", "max_tokens": 1},
    ],
    ids=str,
)
def test_some_completions_are_not_continued(body: dict[str, Any]) -> None:
    assert continued(COMPLETIONS, body, written("One")) is None


@pytest.mark.parametrize(
    "bad",
    [
        event([{"index": 0, "delta": {"reasoning": "hm"}, "finish_reason": None}]),
        event([{"index": 0, "delta": {"tool_calls": [{}]}, "finish_reason": None}]),
        event([{"index": 1, "delta": {"content": "x"}, "finish_reason": None}]),
        event([{"index": 0, "delta": {"content": "x"}, "logprobs": {"content": []}, "finish_reason": None}]),
        chunk_of(None, "tool_calls"),
        event(["x"]),
        event([{"index": 0, "delta": "x"}]),
        event([{"index": 0, "text": 7}]),
        b"data: {broken\n\n",
        b'data: {"error": {"message": "no"}}\n\n',
    ],
)
def test_a_response_with_more_than_text_is_not_continued(bad: bytes) -> None:
    assert chat(opened(), chunk_of("One"), bad) is None


def test_an_overlong_response_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(continuation, "LONGEST", 100)
    monkeypatch.setattr(continuation, "READ_AT", 50)
    assert chat(opened(), *[chunk_of("x" * 10)] * 10) is not None
    assert chat(opened(), *[chunk_of("x" * 10)] * 11) is None


def test_a_comment_is_not_part_of_a_response() -> None:
    assert chat(opened(), b": keep-alive\n\n", chunk_of("One")) is not None


def go_on(cut: list[bytes], *events: bytes) -> list[bytes]:
    before = partial(*cut)
    before.complete_text()
    continued = RestOfResponse(before)
    return [each for each in map(continued.event, events) if each]


def other(given: bytes) -> bytes:
    """As another pod would say it."""
    return given.replace(b'"id": "a"', b'"id": "b"').replace(b'"created": 5', b'"created": 6')


def fields_of(given: bytes) -> Any:
    return json.loads(given[6:])


def test_the_rest_has_the_first_id_no_second_role_and_the_total_usage() -> None:
    cut = [opened(), chunk_of("One"), chunk_of(" two")]
    usage = used(12, 3, prompt_tokens_details={"cached_tokens": 12})
    *events, done = go_on(
        cut, *map(other, (opened(), chunk_of(" three"), chunk_of(" four"), chunk_of(None, "stop"), usage, DONE))
    )
    expected = [chunk_of(" three"), chunk_of(" four"), chunk_of(None, "stop")]
    assert list(map(fields_of, events[:-1])) == list(map(fields_of, expected))
    assert fields_of(events[-1])["usage"] == {
        "prompt_tokens": 10,
        "total_tokens": 15,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 10},
    }
    assert done == DONE


def test_text_in_the_event_of_the_role_is_kept() -> None:
    with_text = event([{"index": 0, "delta": {"role": "assistant", "content": " two"}, "finish_reason": None}])
    (news,) = go_on([opened(), chunk_of("One")], with_text)
    assert fields_of(news)["choices"][0]["delta"] == {"content": " two"}


@pytest.mark.parametrize(("finish", "completion"), [(chunk_of(" two", "length"), 2), (chunk_of(None, "stop"), 2)])
def test_a_finished_response_gets_its_usage_and_no_more_text(finish: bytes, completion: int) -> None:
    shown = 2 if b" two" in finish else 1
    cut = [opened(), chunk_of("One"), finish]
    usage, done = go_on(cut, opened(), chunk_of("x", "length"), used(10 + shown, 1), DONE)
    assert fields_of(usage)["usage"]["prompt_tokens"] == 10
    assert fields_of(usage)["usage"]["completion_tokens"] == completion
    assert done == DONE


def test_the_end_is_sent_once() -> None:
    cut = [opened(), chunk_of("One", "length"), used(10, 1)]
    again = (opened(), chunk_of("x", "length"), used(11, 1), DONE)
    assert go_on(cut, *again) == [DONE]
    assert go_on([*cut, DONE], *again) == []


def test_nothing_is_sent_after_an_error() -> None:
    error = b'data: {"error": {"message": "no"}}\n\n'
    assert go_on([opened(), chunk_of("One")], chunk_of(" two"), error, DONE)[1:] == [error]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "x", "assistant", "stop"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["role", "content", "delta", "text", "index", "finish_reason"]), inner)
    ),
)
ODD = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("id", "choices", "usage", "error", "created"), JSON)
) | st.fixed_dictionaries(
    {
        "choices": st.lists(JSON, max_size=2),
        "usage": st.dictionaries(
            st.sampled_from(["prompt_tokens", "completion_tokens", "prompt_tokens_details"]), JSON
        ),
    }
)


@given(st.lists(ODD, max_size=3), ODD)
def test_any_bytes_of_pods_are_handled(events: list[Any], more: Any) -> None:
    seen = partial(*[b"data: %b\n\n" % json.dumps(each).encode() for each in events])
    rest(CHAT, b'{"messages":[]}', seen)
    RestOfResponse(seen).event(b"data: %b\n\n" % json.dumps(more).encode())


TOKENS = st.lists(st.sampled_from(["a", " b", "é", '"quoted"', "\n\n", "data: [DONE]"]), min_size=1, max_size=9)


def pieces(tokens: list[str], at_once: int, prompt: int) -> list[bytes]:
    """Events of so many tokens; of one each, their engine need not say how many there are."""
    events = []
    for start in range(0, len(tokens), at_once):
        piece = tokens[start : start + at_once]
        usage = so_far(start + len(piece), prompt) if at_once > 1 else {}
        events.append(chunk_of("".join(piece), **usage))
    return events


@given(TOKENS, st.lists(st.integers(0, 12), max_size=3), st.integers(0, 8), st.integers(1, 3))
def test_with_any_cuts_the_text_is_the_same(tokens: list[str], cuts: list[int], first: int, at_once: int) -> None:
    """Each pod writes what is missing of the text that it is given."""
    limit = len(tokens)
    body = json.dumps({"messages": [HELLO], "max_tokens": limit}).encode()
    client = PartialResponse()
    got = [opened(), *pieces(tokens[: min(first, limit - 1)], at_once, 7)]
    for each in got:
        client.add(each)
    for events_before_the_cut in (*cuts, None):
        if client.is_done:
            break
        request = json.loads(rest(CHAT, body, client) or b"")
        begun = request["messages"][-1]["content"] if len(request["messages"]) > 1 else ""
        missing = tokens[len(tokens) - request["max_tokens"] :] if not client.is_finished else ["x"]
        assert client.is_finished or begun + "".join(missing) == "".join(tokens)
        *texts, last = missing
        prompt = 7 + client.shown
        end = chunk_of(last, "length", **(so_far(len(missing), prompt) if at_once > 1 else {}))
        pod = [opened(), *pieces(texts, at_once, prompt), end, used(prompt, len(missing)), DONE]
        continued = RestOfResponse(client)
        for each in pod[:events_before_the_cut]:
            if news := continued.event(other(each)):
                got.append(news)
                client.add(news)
        client.read()
    *events, done = got
    usage = fields_of(events.pop())["usage"]
    assert done == DONE
    assert "".join(fields_of(each)["choices"][0]["delta"].get("content", "") for each in events) == "".join(tokens)
    assert {fields_of(each)["id"] for each in events} == {"a"}
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, limit)


def test_tokens_without_text_are_not_counted_twice() -> None:
    client = partial(opened(), chunk_of("One"), chunk_of(""))
    client.complete_text()
    client.add(chunk_of(" two", "length"))
    client.complete_text()
    assert (client.shown, client.produced) == (2, 2)
