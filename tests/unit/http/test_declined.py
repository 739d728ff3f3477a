"""Responses with which a pod declines a request, and how long it wants to be left alone."""

from __future__ import annotations

import pytest

from proxy.core.errors import RankOutOfRange
from proxy.http.head import declined_or_none, declined_with, read_response_head

DATE = "Date: Sun, 06 Nov 1994 08:49:37 GMT"


@pytest.mark.parametrize(
    ("lines", "seconds"),
    [
        (["Retry-After: 7"], 7.0),
        (["retry-after:7 "], 7.0),
        ([DATE, "Retry-After: Sun, 06 Nov 1994 08:50:07 GMT"], 30.0),
        (["Retry-After: Sunday, 06-Nov-94 08:50:07 GMT", DATE], 30.0),
        ([DATE, "Retry-After: Sun, 06 Nov 1994 08:49:00 GMT"], 0.0),
        (["Retry-After: Sun, 06 Nov 1994 08:50:07 GMT"], None),
        ([DATE, "Retry-After: Sun, 99 Nov 1994 08:50:07 GMT"], None),
        ([DATE, "Retry-After: soon"], None),
        (["Date: never", "Retry-After: Sun, 06 Nov 1994 08:50:07 GMT"], None),
        ([DATE], None),
    ],
)
def test_retry_after_is_read_in_both_forms(lines: list[str], seconds: float | None) -> None:
    head = "\r\n".join(["HTTP/1.1 503 Service Unavailable", *lines, "Content-Length: 0", "", ""])
    assert declined_with(read_response_head(head.encode()), b"").retry_after == seconds


@pytest.mark.parametrize(
    ("body", "is_missing"),
    [
        (b'{"error":{"message":"The model `m` does not exist.","type":"NotFoundError","code":404}}', True),
        (b'{"object":"error","message":"The model `m` does not exist.","code":404}', True),
        (b'{"error":{"message":"No such thing","code":"model_not_found"}}', True),
        (b'{"error":"model \'m\' not found"}', True),
        (b'{"detail":"Not Found"}', False),
        (b'{"error":{"message":"Response with id resp_1 not found.","code":404}}', False),
        (b'{"error":{"message":7}}', False),
        (b'{"error":[]}', False),
        (b"[]", False),
        (b"not JSON: the model does not exist", True),
        (b'{"error":{"message":"The model does not exist."}}' + b" " * 9000, True),
        (b"", False),
    ],
)
def test_a_404_declines_only_for_a_missing_model(body: bytes, is_missing: bool) -> None:
    head = read_response_head(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(body))
    error = declined_or_none(head, body)
    assert (error is not None and error.status == 404) is is_missing


@pytest.mark.parametrize(
    ("message", "rank", "size"),
    [
        ("data_parallel_rank 5 is out of range [0, 2).", 5, 2),
        ("data_parallel_rank 5 is out of range [0, 2). None", 5, 2),
        ("data parallel rank 5 is out of range for 2 engine(s)", 5, 2),
        ("data_parallel_rank 5 is out of range [0, 2).", 4, None),
        ("data_parallel_rank 5 is out of range [0, 2).", None, None),
        ("data_parallel_rank 5 is out of range [0, 8).", 5, None),
        ("data_parallel_rank 5 is out of range [0, 0).", 5, None),
        ("temperature: 'data_parallel_rank 5 is out of range [0, 2).' is not a number", 5, None),
        ("temperature must be non-negative", 5, None),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_400_declines_only_for_the_rank_that_was_sent(
    message: str, rank: int | None, size: int | None, is_stream: bool
) -> None:
    body = b'{"error":{"message":"%b","type":"BadRequestError","code":400}}' % message.encode()
    head = read_response_head(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 1\r\n\r\n")
    if is_stream:  # older versions find fault with a stream in its first event
        body = b"data: %b\n\n" % body
        head = read_response_head(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
    error = declined_or_none(head, body, rank)
    assert (error.size if isinstance(error, RankOutOfRange) else error) == size
