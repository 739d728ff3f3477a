"""The log of explained decisions: the listener that fills it, the limits of what it keeps, and queries."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice
from operator import attrgetter
from typing import Any

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision, DecisionRecord
from proxy.core.endpoint import Endpoint
from proxy.core.errors import BadRequest, NotFound, Reason, RequestError
from proxy.core.listener import Listener
from proxy.core.params import parse_duration, suggestion
from proxy.core.ports import ClientRequest, Clock, Random
from proxy.core.request import InferenceRequest
from proxy.scheduling.build import Scheduling
from proxy.scheduling.explained_decision import (
    ENTRY,
    HEADER,
    DecisionEntry,
    EndedAttempt,
    EntryBuilder,
    short,
    summary,
    whole,
)
from proxy.telemetry.settings import DecisionSettings

MAX_BYTES = 64 << 20
"""Memory for the decisions that a process keeps."""

REQUESTED_BY = "x-kvlane-explain"
YES = ("1", "true")


_ENDED = attrgetter(*EndedAttempt._fields)


class Ring:
    """The latest entries that fit into the memory limit."""

    def __init__(self) -> None:
        self.entries: deque[DecisionEntry] = deque()
        self.bytes = 0

    def add(self, entry: DecisionEntry, keep: int) -> list[DecisionEntry]:
        """Add an entry. Return the entries that were removed."""
        self.entries.append(entry)
        entry.is_kept = True
        self.bytes += entry.bytes
        removed = []
        while len(self.entries) > keep or self.bytes > MAX_BYTES / 2:
            oldest = self.entries.popleft()
            oldest.is_kept = False
            self.bytes -= oldest.bytes
            removed.append(oldest)
        return removed


class DecisionLog:
    """The decisions that a process keeps. It survives a reload. Half of the memory is for the latest decisions. The
    other half is for decisions whose request was slow, failed or required the explanation, so that a burst of other
    decisions does not remove them."""

    def __init__(self, settings: DecisionSettings, clock: Clock, prefix: str = "") -> None:
        """`prefix` makes the ids of several processes different."""
        self.settings = settings
        self.seen = 0
        self._clock = clock
        self.ids = map(f"{prefix}{{:x}}".format, count(1))
        self._open: dict[str, DecisionEntry] = {}
        """Entries of open requests, by request: a refused request has no attempt with the entry."""
        self._latest, self._striking = Ring(), Ring()

    @property
    def bytes(self) -> int:
        return self._latest.bytes + self._striking.bytes

    def __len__(self) -> int:
        return len(self._latest.entries) + len(self._striking.entries)

    def __iter__(self) -> Iterator[DecisionEntry]:
        """Iterate over the entries, the newest first."""
        both = [*self._latest.entries, *self._striking.entries]
        return iter(sorted(both, key=lambda entry: entry.decided_at, reverse=True))

    def find(self, name: str) -> DecisionEntry | None:
        """Return the entry with this id, or the newest of this request."""
        entries = list(self)
        by_id = (entry for entry in entries if entry.id == name)
        return next(by_id, None) or next((entry for entry in entries if entry.request == name), None)

    def add(self, entry: DecisionEntry) -> None:
        self.seen += 1
        self._open[entry.request] = entry
        for removed in self._latest.add(entry, self.settings.keep):
            if self._is_striking(removed):
                self._striking.add(removed, self.settings.keep)

    def end(self, request_id: str, attempt: Attempt | None, status: int, outcome: Ending | Reason) -> None:
        opened = self._open.pop(request_id, None)
        entry = (None if attempt is None else attempt.request.state.read(ENTRY)) or opened
        if entry is not None:
            entry.status, entry.ended_as, entry.ended_at = status, outcome, self._clock.now()
            if not entry.is_kept and self._is_striking(entry):
                self._striking.add(entry, self.settings.keep)

    def _is_striking(self, entry: DecisionEntry) -> bool:
        has_failed = entry.ended_as not in (None, Ending.COMPLETE, Ending.CLIENT_GONE)
        if entry.is_requested or has_failed or entry.error is not None:
            return True
        return entry.ended_at is not None and entry.is_slower_than(self.settings.slow, entry.ended_at)

    def listed(self, query: DecisionQuery) -> dict[str, Any]:
        now = self._clock.now()
        found = islice((entry for entry in self if query.matches(entry, now)), query.limit)
        return {
            "on": True,
            "keep": self.settings.keep,
            "sample": self.settings.sample,
            "slow": self.settings.slow,
            "kept": len(self),
            "bytes": self.bytes,
            "seen": self.seen,
            "decisions": list(map(short, found)),
        }


@dataclass(frozen=True, slots=True, eq=False)
class Explained(Listener):
    """The listener that adds decisions to the log. `builders` are by pool; `may_ask` returns whether the client is
    allowed to see the explanation."""

    builders: Mapping[str, EntryBuilder]
    log: DecisionLog
    random: Random
    may_ask: Callable[[InferenceRequest], bool]

    def wants(self, request: InferenceRequest) -> bool:
        """Return whether to record the decision: the client requests it, or it is sampled."""
        is_sampled = self._is_requested(request) or self.random.random() < self.log.settings.sample
        return is_sampled and request.state.read(ENTRY) is None

    def _is_requested(self, request: InferenceRequest) -> bool:
        headers = request.headers
        return REQUESTED_BY in headers and headers[REQUESTED_BY].lower() in YES and self.may_ask(request)

    def decided(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        decision: Decision | RequestError,
        started: float,
        record: DecisionRecord | None,
    ) -> None:
        if record is not None and record.is_wanted:
            builder, is_requested = self.builders[candidates[0].pool], self._is_requested(request)
            entry = builder.entry(next(self.log.ids), request, candidates, record.runs, decision, is_requested)
            request.state.write(ENTRY, entry)
            self.log.add(entry)

    def not_scheduled(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        error: RequestError,
        record: DecisionRecord | None,
    ) -> None:
        self.decided(request, candidates, error, 0.0, record)

    def attempt_started(self, attempt: Attempt) -> None:
        entry = attempt.request.state.read(ENTRY)
        if entry is None:
            return
        entry.attempts.append(attempt)
        if attempt.for_client and entry.decision is not None:
            final = attempt.decision  # which may have dropped a stage since
            entry.decision = entry.decision._replace(
                prefill=final.prefill, encode=final.encode, split_outcome=final.split_outcome
            )
        if attempt.for_client and entry.is_requested:
            attempt.response_headers.append((HEADER, summary(entry, attempt.endpoint)))

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        entry = attempt.request.state.read(ENTRY)
        if entry is not None and attempt in entry.attempts:
            entry.attempts[entry.attempts.index(attempt)] = EndedAttempt(*_ENDED(attempt))

    def request_ended(
        self, client_request: ClientRequest, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        self.log.end(client_request.id, attempt, status, outcome)


MOST, FEW = 1000, 50

_EQUAL = ("request", "tenant", "model", "pool", "outcome")
_FILTERS = (*_EQUAL, "pod", "slow", "asked", "limit")


@dataclass(frozen=True, slots=True)
class DecisionQuery:
    """A query. `equal` are values of fields of the entry, `slow` is in seconds."""

    equal: Mapping[str, str]
    pod: str
    slow: float | None
    is_requested: bool
    limit: int

    @classmethod
    def of(cls, query: Mapping[str, str]) -> DecisionQuery:
        """Read the query of a URL. Raise BadRequest."""
        for name in query:
            if name not in _FILTERS:
                raise BadRequest(f"There is no filter '{name}'{suggestion(name, _FILTERS)}.", param=name)
        return cls(
            {name: query[name] for name in _EQUAL if name in query},
            query.get("pod", ""),
            _seconds(query["slow"]) if "slow" in query else None,
            query.get("asked", "") in YES,
            _limit(query.get("limit", str(FEW))),
        )

    def matches(self, entry: DecisionEntry, now: float) -> bool:
        if self.is_requested and not entry.is_requested:
            return False
        if self.slow is not None and (entry.error is not None or not entry.is_slower_than(self.slow, now)):
            return False
        chosen = [] if entry.decision is None else [entry.decision.target]
        if self.pod and all(pod.name != self.pod for pod in (*chosen, *(one.endpoint for one in entry.attempts))):
            return False
        return all(getattr(entry, name) == value for name, value in self.equal.items())


def _seconds(text: str) -> float:
    """Read a duration or a number of seconds. Raise BadRequest."""
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text)
    except ValueError as error:
        raise BadRequest(f"slow: {error}", param="slow") from None


def _limit(text: str) -> int:
    """Read the limit. Raise BadRequest."""
    if not text.isdecimal() or not 0 < int(text) <= MOST:
        raise BadRequest(f"limit must be a whole number from 1 to {MOST}.", param="limit")
    return int(text)


OFF: Mapping[str, Any] = {
    "on": False,
    "hint": "Decisions are not kept. To keep them: `telemetry: {decisions: {}}` in the configuration, and a reload.",
    "decisions": [],
}


@dataclass(slots=True)
class Explaining:
    """The explained decisions of a process. `log` is None while decisions are not kept."""

    endpoints: Callable[[], Sequence[Endpoint]]
    clock: Clock
    random: Random
    may_ask: Callable[[InferenceRequest], bool]
    prefix: str = ""
    log: DecisionLog | None = None

    def listener(self, schedulings: Mapping[str, Scheduling], log: DecisionLog) -> Explained:
        builders = {pool: self.builder(scheduling, pool) for pool, scheduling in schedulings.items()}
        return Explained(builders, log, self.random, self.may_ask)

    def builder(self, scheduling: Scheduling, pool: str) -> EntryBuilder:
        return EntryBuilder(
            scheduling, pool, lambda: [each for each in self.endpoints() if each.pool == pool], self.clock
        )

    def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the decisions that match. Raise BadRequest."""
        wanted = DecisionQuery.of(query)
        return OFF if self.log is None else self.log.listed(wanted)

    def shown(self, name: str) -> Mapping[str, Any]:
        """Return the decision with this id, or the newest of this request. Raise NotFound."""
        if self.log is None:
            raise NotFound(OFF["hint"])
        if (entry := self.log.find(name)) is None:
            raise NotFound(f"No decision '{name}' is kept: it was removed, not sampled, or never made.")
        return whole(entry)
