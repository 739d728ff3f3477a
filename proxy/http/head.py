"""Heads of messages, rewritten: what is end-to-end passes as it came, in order; what is not stays behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus

from proxy.http.upstream.connection import Garbled

RawHeaders = Iterable[tuple[bytes, bytes]]
Pairs = Sequence[tuple[str, str]]

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
REPLACED_UPSTREAM = frozenset((b"host", b"content-length", b"expect"))
ONCE = frozenset((b"x-request-id", b"authorization"))
"""Sent exactly once, or not at all."""

INTERNAL = frozenset(
    (b"x-prefiller-host-port", b"x-encoder-hosts-ports", b"x-data-parallel-host-port", b"x-kv-cache-source-host-port")
)
"""By these, routers tell engines whom to talk to."""

INTERNAL_PREFIXES = (b"proxy-", b"x-kvlane-", b"x-gateway-destination-endpoint")


def upstream_head(
    *,
    method: str,
    target: bytes,
    host: bytes,
    headers: RawHeaders,
    request_id: str,
    api_key: str | None,
    framing: bytes,
    added: Pairs,
    upgrade: bool = False,
) -> bytes:
    """The head of a request to a pod. `framing` is the line that says how its body ends, CRLF included, or nothing."""
    lines = [b"%b %b HTTP/1.1\r\nhost: %b\r\n" % (method.encode(), target, host)]
    named: frozenset[bytes] = frozenset()
    once = {b"x-request-id": b"x-request-id: %b\r\n" % _encode(request_id)}
    if api_key is not None:
        once[b"authorization"] = b"authorization: Bearer %b\r\n" % _encode(api_key)
    for name, value in headers:
        if _goes_upstream(name):
            lines.append(b"%b: %b\r\n" % (name, value))
            continue
        lower = name.lower()
        if lower in ONCE:
            lines.append(once.get(lower, b"%b: %b\r\n" % (name, value)))
            once[lower] = b""
        elif lower == b"connection":
            named |= _named_by(value)
    if named:
        lines = [lines[0], *(line for line in lines[1:] if line.partition(b":")[0].lower() not in named)]
    lines += (*once.values(), framing, encode_pairs(added))
    lines.append(b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n" if upgrade else b"\r\n")
    return b"".join(lines)


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """The head of a pod's answer: `status_line` and end-to-end `fields` as they came (CRLF included), the rest read.

    `length` is None where there is no Content-Length; `events` says that the body is an uncompressed event stream.
    """

    status_line: bytes
    fields: bytes
    length: int | None
    chunked: bool
    events: bool
    upgrade: bytes | None


def read_answer_head(lines: list[bytes]) -> AnswerHead:
    """Raises Garbled for what must not be relayed. The parser has checked the characters of names and values."""
    version, _, status = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise Garbled(f"answered with {version[:20]!r}")
    kept: list[bytes] = []
    length: int | None = None
    chunked = events = compressed = False
    named: frozenset[bytes] = frozenset()
    upgrade = None
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        kind = _answer_field(name)
        if not kind:
            kept.append(line)
        elif kind == b"content-length":
            length = int(value)
            kept.append(line)
        elif kind == b"content-type":
            events = value.strip().lower().startswith(b"text/event-stream")
            kept.append(line)
        elif kind == b"content-encoding":
            compressed = value.strip().lower() not in (b"", b"identity")
            kept.append(line)
        elif kind == b"transfer-encoding":
            if value.strip().lower() != b"chunked" or chunked:
                raise Garbled(f"unknown transfer coding {value[:40]!r}")
            chunked = True
        elif kind == b"connection":
            named |= _named_by(value)
        elif kind == b"upgrade":
            upgrade = value.strip()
    if named:
        kept = [line for line in kept if line.partition(b":")[0].lower() not in named]
    fields = b"\r\n".join((*kept, b"")) if kept else b""
    return AnswerHead(b"HTTP/1.1 %b\r\n" % status, fields, length, chunked, events and not compressed, upgrade)


def local_answer(
    status: int, headers: Pairs, body: bytes, *, connection: bytes = b"", head_only: bool = False
) -> bytes:
    """A whole answer of our own. `connection` is the line of that name."""
    return b"HTTP/1.1 %d %b\r\n%bcontent-length: %d\r\n%b\r\n%b" % (
        status,
        HTTPStatus(status).phrase.encode(),
        encode_pairs(headers),
        len(body),
        connection,
        b"" if head_only else body,
    )


def encode_pairs(pairs: Pairs) -> bytes:
    """Header lines. A line break inside would begin a header of somebody else's making: it becomes a space."""
    return b"".join([b"%b: %b\r\n" % (_encode(name), _encode(value)) for name, value in pairs])


def _encode(text: str) -> bytes:
    if "\n" in text or "\r" in text or "\0" in text:
        text = text.replace("\r", " ").replace("\n", " ").replace("\0", " ")
    return text.encode("utf-8", "surrogateescape")


@lru_cache(maxsize=1024)
def _goes_upstream(name: bytes) -> bool:
    """Cached: clients send the same few names in the same spelling, and a hit costs a sixth of the checks."""
    lower = name.lower()
    return not (
        lower in HOP_BY_HOP
        or lower in REPLACED_UPSTREAM
        or lower in ONCE
        or lower in INTERNAL
        or lower.startswith(INTERNAL_PREFIXES)
    )


_READ = frozenset((b"content-length", b"content-type", b"content-encoding"))
_OURS = frozenset((b"x-request-id", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"))


@lru_cache(maxsize=1024)
def _answer_field(name: bytes) -> bytes:
    """The lower-case name of a field that is not simply passed on."""
    lower = name.lower()
    special = lower in HOP_BY_HOP or lower in _READ or lower in _OURS or lower.startswith(b"x-kvlane-")
    return lower if special else b""


def _named_by(connection: bytes) -> frozenset[bytes]:
    """The fields that a Connection header declares hop-by-hop; never one that frames or describes the body."""
    tokens = (token.strip().lower() for token in connection.split(b","))
    return frozenset(token for token in tokens if token not in (b"", b"close", b"keep-alive", b"upgrade", *_READ))
