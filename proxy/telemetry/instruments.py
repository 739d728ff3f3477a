"""Counters, gauges and histograms at hot-path prices: label values are bound once, to a cell that is a slot away."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, Protocol, TypeVar

from prometheus_client import Metric
from prometheus_client.samples import Sample

OTHER = "other"


class Cell(Protocol):
    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        """What is exposed for this cell; `name` is that of its family."""


C = TypeVar("C", bound=Cell)


class Counter:
    """Counts up."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def add(self, amount: float = 1.0) -> None:
        self.value += amount

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        yield Sample(name + "_total", labels, self.value)


class Gauge:
    """Set to what was read."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        yield Sample(name, labels, self.value)


class Histogram:
    """`bounds` are the upper bounds of the buckets, ascending, each included in its bucket; +Inf is implied."""

    __slots__ = ("_edges", "bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], edges: Sequence[str]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self._edges = edges

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """As `observe` of each: to look for the bounds among the values in order takes a third of what it takes to look
        for each value among the bounds."""
        ordered, counts, before = sorted(values), self.counts, 0
        for bucket, bound in enumerate(self.bounds):
            until = bisect_right(ordered, bound)
            counts[bucket] += until - before
            before = until
        counts[-1] += len(ordered) - before
        self.sum += sum(values)

    def samples(self, name: str, labels: dict[str, str]) -> Iterator[Sample]:
        total = 0
        for edge, count in zip(self._edges, self.counts, strict=True):
            total += count
            yield Sample(name + "_bucket", {**labels, "le": edge}, total)
        yield Sample(name + "_count", labels, total)
        yield Sample(name + "_sum", labels, self.sum)


class Family(Generic[C]):
    """One series name with its cells, one per combination of label values."""

    def __init__(self, name: str, kind: str, help_text: str, labels: Sequence[str], make: Callable[[], C]) -> None:
        self.name = name
        self.kind = kind
        self.help = help_text
        self.labels = tuple(labels)
        self._make = make
        self._cells: dict[tuple[str, ...], C] = {}

    def cell(self, *values: str) -> C:
        """The cell of these label values, made if it is missing. Bind it once; do not call this per request."""
        cell = self._cells.get(values)
        if cell is None:
            if len(values) != len(self.labels):
                raise ValueError(f"{self.name} has the labels {self.labels}, not {values}")
            cell = self._cells[values] = self._make()
        return cell

    @property
    def cells(self) -> Mapping[tuple[str, ...], C]:
        """By their label values."""
        return self._cells

    def clear(self) -> None:
        """Forget all cells: what is read anew for every exposition begins with this."""
        self._cells.clear()

    @property
    def sample_names(self) -> tuple[str, ...]:
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}.get(self.kind, ("",))
        return tuple(self.name + suffix for suffix in suffixes)

    def slices(self, cells_at_once: int) -> Iterator[Metric]:
        """The family in pieces, each complete in itself; at least one, so that help and type are always exposed."""
        cells = list(self._cells.items())
        for start in range(0, len(cells) or 1, cells_at_once):
            metric = Metric(self.name, self.help, self.kind)
            for values, cell in cells[start : start + cells_at_once]:
                metric.samples.extend(cell.samples(self.name, dict(zip(self.labels, values, strict=True))))
            yield metric


def edges_of(bounds: Iterable[float]) -> tuple[str, ...]:
    """The values of the label `le`."""
    return (*(repr(float(bound)) for bound in bounds), "+Inf")
