"""Interfaces to the outside world. A field of a plugin that is annotated with one of the types in
`scheduling.build.PORTS` is injected and is no YAML parameter."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from random import Random as Random
from types import TracebackType
from typing import Any, ClassVar, Literal, NewType, Protocol

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.errors import LONGEST_NAME
from proxy.core.listener import Listener
from proxy.core.plugin import Decider
from proxy.core.request import DataKey, InferenceRequest, Prompt, frozen


@frozen
class Identity:
    """The authenticated key or token. `name` appears in logs and metrics, never the secret; `models` and `objectives`
    are the permitted ones, None: all."""

    name: str
    tenant: str = ""
    models: frozenset[str] | None = None
    objectives: frozenset[str] | None = None
    limits: str = ""
    """Name of its limits."""


IDENTITY: DataKey[Identity] = DataKey("Identity")
"""The authenticated sender; absent without authentication."""

CHARGED: DataKey[bool] = DataKey("ChargedRequest")
"""Whether the request counts against the limits of its sender already; it counts once, whatever models it is sent
to."""


BlockHash = int | bytes
"""The name of a block in an engine; meaningful to that engine process only."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks that a tier (`medium`, lower case) has stored. `tokens` are the token ids of all blocks,
    packed as little-endian 32-bit integers; empty for blocks that another tier already has. `parent` is the block
    before the first one, None at the start of a prompt. `keys` has what else identifies each block (media, cache_salt),
    or is empty."""

    hashes: Sequence[BlockHash]
    parent: BlockHash | None
    tokens: bytes
    block_size: int
    lora: str = ""
    medium: str = "gpu"
    keys: Sequence[Sequence[Any] | None] = ()
    group: int = 0


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    hashes: Sequence[BlockHash]
    medium: str = "gpu"
    group: int = 0


@dataclass(frozen=True, slots=True)
class AllCleared:
    """All tiers are empty."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class KvSources:
    """Where pods publish KV events. `{host}` and `{port}` stand for the host and the port of the pod; the ranks of a
    pod have consecutive ports. `port` and `replay_port` apply to pods without a label; `replay_port` 0: no replay of
    lost events. With `bind`, pods connect to that address, and their topics identify them."""

    endpoint: str = "tcp://{host}:{port}"
    port: int = 5557
    replay_port: int = 0
    ranks: int = 1
    topic: str = ""
    bind: str = ""


ContentFormat = Literal["auto", "string", "openai"]
"""How a template expects the content of messages: as one text or in parts."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`model` is a directory with tokenizer.json or an id in the local cache of Hugging Face; `chat_template` is a file
    that replaces the model's own template."""

    model: str
    chat_template: str = ""
    content_format: ContentFormat = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_not_chosen: bool = False
    cache_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """`url` is a server that renders prompts; empty: any pod, at /tokenize. `model` is the model's name there; empty:
    that of the request. `timeout` is in seconds."""

    url: str = ""
    model: str = ""
    timeout: float = 5.0


def allows(patterns: frozenset[str] | None, name: str) -> bool:
    """Return whether one of the patterns matches the name; None matches every name."""
    if patterns is None:
        return True
    matches = _matches if len(name) <= LONGEST_NAME else _matches.__wrapped__  # no client fills the memory
    return matches(patterns, name)


def any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_matches = lru_cache(maxsize=4096)(any_matches)


InstanceName = NewType("InstanceName", str)
"""The name of the configured plugin; its type by default."""

ProfileNames = NewType("ProfileNames", tuple[str, ...])
"""The profiles that may decide, in the order of the file; without shadow profiles."""

Deciders = NewType("Deciders", Mapping[str, Decider])
"""The configured deciders by name. Injected into profile handlers, which are built after them."""


class Clock(Protocol):
    """Two clocks, both in seconds."""

    def now(self) -> float:
        """Return monotonic time; only differences are meaningful."""

    def wall(self) -> float:
        """Return the time since the Unix epoch."""


class Timer(Protocol):
    async def sleep(self, seconds: float) -> None:
        """Wait for this many seconds; return at once if the clock is stopped."""

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call the function after this many seconds; never if the clock is stopped."""


class ClientRequest(Protocol):
    """One HTTP request of a client, as the transport delivers it. Header names are case-insensitive."""

    @property
    def id(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def query(self) -> str:
        """The query with its `?`; empty without a query."""

    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes:
        """The whole body, or the first part of a streamed upload."""

    @property
    def upload(self) -> object | None:
        """The rest of a streamed upload; None if `body` is complete."""

    @property
    def received_at(self) -> float: ...
    @property
    def identity(self) -> Identity | None:
        """The authenticated sender; None without authentication."""

    @property
    def refusal(self) -> str:
        """Why kvlane sent an error: the failure of the attempt that caused it, or else its message; "" without one."""

    model: str
    """The model that the client requested, once the request has failed; "" if it could not be parsed."""


class Poster(Protocol):
    """Sends kvlane's own requests to pods."""

    async def post(self, url: str, body: bytes, api_key: str | None, rank: int | None = None) -> tuple[int, bytes]:
        """Post JSON, to a data-parallel rank if one is given. Return status and body of the response. Raise
        UpstreamFailed without a complete response."""


