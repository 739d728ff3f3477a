"""Typed state of one request: written once by its producer, read by whoever imports the key, gone with the request."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


class DataKey(str, Generic[T]):
    """(type of the datum, name of its producer); without a producer, the first that delivered."""

    # A text, which knows its hash: to find something by a tuple takes 300 instructions more, twelve times a request.
    __slots__ = ("kind", "producer", "unbound")

    kind: str
    producer: str
    unbound: DataKey[T] | None
    """The same without its producer."""

    def __new__(cls, kind: str, producer: str = "") -> DataKey[T]:
        key = super().__new__(cls, f"{kind}/{producer}" if producer else kind)
        key.kind, key.producer, key.unbound = kind, producer, cls(kind) if producer else None
        return key

    def of(self, producer: str) -> DataKey[T]:
        """The same datum, bound to the producer of this name; unbound if the name is empty."""
        return _bound(self.kind, producer)

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
        """Raises KeyError if the key was written before; None is as good as nothing."""
        unbound, known = key.unbound, self.get
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
