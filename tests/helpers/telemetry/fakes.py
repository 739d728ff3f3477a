"""A small world to observe: pods, requests and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from prometheus_client.parser import text_string_to_metric_families

from proxy.core.attempt import Attempt, Ending, Usage
from proxy.core.decision import Decision
from proxy.core.endpoint import DEFAULT_POOL, Endpoint, EndpointState, Freshness, Metrics
from proxy.core.ports import Identity, ManualClock
from proxy.core.request import InferenceRequest, Prompt
from proxy.fleet.store import Fleet
from proxy.prefix.index import PrefixIndex
from proxy.telemetry.access_log import AccessLog
from proxy.telemetry.endpoints import EndpointSeries
from proxy.telemetry.metrics import Catalogue
from proxy.telemetry.observation import Exposition
from proxy.telemetry.observer import Observer


@dataclass
class FakeFleet:
    endpoints: list[Endpoint] = field(default_factory=list)
    pools: tuple[str, ...] = (DEFAULT_POOL,)

    def ejection_reasons(self, endpoint: Endpoint) -> list[str]:
        return []

    def add(self, name: str, pool: str = DEFAULT_POOL, **fields: object) -> Endpoint:
        endpoint = Endpoint(name, pool=pool, state=EndpointState.READY)
        endpoint.publish(Metrics(scraped_at=0.0, freshness=Freshness.FRESH, **fields), 0)  # type: ignore[arg-type]
        self.endpoints.append(endpoint)
        return endpoint


@dataclass
class FakeIndex:
    pairs: int = 0
    bytes: int = 0
    error: float = 0.0

    def prediction_error(self, endpoint: Endpoint) -> float:
        return self.error


@dataclass
class FakeClientRequest:
    path: str = "/v1/chat/completions"
    id: str = "req-1"
    method: str = "POST"
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b"{}"
    received_at: float = 0.0
    identity: Identity | None = None
    upload: object | None = None
    refusal: str = ""
    model: str = ""


class World:
    """The telemetry of a process, built as the composition root does it."""

    def __init__(self, access_log: AccessLog | None = None, limit: int = 1000) -> None:
        self.clock = ManualClock()
        self.catalogue = Catalogue("1.2.3")
        self.fleet = FakeFleet()
        self.index = FakeIndex()
        indexes = [cast(PrefixIndex, self.index)]
        self.series = EndpointSeries(self.catalogue, cast(Fleet, self.fleet), self.clock, limit)
        self.series.indexes = indexes
        self.observer = Observer(self.catalogue, self.series, self.clock, access_log, limit)
        self.exposition = Exposition(self.catalogue, self.series, self.observer)

    def scrape(self) -> Seen:
        body, _ = asyncio.run(self.exposition.render(""))
        return Seen(body.decode())

    def request(self, attempt: Attempt) -> None:
        """Report all events of a request with one attempt."""
        self.decided(attempt)
        self.observer.first_byte(attempt)
        self.observer.attempt_ended(attempt)
        assert attempt.ending is not None
        self.observer.request_ended(FakeClientRequest(), attempt.status or 502, attempt.ending, attempt, 0)

    def decided(self, attempt: Attempt) -> None:
        """The decision took 20 microseconds."""
        self.observer.decided(attempt.request, (), attempt.decision, self.clock.now() - 2e-5)

    def attempt_of(self, endpoint: Endpoint, model: str = "sim", number: int = 0, stream: bool = True) -> Attempt:
        """An attempt with a complete response: first byte after 0.3 s, eleven tokens in one more second."""
        request = InferenceRequest("req-1", "/v1/chat/completions", model, Prompt((b"x" * 400,)), stream=stream)
        attempt = Attempt(request, Decision(endpoint), endpoint, number, 0.0)
        attempt.status, attempt.ending = 200, Ending.COMPLETE
        attempt.first_byte_at, attempt.last_byte_at = 0.3, 1.3
        attempt.chunks, attempt.response_bytes = 21, 5000
        attempt.usage = Usage(100, 11, 64)
        return attempt


class Seen:
    def __init__(self, text: str) -> None:
        self.text = text
        self.families = {family.name: family for family in text_string_to_metric_families(text)}

    def __getitem__(self, name: str) -> dict[tuple[str, ...], float]:
        """Label values (in the order of the label names) -> value, of one sample name."""
        return {
            tuple(value for _, value in sorted(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
            if sample.name == name
        }
