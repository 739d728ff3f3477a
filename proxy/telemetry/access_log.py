"""One JSON line per request, collected on the hot path, formatted in batches and written where nobody waits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from queue import SimpleQueue
from typing import Any

from proxy.core.exchange import Exchange
from proxy.core.ports import Call, Clock
from proxy.telemetry.instruments import Counter
from proxy.telemetry.logs import json_line

log = logging.getLogger(__name__)

FLUSH_INTERVAL = 0.2
FLUSH_LINES = 512
BACKLOG = 16 * 1024 * 1024
"""Bytes that wait for a slow reader of the log; what comes on top is dropped and counted."""

STOP_TIMEOUT = 2.0
"""Seconds that a stopping process gives the reader to take what is left."""

Line = tuple[Any, ...]

FIELDS = (
    "time",
    "request_id",
    "method",
    "path",
    "model",
    "endpoint",
    "status",
    "outcome",
    "ttft",
    "duration",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "bytes",
    "attempts",
)
"""Times are seconds; a field without a value is left out."""


class AccessLog:
    """`write` is `os.write` of some file descriptor: it may block, for it is called in a thread of its own, and may
    take a part only. Use as `async with`, and run `run()` as a task."""

    # Not a buffered stream: if its reader stood still when the process ends, the interpreter would abort over its lock.
    def __init__(self, write: Callable[[bytes], int], clock: Clock, lost: Counter) -> None:
        self._write = write
        self._clock = clock
        self._lost = lost
        self._lines: list[Line] = []
        self._batches: SimpleQueue[bytes | None] = SimpleQueue()
        self._handed = 0
        self._taken = 0
        self._thread = threading.Thread(target=self._write_batches, name="access-log", daemon=True)

    def add(self, call: Call, status: int, outcome: str, exchange: Exchange | None, seconds: float, sent: int) -> None:
        """Keeps the few values that are needed, so that no request body outlives its request here."""
        head = (self._clock.wall(), call.id, call.method, call.path)
        if exchange is None:
            self._lines.append((*head, None, None, status, outcome, None, seconds, None, None, None, sent, 0))
        else:
            self._lines.append((*head, *_of(exchange, status, outcome, seconds, sent)))
        if len(self._lines) >= FLUSH_LINES:
            self.flush()

    def flush(self) -> None:
        """Formats what was collected and hands it to the writer; drops it while the writer is too far behind."""
        lines, self._lines = self._lines, []
        if not lines:
            return
        if self._handed - self._taken > BACKLOG:
            self._lost.add(len(lines))
            return
        batch = b"".join(map(_format, lines))
        self._handed += len(batch)
        self._batches.put(batch)

    async def run(self) -> None:
        """Flushes at intervals, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_INTERVAL)
            self.flush()

    async def __aenter__(self) -> AccessLog:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everything collected is written, unless nobody reads."""
        self.flush()
        self._batches.put(None)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT)

    def _write_batches(self) -> None:
        """In the thread: `_taken` is written here only, `_handed` on the event loop only."""
        broken = False
        while (batch := self._batches.get()) is not None:
            try:
                self._write_all(batch)
                broken = False
            except (OSError, ValueError) as error:  # the reader is gone, or the stream is closed
                self._lost.add(batch.count(b"\n"))
                if not broken:
                    log.warning("the access log cannot be written, its lines are lost: %s", error)
                broken = True
            self._taken += len(batch)

    def _write_all(self, batch: bytes) -> None:
        while batch:
            batch = batch[self._write(batch) :]


def _of(exchange: Exchange, status: int, outcome: str, seconds: float, sent: int) -> Line:
    request, usage, first = exchange.request, exchange.usage, exchange.first_byte_at
    ttft = None if first is None else first - request.received_at
    prompt, completion, cached = (
        (None, None, None) if usage is None else (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    )
    leg = (exchange.endpoint.name, status, outcome, ttft, seconds, prompt, completion, cached)
    return (request.model, *leg, sent or exchange.response_bytes, exchange.attempt + 1)


def _format(line: Line) -> bytes:
    fields = {name: value for name, value in zip(FIELDS, line, strict=True) if value is not None}
    fields["time"] = datetime.fromtimestamp(fields["time"], UTC)
    fields["duration"] = round(fields["duration"], 6)
    if "ttft" in fields:
        fields["ttft"] = round(fields["ttft"], 6)
    return json_line(fields)
