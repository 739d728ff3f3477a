"""A pod as the scheduler sees it: identity, last scrape, and the load this proxy has put on it since."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

ROLE_LABEL = "llm-d.ai/role"


class EndpointState(Enum):
    """starting -> ready <-> ejected; draining from any of them, for good unless it is undone."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"


class Freshness(Enum):
    FRESH = "fresh"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape of a pod, swapped whole. `kv_usage` is a share in [0, 1], `blocks` the pod's KV capacity in engine
    blocks of `block_size` tokens (0: unknown), `scraped_at` monotonic seconds of the moment the scrape was sent."""

    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    active_models: frozenset[str] = frozenset()
    waiting_models: frozenset[str] = frozenset()
    max_active_models: int = 0
    block_size: int = 0
    blocks: int = 0
    prefix_queries: float = 0.0
    prefix_hits: float = 0.0
    process_started: float = 0.0
    attributes: Mapping[str, float] = field(default_factory=dict)
    scraped_at: float = -math.inf
    freshness: Freshness = Freshness.STALE


NEVER_SCRAPED = Metrics()


@dataclass(slots=True)
class Load:
    """What is in flight on one pod, by this process and its siblings; `fleet.ledger` is its only writer.

    `tokens` are uncached prompt tokens whose prefill has not answered yet. `recent` is the log of the pod's work per
    unit of weight, decayed exponentially: only comparisons mean something, the least loaded pod has the least.
    `remote_requests` and `remote_tokens` are the siblings' part of `requests` and `tokens`.
    """

    requests: int = 0
    tokens: int = 0
    dispatched: int = 0
    finished: int = 0
    recent: float = -math.inf
    remote_requests: int = 0
    remote_tokens: int = 0


class LoadView(NamedTuple):
    """The scrape, shifted by what this proxy dispatched and finished since: what scorers read."""

    waiting: int
    running: int
    kv_usage: float


@dataclass(slots=True, eq=False)
class Endpoint:
    """One pod, from discovery to removal. Identity is the object; a pod that comes back is a new one."""

    name: str
    url: str = ""
    role: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    engine: str = "vllm"
    api_key: str | None = None
    """Sent to the pod as its bearer token, in place of the client's."""
    models: frozenset[str] | None = None
    """The models it serves; None while the pod has not said, and for pods that cannot say: they serve any."""
    state: EndpointState = EndpointState.STARTING
    metrics: Metrics = NEVER_SCRAPED
    load: Load = field(default_factory=Load)
    _dispatched_at_scrape: int = 0
    _finished_at_scrape: int = 0
    _viewed_at: int | None = None
    _view: LoadView = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.role = self.role or self.labels.get(ROLE_LABEL, "")
        if self.role and ROLE_LABEL not in self.labels:
            self.labels = {**self.labels, ROLE_LABEL: self.role}

    def publish(self, metrics: Metrics, dispatched: int, finished: int) -> None:
        """Swap in a scrape; the two counters are the load's, read when the scrape was sent."""
        self.metrics = metrics
        self._dispatched_at_scrape = dispatched
        self._finished_at_scrape = finished
        self._viewed_at = None

    @property
    def in_flight_at_scrape(self) -> int:
        """Requests that were on the pod, as far as is known here, when the last scrape was sent."""
        return self._dispatched_at_scrape - self._finished_at_scrape

    @property
    def view(self) -> LoadView:
        """Read by most scorers for every pod of every request, so it is kept while nothing changes: 0.2 us, not 0.6."""
        load = self.load
        if self.metrics.freshness is Freshness.STALE:
            return LoadView(0, load.requests, self.metrics.kv_usage)
        in_flight = load.dispatched - load.finished
        if in_flight != self._viewed_at:
            self._viewed_at = in_flight
            self._view = self._shifted(in_flight - self.in_flight_at_scrape)
        return self._view

    def _shifted(self, shift: int) -> LoadView:
        """To running while nothing waits, else to waiting."""
        waiting, running = self.metrics.waiting, self.metrics.running
        if waiting:
            waiting += shift
            if waiting < 0:
                waiting, running = 0, running + waiting
        else:
            running += shift
        return LoadView(waiting, running if running > 0 else 0, self.metrics.kv_usage)

    def __repr__(self) -> str:
        return f"<Endpoint {self.name} {self.state.value}>"
