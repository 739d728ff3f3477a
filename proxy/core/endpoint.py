"""A pod as the scheduler sees it: identity, last scrape, and the load this proxy has put on it since."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple

from proxy.core.params import param


@dataclass(frozen=True, slots=True)
class PodTls:
    """TLS to pods with `https` URLs. Files are PEM and are read again when they change."""

    ca: str | None = param(
        None, "file of the certificate authorities that may sign the certificates of pods; default: those of the system"
    )
    cert: str | None = param(None, "file of the client certificate that kvlane presents to pods")
    key: str | None = param(None, "file of the private key; default: the key in the certificate file")
    server_name: str | None = param(
        None, "host name that the certificate of the pod must have; default: the host of its URL"
    )
    insecure_skip_verify: bool = param(
        False, "accept any certificate. Anyone on the network path can then read and change the traffic"
    )

    def __post_init__(self) -> None:
        """Raises ValueError for what contradicts itself."""
        if self.key and not self.cert:
            raise ValueError("key is of no use without cert")
        if self.insecure_skip_verify and self.ca:
            raise ValueError("insecureSkipVerify trusts everybody, so ca has no effect; take one of them out")


ROLE_LABEL = "llm-d.ai/role"

SIZE_LABEL = "kvlane/data-parallel-size"
"""How many data-parallel ranks a pod has behind its port."""

RANK_LABEL = "kvlane/data-parallel-rank"
"""The rank that a pod is, where each rank has a port of its own."""

DEFAULT_POOL = "default"
"""The pool whose pods stand in no other one."""

LIGHT_SLEEP = 1
"""The level that ends when a pod is told so: its weights are still in memory."""


class EndpointState(Enum):
    """starting -> ready <-> ejected; draining from any of them, for good unless it is undone. Gone is the end: the
    endpoint has left the fleet; attempts may still be in flight on it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"
    GONE = "gone"


GONE = EndpointState.GONE
"""Read after each attempt: a member of an enumeration takes three times as long to be found."""


