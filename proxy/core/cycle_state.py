"""Typed state of one request: written once by its producer, read by whoever imports the key, gone with the request."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Generic, TypeVar

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
