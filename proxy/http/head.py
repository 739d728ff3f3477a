"""Heads of messages: parsed, rewritten and interpreted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from itertools import compress, starmap
from operator import itemgetter

from proxy.core.errors import Declined, InvalidResponse, RankOutOfRange
from proxy.core.request import frozen
from proxy.openai import errors as api_errors
from proxy.openai.errors import says_that_model_is_missing

RawHeaders = Sequence[tuple[bytes, bytes]]
Pairs = Sequence[tuple[str, str]]

HOP_BY_HOP = frozenset((b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"))
PROXY_FIELDS = frozenset((b"proxy-connection", b"proxy-authenticate", b"proxy-authorization"))
REPLACED_UPSTREAM = frozenset((b"host", b"content-length", b"expect", b"x-request-id"))
INTERNAL_HEADERS = frozenset(
    (
        b"x-prefiller-host-port",
        b"x-encoder-hosts-ports",
        b"x-data-parallel-host-port",
        b"x-data-parallel-rank",
        b"x-kv-cache-source-host-port",
    )
)
"""Fields by which routers control engines; they never pass from clients."""

INTERNAL_PREFIXES = (b"proxy-", b"x-kvlane-", b"x-gateway-destination-endpoint")

REMEMBERED = 2 * 1024
"""Size of a head, or of its names, up to which results are cached."""

LONGEST_FIELD = 32
"""Longest field name that is examined; all known names are shorter. Names are cached, and a pod's may have 256 KiB."""

BODYLESS = (204, 304)
"""Statuses of responses without a body, whatever the head says."""

NO_CONTENT, TOO_MANY_REQUESTS, BAD_REQUEST, NOT_FOUND = 204, 429, 400, 404
UNSURE = (BAD_REQUEST, NOT_FOUND)
"""Statuses whose body decides whether to retry on another pod."""

_NAME, _VALUE, _LINE = itemgetter(0), itemgetter(1), b": ".join


def passing(headers: RawHeaders, has_pod_key: bool) -> bytes:
    """Return the lines of a client's fields that are relayed to a pod, after a CRLF. `has_pod_key`: the pod's key
    replaces the client's. Clients repeat the same names in the same order, so the result per list of names is cached,
    which makes three loops in C of a request's head: 70 bytecodes for 7 fields instead of 140."""
    names = b":".join(map(_NAME, headers))
    find = _fates if len(names) <= REMEMBERED else _fates.__wrapped__
    passed, listing = find(names, has_pod_key)
    if listing:
        values = b",".join(map(_VALUE, compress(headers, listing)))
        named = (_named_by if len(values) <= REMEMBERED else _named_by.__wrapped__)(values)
        if named:
            passed = tuple(
                is_passed and name not in named
                for is_passed, name in zip(passed, names.lower().split(b":"), strict=True)
            )
    return b"\r\n".join((b"", *map(_LINE, compress(headers, passed)), b""))


@lru_cache(maxsize=128)
def first_lines(method: str, target: str, base: bytes, host: bytes) -> bytes:
    """Return the request line and the Host field, without the last CRLF."""
    return b"%b %b%b HTTP/1.1\r\nhost: %b" % (
        method.encode(),
        base,
        target.encode("utf-8", "surrogateescape"),
        host,
    )


@frozen
class ResponseHead:
    """The head of a pod's response. `start` is the relayed part: the status line and the end-to-end fields as received;
    the rest is parsed. `sized`: `start` has the length of the body; `events`: it is an uncompressed event stream;
    `declines`: the status means that the pod did not serve the request; `simple`: sized, and the status alone says that
    it goes to the client; `final`: not an informational head; `until_close`: the body ends with the connection;
    `keeps_alive`: the connection stays open after the response."""

    status: int
    start: bytes
    final: bool
    simple: bool
    sized: bool
    declines: bool
    chunked: bool
    events: bool
    upgrade: bytes | None
    until_close: bool
    keeps_alive: bool


BLANK = ResponseHead(0, b"", False, False, False, False, False, False, None, False, False)
"""Empty lines that may precede a head."""


