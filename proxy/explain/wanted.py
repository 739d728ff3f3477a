"""Which of the decisions that are kept somebody wants to see."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from proxy.core.errors import BadRequest
from proxy.core.params import suggestion
from proxy.core.units import parse_duration
from proxy.explain.entry import Entry
from proxy.explain.kept import Kept
from proxy.explain.table import outcome, short

MOST, FEW = 1000, 50

_NAMES = ("request", "pod", "tenant", "model", "pool", "outcome", "slow", "asked", "limit")


@dataclass(frozen=True, slots=True)
class Wanted:
    """`same` are values that the short form must have, `slow` is in seconds."""

    same: Mapping[str, str]
    pod: str
    slow: float | None
    asked: bool
    limit: int

    @classmethod
    def of(cls, query: Mapping[str, str]) -> Wanted:
        """Raises BadRequest."""
        for name in query:
            if name not in _NAMES:
                raise BadRequest(f"There is no filter '{name}'{suggestion(name, _NAMES)}.", param=name)
        return cls(
            {name: query[name] for name in ("request", "tenant", "model", "pool", "outcome") if name in query},
            query.get("pod", ""),
            _seconds(query["slow"]) if "slow" in query else None,
            query.get("asked", "") in ("1", "true"),
            _limit(query.get("limit", str(FEW))),
        )

    def among(self, kept: Kept, now: float) -> list[dict[str, Any]]:
        """The newest first, in short."""
        found: list[dict[str, Any]] = []
        for entry in kept:
            if len(found) == self.limit:
                break
            if self._takes(entry, now):
                found.append(short(entry))
        return found

    def _takes(self, entry: Entry, now: float) -> bool:
        if self.asked and not entry.asked:
            return False
        if self.slow is not None and (entry.refusal is not None or not entry.is_slower_than(self.slow, now)):
            return False
        if self.pod and self.pod not in _pods_of(entry):
            return False
        return all(_FIELDS[name](entry) == value for name, value in self.same.items())


def _pods_of(entry: Entry) -> set[str]:
    """That had to do with it."""
    asked = {leg.endpoint.name for leg in entry.legs}
    return asked if entry.decision is None else {entry.decision.target.name, *asked}


_FIELDS: Mapping[str, Callable[[Entry], str]] = {
    "request": lambda entry: entry.request,
    "tenant": lambda entry: entry.tenant,
    "model": lambda entry: entry.model,
    "pool": lambda entry: entry.pool,
    "outcome": outcome,
}


def _seconds(text: str) -> float:
    """A duration, or a number of seconds. Raises BadRequest."""
    try:
        return float(text) if text.replace(".", "", 1).isdecimal() else parse_duration(text)
    except ValueError as error:
        raise BadRequest(f"slow: {error}", param="slow") from None


def _limit(text: str) -> int:
    """Raises BadRequest."""
    if not text.isdecimal() or not 0 < int(text) <= MOST:
        raise BadRequest(f"limit must be a whole number from 1 to {MOST}.", param="limit")
    return int(text)
