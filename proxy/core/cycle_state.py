"""Typed state of one request: written once by its producer, read by whoever imports the key, gone with the request."""

from __future__ import annotations

from typing import Any, Generic, TypeVar, cast

T = TypeVar("T")


class DataKey(Generic[T]):
    """(type of the datum, name of its producer); without a producer it means the only provider there is."""

    __slots__ = ("_hash", "kind", "producer")

    def __init__(self, kind: str, producer: str = "") -> None:
        self.kind = kind
        self.producer = producer
        self._hash = hash((kind, producer))

    def of(self, producer: str) -> DataKey[T]:
        """The same datum, bound to the producer of this name; unbound if the name is empty."""
        return DataKey(self.kind, producer)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DataKey) and self.kind == other.kind and self.producer == other.producer

    def __repr__(self) -> str:
        return f"{self.kind}/{self.producer}" if self.producer else self.kind


class CycleState:
    """The data of one request, from parse to PostResponse.

    Start-up has made sure that an unbound key has one provider, so a bound write also answers unbound reads.
    """

    __slots__ = ("_values",)

    def __init__(self) -> None:
        self._values: dict[tuple[str, str], Any] = {}

    def write(self, key: DataKey[T], value: T) -> None:
        """Raises KeyError if the key was written before."""
        slot = (key.kind, key.producer)
        if slot in self._values:
            raise KeyError(f"{key!r} is written once per request")
        self._values[slot] = value
        if key.producer:
            self._values.setdefault((key.kind, ""), value)

    def read(self, key: DataKey[T]) -> T | None:
        """None if the producer did not deliver, for whatever reason."""
        return cast("T | None", self._values.get((key.kind, key.producer)))
