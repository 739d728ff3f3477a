"""Heads of requests that come again: what is taken out and looked up is what the parser would have read."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.http.head import REMEMBERED, first_lines, passing
from proxy.http.request import HEAD_END, MOST_POD_HEADS, Heads, ParserError, new_parser
from tests.helpers.examples import examples

FIRST = b"POST /v1/completions?a=1 HTTP/1.1\r\nHost: a"

LINES = (
    b"Content-Length: 12",
    b"content-length: 12",
    b"Content-Length: 12 ",
    b"Content-Length:12",
    b"CONTENT-LENGTH: 3",
    b"Content-Length: +3",
    b"Content-Length: 3, 3",
    b"Content-Length: 0x3",
    b"Content-Length : 3",
    b"Content-Length: 9999999999999999999",
    b"X-Content-Length: 5",
    b"X: a\r",
    b"X: Content-Length: 7",
    b" folded",
    b"\tfolded",
    b"Strength: 5",
    b"length: 5",
    b"Accept: */*",
    b"Connection: close",
    b"Upgrade: websocket\r\nConnection: upgrade",
    b"X-Request-Id: mine",
    b"x\0: y",
    b"",
)


def some_loop() -> asyncio.AbstractEventLoop:
    """A parser of heads asks nothing of it."""
    loop = asyncio.new_event_loop()
    loop.close()
    return loop


def plainly(head: bytes) -> tuple[object, ...] | None:
    """What the parser makes of a whole head; None where it makes nothing, or nothing usual."""
    try:
        [(message, _)], _, _ = new_parser(None, some_loop(), response_with_body=False).feed_data(head + HEAD_END)
    except (ParserError, ValueError):
        return None
    length = message.headers.get("content-length")
    fields = [(name, value) for name, value in message.raw_headers if name.lower() != b"content-length"]
    return message.method, message.path, fields, message.should_close, None if length is None else int(length)


def remembered(heads: Heads, head: bytes) -> tuple[object, ...] | None:
    found = heads.read(head)
    if found is None:
        return None
    read, length = found
    fields = [(name, value) for name, value in read.raw_headers if name.lower() != b"content-length"]
    return read.method, read.path + read.query, fields, read.closing, length


@pytest.fixture
def heads() -> Heads:
    return Heads(some_loop())


@settings(max_examples=examples(500))
@given(st.lists(st.lists(st.sampled_from(LINES), max_size=5), min_size=1, max_size=4))
def test_any_heads_are_parsed_as_by_a_reference_parser(several: list[list[bytes]]) -> None:
    heads = Heads(some_loop())
    for lines in several * 2:
        head = b"\r\n".join((FIRST, *lines))
        assert HEAD_END in head or remembered(heads, head) == plainly(head)


def test_heads_that_differ_only_in_the_body_length_are_cached_once(heads: Heads) -> None:
    some, other = (heads.read(FIRST + b"\r\nContent-Length: %d\r\nAccept: */*" % length) for length in (5, 1234))
    assert some is not None
    assert other is not None
    assert some[0] is other[0]
    assert (some[1], other[1]) == (5, 1234)
    assert some[0].head_for_pod(b"/base", b"pod:80", False) == (
        b"POST /base/v1/completions?a=1 HTTP/1.1\r\nhost: pod:80\r\nAccept: */*\r\n"
    )


def test_a_bounded_number_of_heads_is_cached(heads: Heads) -> None:
    found = heads.read(FIRST + b"\r\nAccept: */*")
    assert found is not None
    pods = [b"pod-%d:80" % number for number in range(3 * MOST_POD_HEADS)] * 2
    for pod in pods:
        assert found[0].head_for_pod(b"", pod, True) == first_lines("POST", found[0].target, b"", pod) + passing(
            found[0].raw_headers, True
        )
        assert len(found[0]._pod_heads) <= MOST_POD_HEADS


def test_two_content_lengths_are_invalid(heads: Heads) -> None:
    assert heads.read(FIRST + b"\r\nContent-Length: 5\r\nContent-Length: 5") is None
    assert heads.read(FIRST + b"\r\ncontent-length: 6\r\nContent-Length: 5") is None


@pytest.mark.parametrize(
    "head",
    [
        b"\r\nContent-Length: 5\r\n" + FIRST,
        b"\r\r\nContent-Length: 5\r\n" + FIRST,
        b"\r\n" + FIRST + b"\r\nContent-Length: 5",
        b"POST  / HTTP/1.1\r\nHost: a\r\nContent-Length: 5",
        b"POST / HTTP/1.0\r\nHost: a\r\nContent-Length: 5",
        FIRST + b"\r\nTransfer-Encoding: chunked\r\nContent-Length: 5",
        FIRST + b"\r\nContent-Length: 5\r\n 6",
        b"CONNECT a:80 HTTP/1.1\r\nContent-Length: 5",
    ],
)
def test_unusual_heads_are_left_to_the_full_parser(heads: Heads, head: bytes) -> None:
    assert heads.read(head) is None
    assert heads.read(FIRST) is not None


def test_long_heads_are_parsed_and_not_cached(heads: Heads) -> None:
    head = FIRST + b"\r\nX: " + b"a" * REMEMBERED + b"\r\nContent-Length: 5"
    some, other = heads.read(head), heads.read(head)
    assert some is not None
    assert other is not None
    assert some[1] == other[1] == 5
    assert some[0] is not other[0]
