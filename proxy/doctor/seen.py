"""What was seen of one pod; None is what was not tried, or what nobody could tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from proxy.core.endpoint import Metrics

CACHE = "cache_info"
"""Of the parts of a dialect: the size and number of KV blocks."""


@dataclass(frozen=True, slots=True)
class Exposition:
    """`engine` is that of the dialect with the most names in it, `missing` are the parts of the dialect that it lacks,
    `old` the names that newer releases of the engine do not have any more."""

    engine: str
    metrics: Metrics
    size: int
    seconds: float
    missing: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    """Of the series that describes the cache."""
    connector: str = ""
    """That its series are of, as kvlane calls it; empty if they are of none."""


@dataclass(frozen=True, slots=True)
class Caching:
    """A prompt that nobody sent before was sent twice."""

    refused: str = ""
    """Why the pod did not answer; then the rest says nothing."""
    told: int | None = None
    """Cached tokens in the answer to the second; None if it does not say."""
    counted: float = 0.0
    """Tokens by which the pod's own counter of hits grew."""
    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Events:
    """Where KV events are published; `speaks` if somebody there speaks ZMTP."""

    host: str
    port: int
    speaks: bool
    announced: bool = False
    """By /kv_event_sources; else the port is a guess."""
    replay: bool | None = None
    """Whether missed events can be had again; None if it is not announced."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """How KV caches are handed over: `connector` as kvlane calls it, `role` prefill, decode or empty."""

    connector: str = ""
    role: str = ""
    unknown: str = ""
    """The engine's own name of a connector that kvlane does not know."""
    host: str = ""
    """Where other pods are told to fetch."""


@dataclass(frozen=True, slots=True)
class Seen:
    url: str
    unreachable: str = ""
    """Why; then nothing else was seen."""
    health: int = 0
    version: str = ""
    models: tuple[str, ...] = ()
    max_model_len: int | None = None
    exposition: Exposition | None = None
    caching: Caching | None = None
    says_caching: bool | None = None
    events: Events | None = None
    transfer: Transfer = field(default_factory=Transfer)
    abort: float | None = None
    """Seconds from leaving to the end of the request on the pod; infinite if it went on."""
    skew: float | None = None
    """Seconds by which its clock is ahead."""
    keep_alive: float | None = None
    """Seconds after which it closes an idle connection; infinite if it was not closed while watched."""
    tokenize: float | None = None
    """Seconds, the median."""

    @property
    def engine(self) -> str:
        return self.exposition.engine if self.exposition else ""
