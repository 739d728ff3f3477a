"""Stands between a scheduler and its plugins, and keeps what they return, decision by decision."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import cast

from proxy.core.decision import ProfileRun, ScoredEndpoint
from proxy.core.endpoint import Endpoint
from proxy.core.plugin import Filter, Picker, Plugin, Scorer
from proxy.core.request import InferenceRequest

_ENDPOINT, _SCORE = itemgetter(0), itemgetter(1)


@dataclass(slots=True)
class ProfileRecord:
    """What happened in one profile run. `filters` have the names of the pods that each took out, by its own name;
    `scores`, by scorer, and `totals` stand in the order of `scored`, which are empty where no pod was left."""

    profile: str
    shadow: bool
    filters: dict[str, list[str]] = field(default_factory=dict)
    scores: dict[str, Sequence[float]] = field(default_factory=dict)
    scored: tuple[Endpoint, ...] = ()
    totals: Sequence[float] = ()
    ranked: tuple[Endpoint, ...] = ()


class Recorder:
    """Of the schedulers that are built with its `wrap`. A decision is one tick, so it has one at a time."""

    def __init__(self) -> None:
        self._records: dict[str, ProfileRecord] = {}

    def taken(self) -> tuple[ProfileRecord, ...]:
        """What has happened since it was last called: of every profile that ran its last run, in their order."""
        records, self._records = self._records, {}
        return tuple(records.values())

    def wrap(self, plugin: Plugin, point: type, profile: str, name: str) -> Plugin:
        """As `build.Wrap`."""
        if point is Filter:
            return RecordedFilter(self, name, cast(Filter, plugin))
        if point is Scorer:
            return RecordedScorer(self, name, cast(Scorer, plugin))
        if point is Picker:
            return RecordedPicker(self, cast(Picker, plugin))
        return plugin

    def of(self, run: ProfileRun) -> ProfileRecord:
        return self._records.setdefault(run.profile, ProfileRecord(run.profile, run.shadow))


@dataclass(frozen=True, slots=True)
class RecordedFilter(Filter):
    recorder: Recorder
    name: str
    inner: Filter

    def filter(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        kept = self.inner.filter(run, request, endpoints)
        stays = set(kept)
        removed = [endpoint.name for endpoint in endpoints if endpoint not in stays]
        self.recorder.of(run).filters[self.name] = removed
        return kept


@dataclass(frozen=True, slots=True)
class RecordedScorer(Scorer):
    recorder: Recorder
    name: str
    inner: Scorer

    def score(self, run: ProfileRun, request: InferenceRequest, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        scores = self.inner.score(run, request, endpoints)
        self.recorder.of(run).scores[self.name] = array("d", scores)
        return scores


@dataclass(frozen=True, slots=True)
class RecordedPicker(Picker):
    recorder: Recorder
    inner: Picker

    def pick(
        self, run: ProfileRun, request: InferenceRequest, scored: Sequence[ScoredEndpoint]
    ) -> Sequence[ScoredEndpoint]:
        record = self.recorder.of(run)
        record.scored = tuple(map(_ENDPOINT, scored))
        record.totals = array("d", map(_SCORE, scored))
        ranked = self.inner.pick(run, request, scored)
        record.ranked = tuple(map(_ENDPOINT, ranked))
        return ranked
