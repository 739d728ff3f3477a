"""Requests that two parsers could read in two ways are read by none: refused, with all that comes behind them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from proxy.core.errors import Reason
from tests.helpers.examples import examples
from tests.helpers.http.support import CHAT, Pod, Rig, answering, plain, rig
from tests.unit.http.test_any_request import Seen, served

HIDDEN = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"
"""What an attacker wants to get in behind a request."""

CHUNKED = b"transfer-encoding: chunked\r\n"

FIELDS = {
    "two lengths": b"content-length: 2\r\ncontent-length: 3\r\n",
    "the same length twice": b"content-length: 2\r\ncontent-length: 2\r\n",
    "a list of lengths": b"content-length: 2, 2\r\n",
    "a length with a sign": b"content-length: +2\r\n",
    "a negative length": b"content-length: -2\r\n",
    "a hexadecimal length": b"content-length: 0x2\r\n",
    "an empty length": b"content-length:\r\n",
    "a length with an underscore": b"content-length: 1_0\r\n",
    "a length in other digits": "content-length: ٢\r\n".encode(),
    "a length and chunks": b"content-length: 2\r\n" + CHUNKED,
    "chunks and a length": CHUNKED + b"content-length: 2\r\n",
    "chunked twice": CHUNKED + CHUNKED,
    "chunked twice in a list": b"transfer-encoding: chunked, chunked\r\n",
    "compressed and chunked": b"transfer-encoding: gzip, chunked\r\n",
    "compressed": b"transfer-encoding: gzip\r\n",
    "chunked and compressed": b"transfer-encoding: chunked, gzip\r\n",
    "identity": b"transfer-encoding: identity\r\n",
    "no coding at all": b"transfer-encoding:\r\n",
    "a coding like chunked": b"transfer-encoding: xchunked\r\n",
    "chunked in quotes": b'transfer-encoding: "chunked"\r\n',
    "chunked with a parameter": b"transfer-encoding: chunked;q=1\r\n",
    "chunked behind a vertical tab": b"transfer-encoding:\x0bchunked\r\n",
    "a space before the colon": b"transfer-encoding : chunked\r\n",
    "a space before the colon of a length": b"content-length : 2\r\n",
    "a folded line": b"x: a\r\n b\r\ncontent-length: 2\r\n",
    "a folded first line": b" x: a\r\ncontent-length: 2\r\n",
    "a bare line feed": b"x: a\ncontent-length: 2\r\n",
    "a bare carriage return": b"x: a\rcontent-length: 2\r\n",
    "a NUL in a value": b"x: a\0b\r\ncontent-length: 2\r\n",
    "a NUL in a name": b"x\0y: ab\r\ncontent-length: 2\r\n",
    "a control character": b"x: a\x01b\r\ncontent-length: 2\r\n",
    "a delete character": b"x: a\x7fb\r\ncontent-length: 2\r\n",
    "a name without letters": b": ab\r\ncontent-length: 2\r\n",
    "a line without a colon": b"abc\r\ncontent-length: 2\r\n",
    "a name in parentheses": b"x(y): ab\r\ncontent-length: 2\r\n",
    "a name beyond ASCII": b"x\xe9: ab\r\ncontent-length: 2\r\n",
}

LINES = {
    "a tab for a space": b"POST\t/v1/chat/completions\tHTTP/1.1",
    "a space at the end": b"POST /v1/chat/completions HTTP/1.1 ",
    "a space in the target": b"POST /v1/chat/ completions HTTP/1.1",
    "a NUL in the target": b"POST /v1/chat/completions\0 HTTP/1.1",
    "a method in small letters": b"post /v1/chat/completions HTTP/1.1",
    "no version": b"POST /v1/chat/completions",
    "an old version": b"POST /v1/chat/completions HTTP/0.9",
    "a version to come": b"POST /v1/chat/completions HTTP/1.2",
    "a new version": b"POST /v1/chat/completions HTTP/2.0",
    "the preface of HTTP/2": b"PRI * HTTP/2.0",
    "a tunnel": b"CONNECT pod:80 HTTP/1.1",
    "a backslash": b"POST \\v1\\chat\\completions HTTP/1.1",
}

CHUNKS = {
    "a size with a prefix": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a size with a sign": b"+2\r\n{}\r\n0\r\n\r\n",
    "a negative size": b"-2\r\n{}\r\n0\r\n\r\n",
    "a size with an underscore": b"0_2\r\n{}\r\n0\r\n\r\n",
    "a space before a size": b" 2\r\n{}\r\n0\r\n\r\n",
    "a space behind a size": b"2 \r\n{}\r\n0\r\n\r\n",
    "a space behind a size with an extension": b"2 ;a\r\n{}\r\n0\r\n\r\n",
    "a size beyond 64 bits": b"1000000000000002\r\n{}\r\n0\r\n\r\n".replace(b"1", b"10", 1),
    "a bare line feed behind a size": b"2\n{}\r\n0\r\n\r\n",
    "a bare line feed behind a chunk": b"2\r\n{}\n0\r\n\r\n",
    "two carriage returns": b"2\r\r\n{}\r\n0\r\n\r\n",
    "a chunk without an end": b"2\r\n{}x0\r\n\r\n",
    "an empty line before a size": b"\r\n2\r\n{}\r\n0\r\n\r\n",
    "a bare line feed in an extension": b"2;a\nb\r\n{}\r\n0\r\n\r\n",
    "a NUL in an extension": b"2;\0\r\n{}\r\n0\r\n\r\n",
    "bare line feeds at the end": b"2\r\n{}\r\n0\n\n",
    "a NUL in a trailer": b"2\r\n{}\r\n0\r\nx\0: y\r\n\r\n",
}


async def refused(
    port: Rig, pod: Pod, *pieces: bytes, status: int = 400, reason: Reason = Reason.INVALID_REQUEST
) -> None:
    async with port.client() as client:
        for piece in pieces:
            client.send(piece)
            await asyncio.sleep(0.005)
        seen = await client.until_closed()
    assert (seen.status, seen.all("connection"), seen.all("x-kvlane-reason")) == (status, ["close"], [reason.value])
    assert seen.raw.count(b"HTTP/1.1 ") == 1
    assert pod.requests == []
    assert port.gateway.calls == []


def in_pieces(head: bytes, rest: bytes, cut: bool) -> tuple[bytes, ...]:
    """A head that is cut is read by another reader than one that is not."""
    return (head, rest) if cut else (head + rest,)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("fields", FIELDS.values(), ids=FIELDS)
async def test_a_head_with_ambiguous_headers_is_refused(fields: bytes, cut: bool) -> None:
    body = b"2\r\n{}\r\n0\r\n\r\n" if b"hunked" in fields else b"{}"
    head = b"POST %b HTTP/1.1\r\nhost: a\r\n%b" % (CHAT.encode(), fields)
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await refused(port, pod, *in_pieces(head, b"\r\n" + body + HIDDEN, cut))


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
async def test_a_malformed_request_line_is_refused(line: bytes, cut: bool) -> None:
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        head = line + b"\r\nhost: a\r\ncontent-length: 2\r\n"
        await refused(port, pod, *in_pieces(head, b"\r\n{}" + HIDDEN, cut))


async def test_chunks_in_http_10_are_refused() -> None:
    head = f"POST {CHAT} HTTP/1.0\r\nhost: a\r\n".encode() + CHUNKED
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await refused(port, pod, head + b"\r\n2\r\n{}\r\n0\r\n\r\n" + HIDDEN)


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
async def test_malformed_chunks_are_refused(chunks: bytes, cut: bool) -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n".encode() + CHUNKED + b"\r\n"
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await refused(port, pod, *in_pieces(head, chunks + HIDDEN, cut))


async def test_trailers_count_as_headers() -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n".encode() + CHUNKED + b"\r\n"
    whole = head + b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 300 + b"\r\n" + HIDDEN
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await refused(port, pod, whole, status=431, reason=Reason.HEAD_TOO_LARGE)


async def test_chunks_with_more_framing_than_body_are_refused() -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n".encode() + CHUNKED + b"\r\n2;"
    async with Pod(answering(plain())) as pod, rig(pod) as port:
        await refused(port, pod, head, *[b"x" * 1000] * 30)


async def test_chunks_of_a_byte_are_accepted() -> None:
    head = f"POST {CHAT} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n".encode() + CHUNKED + b"\r\n"
    async with Pod(answering(plain())) as pod, rig(pod) as port, port.client() as client:
        client.send(head)
        for _ in range(20):
            client.send(b"1\r\n \r\n" * 1000)
            await asyncio.sleep(0.001)
        client.send(b"0\r\n\r\n")
        assert (await client.until_closed()).status == 200
        assert pod.requests[0].all(b"content-length") == [b"20000"]


# Two readers find the requests of a connection: they must agree on any bytes.

PARTS = st.sampled_from(
    [
        b"POST /v1/chat/completions HTTP/1.1\r\n",
        b"GET /a HTTP/1.0\r\n",
        b"CONNECT a:1 HTTP/1.1\r\n",
        b"host: a\r\n",
        b"content-length: 2\r\n",
        b"content-length: 0\r\n",
        CHUNKED,
        b"connection: close\r\n",
        b"connection: upgrade\r\nupgrade: websocket\r\n",
        b"expect: 100-continue\r\n",
        b"x: \t y \t\r\n",
        b"\r\n",
        b"\r",
        b"\n",
        b" ",
        b"\0",
        b"{}",
        b"2\r\n{}\r\n",
        b"0\r\n\r\n",
        b"0\r\nx: y\r\n\r\n",
        HIDDEN,
        *FIELDS.values(),
    ]
)

HEADS = st.lists(PARTS, max_size=5).map(
    lambda parts: b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n" + b"".join(parts)
)


async def read(pieces: list[bytes]) -> Seen:
    return await served(pieces, 0, 1_000_000)


@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(HEADS, st.lists(PARTS, max_size=12).map(b"".join)), st.integers(1, 30))
@example(b"CONNECT a:1 HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}" + HIDDEN, 3)
@example(b"GET /a HTTP/1.1\r\nhost: a\r\ntransfer-encoding:\r\n\r\n" + HIDDEN, 3)
def test_both_parsers_find_the_same_requests(raw: bytes, cut: int) -> None:
    whole, pieces = asyncio.run(read([raw])), asyncio.run(read([raw[:cut], raw[cut:]]))
    assert (whole.requests, whole.refusals) == (pieces.requests, pieces.refusals)
