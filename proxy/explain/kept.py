"""The decisions that are kept: the latest, and for longer those that somebody will ask about."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import count

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import Reason
from proxy.core.listener import Listener
from proxy.core.ports import Call, Clock
from proxy.explain.entry import ENTRY, LEG, Entry, Leg
from proxy.explain.summary import HEADER, summary
from proxy.telemetry.settings import DecisionSettings


class Ring:
    """Of entries, the latest, as many as have room."""

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque()
        self.bytes = 0
        self._members: set[Entry] = set()

    def __contains__(self, entry: Entry) -> bool:
        return entry in self._members

    def add(self, entry: Entry, keep: int, most_bytes: float) -> Iterator[Entry]:
        """Yield the entries that are removed for it."""
        self.entries.append(entry)
        self._members.add(entry)
        self.bytes += entry.bytes
        while len(self.entries) > keep or self.bytes > most_bytes:
            gone = self.entries.popleft()
            self._members.remove(gone)
            self.bytes -= gone.bytes
            yield gone


class Kept(Listener):
    """Half of the memory is for decisions of any kind; half for those that a client asked about, that failed or took
    long: they are not driven out by a thousand others in a second."""

    def __init__(self, settings: DecisionSettings, clock: Clock, prefix: str = "") -> None:
        """`prefix` tells the ids of several processes apart."""
        self._clock = clock
        self._ids = map(f"{prefix}{{:x}}".format, count(1))
        self._open: dict[str, Entry] = {}
        """By request, those that have not ended: what is refused has no leg that would lead to its entry."""
        self.seen = 0
        self.settings = settings
        """Where they change, what is too much goes with the next decision."""
        self._recent, self._striking = Ring(), Ring()

    @property
    def bytes(self) -> int:
        return self._recent.bytes + self._striking.bytes

    def __len__(self) -> int:
        return len(self._recent.entries) + len(self._striking.entries)

    def __iter__(self) -> Iterator[Entry]:
        """The newest first."""
        both = [*self._recent.entries, *self._striking.entries]
        return iter(sorted(both, key=lambda entry: entry.decided_at, reverse=True))

    def find(self, name: str) -> Entry | None:
        """By its id, or else the newest of a request."""
        entries = list(self)
        by_id = (entry for entry in entries if entry.id == name)
        return next(by_id, None) or next((entry for entry in entries if entry.request == name), None)

    def next_id(self) -> str:
        return next(self._ids)

    def add(self, entry: Entry) -> None:
        self.seen += 1
        self._open[entry.request] = entry
        for gone in list(self._recent.add(entry, self.settings.keep, self.settings.max_bytes / 2)):
            if self._is_striking(gone):
                self._remember(gone)

    def attempt_started(self, attempt: Attempt) -> None:
        entry = attempt.request.state.read(ENTRY)
        if entry is not None:
            entry.legs.append(attempt)
            if attempt.answers and entry.decision is not None:
                made = attempt.decision  # what cannot be split after all is known by now
                entry.decision = entry.decision._replace(prefill=made.prefill, encode=made.encode, why=made.why)
            if entry.asked and attempt.answers:
                attempt.response_headers.append((HEADER, summary(entry, attempt.endpoint)))

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        entry = attempt.request.state.read(ENTRY)
        if entry is not None and attempt in entry.legs:
            entry.legs[entry.legs.index(attempt)] = Leg(*LEG(attempt))

    def request_ended(
        self, call: Call, status: int, outcome: Ending | Reason, attempt: Attempt | None, sent: int
    ) -> None:
        opened = self._open.pop(call.id, None)
        entry = None if attempt is None else attempt.request.state.read(ENTRY)
        if (entry := entry or opened) is not None:
            self._end(entry, status, outcome)

    def _end(self, entry: Entry, status: int, outcome: Ending | Reason) -> None:
        entry.status, entry.outcome, entry.ended_at = status, outcome, self._clock.now()
        if entry not in self._recent and entry not in self._striking and self._is_striking(entry):
            self._remember(entry)

    def _remember(self, entry: Entry) -> None:
        for _ in self._striking.add(entry, self.settings.keep, self.settings.max_bytes / 2):
            pass

    def _is_striking(self, entry: Entry) -> bool:
        if entry.asked or entry.failed or entry.refusal is not None:
            return True
        return entry.ended_at is not None and entry.is_slower_than(self.settings.slow, entry.ended_at)