class Freshness(Enum):
    FRESH = "fresh"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape of a pod, swapped whole. `kv_usage` is a share in [0, 1], `blocks` the pod's KV capacity in engine
    blocks of `block_size` tokens (0: unknown), `prompt_tokens` and `generation_tokens` the tokens of all prompts and
    answers since the engine started (-1: unknown), `sleep_level` 0 while it is awake, 1 asleep, 2 asleep without its
    weights, `scraped_at` monotonic seconds of the moment the scrape was sent."""

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
    prompt_tokens: float = -1.0
    generation_tokens: float = -1.0
    sleep_level: int = 0
    attributes: Mapping[str, float] = field(default_factory=dict)
    scraped_at: float = -math.inf
    freshness: Freshness = Freshness.STALE

    def __post_init__(self) -> None:
        object.__setattr__(self, "attributes", MappingProxyType(self.attributes))

    @property
    def progress(self) -> float:
        """Tokens of prompts and answers together: as long as the engine works, they grow. -1 if neither is known."""
        if self.prompt_tokens < 0 and self.generation_tokens < 0:
            return -1.0
        return max(self.prompt_tokens, 0.0) + max(self.generation_tokens, 0.0)


NEVER_SCRAPED = Metrics()


@dataclass(frozen=True)
class Load:
    """What is in flight on one pod, by this process and its siblings. Plugins cannot assign to it: `Endpoint.charge`
    and `fleet.ledger` write to its dictionary. With slots, which only their setters can write then, a request of 1 KB
    takes 0.9 % more instructions (`python bench/instructions.py --still`).

    `requests` changes by `Endpoint.charge` alone, so that the view follows; `crowding` are they per unit of the pod's
    weight. `tokens` are uncached prompt tokens whose prefill has not answered yet. `recent` is the log of the pod's
    work per unit of weight, decayed exponentially: only comparisons mean something, the least loaded pod has the
    least. `remote_requests` and `remote_tokens` are the siblings' part of `requests` and `tokens`.
    """

    requests: int = 0
    crowding: float = 0.0
    tokens: int = 0
    recent: float = -math.inf
    remote_requests: int = 0
    remote_tokens: int = 0


class LoadView(NamedTuple):
    """The scrape, shifted by what this proxy dispatched and finished since: what scorers read."""

    waiting: int
    running: int
    kv_usage: float


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """A pod, or one data-parallel rank of a pod, from discovery to removal. Identity is the object; a pod that comes
    back is a new one.

    Ranks of a pod share its URL, state and settings. Metrics, load and all that is learned belong to the rank. What
    belongs to the pod as a whole, such as its breaker, is kept under `lead`.

    Plugins cannot assign to it: it changes by `update`, `publish` and `charge`, which belong to the fleet.
    """

    name: str
    url: str = ""
    pool: str = DEFAULT_POOL
    """Never another one: a pod that is put into another pool is a new endpoint."""
    role: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    engine: str = "vllm"
    api_key: str | None = None
    """Sent to the pod as its bearer token, in place of the client's."""
    tls: PodTls | None = None
    """How its `https` URL is spoken to; None: as all pods are."""
    models: frozenset[str] | None = None
    """The models it serves; None while the pod has not said, and for pods that cannot say: they serve any."""
    adapters: frozenset[str] = frozenset()
    """Those of them that are LoRA adapters of another."""
    state: EndpointState = EndpointState.STARTING
    metrics: Metrics = NEVER_SCRAPED
    load: Load = field(default_factory=Load)
    rank: int | None = None
    """The data-parallel rank that requests name to the pod; None where the pod is one endpoint."""
    lead: Endpoint = field(init=False, repr=False)
    """The first rank of the pod; the endpoint itself where the pod is one endpoint."""
    ranks: tuple[Endpoint, ...] = field(init=False, repr=False)
    """All ranks of the pod, in their order."""
    in_flight_at_scrape: int = field(init=False, repr=False)
    """Requests that were on the pod, as far as is known here, when the last scrape was sent."""
    ledger: dict[str, Any] = field(init=False, repr=False)
    """The dictionary of `load`, which `charge` and `fleet.ledger` write to."""
    _scraped: tuple[int, int, float] = field(init=False, repr=False)
    _views: dict[int, LoadView] = field(init=False, repr=False)
    """By requests in flight, since this scrape: so a view that comes again is the same object, and costs a look-up."""
    view: LoadView = field(init=False, repr=False)
    """Read by scorers for every pod of every request, so it is made where `metrics` and `load.requests` change."""
    is_watched: bool = field(init=False, repr=False, default=False)
    """Requests failed there of late: `reliability.breaker`, which sets it, wants to know of every one."""

    def __post_init__(self) -> None:
        """A pod that is made with metrics and load counts as scraped under this load."""
        role = self.role or self.labels.get(ROLE_LABEL, "")
        labels = {ROLE_LABEL: role, **self.labels} if role else self.labels
        update(self, role=role, labels=labels, lead=self, ranks=(self,), ledger=vars(self.load))
        self.publish(self.metrics, self.load.requests)

    @property
    def pod_name(self) -> str:
        """The name of the pod; the endpoint's own unless it is a rank."""
        return self.name if self.rank is None else self.name.rpartition("/")[0]

    @property
    def replica_name(self) -> str:
        """The name of the pod that the platform runs: without the suffix of a rank that has a port of its own."""
        return self.pod_name.removesuffix(f"-rank-{self.labels.get(RANK_LABEL)}")

    def publish(self, metrics: Metrics, in_flight: int) -> None:
        """Swap in a scrape; `in_flight` are the load's requests, read when the scrape was sent. Of a stale one nothing
        counts but the KV usage: what is in flight is all that is known to run."""
        if metrics.freshness is Freshness.STALE:
            in_flight, scraped = 0, (0, 0, metrics.kv_usage)
        else:
            scraped = (metrics.waiting, metrics.running, metrics.kv_usage)
        update(self, metrics=metrics, in_flight_at_scrape=in_flight, _scraped=scraped, _views={})
        self.charge(0, 0)

    def charge(self, requests: int, tokens: int) -> None:
        """So many more, or less, are in flight; since the scrape they count as running while nothing waits, else as
        waiting."""
        load = self.ledger
        load["requests"] = in_flight = load["requests"] + requests
        load["crowding"] = in_flight / self.weight if in_flight else 0.0
        load["tokens"] += tokens
        _set_view(self, self._views.get(in_flight) or self._shifted(in_flight))

    def _shifted(self, in_flight: int) -> LoadView:
        waiting, running, kv_usage = self._scraped
        if not waiting:
            running += in_flight - self.in_flight_at_scrape
        else:
            waiting += in_flight - self.in_flight_at_scrape
            if waiting < 0:
                waiting, running = 0, running + waiting
        view = self._views[in_flight] = LoadView(waiting, max(0, running), kv_usage)
        return view

    def __repr__(self) -> str:
        return f"<Endpoint {self.name} {self.state.value}>"


def join_ranks(ranks: Sequence[Endpoint]) -> None:
    """Make the endpoints the ranks of one pod. For the fleet."""
    for endpoint in ranks:
        update(endpoint, lead=ranks[0], ranks=tuple(ranks))


def update(target: Endpoint | Load, **changes: Any) -> None:
    """Assign to fields. For the fleet and what belongs to it: plugins change nothing."""
    for name, value in changes.items():
        object.__setattr__(target, name, MappingProxyType(dict(value)) if name == "labels" else value)


_set_view: Callable[[Endpoint, LoadView], None] = vars(Endpoint)["view"].__set__
"""Half as many instructions as `object.__setattr__`."""
