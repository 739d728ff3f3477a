"""How long a pod that declines wants to be left alone."""

from __future__ import annotations

import pytest

from proxy.http.head import read_answer_head
from proxy.http.refusal import declined_with

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
