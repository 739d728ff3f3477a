"""One JSON line per request, formatted in batches and written where nobody waits."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import compress, repeat
from operator import add, is_not, sub
from queue import SimpleQueue

import orjson

from proxy.core.ports import Clock
from proxy.telemetry.instruments import Counter
from proxy.telemetry.logs import spelt_out
from proxy.telemetry.records import TOKENS, VALUE, Record

log = logging.getLogger(__name__)

BACKLOG = 16 * 1024 * 1024
"""Bytes that wait for a slow reader of the log; what comes on top is dropped and counted."""

STOP_TIMEOUT = 2.0
"""Seconds that a stopping process gives the reader to take what is left."""

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

_NO_USAGE = (None, None, None)
_is_known = partial(is_not, None)


class AccessLog:
    """`write_some` is `os.write` of some file descriptor: it may block, for it is called in a thread of its own, and
    may take a part only. Use as `async with`."""

    # Not a buffered stream: if its reader stood still when the process ends, the interpreter would abort over its lock.
    def __init__(self, write_some: Callable[[bytes], int], clock: Clock, lost: Counter) -> None:
        self._write_some = write_some
        self._clock = clock
        self._lost = lost
        self._batches: SimpleQueue[bytes | None] = SimpleQueue()
        self._handed = 0
        self._taken = 0
        self._thread = threading.Thread(target=self._write_batches, name="access-log", daemon=True)

    def write(self, requests: Sequence[Record]) -> None:
        """Formats the records of requests and hands them to the writer; drops them while it is too far behind."""
        if self._handed - self._taken > BACKLOG:
            self._lost.add(len(requests))
            return
        batch = lines_of(requests, self._clock.wall() - self._clock.now())
        self._handed += len(batch)
        self._batches.put(batch)

    async def __aenter__(self) -> AccessLog:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Everything is written, unless nobody reads."""
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
            batch = batch[self._write_some(batch) :]


def lines_of(requests: Sequence[Record], epoch: float) -> bytes:
    """A line of JSON for each record of a request; `epoch` is the wall time at which the monotonic clock was 0."""
    calls, ended_at, statuses, outcomes, sent, legs = zip(*requests, strict=True)
    ids, methods, paths, received_at = zip(*calls, strict=True)
    models, endpoints, begun_at, usages, received, attempts = zip(*legs, strict=True)
    waits = [None if at is None else round(at - since, 6) for at, since in zip(begun_at, received_at, strict=True)]
    columns = (
        map(datetime.fromtimestamp, map(add, ended_at, repeat(epoch)), repeat(UTC)),
        ids,
        methods,
        paths,
        models,
        endpoints,
        statuses,
        map(VALUE, outcomes),
        waits,
        map(round, map(sub, ended_at, received_at), repeat(6)),
        *zip(*[_NO_USAGE if usage is None else TOKENS(usage) for usage in usages], strict=True),
        [own or relayed for own, relayed in zip(sent, received, strict=True)],
        map(add, attempts, repeat(1)),
    )
    return _encode(list(zip(*columns, strict=True)))


def _encode(rows: Sequence[Sequence[object]]) -> bytes:
    """orjson is called once: calling it costs more than ten times what it does for a line. No text can be taken for
    what lies between two lines, because inside a JSON string quotes are escaped."""
    pairs, known = map(partial(zip, FIELDS), rows), map(partial(map, _is_known), rows)
    lines = list(map(dict, map(compress, pairs, known)))
    try:
        batch = orjson.dumps(lines, option=orjson.OPT_UTC_Z)
    except TypeError:  # lone surrogates, from headers and paths, which are no Unicode
        batch = orjson.dumps(list(map(spelt_out, lines)), option=orjson.OPT_UTC_Z)
    return batch[1:-1].replace(b'},{"time":', b'}\n{"time":') + b"\n"
