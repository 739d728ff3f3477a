"""Sums over the series of the catalogue: of this process, or as several workers have written theirs down."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from math import inf
from typing import Any, NamedTuple, Protocol

from proxy.telemetry.catalogue import PREFIX, Catalogue
from proxy.telemetry.instruments import Family, Histogram
from proxy.telemetry.prometheus_text import Sample, SampleReader, sums_by

Labels = tuple[str, ...]
Buckets = Sequence[tuple[float, float]]
"""Upper bound -> observations up to it, as `autoscale.quantile` takes them."""


class Mass(NamedTuple):
    """So many observations, and their sum."""

    number: float
    total: float


class Series(Protocol):
    """`name` is that of a family without `kvlane_`; what is not there counts 0."""

    def by(self, name: str, *labels: str) -> Mapping[Labels, float]:
        """A counter or gauge, added up by the values of these labels."""

    def buckets(self, name: str) -> Buckets:
        """A histogram, all of its cells as one."""

    def masses(self, name: str, *labels: str) -> Mapping[Labels, Mass]:
        """A histogram by the values of these labels."""


class CatalogueSeries:
    """Reads the cells themselves."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._families: dict[str, Family[Any]] = {
            family.name.removeprefix(PREFIX): family for family in catalogue.families
        }

    def by(self, name: str, *labels: str) -> Mapping[Labels, float]:
        family, sums = self._families[name], dict[Labels, float]()
        places = [family.labels.index(label) for label in labels]
        for values, cell in family.cells.items():
            key = tuple(values[place] for place in places)
            sums[key] = sums.get(key, 0.0) + cell.value
        return sums

    def buckets(self, name: str) -> Buckets:
        cells: list[Histogram] = list(self._families[name].cells.values())
        if not cells:
            return ()
        counts = accumulate(map(sum, zip(*(cell.counts for cell in cells), strict=True)))
        return list(zip((*cells[0].bounds, inf), map(float, counts), strict=True))

    def masses(self, name: str, *labels: str) -> Mapping[Labels, Mass]:
        family, masses = self._families[name], dict[Labels, Mass]()
        places = [family.labels.index(label) for label in labels]
        for values, cell in family.cells.items():
            key = tuple(values[place] for place in places)
            count, total = masses.get(key, (0.0, 0.0))
            masses[key] = Mass(count + sum(cell.counts), total + cell.sum)
        return masses


class TextSeries:
    """The sums over the expositions of several workers: of the families in `names` alone."""

    def __init__(self, expositions: Iterable[bytes], names: tuple[str, ...]) -> None:
        self._samples: dict[str, list[Sample]] = {}
        reader = _reader(names)
        for exposition in expositions:
            for name, samples in reader.read(exposition).items():
                self._samples.setdefault(name, []).extend(samples)

    def by(self, name: str, *labels: str) -> Mapping[Labels, float]:
        return self._sums(name + "_total", labels) or self._sums(name, labels)

    def buckets(self, name: str) -> Buckets:
        counts = {float(bound): count for (bound,), count in self._sums(name + "_bucket", ("le",)).items()}
        return sorted(counts.items())

    def masses(self, name: str, *labels: str) -> Mapping[Labels, Mass]:
        sums = self._sums(name + "_sum", labels)
        return {key: Mass(count, sums.get(key, 0.0)) for key, count in self._sums(name + "_count", labels).items()}

    def _sums(self, name: str, labels: Sequence[str]) -> dict[Labels, float]:
        return sums_by(self._samples.get(PREFIX + name, ()), labels)


@cache
def _reader(names: tuple[str, ...]) -> SampleReader:
    suffixes = ("", "_total", "_bucket", "_sum", "_count")
    return SampleReader([PREFIX + name + suffix for name in names for suffix in suffixes])
