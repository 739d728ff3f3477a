"""One request of a gateway's client, and how it is answered without a pod."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from proxy.core.identity import Identity
from proxy.extproc.addresses import SUBSET, told_subset
from proxy.extproc.messages import plain
from proxy.extproc.stream import Stream
from proxy.http.body import Upload
from proxy.http.head import INTERNAL, INTERNAL_PREFIXES, Pairs
from proxy.http.paths import split_target


class EnvoyCall:
    """Implements `http.service.Brought`; lives as long as the request. What is answered here is kept in `local` until
    the gateway is told."""

    body = b""
    retained = 0
    answered = 0
    sent = 0
    closing = False
    identity: Identity | None = None
    local: tuple[int, Pairs, bytes] | None = None
    is_broken = False
    """Whether what was sent of an answer must not look whole."""
    upload: Upload | None = None
    chunked = False
    wants_websocket = False

    def __init__(self, stream: Stream, ids: Iterator[str], received_at: float) -> None:
        """`ids` are for requests that bring none; `received_at` is in monotonic seconds."""
        self.stream = stream
        fields = [
            (each.key, each.raw_value or each.value.encode()) for each in stream.head.request_headers.headers.headers
        ]
        headers: dict[str, str] = {}
        for name, value in fields:
            text = value.decode("utf-8", "surrogateescape")
            headers[name] = f"{headers[name]}, {text}" if name in headers else text
        self.method = headers.pop(":method", "")
        self.path, self.query = split_target(headers.pop(":path", "/"))
        headers = {name: value for name, value in headers.items() if not name.startswith(":")}
        subset = told_subset(plain(stream.head.metadata_context.filter_metadata))
        if subset is not None:
            headers[SUBSET] = subset
        self.headers: Mapping[str, str] = headers
        self.raw_headers = tuple((name.encode(), value) for name, value in fields if not name.startswith(":"))
        self.id = headers.get("x-request-id") or next(ids)
        self.id_line = b"x-request-id: %b\r\n" % self.id.encode("utf-8", "surrogateescape")
        self.received_at = received_at

    @property
    def has_left(self) -> bool:
        return self.stream.is_over

    def answer(self, status: int, headers: Pairs, body: bytes) -> None:
        self.answered = status
        self.sent = len(body)
        self.local = (status, headers, b"" if self.method == "HEAD" else body)

    def break_off(self) -> None:
        self.is_broken = True

    def end(self) -> None:
        """Whoever has brought it ends its stream."""

    def unwanted(self) -> list[str]:
        """Names of fields that do not go on to a pod: credentials that ended here, and what is said between routers and
        engines only."""
        passed = {name for name, _ in self.raw_headers if not (name in INTERNAL or name.startswith(INTERNAL_PREFIXES))}
        return [name for name in self.headers if name != SUBSET and name.encode() not in passed]


def fields_of(headers: Any) -> dict[str, str]:
    """Of an answer, by lower-case name."""
    return {each.key: (each.raw_value or each.value.encode()).decode("latin-1") for each in headers.headers}
