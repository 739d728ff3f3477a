"""What a pod remembers of the calls it got, for black-box tests of whatever stands in front of it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from proxy.lab.sim.sequence import Progress

REMEMBERED = 10_000


@dataclass(slots=True, eq=False)
class RequestRecord:
    """One call, from its headers to its end. `status` is None while no response has begun; `fault` is what it met,
    `aborted` that the client left, `cut` that the pod did."""

    id: str
    method: str
    path: str
    headers: dict[str, str]
    arrived: float
    body_sha256: str = ""
    model: str | None = None
    status: int | None = None
    ended: float | None = None
    aborted: bool = False
    cut: bool = False
    fault: str | None = None
    sequences: list[Progress] = field(default_factory=list)

    @property
    def prompt_tokens(self) -> int:
        return sum(sequence.prompt_tokens for sequence in self.sequences)

    @property
    def cached_tokens(self) -> int:
        return sum(sequence.cached_tokens for sequence in self.sequences)

    @property
    def generated_tokens(self) -> int:
        return sum(sequence.generated_tokens for sequence in self.sequences)

    @property
    def started(self) -> float | None:
        """When its first sequence left the queue."""
        return min((s.started for s in self.sequences if s.started is not None), default=None)

    @property
    def first_token(self) -> float | None:
        return min((s.first_token for s in self.sequences if s.first_token is not None), default=None)

    def as_json(self) -> dict[str, object]:
        names = (
            "id method path headers body_sha256 model prompt_tokens cached_tokens generated_tokens "
            "arrived started first_token ended aborted cut fault status"
        )
        return {name: getattr(self, name) for name in names.split()}


class RequestLog:
    """The last calls in order of arrival, and those that are open; `idle` is set while none is."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self.aborted = 0
        self.open: dict[RequestRecord, None] = {}
        self.idle = asyncio.Event()
        self._records: deque[RequestRecord] = deque(maxlen=remembered)
        self.idle.set()

    def __iter__(self) -> Iterator[RequestRecord]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> RequestRecord:
        return self._records[index]

    def begin(self, record: RequestRecord) -> None:
        self.open[record] = None
        self.idle.clear()
        self._records.append(record)

    def end(self, record: RequestRecord, now: float, *, aborted: bool) -> None:
        record.ended = now
        record.aborted = aborted and not record.cut
        self.aborted += record.aborted
        self.open.pop(record, None)
        if not self.open:
            self.idle.set()

    def clear(self) -> None:
        """Forget what has ended."""
        self.aborted = 0
        self._records.clear()
