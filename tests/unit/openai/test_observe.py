import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.core.attempt import Usage
from proxy.openai.events import response_id_from, usage_from
from proxy.openai.parse import SGLANG_GENERATE

CHAT_USAGE = (
    b'{"usage":{"prompt_tokens":5,"total_tokens":8,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}}}'
)


def test_usage_of_a_json_response_is_found() -> None:
    assert usage_from(b'{"choices":[],' + CHAT_USAGE[1:]) == Usage(5, 3, 2)


def test_the_last_usage_of_a_stream_counts() -> None:
    early = CHAT_USAGE.replace(b'"completion_tokens":3', b'"completion_tokens":1')
    tail = b"data: " + early + b"\n\ndata: " + CHAT_USAGE + b"\n\ndata: [DONE]\n\n"
    assert usage_from(tail) == Usage(5, 3, 2)


def test_a_null_usage_is_skipped() -> None:
    assert usage_from(b"data: " + CHAT_USAGE + b'\n\ndata: {"usage":null}\n\n') == Usage(5, 3, 2)


def test_an_engine_that_reports_no_cached_tokens_leaves_them_unknown() -> None:
    assert usage_from(b'{"usage":{"prompt_tokens":5,"completion_tokens":3,"prompt_tokens_details":null}}') == Usage(
        5, 3
    )


def test_usage_of_responses_and_messages_is_read() -> None:
    assert usage_from(
        b'"usage":{"input_tokens":4,"input_tokens_details":{"cached_tokens":1},"output_tokens":2}'
    ) == Usage(4, 2, 1)
    assert usage_from(b'"usage":{"input_tokens":4,"output_tokens":2,"cache_read_input_tokens":3}') == Usage(4, 2, 3)


@pytest.mark.parametrize("count", [b"9" * 5000, b"9" * 40, b"-1", b"1.5", b"true", b'"5"'])
def test_an_invalid_count_is_ignored(count: bytes) -> None:
    usual = b'{"usage":{"prompt_tokens":%b,"total_tokens":8,"completion_tokens":3}}' % count
    other = b'{"usage":{"completion_tokens":3,"input_tokens":%b}}' % count
    cached = CHAT_USAGE.replace(b'"cached_tokens":2', b'"cached_tokens":%b' % count)
    for body in (usual, other, cached):
        found = usage_from(body)
        assert found is None or (found.prompt_tokens in (0, 5) and found.cached_tokens is None)


@pytest.mark.parametrize("name", [b"resp_\xff", b"resp_" + b"a" * 5000, b'resp_\\"', "resp_é".encode(), b"resp_\x00"])
def test_an_id_that_cannot_be_in_a_path_is_ignored(name: bytes) -> None:
    assert response_id_from(b'{"id":"%b"}' % name) is None


def test_a_tail_that_starts_inside_the_usage_gives_none() -> None:
    assert usage_from(CHAT_USAGE[20:]) is None


@given(st.text())
def test_generated_text_is_never_taken_for_usage(text: str) -> None:
    fake = '"usage":{"prompt_tokens":9,"completion_tokens":9}' + text
    assert usage_from(json.dumps({"choices": [{"text": fake}]}).encode()) is None


@given(st.binary(max_size=300))
def test_any_bytes_are_searched_without_an_error(tail: bytes) -> None:
    usage_from(tail + b'"usage":{' + tail)
    response_id_from(tail)


def test_the_id_of_a_stored_response_is_found_in_json_and_streams() -> None:
    assert response_id_from(b'{"id":"resp_1","object":"response"}') == "resp_1"
    assert response_id_from(b'event: response.created\ndata: {"response":{"id": "resp_2"') == "resp_2"
    assert response_id_from(b'{"object":"response"}') is None


def test_sglangs_own_api_reports_cumulative_usage() -> None:
    event = (
        b'data: {"text":"a \\"usage\\"","meta_info":{"id":"x","finish_reason":%b,'
        b'"prompt_tokens":6,"completion_tokens":%d,"cached_tokens":4}}'
    )
    stream = b"\n\n".join((event % (b"null", 1), event % (b'{"type":"length","length":2}', 2), b"data: [DONE]", b""))
    assert usage_from(stream, SGLANG_GENERATE) == Usage(6, 2, 4)
    assert usage_from(stream[: stream.index(b"\n\n")], SGLANG_GENERATE) == Usage(6, 1, 4)