@lru_cache(maxsize=256)
def read_response_head(head: bytes) -> ResponseHead:
    """Raise InvalidResponse for a head that must not be relayed. The parser has checked the characters of names and
    values. Cached: a pod's heads differ in date and length, so under load most repeat within the second. Use
    `__wrapped__` for heads of more than REMEMBERED bytes."""
    status_line, *lines = head.strip(b"\r\n").split(b"\r\n")
    if not status_line:
        return BLANK
    version, _, status = status_line.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not status[:3].isdigit():
        raise InvalidResponse(f"it responded with {status_line[:20]!r}")
    kept: list[bytes] = []
    fields: dict[bytes, list[bytes]] = {}
    for line in lines:
        name, _, value = line.partition(b":")
        kind = _response_field(name[:LONGEST_FIELD])
        if not kind or kind in _READ:
            kept.append(line)
        if kind:
            fields.setdefault(kind, []).append(value)
    has_length = b"content-length" in fields
    events = fields.get(b"content-type", [b""])[-1].strip().lower().startswith(b"text/event-stream")
    compressed = fields.get(b"content-encoding", [b""])[-1].strip().lower() not in (b"", b"identity")
    codings = fields.get(b"transfer-encoding", [])
    # The parser knows no coding with a tab behind it.
    if codings and [coding.lstrip().rstrip(b" ").lower() for coding in codings] != [b"chunked"]:
        raise InvalidResponse(f"unknown transfer coding {codings[-1][:40]!r}")
    listed = _tokens(b",".join(fields.get(b"connection", [])))
    upgrade = fields[b"upgrade"][-1].strip() if b"upgrade" in fields else None
    if named := listed - _NEVER_NAMED:
        kept = [line for line in kept if line.partition(b":")[0].lower() not in named]
    code = int(status[:3])
    events = events and not compressed
    until_close = code >= 200 and not (codings or has_length or code in BODYLESS)
    if has_length and (code == NO_CONTENT or code < 200):  # a client that believes it waits for a body
        has_length = False
        kept = [line for line in kept if _response_field(line.partition(b":")[0][:LONGEST_FIELD]) != b"content-length"]
    start = b"\r\n".join((b"HTTP/1.1 " + status, *kept, b""))
    final = code >= 200 or code == 101
    sized = has_length and code != 101
    keeps = b"close" not in listed and (version != b"HTTP/1.0" or b"keep-alive" in listed)
    declines = code == TOO_MANY_REQUESTS or code >= 500
    simple = sized and not declines and code not in UNSURE
    return ResponseHead(code, start, final, simple, sized, declines, bool(codings), events, upgrade, until_close, keeps)


def without_length(head: ResponseHead) -> ResponseHead:
    """Return the head for a body whose length changes on its way to the client."""
    return replace(head, start=_LENGTH_LINE.sub(b"", head.start), sized=False, simple=False)


_LENGTH_LINE = re.compile(rb"(?im)^content-length:[^\r\n]*\r\n")


def encode_pairs(pairs: Pairs) -> bytes:
    """Return header lines. A line break in a value, which could inject a header, becomes a space. Not cached: ids of
    clients differ, and may be long."""
    return b"".join(starmap(header_line.__wrapped__, pairs))


@lru_cache(maxsize=1024)
def header_line(name: str, value: str) -> bytes:
    """Cached, because hooks mostly add the name of one of a few pods."""
    return b"%b: %b\r\n" % (_encode(name), _encode(value))


def _encode(text: str) -> bytes:
    if "\n" in text or "\r" in text or "\0" in text:
        text = text.replace("\r", " ").replace("\n", " ").replace("\0", " ")
    return text.encode("utf-8", "surrogateescape")


_DROPPED = HOP_BY_HOP | REPLACED_UPSTREAM | INTERNAL_HEADERS


