"""How long a pod that declines wants to be left alone."""

from __future__ import annotations

import pytest

from proxy.http.head import declined_with, read_answer_head, refusal

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
def test_a_time_to_wait_is_read_in_both_forms(lines: list[str], seconds: float | None) -> None:
    head = "\r\n".join(["HTTP/1.1 503 Service Unavailable", *lines, "Content-Length: 0", "", ""])
    assert declined_with(read_answer_head(head.encode()), b"").retry_after == seconds


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
        (b"not JSON: the model does not exist", False),
        (b'{"error":{"message":"The model does not exist."}}' + b" " * 9000, False),
        (b"", False),
    ],
)
def test_a_404_is_a_refusal_only_where_it_says_that_the_model_is_missing(body: bytes, is_missing: bool) -> None:
    head = read_answer_head(b"HTTP/1.1 404 Not Found\r\ncontent-length: %d\r\n\r\n" % len(body))
    error = refusal(head, body)
    assert (error is not None and error.status == 404) is is_missing
