"""Requests of real clients, to the byte: written down before kvlane, kept in `sent/`, and sent again by tests.

`make test-clients KVLANE_RECORD=1` writes them again. Of requests that differ in values only, the first one is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.vllm.tap import Tap

RECORD = "KVLANE_RECORD"
SENT = Path(__file__).parent / "sent"
HOST = "localhost:8000"


@dataclass(frozen=True, slots=True)
class Sent:
    line: str
    headers: Sequence[str]
    """Lines, as they were."""
    body: bytes

    @property
    def path(self) -> str:
        return self.line.split(" ")[1]

    def header(self, name: str) -> list[str]:
        return [line.partition(":")[2].strip() for line in self.headers if name_of(line) == name]

    def raw(self) -> bytes:
        return "\r\n".join([self.line, *self.headers, "", ""]).encode("latin-1") + self.body

    @property
    def shape(self) -> tuple[Any, ...]:
        """What is the same of requests that need not both be kept."""
        fields = json.loads(self.body) if self.body[:1] == b"{" else {}
        stream = isinstance(fields, dict) and fields.get("stream")
        return self.line, tuple(name_of(line) for line in self.headers), tuple(sorted(fields)), stream


class Recorder:
    """`with Recorder(url, "curl") as recorder`: what is sent to `recorder.url` gets there, and into sent/curl.json."""

    def __init__(self, url: str, client: str) -> None:
        self._tap = Tap(url.removeprefix("http://"))
        self._file = SENT / f"{client}.json"

    def __enter__(self) -> Tap:
        return self._tap.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._tap.__exit__(*error)
        requests: dict[object, Sent] = {}
        for each in (each for raw in self._tap.sent for each in parsed(raw)):
            requests.setdefault(each.shape, each)
        kept = sorted(requests.values(), key=lambda each: (each.path, len(each.body)))
        self._file.write_text(json.dumps([_as_json(each) for each in kept], indent=1, ensure_ascii=False) + "\n")


def parsed(raw: bytes) -> Iterator[Sent]:
    """The requests of a connection, as far as they are whole."""
    while b"\r\n\r\n" in raw:
        head, _, raw = raw.partition(b"\r\n\r\n")
        line, *headers = head.decode("latin-1").split("\r\n")
        headers = [f"{each[:4]}: {HOST}" if name_of(each) == "host" else each for each in headers]
        sent = Sent(line, headers, raw)
        length = int(next(iter(sent.header("content-length")), "0"))
        if len(raw) < length:
            return
        yield replace(sent, body=raw[:length])
        raw = raw[length:]


def name_of(line: str) -> str:
    return line.partition(":")[0].lower()


def sent_by(client: str) -> list[Sent]:
    requests = json.loads((SENT / f"{client}.json").read_text())
    return [Sent(each["line"], each["headers"], _body(each["body"])) for each in requests]


def clients() -> list[str]:
    return sorted(file.stem for file in SENT.glob("*.json"))


def _as_json(sent: Sent) -> dict[str, Any]:
    """A body that is no text is kept by its bytes, as JSON has them: one character each."""
    try:
        body: Any = sent.body.decode("ascii")
    except UnicodeDecodeError:
        body = {"latin-1": sent.body.decode("latin-1")}
    return {"line": sent.line, "headers": sent.headers, "body": body}


def _body(kept: Any) -> bytes:
    return kept.encode("ascii") if isinstance(kept, str) else kept["latin-1"].encode("latin-1")