@lru_cache(maxsize=256)
def _fates(names: bytes, has_pod_key: bool) -> tuple[tuple[bool, ...], tuple[bool, ...] | None]:
    """Return two masks over a client's fields: the fields that pass to a pod, and the fields Connection, whose values
    name further fields to drop; None without such a field. `names` are joined by colons, which names do not contain.
    The first Authorization passes unless `has_pod_key`."""
    passed = []
    lowered = names.lower().split(b":")
    for name in lowered:
        is_passed = name not in _DROPPED and not name.startswith(INTERNAL_PREFIXES)
        if name == b"authorization":
            is_passed, has_pod_key = not has_pod_key, True
        passed.append(is_passed)
    listing = tuple(name == b"connection" for name in lowered)
    return tuple(passed), listing if any(listing) else None


_READ = frozenset((b"content-length", b"content-type", b"content-encoding"))
_HANDLED = HOP_BY_HOP | PROXY_FIELDS | _READ | {b"x-request-id"}
_OUR_PREFIXES = (b"x-kvlane-", b"access-control-")
"""Engines let pages of any site read their responses; the proxy decides this instead."""


@lru_cache(maxsize=1024)
def _response_field(name: bytes) -> bytes:
    """Return the lower-case name of a field that needs handling."""
    lower = name.lower()
    return lower if lower in _HANDLED or lower.startswith(_OUR_PREFIXES) else b""


_NEVER_NAMED = _READ | {b"", b"close", b"keep-alive", b"upgrade", b"x-request-id"}


@lru_cache(maxsize=64)
def _named_by(connection: bytes) -> frozenset[bytes]:
    """Return the fields that a Connection header declares hop-by-hop, except fields that frame or describe the body."""
    return _tokens(connection) - _NEVER_NAMED


def _tokens(connection: bytes) -> frozenset[bytes]:
    return frozenset(token.strip().lower() for token in connection.split(b","))


_RETRY_AFTER = re.compile(rb"\r\nretry-after:[ \t]*(?:(\d{1,6})|([a-z]{3,9},[^\r\n]{1,60}?))[ \t]*\r\n", re.IGNORECASE)
_DATE = re.compile(rb"\r\ndate:[ \t]*([^\r\n]{1,60}?)[ \t]*\r\n", re.IGNORECASE)


def needs_more(head: ResponseHead, beginning: bytes) -> bool:
    """Return whether more of the body is needed to decide; the reason of an error may be anywhere in it."""
    waits_for_end = head.declines or head.status in UNSURE
    return len(beginning) <= api_errors.LONGEST and (waits_for_end or not api_errors.is_enough_to_judge(beginning))


def declined_or_none(head: ResponseHead, beginning: bytes, rank: int | None = None) -> Declined | None:
    """Return why the pod declines the request; None if it serves it, or finds fault with it. With a 404 it declines
    only for a model that it does not have, and with a 400 only for a `rank` that it does not have."""
    if head.declines or (head.status == NOT_FOUND and says_that_model_is_missing(beginning)):
        return declined_with(head, beginning)
    if head.status == NOT_FOUND:
        return None
    is_whole = head.status == BAD_REQUEST
    error = api_errors.names_rank_out_of_range(beginning) if is_whole else api_errors.declined(beginning)
    return None if isinstance(error, RankOutOfRange) and error.rank != rank else error


def declined_with(head: ResponseHead, beginning: bytes) -> Declined:
    """Return the error for the status."""
    text = beginning[: api_errors.LONGEST].decode("utf-8", "replace")
    return Declined(head.status, _retry_after(head.start), text)


def _retry_after(head: bytes) -> float | None:
    """Return the seconds of a Retry-After (RFC 9110) in either form. A date is compared with the pod's own `date`,
    because clocks differ."""
    after = _RETRY_AFTER.search(head)
    if after is None:
        return None
    if after[1]:
        return float(after[1])
    then, now = _moment(after[2]), _DATE.search(head)
    at = None if now is None else _moment(now[1])
    return None if then is None or at is None else max(0.0, (then - at).total_seconds())


def _moment(date: bytes) -> datetime | None:
    try:
        moment = parsedate_to_datetime(date.decode("latin-1"))
    except ValueError:
        return None
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
