"""The listener that keeps how decisions were made."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import RequestError
from proxy.core.listener import Listener
from proxy.core.plugin import Scorer
from proxy.core.ports import Clock, Random
from proxy.core.record import DecisionRecord, ProfileRecord
from proxy.core.request import InferenceRequest
from proxy.explain.entry import (
    ENTRY,
    Absent,
    Entry,
    Refusal,
    predictions,
    queued_since,
    situations,
    size,
    tokens_of,
)
from proxy.explain.kept import Kept
from proxy.scheduling.build import Scheduling
from proxy.scheduling.dependencies import declares
from proxy.scheduling.profile import shares

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
