"""What a client wants, parsed once at the edge and frozen; and the typed state of the request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Generic, TypeVar, dataclass_transform

from proxy.core.errors import BadRequest

T = TypeVar("T")


class DataKey(str, Generic[T]):
    """The type of a datum and the name of its producer; without a producer, the first one that writes it. `value_type`
    is the class of its values. A Protocol accepts its explicit subclasses; `object` accepts all."""

    # A text, which knows its hash: finding by a tuple is slower (hot path, see docs/notes/cpu.md).
    __slots__ = ("kind", "known", "producer", "unbound", "value_type")

    kind: str
    producer: str
    value_type: type
    known: set[type]
    """Classes that were accepted before, so that each is checked once."""
    unbound: DataKey[T] | None
    """The same key without its producer."""

    def __new__(cls, kind: str, producer: str = "", value_type: type = object) -> DataKey[T]:
        key = super().__new__(cls, f"{kind}/{producer}" if producer else kind)
        key.kind, key.producer, key.value_type, key.known = kind, producer, value_type, {type(None)}
        key.unbound = cls(kind, "", value_type) if producer else None
        return key

    def of(self, producer: str) -> DataKey[T]:
        """Return the key bound to the producer of this name; unbound if the name is empty."""
        return _bound(self.kind, producer, self.value_type)

    def accepts(self, cls: type) -> bool:
        """Return whether values of the class may be written."""
        wanted = self.value_type
        if getattr(wanted, "_is_protocol", False):
            return wanted in cls.__mro__
        return issubclass(cls, (float, int) if wanted is float else wanted)

    def __repr__(self) -> str:
        return str(self)


_bound = lru_cache(maxsize=4096)(DataKey[Any])
"""Constructing a key takes ten times as long as finding it, and some plugins need one with each request."""


class CycleState(dict[str, Any]):
    """The data of one request, from parse to PostResponse, by key; see `write` and `read`. A bound write also serves
    unbound reads; the first one wins. The name is llm-d's."""

    __slots__ = ()

    def write(self, key: DataKey[T], value: T) -> None:
        """Raise KeyError if the key was written before, and TypeError for a value of another type than the key's; None
        counts as absent."""
        unbound, known = key.unbound, self.get
        if type(value) not in key.known:
            if not key.accepts(type(value)):
                raise TypeError(f"{key} holds values of type {key.value_type.__name__}, not {type(value).__name__}")
            key.known.add(type(value))
        if known(key) is not None:
            raise KeyError(f"{key} is written once per request")
        self[key] = value
        if unbound is not None and known(unbound) is None:
            self[unbound] = value

    if TYPE_CHECKING:

        def read(self, key: DataKey[T]) -> T | None:
            """None if the producer did not deliver, for whatever reason."""
    else:
        # Some ten reads per request: the dictionary's own method takes no bytecode.
        read = dict.get


@dataclass_transform(eq_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A slotted dataclass that is immutable by convention."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


BYTES_PER_TOKEN = 4
"""Bytes of prompt that count as one token where no tokenizer is used."""


@frozen
class Prompt:
    """What the engine's chat template will see, in its order: tools, then messages with their roles. `parts` has one
    entry per prompt of a batch. Text is UTF-8, token ids are packed as little-endian 32-bit integers, an image is its
    digest repeated over its estimated tokens: so four bytes are one token throughout. `salt` is the request's
    cache_salt."""

    parts: tuple[bytes, ...] = field(default=(), repr=False)
    salt: str = field(default="", repr=False)
    tokens: int = field(init=False, compare=False)
    """Estimated tokens of all parts."""
    starts_conversation: bool = field(init=False, compare=False)
    """Whether the prompt starts a conversation, so it contains no response of the model."""

    def __init__(
        self, parts: tuple[bytes, ...] = (), salt: str = "", tokens: int = 0, starts_conversation: bool = False
    ) -> None:
        """`tokens` are required if `parts` contain only the start of the prompt."""
        self.parts = parts  # type: ignore[misc]
        self.salt = salt  # type: ignore[misc]
        self.starts_conversation = starts_conversation  # type: ignore[misc]
        if not tokens:
            for part in parts:
                tokens -= -len(part) // BYTES_PER_TOKEN  # rounded up
        self.tokens = tokens  # type: ignore[misc]


EMPTY_PROMPT = Prompt()


@frozen
class Naming:
    """The naming of a request whose model is rewritten or may be: `requested` is the client's name for it, `fallbacks`
    are models to try in order where no pod has capacity; `model@pool` restricts one to a pool. `may_wait`: for a pod
    that is being woken. `pool`: the only permitted pool; empty: any."""

    requested: str
    fallbacks: tuple[str, ...] = ()
    may_wait: bool = False
    pool: str = ""


@frozen
class InferenceRequest:
    """What the client wants; immutable: `changed` makes a copy, for example with another model. `body` has the bytes
    for the pod; of a streamed upload, the first part. `headers` have lower-case names, `max_tokens` is the client's
    limit on the response (0: none), `received_at` is monotonic seconds, and so is `deadline`, by which the response
    must be complete. `usage_added`: kvlane has added a request for usage to the body, so the relay takes usage out of
    the stream. `naming`: None if the model's name stands for itself."""

    id: str
    path: str
    model: str
    prompt: Prompt = field(default=EMPTY_PROMPT, repr=False)
    body: bytes = field(default=b"", repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    stream: bool = False
    max_tokens: int = 0
    priority: int = 0
    tenant: str = ""
    received_at: float = 0.0
    deadline: float = math.inf
    usage_added: bool = False
    naming: Naming | None = None
    state: CycleState = field(default_factory=CycleState)


TIME_LIMIT = "x-request-timeout-ms"
"""The header with which a client limits the time of its request."""


EARLY = 0.002
"""Seconds by which a timer may fire before its time: uvloop counts whole milliseconds."""


def deadline_has_passed(request: InferenceRequest, now: float) -> bool:
    """Return whether the deadline has passed, or a timer for it has fired. `now` is monotonic seconds."""
    return now >= request.deadline - EARLY


def client_limit_has_passed(request: InferenceRequest, now: float) -> bool:
    """Return whether the time limit of the client has passed, as above."""
    return deadline_has_passed(request, now) and TIME_LIMIT in request.headers


def changed(request: InferenceRequest, **changes: Any) -> InferenceRequest:
    """A `dataclasses.replace` that runs in C (hot path)."""
    return InferenceRequest(**dict(zip(_NAMES, _VALUES(request), strict=True), **changes))


_NAMES = tuple(each.name for each in fields(InferenceRequest))
_VALUES = attrgetter(*_NAMES)

OUTPUT_ESTIMATE: DataKey[int] = DataKey("OutputEstimate", value_type=int)
"""Expected tokens of the response, which the load ledger counts until the attempt ends. Absent: not counted."""


def time_limit(headers: Mapping[str, str], most: float) -> float:
    """Return the seconds from receipt to the end of the response: `most`, or less on the client's request. Raise
    BadRequest."""
    given = headers.get(TIME_LIMIT)
    if given is None:
        return most
    try:
        seconds = float(given) / 1000
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise BadRequest(f"The header {TIME_LIMIT} must be a positive number of milliseconds, not '{given[:40]}'.")
    return min(most, seconds)
