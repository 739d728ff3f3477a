"""Heads of messages, rewritten: what is end-to-end passes as it came, in order; what is not stays behind."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple

from proxy.http.upstream.connection import Garbled

RawHeaders = Iterable[tuple[bytes, bytes]]
Pairs = Sequence[tuple[str, str]]

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
REPLACED_UPSTREAM = frozenset((b"host", b"content-length", b"expect"))
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
    request_id: bytes,
    api_key: str | None,
    framing: bytes,
    added: Pairs,
    upgrade: bool = False,
) -> bytes:
    """The head of a request to a pod. `request_id` and `framing`, which says how the body ends, are whole lines, with
    their CRLF; `framing` may be empty."""
    parts = [method.encode(), b" ", target, b" HTTP/1.1\r\nhost: ", host, b"\r\n"]
    named: frozenset[bytes] = frozenset()
    id_sent = False
    authorized = api_key is not None
    for name, value in headers:
        fate = _upstream_fate(name)
        if fate is Fate.PASSED:
            parts += (name, b": ", value, b"\r\n")
        elif fate is Fate.IDENTITY and not id_sent:
            parts.append(request_id)
            id_sent = True
        elif fate is Fate.AUTHORIZATION and not authorized:
            parts += (name, b": ", value, b"\r\n")
            authorized = True
        elif fate is Fate.CONNECTION:
            named |= _named_by(value)
    if named:
        parts[6:] = _without(parts[6:], named)
    if not id_sent:
        parts.append(request_id)
    if api_key is not None:
        parts.append(b"authorization: Bearer %b\r\n" % _encode(api_key))
    parts.append(framing)
    if added:
        parts.append(encode_pairs(added))
    parts.append(b"connection: Upgrade\r\nupgrade: websocket\r\n\r\n" if upgrade else b"\r\n")
    return b"".join(parts)


class AnswerHead(NamedTuple):
    """The head of a pod's answer: `status_line` and end-to-end `fields` as they came (CRLF included), the rest read.

    `events` says that the body is an uncompressed event stream.
    """

    status_line: bytes
    fields: bytes
    has_length: bool
    chunked: bool
    events: bool
    upgrade: bytes | None


def read_answer_head(lines: list[bytes]) -> AnswerHead:
    """Raises Garbled for what must not be relayed. The parser has checked the characters of names and values."""
    version, _, status = lines[0].partition(b" ")
    if not version.startswith(b"HTTP/1."):
        raise Garbled(f"answered with {version[:20]!r}")
    kept: list[bytes] = []
    has_length = chunked = events = compressed = False
    named: frozenset[bytes] = frozenset()
    upgrade = None
    for line in lines[1:]:
        name, _, value = line.partition(b":")
        kind = _answer_field(name)
        if not kind:
            kept.append(line)
        elif kind == b"content-length":
            has_length = True
            kept.append(line)
        elif kind == b"content-type":
            events = _is_event_stream(value)
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
    return AnswerHead(b"HTTP/1.1 " + status + b"\r\n", fields, has_length, chunked, events and not compressed, upgrade)


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
    return b"".join([_line(name, value) for name, value in pairs])


@lru_cache(maxsize=1024)
def _line(name: str, value: str) -> bytes:
    """Cached: what hooks add is mostly the name of one of a few pods."""
    return b"%b: %b\r\n" % (_encode(name), _encode(value))


def _encode(text: str) -> bytes:
    if "\n" in text or "\r" in text or "\0" in text:
        text = text.replace("\r", " ").replace("\n", " ").replace("\0", " ")
    return text.encode("utf-8", "surrogateescape")


class Fate(Enum):
    """What becomes of a client's header field on its way to a pod."""

    PASSED = "passed"
    DROPPED = "dropped"
    IDENTITY = "replaced by the request's id, once"
    AUTHORIZATION = "passed once, unless the pod has a key of its own"
    CONNECTION = "dropped, with the fields that it names"


_FATES = {
    b"x-request-id": Fate.IDENTITY,
    b"authorization": Fate.AUTHORIZATION,
    b"connection": Fate.CONNECTION,
    **dict.fromkeys((*(HOP_BY_HOP - {b"connection"}), *REPLACED_UPSTREAM, *INTERNAL), Fate.DROPPED),
}


@lru_cache(maxsize=1024)
def _upstream_fate(name: bytes) -> Fate:
    """Cached: clients send the same few names in the same spelling, and a hit costs a sixth of the checks."""
    lower = name.lower()
    return Fate.DROPPED if lower.startswith(INTERNAL_PREFIXES) else _FATES.get(lower, Fate.PASSED)


def _without(parts: Sequence[bytes], named: frozenset[bytes]) -> list[bytes]:
    """Header lines without those of these names."""
    lines = b"".join(parts).split(b"\r\n")
    return [line + b"\r\n" for line in lines if line and line.partition(b":")[0].lower() not in named]


@lru_cache(maxsize=64)
def _is_event_stream(content_type: bytes) -> bool:
    return content_type.strip().lower().startswith(b"text/event-stream")


_READ = frozenset((b"content-length", b"content-type", b"content-encoding"))
_OURS = frozenset((b"x-request-id", b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"))


@lru_cache(maxsize=1024)
def _answer_field(name: bytes) -> bytes:
    """The lower-case name of a field that is not simply passed on."""
    lower = name.lower()
    special = lower in HOP_BY_HOP or lower in _READ or lower in _OURS or lower.startswith(b"x-kvlane-")
    return lower if special else b""


_NEVER_NAMED = _READ | {b"", b"close", b"keep-alive", b"upgrade", b"x-request-id"}


def _named_by(connection: bytes) -> frozenset[bytes]:
    """The fields that a Connection header declares hop-by-hop; never one that frames or describes the body."""
    tokens = (token.strip().lower() for token in connection.split(b","))
    return frozenset(
        token for token in tokens if token not in (b"", b"close", b"keep-alive", b"upgrade", b"x-request-id", *_READ)
    )
