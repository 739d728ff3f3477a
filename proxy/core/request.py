"""What a client wants: parsed once at the edge, frozen from there on; and the typed state of the request."""

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
    """(type of the datum, name of its producer); without a producer, the first that delivered.

    `value_type` is the class of its values. A Protocol accepts classes that name it as a base; `object` accepts all.
    """

    # A text, which knows its hash: to find something by a tuple takes 300 instructions more, twelve times a request.
    __slots__ = ("kind", "known", "producer", "unbound", "value_type")

    kind: str
    producer: str
    value_type: type
    known: set[type]
    """Classes of values that were accepted, so that a write looks its class up instead of checking it again."""
    unbound: DataKey[T] | None
    """The same without its producer."""

    def __new__(cls, kind: str, producer: str = "", value_type: type = object) -> DataKey[T]:
        key = super().__new__(cls, f"{kind}/{producer}" if producer else kind)
        key.kind, key.producer, key.value_type, key.known = kind, producer, value_type, {type(None)}
        key.unbound = cls(kind, "", value_type) if producer else None
        return key

    def of(self, producer: str) -> DataKey[T]:
        """The same datum, bound to the producer of this name; unbound if the name is empty."""
        return _bound(self.kind, producer, self.value_type)

    def accepts(self, cls: type) -> bool:
        """Whether values of the class may be written."""
        wanted = self.value_type
        if getattr(wanted, "_is_protocol", False):
            return wanted in cls.__mro__
        return issubclass(cls, (float, int) if wanted is float else wanted)

    def __repr__(self) -> str:
        return str(self)


_bound = lru_cache(maxsize=4096)(DataKey[Any])
"""To make one takes ten times as long as to find it, and some plugins ask with each request."""


class CycleState(dict[str, Any]):
    """The data of one request, from parse to PostResponse, by key: use `write` and `read`.

    A bound write also answers unbound reads: of several, the one that was first.
    """

    __slots__ = ()

    def write(self, key: DataKey[T], value: T) -> None:
        """Raises KeyError if the key was written before, and TypeError for a value of another type than the key's; None
        is as good as nothing."""
        unbound, known = key.unbound, self.get
        if type(value) not in key.known:
            _accept(key, type(value))
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


def _accept(key: DataKey[Any], cls: type) -> None:
    """Raises TypeError."""
    if not key.accepts(cls):
        raise TypeError(f"{key} holds values of type {key.value_type.__name__}, not {cls.__name__}")
    key.known.add(cls)


@dataclass_transform(eq_default=True, frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T]) -> type[T]:
    """A slotted dataclass that nobody changes."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


BYTES_PER_TOKEN = 4
"""One token counts as four bytes of prompt, wherever a tokenizer is not asked."""


@frozen
class Prompt:
    """What the engine's chat template will see, in its order: tools, then messages with their roles.

    `parts` has one entry per prompt of a batch. Text is UTF-8, token ids are packed as little-endian 32-bit integers,
    an image is its digest repeated over the tokens it will take: so four bytes are one token throughout.
    `salt` is the request's cache_salt.
    """

    parts: tuple[bytes, ...] = field(default=(), repr=False)
    salt: str = field(default="", repr=False)
    tokens: int = field(init=False, compare=False)
    """Estimated tokens of all parts."""
    begins: bool = field(init=False, compare=False)
    """It is that of a conversation in which nobody has answered yet."""

    def __init__(self, parts: tuple[bytes, ...] = (), salt: str = "", tokens: int = 0, begins: bool = False) -> None:
        """`tokens` are to be given if `parts` are only a beginning."""
        self.parts = parts  # type: ignore[misc]
        self.salt = salt  # type: ignore[misc]
        self.begins = begins  # type: ignore[misc]
        if not tokens:
            for part in parts:
                tokens -= -len(part) // BYTES_PER_TOKEN  # rounded up
        self.tokens = tokens  # type: ignore[misc]


EMPTY_PROMPT = Prompt()


@frozen
class Naming:
    """Of a request whose model is not, or need not be, the one that was asked for: `asked` is what its client calls it,
    `fallbacks` are models that are tried in its place, one after the other, where nobody has room for it; `model@pool`
    means the pods of that pool alone. `may_wait`: for a pod that is woken up. `pool`: the only one it may go to; empty:
    any."""

    asked: str
    fallbacks: tuple[str, ...] = ()
    may_wait: bool = False
    pool: str = ""


@frozen
class InferenceRequest:
    """The client's intention, as long as it lives; a rewritten model is a `dataclasses.replace()`.

    `body` are the client's bytes (empty for a streamed upload), `headers` have lower-case keys, `max_tokens` is the
    limit the client set on the answer (0: none), `received_at` is monotonic seconds, and so is `deadline`, by which the
    answer has to be whole. `asks_usage`: the body asks for usage that its client did not ask for, so the relay takes it
    out of the stream. `naming`: None where nothing stands behind the model's name but itself.
    """

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
    asks_usage: bool = False
    naming: Naming | None = None
    state: CycleState = field(default_factory=CycleState)


TIME_LIMIT = "x-request-timeout-ms"
"""The header by which a client limits the time of its request."""


def is_out_of_its_own_time(request: InferenceRequest, now: float) -> bool:
    """Return whether the time is up that the client gave the request. `now` is monotonic seconds."""
    return now >= request.deadline and TIME_LIMIT in request.headers


def changed(request: InferenceRequest, **changes: Any) -> InferenceRequest:
    """A `dataclasses.replace` that takes its steps in C: 100 bytecodes, not 450."""
    return InferenceRequest(**dict(zip(_NAMES, _VALUES(request), strict=True), **changes))


_NAMES = tuple(each.name for each in fields(InferenceRequest))
_VALUES = attrgetter(*_NAMES)

OUTPUT_ESTIMATE: DataKey[int] = DataKey("OutputEstimate", value_type=int)
"""Tokens the answer is expected to have; the load ledger counts them until the leg ends. Absent: not counted."""


def time_limit(headers: Mapping[str, str], most: float) -> float:
    """Seconds from receipt to the end of the answer: `most`, or less if the client says so. Raises BadRequest."""
    asked = headers.get(TIME_LIMIT)
    if asked is None:
        return most
    try:
        seconds = float(asked) / 1000
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise BadRequest(f"The header {TIME_LIMIT} must be a positive number of milliseconds, not '{asked[:40]}'.")
    return min(most, seconds)
