"""The log of explained decisions: which decisions are kept, for how long, and how they are listed."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from proxy.core.attempt import Attempt, Ending
from proxy.core.decision import Decision, DecisionRecord, ProfileRecord
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import BadRequest, NotFound, Reason, RequestError
from proxy.core.listener import Listener
from proxy.core.params import parse_duration, suggestion
from proxy.core.plugin import Scorer
from proxy.core.ports import Call, Clock, Random
from proxy.core.request import InferenceRequest
from proxy.scheduling.build import Scheduling
from proxy.scheduling.explained_decision import (
    ENTRY,
    HEADER,
    LEG,
    Absent,
    Entry,
    Leg,
    Refusal,
    outcome,
    predictions,
    queued_since,
    short,
    situations,
    size,
    summary,
    tokens_of,
    whole,
)
from proxy.scheduling.layout import declares
from proxy.scheduling.profile import shares
from proxy.telemetry.settings import DecisionSettings

MAX_BYTES = 64 << 20
"""Memory for the decisions that a process keeps."""


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
        for gone in list(self._recent.add(entry, self.settings.keep, MAX_BYTES / 2)):
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
        for _ in self._striking.add(entry, self.settings.keep, MAX_BYTES / 2):
            pass

    def _is_striking(self, entry: Entry) -> bool:
        if entry.asked or entry.failed or entry.refusal is not None:
            return True
        return entry.ended_at is not None and entry.is_slower_than(self.settings.slow, entry.ended_at)


log = logging.getLogger(__name__)

ASKS = "x-kvlane-explain"
YES = ("1", "true")

MayAsk = Callable[[InferenceRequest], bool]
"""Whether who sends it may know why."""

Pods = Callable[[], Sequence[Endpoint]]
"""All pods of a pool, ready or not."""


class Notes:
    """How decisions of one scheduling are made, one at a time."""

    def __init__(self, scheduling: Scheduling, pool: str, pods: Pods, clock: Clock) -> None:
        self._pool = pool
        self._pods = pods
        self._clock = clock
        self._shares = parts(scheduling)

    def entry(
        self,
        id: str,
        request: InferenceRequest,
        endpoints: Sequence[Endpoint],
        records: tuple[ProfileRecord, ...],
        outcome: Decision | RequestError,
        asked: bool = False,
    ) -> Entry:
        """In the tick of the decision, before anything of it is reserved."""
        hits, ttfts = predictions(request, endpoints)
        return Entry(
            id=id,
            request=request.id,
            at=self._clock.wall(),
            pool=self._pool,
            model=request.model,
            path=request.path,
            tenant=request.tenant,
            priority=request.priority,
            stream=request.stream,
            prompt_tokens=tokens_of(request),
            received_at=request.received_at,
            decided_at=self._clock.now(),
            queued_since=queued_since(request),
            asked=asked,
            candidates=tuple(endpoints),
            seen=situations(endpoints),
            hits=hits,
            ttfts=ttfts,
            absent=self._absent(request, endpoints),
            records=records,
            shares=self._shares,
            decision=None if isinstance(outcome, RequestError) else outcome,
            refusal=Refusal(outcome.type, outcome.message, outcome.reason)
            if isinstance(outcome, RequestError)
            else None,
            bytes=size(len(endpoints), records),
        )

    def _absent(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> tuple[Absent, ...]:
        pods = self._pods()
        if len(pods) == len(endpoints):
            return ()
        there = set(endpoints)
        return tuple(Absent(pod.name, _why_absent(pod, request.model)) for pod in pods if pod not in there)


class Explained(Listener):
    """Keeps how decisions were made. `notes` are by pool."""

    def __init__(self, notes: Mapping[str, Notes], kept: Kept, chosen: Chosen) -> None:
        self._notes = notes
        self._kept = kept
        self._chosen = chosen

    def wants(self, request: InferenceRequest) -> bool:
        """Return whether the decision about the request is to be recorded, because it is kept."""
        return (self._chosen.asks(request) or self._chosen.is_drawn()) and request.state.read(ENTRY) is None

    def decided(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        decision: Decision,
        started: float,
        record: DecisionRecord | None,
    ) -> None:
        self._keep(request, candidates, decision, record)

    def refused(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        error: RequestError,
        record: DecisionRecord | None,
    ) -> None:
        self._keep(request, candidates, error, record)

    def _keep(
        self,
        request: InferenceRequest,
        candidates: Sequence[Endpoint],
        outcome: Decision | RequestError,
        record: DecisionRecord | None,
    ) -> None:
        if record is not None and record.is_wanted:
            notes, asked = self._notes[candidates[0].pool], self._chosen.asks(request)
            entry = notes.entry(self._kept.next_id(), request, candidates, record.runs, outcome, asked)
            request.state.write(ENTRY, entry)
            self._kept.add(entry)


class Chosen:
    """Of which requests the decision is kept."""

    def __init__(self, random: Random, kept: Kept, may_ask: MayAsk) -> None:
        self._random = random
        self._kept = kept
        self._may_ask = may_ask

    def asks(self, request: InferenceRequest) -> bool:
        return ASKS in request.headers and request.headers[ASKS].lower() in YES and self._may_ask(request)

    def is_drawn(self) -> bool:
        return self._random.random() < self._kept.settings.sample


def parts(scheduling: Scheduling) -> dict[str, dict[str, tuple[float, float]]]:
    """(weight, part of the total) of scorers, by profile."""
    found = {}
    for profile in scheduling.effective.profiles:
        uses = [use for use in profile.uses if declares(scheduling.instances[use.ref], Scorer)]
        portions = shares([use.weight for use in uses])
        found[profile.name] = {use.ref: (use.weight, part) for use, part in zip(uses, portions, strict=True)}
    return found


def _why_absent(pod: Endpoint, model: str) -> str:
    if pod.state is not EndpointState.READY:
        return "asleep" if pod.metrics.sleep_level and pod.state is EndpointState.EJECTED else pod.state.value
    return "model" if pod.models and model and model not in pod.models else "narrowed"


MOST, FEW = 1000, 50

_NAMES = ("request", "pod", "tenant", "model", "pool", "outcome", "slow", "asked", "limit")


@dataclass(frozen=True, slots=True)
class Wanted:
    """`same` are values that the short form must have, `slow` is in seconds."""

    same: Mapping[str, str]
    pod: str
    slow: float | None
    asked: bool
    limit: int

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """Raises BadRequest."""
        for name in query:
            if name not in _NAMES:
                raise BadRequest(f"There is no filter '{name}'{suggestion(name, _NAMES)}.", param=name)
        return cls(
            {name: query[name] for name in ("request", "tenant", "model", "pool", "outcome") if name in query},
            query.get("pod", ""),
            _seconds(query["slow"]) if "slow" in query else None,
            query.get("asked", "") in ("1", "true"),
            _limit(query.get("limit", str(FEW))),
        )

    def among(self, kept: Kept, now: float) -> list[dict[str, Any]]:
        """The newest first, in short."""
        found: list[dict[str, Any]] = []
        for entry in kept:
            if len(found) == self.limit:
                break
            if self._takes(entry, now):
                found.append(short(entry))
        return found

    def _takes(self, entry: Entry, now: float) -> bool:
        if self.asked and not entry.asked:
            return False
        if self.slow is not None and (entry.refusal is not None or not entry.is_slower_than(self.slow, now)):
            return False
        if self.pod and self.pod not in _pods_of(entry):
            return False
        return all(_FIELDS[name](entry) == value for name, value in self.same.items())


def _pods_of(entry: Entry) -> set[str]:
    """That had to do with it."""
    asked = {leg.endpoint.name for leg in entry.legs}
    return asked if entry.decision is None else {entry.decision.target.name, *asked}


_FIELDS: Mapping[str, Callable[[Entry], str]] = {
    "request": lambda entry: entry.request,
    "tenant": lambda entry: entry.tenant,
    "model": lambda entry: entry.model,
    "pool": lambda entry: entry.pool,
    "outcome": outcome,
}


def _seconds(text: str) -> float:
    """A duration, or a number of seconds. Raises BadRequest."""
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text)
    except ValueError as error:
        raise BadRequest(f"slow: {error}", param="slow") from None


def _limit(text: str) -> int:
    """Raises BadRequest."""
    if not text.isdecimal() or not 0 < int(text) <= MOST:
        raise BadRequest(f"limit must be a whole number from 1 to {MOST}.", param="limit")
    return int(text)


OFF: Mapping[str, Any] = {
    "on": False,
    "hint": "Decisions are not kept. To keep them: `telemetry: {decisions: {}}` in the configuration, and a reload.",
    "decisions": [],
}


class Explaining:
    """`kept` is None while decisions are not kept: then nothing of this is on the way of a request."""

    def __init__(self, endpoints: Pods, clock: Clock, rng: Random, may_ask: MayAsk, prefix: str = "") -> None:
        """`prefix`: see `Kept`."""
        self.kept: Kept | None = None
        self._endpoints = endpoints
        self._clock = clock
        self._random = rng
        self._may_ask = may_ask
        self._prefix = prefix

    def listener(self, schedulings: Mapping[str, Scheduling], kept: Kept) -> Explained:
        """Return what keeps the decisions of these, by pool."""
        alone = len(schedulings) == 1
        notes = {name: self.notes(scheduling, name, alone) for name, scheduling in schedulings.items()}
        return Explained(notes, kept, Chosen(self._random, kept, self._may_ask))

    def notes(self, scheduling: Scheduling, pool: str, alone: bool) -> Notes:
        """`alone`: there is no other pool."""
        return Notes(scheduling, pool, self._pods(pool, alone), self._clock)

    def listed(self, query: Mapping[str, str]) -> Mapping[str, Any]:
        """Raises BadRequest."""
        wanted, kept = Wanted.of(query), self.kept
        if kept is None:
            return OFF
        settings = kept.settings
        return {
            "on": True,
            "keep": settings.keep,
            "sample": settings.sample,
            "slow": settings.slow,
            "kept": len(kept),
            "bytes": kept.bytes,
            "seen": kept.seen,
            "decisions": wanted.among(kept, self._clock.now()),
        }

    def shown(self, name: str) -> Mapping[str, Any]:
        """By its id, or by that of the request. Raises NotFound."""
        if self.kept is None:
            raise NotFound(OFF["hint"])
        entry = self.kept.find(name)
        if entry is None:
            raise NotFound(f"No decision '{name}' is kept: it has gone, was not sampled, or never came to be.")
        return whole(entry)

    def make_kept(self, settings: DecisionSettings) -> Kept:
        return Kept(settings, self._clock, self._prefix)

    def _pods(self, pool: str, alone: bool) -> Callable[[], Sequence[Endpoint]]:
        if alone:
            return self._endpoints
        return lambda: [endpoint for endpoint in self._endpoints() if endpoint.pool == pool]
