"""A pod as the scheduler sees it: identity, last scrape, and the requests in flight."""

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
        None,
        "file of the certificate authorities that may sign the certificates of pods; default: those the system knows",
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
        """Raise ValueError for a contradiction."""
        if self.key and not self.cert:
            raise ValueError("key is of no use without cert")
        if self.insecure_skip_verify and self.ca:
            raise ValueError("insecureSkipVerify trusts everybody, so ca has no effect; take one of them out")


ROLE_LABEL = "llm-d.ai/role"

PREFILLING = frozenset({"prefill", "encode-prefill", "prefill-decode", "both", "encode-prefill-decode"})
DECODING = frozenset({"", "decode", "prefill-decode", "both", "encode-prefill-decode"})
"""The roles of prefill pods, and of decode pods."""

SIZE_LABEL = "kvlane/data-parallel-size"
"""Label with the number of data-parallel ranks behind the port of the pod."""

RANK_LABEL = "kvlane/data-parallel-rank"
"""Label with the rank of a pod, if each rank has a port of its own."""

DEFAULT_POOL = "default"
"""The pool of the top level of the configuration."""

LIGHT_SLEEP = 1
"""The sleep level from which a pod can be woken; its weights are still in memory."""


class EndpointState(Enum):
    """starting -> ready <-> ejected; draining from any of these until undone. Gone is final: the endpoint has left the
    fleet, though attempts may still be in flight on it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    EJECTED = "ejected"
    GONE = "gone"


GONE = EndpointState.GONE
"""Read after each attempt. Reading the enum member takes three times as long."""


class Freshness(Enum):
    FRESH = "fresh"
    STALE = "stale"


@dataclass(frozen=True, slots=True)
class Metrics:
    """One scrape of a pod; replaced as a whole. `kv_usage` is a share in [0, 1], `blocks` the KV capacity in blocks of
    `block_size` tokens (0: unknown), `prompt_tokens` and `generation_tokens` the tokens of all prompts and responses
    since the engine started (-1: unknown), `sleep_level` 0 while awake, 1 asleep, 2 asleep without weights,
    `scraped_at` the monotonic seconds at which the scrape was sent. `active_models` and `waiting_models` are the LoRA
    adapters that running and waiting requests use, `max_active_models` is the number of adapters that fit (0:
    unknown)."""

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
    def cached_tokens(self) -> float:
        return self.kv_usage * self.blocks * self.block_size

    @property
    def progress(self) -> float:
        """Tokens of prompts and responses together, which grow while the engine works; -1 if unknown."""
        if self.prompt_tokens < 0 and self.generation_tokens < 0:
            return -1.0
        return max(self.prompt_tokens, 0.0) + max(self.generation_tokens, 0.0)


NEVER_SCRAPED = Metrics()


@dataclass(frozen=True)
class Load:
    """The load on one pod by this process and its peers. Plugins cannot assign to it: `Endpoint.charge` and
    `fleet.ledger` write to its dictionary. (With slots a request of 1 KB takes 0.9 % more instructions, by `python
    bench/instructions.py --still`.)

    `requests` changes by `Endpoint.charge` alone, which updates the view; `crowding` is requests per unit of the pod's
    weight. `tokens` are uncached prompt tokens whose prefill has not finished, and, if a producer estimates them, the
    expected output tokens of the requests. `recent` is the logarithm of the pod's recent work per unit of weight,
    decayed exponentially; use it only to compare pods. `remote_requests` and `remote_tokens` are the parts of the
    peers.
    """

    requests: int = 0
    crowding: float = 0.0
    tokens: int = 0
    recent: float = -math.inf
    remote_requests: int = 0
    remote_tokens: int = 0


class LoadView(NamedTuple):
    """The last scrape, corrected by the requests that this process and its peers sent and finished since. Scorers
    read it."""

    waiting: int
    running: int
    kv_usage: float


@dataclass(frozen=True, slots=True, eq=False)
class Endpoint:
    """A pod, or one data-parallel rank of a pod, from discovery to removal. Identity is the object; a pod that returns
    is a new one.

    Ranks of a pod share its URL, state and settings. Metrics, load and learnt values belong to the rank. What belongs
    to the whole pod, such as its breaker, is kept under `first_rank`. Plugins cannot assign to an endpoint: only the
    fleet changes it, by `update`, `publish` and `charge`.
    """

    name: str
    url: str = ""
    pool: str = DEFAULT_POOL
    """Constant: a pod that moves to another pool is a new endpoint."""
    role: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    weight: float = 1.0
    engine: str = "vllm"
    api_key: str | None = None
    """Bearer token for the pod, sent instead of the client's."""
    tls: PodTls | None = None
    """TLS settings for its `https` URL; None: the settings for all pods."""
    models: frozenset[str] | None = None
    """The models it serves; None while unknown, and for pods that cannot list them: they serve any model."""
    adapters: frozenset[str] = frozenset()
    """The LoRA adapters among `models`."""
    state: EndpointState = EndpointState.STARTING
    metrics: Metrics = NEVER_SCRAPED
    load: Load = field(default_factory=Load)
    rank: int | None = None
    """The data-parallel rank, which requests to the pod name; None if the pod is one endpoint."""
    first_rank: Endpoint = field(init=False, repr=False)
    """The first rank of the pod; the endpoint itself if the pod is one endpoint."""
    ranks: tuple[Endpoint, ...] = field(init=False, repr=False)
    """All ranks of the pod, in order."""
    in_flight_at_scrape: int = field(init=False, repr=False)
    """Requests in flight when the last scrape was sent, as far as this process knows."""
    load_fields: dict[str, Any] = field(init=False, repr=False)
    """The dictionary of `load`, which `charge` and `fleet.ledger` write to."""
    _scraped: tuple[int, int, float] = field(init=False, repr=False)
    _views: dict[int, LoadView] = field(init=False, repr=False)
    """Views since this scrape by requests in flight, so that a repeated view costs one look-up."""
    view: LoadView = field(init=False, repr=False)
    """Read by scorers for every pod of every request, so it is computed where `metrics` and `load.requests` change."""
    is_watched: bool = field(init=False, repr=False, default=False)
    """Whether requests failed on it recently. Set by `reliability.breaker`, which then observes every request."""

    def __post_init__(self) -> None:
        """A pod that is created with metrics and load counts as scraped under this load."""
        role = self.role or self.labels.get(ROLE_LABEL, "")
        labels = {ROLE_LABEL: role, **self.labels} if role else self.labels
        update(self, role=role, labels=labels, first_rank=self, ranks=(self,), load_fields=vars(self.load))
        self.publish(self.metrics, self.load.requests)

    @property
    def pod_name(self) -> str:
        """The name of the pod; the endpoint's own name unless it is a rank."""
        return self.name if self.rank is None else self.name.rpartition("/")[0]

    @property
    def replica_name(self) -> str:
        """The name of the pod on the platform: without the suffix of a rank that has a port of its own."""
        return self.pod_name.removesuffix(f"-rank-{self.labels.get(RANK_LABEL)}")

    def publish(self, metrics: Metrics, in_flight: int) -> None:
        """Replace the metrics; `in_flight` are the requests of the load when the scrape was sent. Of stale metrics only
        the KV usage counts: the requests in flight are all that is known to run."""
        if metrics.freshness is Freshness.STALE:
            in_flight, scraped = 0, (0, 0, metrics.kv_usage)
        else:
            scraped = (metrics.waiting, metrics.running, metrics.kv_usage)
        update(self, metrics=metrics, in_flight_at_scrape=in_flight, _scraped=scraped, _views={})
        self.charge(0, 0)

    def charge(self, requests: int, tokens: int) -> None:
        """Change the number of requests in flight. New ones count as running while none waits, else as waiting."""
        load = self.load_fields
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
        update(endpoint, first_rank=ranks[0], ranks=tuple(ranks))


def update(target: Endpoint | Load, **changes: Any) -> None:
    """Assign to fields. For the fleet and its parts; plugins cannot change endpoints."""
    for name, value in changes.items():
        object.__setattr__(target, name, MappingProxyType(dict(value)) if name == "labels" else value)


_set_view: Callable[[Endpoint, LoadView], None] = vars(Endpoint)["view"].__set__
"""Takes half as many instructions as `object.__setattr__`."""
