"""The expositions of several processes as one: counters and histograms added up, gauges told apart by worker."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

LINES_AT_ONCE = 2000
"""Taken in without a pause: about a millisecond."""

OF_THE_FLEET = (
    "kvlane_endpoint_",
    "kvlane_pool_",
    "kvlane_workers",
    "kvlane_build_info",
    "kvlane_config_",
    "kvlane_replicas_",
    "kvlane_autoscale_",
)
"""Gauges that say the same whoever is asked; the supervisor is."""

SUPERVISOR = "supervisor"

Sums = dict[str, float]
"""Value by series, labels included."""


@dataclass(slots=True)
class _Family:
    head: list[str]
    adds_up: bool
    samples: Sums = field(default_factory=dict)


class Merged:
    """Takes in one exposition after the other, in the text format as this program writes it."""

    def __init__(self) -> None:
        self._families: dict[str, _Family] = {}

    async def add(self, exposition: bytes, worker: str) -> None:
        """Lets the event loop run in between."""
        family = _Family([], adds_up=False)
        shown = True
        for number, line in enumerate(exposition.decode().splitlines()):
            if number % LINES_AT_ONCE == LINES_AT_ONCE - 1:
                await asyncio.sleep(0)
            if line.startswith("#"):
                family = self._head(line)
                shown = family.adds_up or worker == SUPERVISOR or not line.split(" ")[2].startswith(OF_THE_FLEET)
            elif shown and line:
                _take(family, line, worker)

    async def add_sums(self, sums: Sums) -> None:
        """What processes counted that are gone. Series of families that no living process has are left out."""
        for number, (series, value) in enumerate(sums.items()):
            if number % LINES_AT_ONCE == LINES_AT_ONCE - 1:
                await asyncio.sleep(0)
            if (family := self._families.get(_family_of(series, self._families))) is not None:
                family.samples[series] = family.samples.get(series, 0.0) + value

    async def render(self) -> bytes:
        parts: list[str] = []
        for family in self._families.values():
            parts.extend(family.head)
            parts.extend(f"{series} {value!r}" for series, value in family.samples.items())
            await asyncio.sleep(0)
        return ("\n".join(parts) + "\n").encode()

    def _head(self, line: str) -> _Family:
        """Help comes before type, and both before the samples."""
        _, what, name, text = line.split(" ", 3)
        family = self._families.get(name)
        if family is None:
            family = self._families[name] = _Family([], adds_up=False)
        if what == "TYPE":
            family.adds_up = text in ("counter", "histogram")
        if line not in family.head:
            family.head.append(line)
        return family


def sums_of(exposition: bytes) -> Iterator[tuple[str, float]]:
    """The series of an exposition that add up."""
    adds_up = False
    for line in exposition.decode().splitlines():
        if line.startswith("# TYPE "):
            adds_up = line.endswith((" counter", " histogram"))
        elif adds_up and line and not line.startswith("#"):
            series, _, value = line.rpartition(" ")
            yield series, float(value)


def add_up(sums: Sums, more: Iterable[tuple[str, float]]) -> None:
    for series, value in more:
        sums[series] = sums.get(series, 0.0) + value


def _take(family: _Family, line: str, worker: str) -> None:
    series, _, value = line.rpartition(" ")
    if not family.adds_up:
        if not series.startswith(OF_THE_FLEET):
            series = _labelled(series, worker)
        family.samples[series] = float(value)
    else:
        family.samples[series] = family.samples.get(series, 0.0) + float(value)


def _labelled(series: str, worker: str) -> str:
    name, brace, labels = series.partition("{")
    return f'{name}{{worker="{worker}"{"," + labels if brace else "}"}'


def _family_of(series: str, families: dict[str, _Family]) -> str:
    name = series.partition("{")[0]
    if name in families:
        return name
    return name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
