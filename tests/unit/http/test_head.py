"""Heads of requests: what is remembered of their names changes nothing of what goes up."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.http.head import REMEMBERED, RawHeaders, encode_pairs, first_lines, passing, read_response_head
from tests.helpers.examples import examples

FIRST = b"POST / HTTP/1.1\r\nhost: pod"
OURS = b"x-request-id: 1\r\ncontent-length: 2\r\n\r\n"
NAMES = (
    b"Content-Type",
    b"Authorization",
    b"authorization",
    b"Connection",
    b"connection",
    b"X-Private",
    b"x-private",
    b"Keep-Alive",
    b"TE",
    b"Host",
    b"Content-Length",
    b"X-Request-Id",
    b"x-kvlane-endpoint",
    b"Proxy-Authorization",
    b"x-prefiller-host-port",
    b"x-100%b",
    b"x-" + b"long" * 200,
)
VALUES = (b"", b"a", b"keep-alive", b"close, X-Private", b"authorization", b"x-private,content-type", b"%s %b")

NEVER = {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length"}
NEVER |= {b"expect", b"x-request-id", b"x-prefiller-host-port", b"x-encoder-hosts-ports"}
NEVER |= {b"x-data-parallel-host-port", b"x-data-parallel-rank", b"x-kv-cache-source-host-port"}
KEPT = {b"", b"close", b"keep-alive", b"upgrade", b"x-request-id", b"content-length", b"content-type"}
KEPT |= {b"content-encoding"}


def plainly(headers: RawHeaders, authorized: bool) -> bytes:
    named = set()
    for name, value in headers:
        if name.lower() == b"connection":
            named |= {token.strip().lower() for token in value.split(b",")} - KEPT
    lines = [FIRST]
    for name, value in headers:
        lower = name.lower()
        is_passed = lower not in NEVER
        if lower.startswith((b"proxy-", b"x-kvlane-", b"x-gateway-destination-endpoint")):
            is_passed = False
        if lower == b"authorization":
            is_passed, authorized = not authorized, True
        if is_passed and lower not in named:
            lines.append(name + b": " + value)
    return b"\r\n".join((*lines, OURS))


@settings(max_examples=examples(300))
@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(VALUES)), max_size=12), st.booleans())
def test_cached_and_uncached_heads_pass_the_same_fields(headers: list[tuple[bytes, bytes]], authorized: bool) -> None:
    for _ in range(2):
        assert FIRST + passing(headers, authorized) + OURS == plainly(headers, authorized)


def test_a_request_without_fields_has_kvlanes_own() -> None:
    assert passing((), False) == b"\r\n"


def test_the_first_lines_name_the_pod_and_its_path() -> None:
    assert (
        first_lines("POST", "/v1/x?a=\udcff", b"/base", b"pod:80") == b"POST /base/v1/x?a=\xff HTTP/1.1\r\nhost: pod:80"
    )


def test_heads_of_any_length_are_parsed_alike() -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nconnection: x-gone\r\nx-gone: 1\r\nx-kept: "
    short, long = read_response_head(head + b"1"), read_response_head(head + b"1" * REMEMBERED)
    assert short == read_response_head(head + b"1")
    assert replace(long, start=long.start.replace(b"1" * REMEMBERED, b"1")) == short
    assert short.start == b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\nx-kept: 1\r\n"
    assert short.sized


def test_long_names_and_types_of_a_pod_are_not_cached() -> None:
    tracemalloc.start()
    try:
        for number in range(50):
            long = b"%d-" % number + b"y" * 100_000
            read_response_head.__wrapped__(b"HTTP/1.1 200 OK\r\nx-%b: 1\r\ncontent-type: %b" % (long, long))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 200_000


def test_fields_named_like_kvlanes_are_removed_with_any_length() -> None:
    head = read_response_head(b"HTTP/1.1 200 OK\r\nX-Kvlane-%b: 1\r\nx-other: 2" % (b"y" * 500))
    assert head.start == b"HTTP/1.1 200 OK\r\nx-other: 2\r\n"


@pytest.mark.parametrize(
    "read",
    [
        lambda text: encode_pairs([("x-request-id", text)]),
        lambda text: passing([(b"Connection", text.encode())], False),
    ],
    ids=["ids in refusals", "values of Connection"],
)
def test_long_values_of_clients_are_not_remembered(read: Callable[[str], bytes]) -> None:
    tracemalloc.start()
    try:
        for number in range(40):
            read(f"{number}," + "x" * 60_000)
        taken, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert taken < 200_000
