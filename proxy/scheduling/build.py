"""From the `scheduling` section to everything the data path runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar, cast

from proxy.core import wiring
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import Invalid, join
from proxy.core.plugin import (
    DataProducer,
    EndpointRemoved,
    Filter,
    Picker,
    Plugin,
    PostResponse,
    PreRequest,
    ProfileHandler,
    Scorer,
)
from proxy.core.ports import Clock, InstanceName, ProfileNames, Random
from proxy.core.registry import Registry
from proxy.core.wiring import Ports
from proxy.scheduling.dependencies import declares, in_order, satisfy
from proxy.scheduling.document import Document
from proxy.scheduling.effective import Effective, effective
from proxy.scheduling.guard import GuardedScorer, Report, unreported
from proxy.scheduling.layout import Layout, ProfileLayout, Use, lay_out
from proxy.scheduling.profile import FilterStep, Profile, Steps, Totals, shares
from proxy.scheduling.scheduler import OnShadow, Scheduler
from proxy.scheduling.scoring import Scoring, UnguardedScoring

P = TypeVar("P", bound=Plugin)
T = TypeVar("T")

PORTS: tuple[Any, ...] = (Clock, Random, InstanceName, ProfileNames)
"""Annotations that are injected; `build` is handed the first two and knows the others."""

Wrap = Callable[[Plugin, type, str, str], Plugin]
"""(plugin, extension point, profile or "", instance name) -> what is called in its place at that point, unless that is
the point of profile handlers or of removed pods. A wrapped producer keeps its `waits`; a scorer comes guarded."""


def unwrapped(plugin: Plugin, point: type, profile: str, name: str) -> Plugin:
    return plugin


@dataclass(frozen=True, slots=True)
class Watch:
    """Plugins are called as `wrap` gives them every so many times, the first time among them, else as they are: it
    costs nothing while nobody looks."""

    wrap: Wrap
    every: int = 1

    def rounds(self, plain: T, watched: T) -> Iterator[T]:
        """Which of the two it is each time, without end."""
        return cycle([watched, *[plain] * (self.every - 1)] if self.every else [plain])


NOBODY = Watch(unwrapped, every=0)


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`producers` stand in the order in which they run; `instances` are the bare plugins by name. The rounds hand out,
    without end, the producers of the next request and the hooks of the next leg: the plugins, or who watches them."""

    scheduler: Scheduler
    producers: tuple[DataProducer, ...]
    producer_rounds: Iterator[tuple[DataProducer, ...]]
    pre_request_rounds: Iterator[tuple[PreRequest, ...]]
    post_response_rounds: Iterator[tuple[PostResponse, ...]]
    endpoint_removed: tuple[EndpointRemoved, ...]
    instances: Mapping[str, Plugin]
    effective: Effective


def build(
    document: Document,
    registry: Registry,
    ports: Ports,
    watch: Watch = NOBODY,
    report: Report = unreported,
    on_shadow: OnShadow | None = None,
) -> Scheduling:
    """`ports` has a Clock and a Random. Raises ConfigError with every fault of the document."""
    layout = lay_out(document, registry)
    instances: dict[str, Plugin] = {}
    all_ports = {**ports, ProfileNames: ProfileNames(layout.deciding()), InstanceName: None}

    def make(name: str) -> None:
        if name in layout.entries:
            _make(layout, instances, name, all_ports)

    for name in list(layout.entries):
        make(name)
    satisfy(layout, instances, make)
    producers = in_order(layout, instances)
    if layout.problems:
        raise ConfigError(layout.problems)
    return _Assembly(layout, instances, watch, report).scheduling(
        producers, effective(layout, instances, all_ports), on_shadow
    )


def faults(document: Document, registry: Registry, ports: Ports) -> tuple[Problem, ...]:
    """Every fault that `build` would raise."""
    try:
        build(document, registry, ports)
    except ConfigError as error:
        return error.problems
    return ()


def _make(layout: Layout, instances: dict[str, Plugin], name: str, ports: Ports) -> None:
    entry = layout.entries[name]
    path = join(layout.path, f"plugins.{name}")
    try:
        instances[name] = wiring.make(entry.cls, entry.parameters, path, {**ports, InstanceName: InstanceName(name)})
    except Invalid as invalid:
        layout.problems.extend(invalid.problems)


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Puts the instances where they are called."""

    layout: Layout
    instances: Mapping[str, Plugin]
    watch: Watch
    report: Report

    def scheduling(self, producers: list[str], described: Effective, on_shadow: OnShadow | None) -> Scheduling:
        profiles = [self._profile(profile) for profile in self.layout.profiles]
        return Scheduling(
            scheduler=Scheduler(
                handler=cast(ProfileHandler, self.instances[self.layout.handler]),
                profiles={profile.name: profile for profile in profiles if not profile.shadow},
                shadows=[profile for profile in profiles if profile.shadow],
                on_shadow=on_shadow,
            ),
            producers=self._at(DataProducer, producers, unwrapped),
            producer_rounds=self._rounds(DataProducer, producers),
            pre_request_rounds=self._rounds(PreRequest, self._all(PreRequest)),
            post_response_rounds=self._rounds(PostResponse, self._all(PostResponse)),
            endpoint_removed=self._at(EndpointRemoved, self._all(EndpointRemoved), unwrapped),
            instances=self.instances,
            effective=described,
        )

    def _profile(self, profile: ProfileLayout) -> Profile:
        """Its guards are those of all rounds, so that they log a fault once."""
        uses, wrap = self._uses(profile, Scorer), self.watch.wrap
        guards = [GuardedScorer(cast(Scorer, self.instances[use.ref]), use.ref, self.report) for use in uses]
        watched = [cast(Scorer, wrap(guard, Scorer, profile.name, guard.name)) for guard in guards]
        parts = shares([use.weight for use in uses])
        rounds = self.watch.rounds(
            self._steps(profile, unwrapped, UnguardedScoring(guards, parts).totals),
            self._steps(profile, wrap, Scoring(watched, parts).totals),
        )
        return Profile(profile.name, rounds, profile.shadow)

    def _steps(self, profile: ProfileLayout, wrap: Wrap, totals: Totals) -> Steps:
        filters, (picker,) = self._uses(profile, Filter), self._uses(profile, Picker)
        (wrapped_picker,) = self._at(Picker, [picker.ref], wrap, profile.name)
        return Steps(tuple(self._filter(profile.name, use.ref, wrap) for use in filters), totals, wrapped_picker.pick)

    def _filter(self, profile: str, name: str, wrap: Wrap) -> FilterStep:
        (wrapped,) = self._at(Filter, [name], wrap, profile)
        return FilterStep(name, wrapped, cast(Filter, self.instances[name]).exhausts)

    def _uses(self, profile: ProfileLayout, point: type) -> list[Use]:
        return [use for use in profile.uses if declares(self.instances[use.ref], point)]

    def _all(self, point: type) -> list[str]:
        return [name for name, made in self.instances.items() if declares(made, point)]

    def _rounds(self, point: Callable[..., P], names: Sequence[str]) -> Iterator[tuple[P, ...]]:
        return self.watch.rounds(self._at(point, names, unwrapped), self._at(point, names, self.watch.wrap))

    def _at(self, point: Callable[..., P], names: Sequence[str], wrap: Wrap, profile: str = "") -> tuple[P, ...]:
        return tuple(cast(P, wrap(self.instances[name], cast(type, point), profile, name)) for name in names)
