"""Responses of pods, valid and malformed, and how they are cut into reads; for Hypothesis."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

STATUS_LINES = (
    b"200 OK",
    b"200",
    b"201 Created",
    b"404 Not Found",
    b"429 Too Many Requests",
    b"500 Internal Server Error",
)
FIELDS = (
    b"content-type: application/json",
    b"Content-Type: text/event-stream; charset=utf-8",
    b"Set-Cookie: a=1",
    b"set-cookie: b=2; Path=/",
    b"X-Odd:   spaces kept inside  it",
    b"x-empty:",
    b"Server: uvicorn",
    b"X-Latin: caf\xe9",
    b"Keep-Alive: timeout=5",
)


@dataclass(frozen=True)
class Message:
    """`raw` as sent; `body` what it means; `closes` if it ends with the connection."""

    raw: bytes
    head: int
    body: bytes
    closes: bool
    events: bool
    chunks: int | None


@st.composite
def messages(draw: st.DrawFn) -> Message:
    kind = draw(st.sampled_from(("length", "chunked", "close")))
    lines = draw(st.lists(st.sampled_from(FIELDS), max_size=5, unique=True))
    if sum(line.lower().startswith(b"content-type") for line in lines) > 1:
        lines = [line for line in lines if not line.startswith(b"content-type")]
    pieces = draw(st.lists(bodies(), max_size=6))
    events = any(b"event-stream" in line for line in lines)
    if events and not any(pieces):
        pieces = [b"data: x\n\n"]  # a stream has an event
    body = b"".join(pieces)
    if kind == "length":
        lines.insert(draw(st.integers(0, len(lines))), b"Content-Length: %d" % len(body))
        framed = body
    elif kind == "chunked":
        lines.insert(draw(st.integers(0, len(lines))), b"Transfer-Encoding: chunked")
        framed = b"".join(draw(chunks(piece)) for piece in pieces if piece) + draw(st.sampled_from(LASTS))
    else:
        framed = body
    version = b"HTTP/1.0" if kind == "close" and draw(st.booleans()) else b"HTTP/1.1"
    head = b"\r\n".join((version + b" " + draw(st.sampled_from(STATUS_LINES)), *lines)) + b"\r\n\r\n"
    informational = draw(st.sampled_from((b"", b"", b"HTTP/1.1 103 Early Hints\r\nlink: a\r\n\r\n")))
    count = sum(bool(piece) for piece in pieces) if kind == "chunked" else None
    return Message(informational + head + framed, len(informational + head), body, kind == "close", events, count)


def bodies() -> st.SearchStrategy[bytes]:
    tricky = (
        b"data: x\n\n",
        b"0\r\n\r\n",
        b"\r\n",
        b"\r",
        b"5\r\nhello\r\n",
        b"1\r\n3\r\n3\r\n",
        b"data: half",
        b"\xff\x00",
    )
    return st.one_of(st.binary(max_size=20), st.sampled_from(tricky), st.just(b"y" * 70_000))


LASTS = (b"0\r\n\r\n", b"0\r\n\r\n", b"000\r\n\r\n", b"0;last\r\n\r\n", b"0\r\nx-trailer: 0\r\n\r\n")


@st.composite
def chunks(draw: st.DrawFn, body: bytes) -> bytes:
    spelling = draw(st.sampled_from((b"%x", b"%X", b"00%x", b"%x;name=value")))
    return spelling % len(body) + b"\r\n" + body + b"\r\n"


@st.composite
def reads(draw: st.DrawFn, raw: bytes) -> list[bytes]:
    """`raw` in any pieces: bytes, lines, which is how streams mostly come, or whatever."""
    kind = draw(st.sampled_from(("bytes", "lines", "any", "any")))
    if kind == "bytes" and len(raw) < 400:
        return [raw[i : i + 1] for i in range(len(raw))]
    if kind == "lines":
        ends = [at + 2 for at in range(len(raw) - 2) if raw.startswith(b"\r\n", at)]
        cuts = sorted(draw(st.sets(st.sampled_from(ends)))) if ends else []
    else:
        cuts = sorted(set(draw(st.lists(st.integers(1, max(1, len(raw) - 1)), max_size=12))))
    return [raw[start:end] for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True) if start < end]


def garbage() -> st.SearchStrategy[bytes]:
    return st.one_of(
        st.binary(min_size=1, max_size=60),
        st.sampled_from(
            (
                b"SSH-2.0-OpenSSH_9.2\r\n",
                b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nab",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhellooo\r\n0\r\n\r\n",
                b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffffffff\r\n",
                b"HTTP/1.1 200 OK\r\na: b\r\n folded\r\ncontent-length: 0\r\n\r\n",
                b"HTTP/1.1 101 Switching Protocols\r\nupgrade: h2c\r\nconnection: upgrade\r\n\r\nxx",
                b"HTTP/1.1 200 OK\ncontent-length: 0\n\n",
            )
        ),
    )
