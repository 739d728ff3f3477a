"""One JSON line per request, formatted in batches and written where nobody waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from itertools import compress, repeat
from operator import add, is_not, sub

import orjson

from proxy.core.ports import Clock
from proxy.telemetry.instruments import Counter
from proxy.telemetry.line_writer import LineWriter
from proxy.telemetry.logs import spelt_out
from proxy.telemetry.records import SENDER, VALUE, Record

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
    "key",
    "tenant",
)
"""Times are seconds; a field without a value is left out."""

_NO_USAGE = (None, None, None)
"""In place of a usage, which is a tuple of its tokens in the order of the fields."""
_NOBODY = (None, None)
_is_known = partial(is_not, None)


class AccessLog:
    """`write_some` is `os.write` of some file descriptor: it may block, for it is called in a thread of its own, and
    may take a part only. Use as `async with`."""

    def __init__(self, write_some: Callable[[bytes], int], clock: Clock, lost: Counter) -> None:
        self._write_some = write_some
        self._clock = clock
        self._lost = lost
        self._writer = LineWriter("the access log", self._write_all, lost)

    def write(self, requests: Sequence[Record]) -> None:
        """Formats the records of requests and hands them to the writer; drops them while it is too far behind."""
        if self._writer.is_behind:
            self._lost.add(len(requests))
            return
        self._writer.hand(lines_of(requests, self._clock.wall() - self._clock.now()))

    async def __aenter__(self) -> AccessLog:
        await self._writer.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._writer.__aexit__(*error)

    def _write_all(self, batch: bytes) -> None:
        while batch:
            batch = batch[self._write_some(batch) :]


def lines_of(requests: Sequence[Record], epoch: float) -> bytes:
    """A line of JSON for each record of a request; `epoch` is the wall time at which the monotonic clock was 0."""
    calls, ended_at, statuses, outcomes, sent, legs = zip(*requests, strict=True)
    ids, methods, paths, received_at, identities = zip(*calls, strict=True)
    senders = [(None,) * len(ids)] * 2
    if any(identities):
        senders = list(zip(*[SENDER(each) if each else _NOBODY for each in identities], strict=True))
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
        *zip(*[usage or _NO_USAGE for usage in usages], strict=True),
        [own or relayed for own, relayed in zip(sent, received, strict=True)],
        map(add, attempts, repeat(1)),
        *senders,
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
