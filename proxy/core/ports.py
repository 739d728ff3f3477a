"""The outside world as the middle of the program sees it.

A plugin field that is annotated with one of these types is filled in by `core.registry` and is no YAML parameter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache
from random import Random as Random
from types import TracebackType
from typing import Any, Literal, NewType, Protocol

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.errors import LONGEST_NAME
from proxy.core.listener import Listener
from proxy.core.plugin import Decider
from proxy.core.request import DataKey, InferenceRequest, Prompt, frozen


@frozen
class Identity:
    """Of a key or a token. `name` is what logs and metrics say, never the secret; `models` and `objectives` are what it
    may ask for, None: any."""

    name: str
    tenant: str = ""
    models: frozenset[str] | None = None
    objectives: frozenset[str] | None = None
    limits: str = ""
    """The name of those that it has."""


IDENTITY: DataKey[Identity] = DataKey("Identity")
"""Who sends the request; absent where no keys are asked for."""


BlockHash = int | bytes
"""How an engine names a block; it means something to that process alone."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks that a tier (`medium`, lower case) holds from here on. `tokens` are the token ids of all of
    them, packed as little-endian 32-bit integers; empty for blocks that another tier has already. `parent` is the block
    before the first one, None at the start of a prompt. `keys` has what else tells each block from others with the same
    tokens: media, cache_salt; or nothing at all."""

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
    """No tier holds anything."""


KvEvent = BlocksStored | BlocksRemoved | AllCleared


@dataclass(frozen=True, slots=True)
class KvSources:
    """Where pods publish. `{host}` is the pod's host and `{port}` the port; of several data-parallel ranks each has its
    own, one after the other. `port` and `replay_port` stand for pods without a label that says otherwise; `replay_port`
    0: nobody can be asked for what was missed. With `bind`, pods connect to that address instead, and their topics say
    who they are."""

    endpoint: str = "tcp://{host}:{port}"
    port: int = 5557
    replay_port: int = 0
    ranks: int = 1
    topic: str = ""
    bind: str = ""


ContentFormat = Literal["auto", "string", "openai"]
"""How a template wants the content of messages: as one text, or in parts."""


@dataclass(frozen=True, slots=True)
class LocalModel:
    """`model` is a folder with tokenizer.json, or an id that the local cache of Hugging Face has; `chat_template` a
    file that stands in for the model's own."""

    model: str
    chat_template: str = ""
    content_format: ContentFormat = "auto"
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    exclude_tools_when_not_chosen: bool = False
    cache_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True)
class RemoteTokenizer:
    """`url` is a server that renders prompts, empty: any of the pods, at their /tokenize; `model` what it calls the
    model, empty: as the request does. `timeout` is in seconds."""

    url: str = ""
    model: str = ""
    timeout: float = 5.0


def allows(patterns: frozenset[str] | None, name: str) -> bool:
    """Whether one of the patterns is the name; None allows any."""
    if patterns is None:
        return True
    matches = _matches if len(name) <= LONGEST_NAME else _matches.__wrapped__  # no client fills the memory
    return matches(patterns, name)


