"""First events that say that a pod declines, and all others."""

from __future__ import annotations

import gzip
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.openai.errors import (
    ABORTED,
    LONGEST,
    declined,
    is_enough_to_judge,
    says_that_model_is_missing,
    starts_without_error,
)

BUSY = "The engine is currently busy and cannot accept new requests."


@pytest.mark.parametrize(
    ("event", "status"),
    [
        (b'data: {"error": {"message": "busy", "type": "Service Unavailable", "param": null, "code": 503}}', 503),
        (b'data: {"error":{"message":"EngineCore","type":"InternalServerError","param":null,"code":500}}', 500),
        (b'data:{"error":{"message":"x","code":"502"}}', 502),
        (b'data: {"error":{"message":"slow down","code":429}}', 429),
        (b'event: error\r\ndata: {"type":"error","error":{"type":"internal_error","message":"code: 503"}}', 500),
        (b'event: error\ndata: {"type":"error","error":{"type":"Service Unavailable","message":"x"}}', 503),
        (b'event: error\ndata: {"type":"error","error":{"type":"overloaded_error","message":"x"}}', 503),
        (b'event: error\ndata: {"type":"error","code":"server_error","message":"x","param":null}', 500),
        (b'event: error\ndata: {"code":"server_error","message":"x"}', 500),
        (b'event:error \r\ndata: {"code":503,"message":"x"}', 503),
        (b'data: {"error":\ndata: {"code":503}}', 503),
    ],
)
def test_an_error_event_of_the_pod_is_a_refusal(event: bytes, status: int) -> None:
    for end in (b"\n\n", b"\r\n\r\n", b""):
        found = declined(event + end + b"data: [DONE]\n\n" * bool(end))
        assert found is not None
        assert found.status == status


MISSING = b'{"error":{"message":"The model `m` does not exist. There are: secret","code":404}}'


@pytest.mark.parametrize(
    ("body", "is_about_a_model"),
    [
        (MISSING, True),
        (gzip.compress(MISSING, mtime=0), True),
        (zlib.compress(MISSING), True),
        (b"\x28\xb5\x2f\xfd" + MISSING, True),
        (MISSING[:-3] + b", secret" * 5000 + b'"}}', True),
        (b"model 'm' not found, try: secret", True),
        (b'{"detail":"The model m does not exist, but secret"}', True),
        (b'{"error":"model m not found"}', True),
        (b'{"error":{"code":"model_not_found"}}', True),
        (b'{"detail":"Not Found"}', False),
        (gzip.compress(b'{"detail":"Not Found"}', mtime=0), False),
        (b"<html>404 Not Found</html>", False),
        (b"", False),
        (b"[]", False),
        ("\N{EURO SIGN}".encode() * 5000, False),
    ],
)
def test_a_404_is_about_a_model_if_it_says_so_or_cannot_be_read(body: bytes, is_about_a_model: bool) -> None:
    assert says_that_model_is_missing(body) is is_about_a_model


def test_the_message_of_the_pod_is_kept_for_the_decision() -> None:
    found = declined(b'data: {"error":{"message":"cannot schedule new futures after shutdown","code":500}}\n\n')
    assert found is not None
    assert found.text == "cannot schedule new futures after shutdown"


@pytest.mark.parametrize(
    "event",
    [
        b'data: {"id":"1","choices":[{"delta":{"content":"error"}}]}',
        b'data: {"error":{"message":"too long","type":"BadRequestError","code":400}}',
        b'data: {"error":{"message":"who knows"}}',
        b'data: {"error":"503"}',
        b'data: {"error":null,"code":503}',
        b'data: {"choices":[{"text":"{\\"error\\":{\\"code\\":503}}"}]}',
        b'event: error\ndata: {"type":"error","error":{"type":"invalid_request_error","message":"x"}}',
        b"data: error",
        b"data: [1,2]",
        b": keep-alive error",
        b"event: response.created\ndata: {}",
        b"",
    ],
)
def test_any_other_event_starts_the_response(event: bytes) -> None:
    refused = b'data: {"error":{"message":"busy","code":503}}\n\n'
    assert declined(event + b"\n\n" + refused) is None


def test_an_overlong_first_event_starts_the_response() -> None:
    assert not is_enough_to_judge(b"x" * LONGEST)
    assert is_enough_to_judge(b"x" * LONGEST + b"x")
    assert declined(b"data: " + b"x" * LONGEST + b"error") is None


PARTS = [b"data: ", b"event: error", b"error", b"word", b"\n", b"\r", ABORTED, b'{"error":{"code":503}}', b'{"code":1}']


@given(st.lists(st.sampled_from(PARTS)).map(b"".join))
def test_a_stream_that_certainly_serves_is_not_declined(parts: bytes) -> None:
    beginning = b"data: " + parts
    if starts_without_error(beginning):
        assert is_enough_to_judge(beginning)
        assert declined(beginning) is None


def test_a_usual_stream_certainly_serves_once_its_first_event_is_complete() -> None:
    event = b'data: {"choices":[{"delta":{"content":"a word"},"finish_reason":null}]}\n\n'
    assert starts_without_error(event)
    assert starts_without_error(event + b"data: error\n\n")
    assert not starts_without_error(event[:-1])
    assert not starts_without_error(b"data: error\n\n" + event)
    assert not starts_without_error(event.replace(b"null", b'"abort"'))


def test_a_response_aborted_before_its_first_event_is_a_refusal() -> None:
    event = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n'
    found = declined(event)
    assert found is not None
    assert found.status == 503
    assert declined(event.replace(b'"abort"', b'"stop"')) is None
    raw = b'data: {"choices":[{"delta":{"content":"\\"finish_reason\\":\\"abort\\""}}]}\n\n'
    assert declined(raw) is None


def test_a_stream_in_one_read_is_judged_by_its_first_event_and_its_end() -> None:
    event = b'data: {"choices":[{"delta":{"content":"a word"},"finish_reason":null}]}\n\n'
    failed = b'data: {"error":{"message":"EngineCore","type":"InternalServerError","code":500}}\n\n'
    ended = b'data: {"choices":[{"delta":{},"finish_reason":"abort"}]}\n\ndata: [DONE]\n\n'
    assert declined(event * 100 + failed) is None
    assert declined(failed + event * 100) is not None
    assert declined(event * 100 + ended) is not None


def test_an_aborted_complete_response_is_recognised_with_any_fields() -> None:
    tokens = ",".join(["17"] * 5000)
    body = b'{"choices":[{"message":{},"finish_reason":"abort","token_ids":[%b]}]}' % tokens.encode()
    assert declined(body) is not None
