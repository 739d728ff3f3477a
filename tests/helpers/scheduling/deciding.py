"""Decisions that are kept, without a proxy around them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.decision import Decision, DecisionSampler
from proxy.core.endpoint import Endpoint
from proxy.core.errors import RequestError
from proxy.core.ports import ManualClock
from proxy.core.request import InferenceRequest
from proxy.scheduling.build import Scheduling
from proxy.scheduling.explained_decision import ENTRY, DecisionEntry, EntryBuilder
from proxy.scheduling.explained_log import DecisionLog, Explained
from proxy.telemetry.settings import DecisionSettings
from tests.helpers.scheduling.situations import pod, scheduling

SCORED: dict[str, Any] = {
    "plugins": [{"type": "queue-scorer"}, {"type": "kv-cache-utilization-scorer"}, {"type": "decode-filter"}],
    "schedulingProfiles": [
        {
            "name": "default",
            "plugins": [
                {"pluginRef": "decode-filter"},
                {"pluginRef": "queue-scorer", "weight": 3},
                {"pluginRef": "kv-cache-utilization-scorer"},
            ],
        }
    ],
}


@dataclass(frozen=True, slots=True)
class Call:
    id: str


@dataclass
class World:
    """`pods` are all pods of the pool; candidates may be fewer."""

    pods: Sequence[Endpoint]
    settings: DecisionSettings = field(default_factory=DecisionSettings)
    document: Any = field(default_factory=lambda: SCORED)
    may_ask: bool = True
    clock: ManualClock = field(default_factory=lambda: ManualClock(now=100.0))
    log: DecisionLog = field(init=False)
    scheduling: Scheduling = field(init=False)

    def __post_init__(self) -> None:
        self.scheduling = plain = scheduling(self.document)
        self.log = DecisionLog(self.settings, self.clock)
        builder = EntryBuilder(plain, "default", lambda: self.pods, self.clock)
        self.explained = Explained({"default": builder}, self.log, random.Random(1), lambda request: self.may_ask)
        self.sampler = DecisionSampler(wants=self.explained.wants)

    def request(self, name: str = "r", **headers: str) -> InferenceRequest:
        named = {key.replace("_", "-"): value for key, value in headers.items()}
        return InferenceRequest(name, "/v1/completions", "m", headers=named, received_at=self.clock.now())

    def decide(self, request: InferenceRequest, candidates: Sequence[Endpoint] | None = None) -> Decision:
        """Decide as the gateway does."""
        pods = self.pods if candidates is None else candidates
        record = self.sampler.record(request, next(self.sampler.timed))
        try:
            decision = self.scheduling.scheduler.schedule(request, pods, record)
        except RequestError as error:
            self.explained.not_scheduled(request, pods, error, record)
            raise
        self.explained.decided(request, pods, decision, self.clock.now(), record)
        return decision

    def respond(
        self,
        request: InferenceRequest,
        decision: Decision,
        after: float = 0.1,
        ending: Ending = Ending.COMPLETE,
        number: int = 0,
    ) -> Attempt:
        """Run an attempt on the chosen pod."""
        attempt = Attempt(request, decision, decision.candidates()[number], number, self.clock.now())
        self.explained.attempt_started(attempt)
        self.clock.advance(after)
        if ending is Ending.COMPLETE:
            attempt.first_byte_at = attempt.last_byte_at = self.clock.now()
            attempt.status, attempt.usage = 200, Usage(10, 2, 4)
        attempt.ending = ending
        self.explained.attempt_ended(attempt, None)
        return attempt

    def end(self, attempt: Attempt | None, name: str = "r", status: int = 200, outcome: Any = Ending.COMPLETE) -> None:
        self.explained.request_ended(Call(name), status, outcome, attempt, 0)  # type: ignore[arg-type]

    def served(self, name: str, after: float = 0.1, **headers: str) -> DecisionEntry | None:
        """Serve a whole request. Return its recorded decision, if any."""
        request = self.request(name, **headers)
        self.end(self.respond(request, self.decide(request), after), name)
        return request.state.read(ENTRY)


def fleet(number: int = 3) -> list[Endpoint]:
    return [pod(f"pod-{at}", waiting=at, kv_usage=at / 10) for at in range(number)]