def any_matches(patterns: Iterable[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


_matches = lru_cache(maxsize=4096)(any_matches)


InstanceName = NewType("InstanceName", str)
"""The name under which a plugin was configured; it defaults to the plugin's type."""

ProfileNames = NewType("ProfileNames", tuple[str, ...])
"""The profiles of the scheduler that may decide, in the order of the file (shadow profiles are not among them)."""

Deciders = NewType("Deciders", Mapping[str, Decider])
"""The deciders there are, by the names under which they were configured; asked for by profile handlers, which are made
after them."""


class Clock(Protocol):
    """Two clocks, both in seconds."""

    def now(self) -> float:
        """Monotonic time; only differences mean something."""

    def wall(self) -> float:
        """Time since the Unix epoch."""


class Timer(Protocol):
    async def sleep(self, seconds: float) -> None:
        """So long, and at once where no time passes."""

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call after so long, and never where no time passes."""


class Call(Protocol):
    """One HTTP request of a client, as the transport hands it to the gateway. Header keys are found in any case."""

    @property
    def id(self) -> str: ...
    @property
    def method(self) -> str: ...
    @property
    def path(self) -> str: ...
    @property
    def query(self) -> str:
        """With its `?`; empty if there is none."""

    @property
    def headers(self) -> Mapping[str, str]: ...
    @property
    def body(self) -> bytes:
        """All of it, or the beginning of a streamed upload."""

    @property
    def upload(self) -> object | None:
        """The rest of a streamed upload; None if `body` is all of it."""

    @property
    def received_at(self) -> float: ...
    @property
    def identity(self) -> Identity | None:
        """None where no keys are asked for."""


class Poster(Protocol):
    """Sends requests of kvlane's own to pods."""

    async def post(self, url: str, body: bytes, api_key: str | None, rank: int | None = None) -> tuple[int, bytes]:
        """Return status and body of the response to JSON, of a data-parallel rank if one is given. Raise UpstreamFailed
        if no whole response came."""


class Resolver(Protocol):
    """What clients call models, and how urgent they are."""

    def resolve(self, request: InferenceRequest, identity: Identity | None) -> InferenceRequest:
        """The request with the model that pods know, its body rewritten if need be, its priority and its tenant. Raises
        RequestError."""


class Gate(Listener):
    """Where a request may have to wait, or is refused, before a pod is chosen."""

    __slots__ = ()

    def admit(self, request: InferenceRequest) -> AbstractAsyncContextManager[object]:
        """Return what to enter around all that is done for the request. Entering it raises RequestError."""
        return nullcontext()

    def narrow(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Return those of the candidates that it may be sent to; never none. Raises RequestError."""
        return endpoints

    def spares(self, request: InferenceRequest, endpoint: Endpoint) -> bool:
        """Return whether the pod has room for a second attempt of the request that no other request waits for."""
        return True


class Race(Protocol):
    """The way to one client for several legs. It gets the answer that begins first; then the others end at once, as
    EVICTED or cancelled. A refusal is none while there is another leg."""

    @property
    def winner(self) -> Attempt | None:
        """The leg that has begun to answer."""

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def relay(self, attempt: Attempt) -> None:
        """As `Relay.relay`, but in a task of its own."""


class Relay(Protocol):
    """The way to one client."""

    async def relay(self, attempt: Attempt) -> None:
        """Send `attempt.request` to `attempt.endpoint` and its answer to the client, until one of them ends it.

        Sets what `Attempt` says the relay sets; `ending` in every case. Raises UpstreamFailed only while nothing of
        the answer has reached the client and the request can be sent again, or CutShort if another pod can go on with
        it; otherwise it has ended the client's response itself: cut short, it never looks whole. Cancelled, it aborts
        the pod's request at once.
        """

    def race(self, begins: Callable[[Attempt], None]) -> Race | None:
        """For legs at the same time; None if there can be only one. `begins` is told of the one that answers, before
        its head goes out."""

    async def collect(self, attempt: Attempt, seconds: float) -> bytes:
        """Send it with the client's headers, and return the body of the pod's answer, of which the client sees nothing.

        Sets what `relay` sets; `status` says whether the body is an error. Raises UpstreamFailed: Declined for 429 and
        5xx, UpstreamTimedOut after so many seconds. Cancelled, it aborts the pod's request.
        """

    def pass_on(self, attempt: Attempt, body: bytes) -> None:
        """Send the client the response that `collect` returned for `attempt`, and nothing after it."""


Reserve = Callable[[Attempt], AbstractContextManager[None]]
"""A leg between PreRequest and PostResponse."""


class KvListener(Protocol):
    """Told what pods say of their KV caches, in their order. A pod has a cache for each of its data-parallel ranks."""

    def told(self, endpoint: Endpoint, rank: int, events: Sequence[KvEvent]) -> None: ...
    def lost(self, endpoint: Endpoint, rank: int) -> None:
        """What was told of it is void: it restarted, or something was missed that nobody can tell any more."""

    def complete(self, endpoint: Endpoint, rank: int, known: bool) -> None:
        """Whether what was told is all there is; nothing is known of a rank that was never heard of."""

    def gone(self, endpoint: Endpoint) -> None:
        """The pod has left for good."""


class KvEvents(Protocol):
    """What pods publish of their KV caches."""

    def follow(self, sources: KvSources, listener: KvListener) -> None:
        """Asked for when a plugin is made; the listener, which is the plugin or one of its fields, is told while the
        proxy serves with that plugin. Raises ValueError if that cannot be."""


class Tokens(Protocol):
    """Makes token ids of prompts."""

    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        """The parts of its prompt as packed token ids, exactly those that an engine would make; None where that is not
        certain: media, an API that is not known, a faulty body."""


class Tokenizers(Protocol):
    """Where Tokens come from. Asked for when a plugin is made, which keeps them as a field; raise ValueError if they
    cannot be had."""

    def local(self, model: LocalModel) -> Tokens: ...
    def remote(self, tokenizer: RemoteTokenizer) -> Tokens: ...


class Unconnected(KvEvents, Tokenizers, Timer):
    """Stands in for all three where nothing is served: a check of a file, a replay, an explanation. Nobody tells
    anything, no prompt can be tokenised, and no time passes."""

    def follow(self, sources: KvSources, listener: KvListener) -> None:
        pass

    def local(self, model: LocalModel) -> Tokens:
        return _NoTokens()

    def remote(self, tokenizer: RemoteTokenizer) -> Tokens:
        return _NoTokens()

    async def sleep(self, seconds: float) -> None:
        pass

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        pass


class _NoTokens(Tokens):
    async def of(self, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Prompt | None:
        return None


class SystemClock:
    """The clocks of the machine; see `ports.Clock`."""

    now = staticmethod(time.monotonic)
    wall = staticmethod(time.time)


class ManualClock:
    """A clock that stands still until it is told to move: for tests and replays."""

    def __init__(self, now: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._now = now
        self._wall_offset = wall - now

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self._wall_offset

    def advance(self, seconds: float) -> None:
        self._now += seconds
