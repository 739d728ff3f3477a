"""The access log: one JSON line per request, formatted in batches and written by a thread."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import orjson

from proxy.core.attempt import Ending, Usage
from proxy.core.endpoint import Endpoint
from proxy.core.errors import Reason
from proxy.core.ports import Clock, Identity
from proxy.telemetry.lines import LineWriter, write_all
from proxy.telemetry.logs import json_line
from proxy.telemetry.metrics import Counter

Decided = tuple[Endpoint, float]
"""A decision: (pod, its duration in seconds). Observer and access log keep only the few values that they count and log,
so that no body is kept longer than its request. They are tuples, because named tuples take longer to create."""

FirstByte = tuple[int | None, Any, float, str, bool]
"""A first byte: (HTTP status, its time, arrival of the request, model, stream)."""

Served = tuple[bool, Usage | None, int, float | None, float | None]
"""The response of an attempt: (stream, usage, chunks, time of the first byte, time of the last byte)."""

Ended = tuple[Endpoint, Any, int, int | None, int, int | None, str, Served]
"""An attempt: (pod, ending, number, predicted cached tokens, prompt tokens, HTTP status, model, its response)."""

RequestSummary = tuple[str, str, str, float, Identity | None]
"""What a client has asked: (id, method, path, arrival, identity)."""

Last = tuple[str, str | None, float | None, Usage | None, int, int, str]
"""The last attempt: (model, name of the pod, time of the first byte, usage, bytes, number, error)."""

Done = tuple[RequestSummary, float, int, Ending | Reason, int, Last]
"""A request: (what the client has asked, end time, HTTP status, outcome, bytes of kvlane's response, last attempt)."""

NO_ATTEMPT: Last = ("", None, None, None, 0, -1, "")
"""The attempt of a request that no pod received."""


class AccessLog(LineWriter):
    """The access log, an `async with` context. `write_some` may block, because a thread calls it."""

    def __init__(self, write_some: Callable[[bytes], int], clock: Clock, lost: Counter) -> None:
        super().__init__("the access log", partial(write_all, write_some), lost.add)
        self._clock = clock

    def write(self, requests: Sequence[Done]) -> None:
        """Format the records of requests for the writer; drop them while it is too far behind."""
        if self.is_behind:
            self.drop(len(requests))
            return
        self.put(lines_of(requests, self._clock.wall() - self._clock.now()))


def lines_of(requests: Sequence[Done], epoch: float) -> bytes:
    """Return a line of JSON for each request; `epoch` is the wall time at which the monotonic clock was 0."""
    # Lines of one kind share a dictionary, which is faster (docs/notes/cpu.md).
    kinds: dict[tuple[Any, ...], dict[str, Any]] = {}
    second, date, lines = math.nan, "", []
    for (name, method, path, received_at, who), ended_at, status, outcome, sent, last in requests:
        model, endpoint, first_byte_at, usage, relayed, number, error = last
        prompt, completion, cached = usage or _NO_USAGE
        shape = (first_byte_at is not None, prompt is not None, cached is not None)
        kind = (method, path, model, endpoint, status, outcome._value_, error, who, shape)
        line = kinds.get(kind) or kinds.setdefault(kind, _template(kind))
        at = ended_at + epoch
        if at // 1.0 != second:
            second = at // 1.0
            date = _time(second)[:-1]
        micros = (1e6 * (at - second)).__round__()  # faster than `round`
        line["time"] = f"{date}{_MILLIS[micros // 1000]}{_MICROS[micros % 1000]}" if 0 < micros < 10**6 else _time(at)
        line["request_id"] = name
        if first_byte_at is not None:
            line["ttft"] = (1e6 * (first_byte_at - received_at)).__round__() / 1e6
        line["duration"] = (1e6 * (ended_at - received_at)).__round__() / 1e6
        if prompt is not None:
            line["prompt_tokens"], line["completion_tokens"] = prompt, completion
        if cached is not None:
            line["cached_tokens"] = cached
        line["bytes"], line["attempts"] = sent or relayed, number + 1
        lines.append(json_line(line))
    return b"".join(lines)


def _template(kind: tuple[Any, ...]) -> dict[str, Any]:
    """Return a template for a line of this kind: its fields, in order. Times are seconds; a field without a value is
    left out. The values that all such lines share are encoded already, as the value of the first such field."""
    method, path, model, endpoint, status, outcome, error, who, (begun, counted, logged) = kind
    pod = {"model": model} if model else {}
    if endpoint is not None:
        pod = {"model": model, "endpoint": endpoint}
    failure = {"error": error} if error else {}
    common = json_line({"method": method, "path": path, **pod, "status": status, "outcome": outcome, **failure})
    line: dict[str, Any] = {
        "time": "",
        "request_id": "",
        "method": orjson.Fragment(common[len('{"method":') : -len("}\n")]),
    }
    tokens = {"prompt_tokens": counted, "completion_tokens": counted, "cached_tokens": logged}
    has = {"ttft": begun, "duration": True, **tokens, "bytes": True, "attempts": True}
    line |= dict.fromkeys([name for name, there in has.items() if there], 0)
    return line if who is None else line | {"key": who.name, "tenant": who.tenant}


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat().replace("+00:00", "Z")


_NO_USAGE = (None, None, None)
_MILLIS = tuple(f".{n:03d}" for n in range(1000))
_MICROS = tuple(f"{n:03d}Z" for n in range(1000))
"""Encoded digits: formatting a number takes five times as long as a look-up."""
