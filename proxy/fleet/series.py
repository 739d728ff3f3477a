"""Which series of a metrics exposition is meant: the grammar `name{label=value,…}`, and the samples it selects."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_PAIR = re.compile(
    r'\s*(?P<name>[A-Za-z_][A-Za-z0-9_]*)\s*=\s*(?:"(?P<quoted>[^"]+)"|(?P<plain>[^\s",{}]+))\s*(?P<comma>,?)'
)
_LABEL = re.compile(rb'([A-Za-z_][A-Za-z0-9_]*)[ \t]*=[ \t]*"((?:[^"\\]|\\.)*+)"', re.DOTALL)
_ESCAPE = re.compile(rb"\\(.)", re.DOTALL)


class Sample(NamedTuple):
    """One line of an exposition; `timestamp` is that of the line, 0 where it has none."""

    raw_labels: bytes
    value: float
    timestamp: float = 0.0

    @property
    def labels(self) -> Mapping[str, str]:
        return parse_labels(self.raw_labels)


Samples = Mapping[str, Sequence[Sample]]
"""Samples by the name of their family, in the order of the exposition."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The series of the family `name` that have at least these labels."""

    name: str
    labels: tuple[tuple[str, str], ...] = ()

    def select(self, samples: Samples) -> Sequence[Sample]:
        family = samples.get(self.name, ())
        if not self.labels:
            return family
        wanted = set(self.labels)
        return [sample for sample in family if wanted <= sample.labels.items()]


def parse_spec(text: str) -> MetricSpec | None:
    """`name` or `name{k=v,k2="v2"}`, spaces ignored; None for an empty text. Raises ValueError, naming the fault."""
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


@lru_cache(maxsize=4096)
def parse_labels(raw: bytes) -> Mapping[str, str]:
    """The labels between the braces of a line. Remembered: those of an engine hardly change, and some have fifty."""
    return MappingProxyType({name.decode(): _unescape(value) for name, value in _LABEL.findall(raw)})


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


def _unescape(value: bytes) -> str:
    if b"\\" in value:
        value = _ESCAPE.sub(lambda match: b"\n" if match[1] == b"n" else match[1], value)
    return value.decode(errors="replace")
