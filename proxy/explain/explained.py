"""A scheduler that keeps how it came to its decisions, and the hooks that see what came of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from proxy.core.decision import Decision
from proxy.core.endpoint import Endpoint, EndpointState
from proxy.core.errors import RequestError
from proxy.core.plugin import Scorer
from proxy.core.ports import Clock, Random
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
from proxy.scheduling.recorder import ProfileRecord, Recorder
from proxy.scheduling.scheduler import OnShadow, Scheduler, Schedules

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


class Explained:
    """Stands in the place of a scheduling's scheduler. What goes wrong here costs an entry, and never a request."""

    def __init__(
        self, plain: Schedules, recorded: Scheduler, recorder: Recorder, notes: Notes, kept: Kept, chosen: Chosen
    ) -> None:
        self._plain = plain
        self._recorded = recorded
        self._recorder = recorder
        self._notes = notes
        self._kept = kept
        self._chosen = chosen
        self._has_failed = False

    def schedule(self, request: InferenceRequest, endpoints: Sequence[Endpoint], attempt: int = 0) -> Decision:
        """Raises RequestError."""
        asked = self._chosen.asks(request)
        if not (asked or self._chosen.is_drawn()) or request.state.read(ENTRY) is not None:
            return self._plain.schedule(request, endpoints, attempt)
        self._recorder.taken()
        try:
            decision = self._recorded.schedule(request, endpoints, attempt)
        except RequestError as error:
            self._keep(request, endpoints, error, asked)
            raise
        self._keep(request, endpoints, decision, asked)
        return decision

    def _keep(
        self, request: InferenceRequest, endpoints: Sequence[Endpoint], outcome: Decision | RequestError, asked: bool
    ) -> None:
        try:
            records = self._recorder.taken()
            entry = self._notes.entry(self._kept.next_id(), request, endpoints, records, outcome, asked)
            request.state.write(ENTRY, entry)
            self._kept.add(entry)
        except Exception:
            if not self._has_failed:
                log.exception("request %s: its decision is not kept; further ones are not named", request.id)
            self._has_failed = True


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


def explained(
    scheduling: Scheduling, notes: Notes, kept: Kept, chosen: Chosen, on_shadow: OnShadow | None
) -> Scheduling:
    """The same, but that it keeps how it came to its decisions."""
    recorder = Recorder()
    recorded = scheduling.made(recorder.wrap, on_shadow)
    return replace(scheduling, scheduler=Explained(scheduling.scheduler, recorded, recorder, notes, kept, chosen))


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
