"""Typed state of one request: written once by its producer, read by whoever imports the key, gone with the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")


class DataKey(NamedTuple, Generic[T]):
    """(type of the datum, name of its producer); without a producer, the first that delivered."""

    kind: str
    producer: str = ""

    def of(self, producer: str) -> DataKey[T]:
        """The same datum, bound to the producer of this name; unbound if the name is empty."""
        return DataKey(self.kind, producer)

    def __repr__(self) -> str:
        return f"{self.kind}/{self.producer}" if self.producer else self.kind


class CycleState(dict[tuple[str, str], Any]):
    """The data of one request, from parse to PostResponse, by key: use `write` and `read`.

    A bound write also answers unbound reads: of several, the one that was first.
    """

    __slots__ = ()

    def write(self, key: DataKey[T], value: T) -> None:
        """Raises KeyError if the key was written before."""
        if key in self:
            raise KeyError(f"{key!r} is written once per request")
        self[key] = value
        kind, producer = key
        if producer:
            self.setdefault((kind, ""), value)

    if TYPE_CHECKING:

        def read(self, key: DataKey[T]) -> T | None:
            """None if the producer did not deliver, for whatever reason."""
    else:
        # Some seven reads per request: the dictionary's own method takes no bytecode.
        read = dict.get
