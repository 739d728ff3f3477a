"""Parsing and selection of metrics in the Prometheus text format. No I/O."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from types import MappingProxyType
from typing import NamedTuple

from proxy.core.errors import KvlaneError

STEP = 128 << 10
"""Bytes of an exposition that are read in one step of the event loop, 3 ms at worst. A typical exposition has 70 KB."""

_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_PAIR = re.compile(
    r'\s*(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?:"(?P<quoted>[^"]+)"|(?P<plain>[^\s",{}]+))\s*(?P<comma>,?)'
)
_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)


class ScrapeError(KvlaneError):
    """A response that lacks the requested values, or is too large."""


LONGEST_CACHED = 4096
"""Bytes of labels that are kept after they were parsed."""


class Sample(NamedTuple):
    """One line of an exposition; `timestamp` is that of the line, 0 if it has no timestamp."""

    raw_labels: bytes
    value: float
    timestamp: float = 0.0

    @property
    def labels(self) -> Mapping[str, str]:
        raw = self.raw_labels
        return parse_labels(raw) if len(raw) <= LONGEST_CACHED else parse_labels.__wrapped__(raw)


Samples = Mapping[str, Sequence[Sample]]
"""Samples by their name, in the order of the exposition."""


class SampleReader:
    """A reader of the samples with some names, or of all samples if no names are given. More than `limit` samples of
    one name raise ScrapeError. `keep_largest` are names: above the limit, of these names only the largest sample is
    kept, instead of an error. Engines add a series for each combination of adapters that was ever in use."""

    def __init__(
        self, names: Collection[str] = (), keep_largest: Collection[str] = (), limit: float = math.inf
    ) -> None:
        pattern = alternatives(names) if names else _NAME.pattern
        # One search for all names costs a third of one `find` each. Common beginnings are shared, so that a line is
        # skipped at its first byte that differs.
        self._lines = re.compile(rf"\n({pattern})(?=[{{ \t])([^\n]*)".encode())
        self._keep_largest = frozenset(keep_largest)
        self._limit = limit

    def read(self, text: bytes) -> dict[str, list[Sample]]:
        """Return the samples with finite values by name. Raise ScrapeError for a line that is longer than STEP."""
        samples: dict[str, list[Sample]] = {}
        for _ in self._steps(text, samples):
            pass
        return samples

    async def read_in_steps(self, text: bytes) -> dict[str, list[Sample]]:
        """Do the same as `read`, and let the event loop run after every STEP bytes."""
        samples: dict[str, list[Sample]] = {}
        for _ in self._steps(text, samples):
            await asyncio.sleep(0)
        return samples

    def _steps(self, text: bytes, samples: dict[str, list[Sample]]) -> Iterator[None]:
        """Fill `samples`, and yield between two steps."""
        text, start = b"\n" + text, 0
        while True:
            end = len(text) if len(text) - start <= STEP else text.rfind(b"\n", start + 1, start + STEP)
            if end < 0:
                raise ScrapeError(f"the exposition has a line of more than {STEP} bytes")
            for name, line in self._lines.findall(text, start, end):
                if (sample := _sample(line)) is not None:
                    samples.setdefault(name.decode(), []).append(sample)
            for name, found in samples.items():
                if len(found) > self._limit and name not in self._keep_largest:
                    raise ScrapeError(f"the exposition has more than {self._limit} series of {name}")
                if len(found) > self._limit:
                    found[:] = [max(found, key=lambda sample: sample.value)]
            if end == len(text):
                return
            start = end
            yield


def alternatives(words: Collection[str]) -> str:
    """Return a pattern that matches exactly these words, as a tree of their common beginnings."""
    branches = []
    for first, group in groupby(sorted({word for word in words if word}), key=lambda word: word[0]):
        tails = [word[1:] for word in group]
        branches.append(re.escape(first) + alternatives(tails))
    pattern = branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})" if branches else ""
    return f"(?:{pattern})?" if pattern and "" in words else pattern


def _sample(line: bytes) -> Sample | None:
    """Parse `{labels} value timestamp`, where only the value is required. An exemplar is ignored."""
    if b" # {" in line:
        line = line[: line.rindex(b" # {")]
    labels, _, rest = line.rpartition(b"}")
    numbers = rest.split(None, 2)
    try:
        value = float(numbers[0])
        timestamp = float(numbers[1]) if len(numbers) > 1 else 0.0
    except (ValueError, IndexError):
        return None
    return Sample(labels, value, timestamp) if math.isfinite(value) else None


@lru_cache(maxsize=4096)
def parse_labels(raw: bytes) -> Mapping[str, str]:
    """Return the labels between the braces of a line. Cached: labels of an engine hardly change."""
    labels = {}
    for name, value in _LABEL.findall(raw):
        unescaped = _ESCAPE.sub(lambda match: b"\n" if match[1] == b"n" else match[1], value)
        labels[name.decode()] = unescaped.decode(errors="replace")
    return MappingProxyType(labels)


# Selecting series.


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The series with the name `name` that have at least these labels."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def select(self, samples: Samples) -> Sequence[Sample]:
        family = samples.get(self.name, ())
        if not self.labels:
            return family
        wanted = set(self.labels)
        return [sample for sample in family if wanted <= sample.labels.items()]


def parse_spec(text: str) -> MetricSpec | None:
    """Parse `name` or `name{k=v,k2="v2"}`, spaces ignored; None for an empty text. Raise ValueError."""
    name, brace, rest = text.strip().partition("{")
    name = name.strip()
    if not name and not brace:
        return None
    if not _NAME.fullmatch(name):
        raise ValueError(f"{text!r} does not begin with the name of a metric")
    if not brace:
        return MetricSpec(name)
    inside, brace, trailing = rest.rpartition("}")
    if not brace:
        raise ValueError(f"{text!r} lacks its closing brace")
    if trailing:
        raise ValueError(f"{text!r} goes on after its closing brace")
    return MetricSpec(name, tuple(_read_pairs(inside, text)))


def _read_pairs(inside: str, text: str) -> Iterator[tuple[str, str]]:
    at, more = 0, True
    while more:
        pair = _PAIR.match(inside, at)
        if not pair:
            raise ValueError(f"{text!r}: write label=value instead of {inside[at:]!r}")
        yield pair["name"], pair["quoted"] or pair["plain"]
        at, more = pair.end(), pair["comma"] == ","
    if at < len(inside):
        raise ValueError(f"{text!r}: {inside[at:]!r} follows a value; labels are separated by commas")