class Resolver(Protocol):
    """Maps the model and the objective of a request."""

    def resolve(self, request: InferenceRequest, identity: Identity | None) -> InferenceRequest:
        """Return the request with the pods' name of the model, a rewritten body if necessary, priority and tenant.
        Raise RequestError."""


class Admission(Listener):
    """Admission before scheduling: a request may wait here or be refused."""

    __slots__ = ()
    holds_for_retries: ClassVar[bool] = False
    """Whether `narrow` restricts every attempt, and has no side effects: retries look for pods before they use one."""

    def admit(self, request: InferenceRequest) -> AbstractAsyncContextManager[object]:
        """Return the context of the request, whose entry waits for admission. Both may raise RequestError."""
        return nullcontext()

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Return the candidates that may receive the request; at least one. Raise RequestError."""
        return endpoints

    def has_spare_capacity(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        """Return whether the pod has capacity for a hedged attempt that no waiting request needs."""
        return True


class Race(Protocol):
    """The way to one client for several concurrent attempts. The response that starts first is relayed; the other
    attempts then end as EVICTED or cancelled. An error response does not win while another attempt runs."""

    @property
    def winner(self) -> Attempt | None:
        """The attempt whose response has started."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def relay(self, attempt: Attempt) -> None:
        """As `Relay.relay`, in a task of its own."""


class Relay(Protocol):
    """Sends attempts to pods and their responses to one client."""

    __slots__ = ()

    async def relay(self, attempt: Attempt) -> None:
        """Send `attempt.request` to `attempt.endpoint` and relay the response until either side ends. Set the fields
        that `Attempt` names, and `ending` in every case. Raise UpstreamFailed only if nothing has been sent to the
        client and the request can be retried, or StreamInterrupted if another pod can continue the response;
        otherwise end the client's response here, never cleanly if it is incomplete. Cancellation aborts the request
        to the pod at once."""

    def race(self, on_start: Callable[[Attempt], None]) -> Race | None:
        """Return a race for concurrent attempts; None if only one is possible. `on_start` is called with the winner
        before its head is sent."""

    async def collect(self, attempt: Attempt, seconds: float) -> bytes:
        """Send the request with the client's headers and return the body of the response without sending it to the
        client. Set the fields as `relay` does; `status` shows whether the body is an error. Raise UpstreamFailed:
        Declined for 429 and 5xx, UpstreamTimedOut after the timeout. Cancellation aborts the request to the pod."""

    def pass_on(self, attempt: Attempt, body: bytes) -> None:
        """Send the client the response that `collect` returned for `attempt`, and end."""


AttemptScope = Callable[[Attempt], AbstractContextManager[None]]
"""The context of an attempt: PreRequest on entry, PostResponse on exit."""


class KvListener(Protocol):
    """Receives the KV events of pods in their order. A pod has one cache per data-parallel rank."""

    def published(self, endpoint: Endpoint, rank: int, events: Sequence[KvEvent]) -> None: ...
    def lost(self, endpoint: Endpoint, rank: int) -> None:
        """Drop what is known of the cache: the pod restarted, or lost events cannot be replayed."""

    def complete(self, endpoint: Endpoint, rank: int, known: bool) -> None:
        """Report whether all events of the rank are known. A rank is unknown until its first event."""

    def gone(self, endpoint: Endpoint) -> None:
        """Drop a removed pod."""


class KvEvents(Protocol):
    """Subscriptions to the KV events of pods."""

    def subscribe(self, sources: KvSources, listener: KvListener) -> None:
        """Subscribe the listener, which is a plugin or one of its fields, while the proxy serves with that plugin.
        Called when a plugin is created. Raise ValueError if it is impossible."""


class PromptTokenizer(Protocol):
    """Produces the token ids of prompts."""

    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        """Return the parts of the prompt as packed token ids, exactly as an engine would; None where that is uncertain:
        media, unknown APIs, invalid bodies."""


class Tokenizers(Protocol):
    """The source of `PromptTokenizer`. Called when a plugin is created, which keeps the result; raise ValueError if
    unavailable."""

    def local(self, model: LocalModel) -> PromptTokenizer: ...
    def remote(self, tokenizer: RemoteTokenizer) -> PromptTokenizer: ...


class Unconnected(KvEvents, Tokenizers, PromptTokenizer, Timer):
    """Replaces all ports where nothing is served: a check, a replay, an explanation. There are no events, no token ids,
    and time does not pass."""

    def subscribe(self, sources: KvSources, listener: KvListener) -> None:
        pass

    def local(self, model: LocalModel) -> PromptTokenizer:
        return self

    def remote(self, tokenizer: RemoteTokenizer) -> PromptTokenizer:
        return self

    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        return None

    async def sleep(self, seconds: float) -> None:
        pass

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        pass


class SystemClock:
    """The clocks of the machine; see `Clock`."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class ManualClock:
    """A clock that moves on request, for tests and replays."""

    def __init__(self, now: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall_offset = wall - now

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        self._now += seconds
