"""From the `scheduling` section to everything the data path runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
from proxy.scheduling.profile import FilterStep, Profile, ScorerStep, shares
from proxy.scheduling.scheduler import OnShadow, Scheduler

P = TypeVar("P", bound=Plugin)

PORTS: tuple[Any, ...] = (Clock, Random, InstanceName, ProfileNames)
"""Annotations that are injected; `build` is handed the first two and knows the others."""

Wrap = Callable[[Plugin, type, str, str], Plugin]
"""(plugin, extension point, profile or "", instance name) -> what is called in its place at that point. A wrapped
producer keeps its `waits`; a scorer comes guarded."""


def unwrapped(plugin: Plugin, point: type, profile: str, name: str) -> Plugin:
    return plugin


@dataclass(frozen=True, slots=True)
class Scheduling:
    """`producers` stand in the order in which they run; `instances` are the bare plugins by name."""

    scheduler: Scheduler
    producers: tuple[DataProducer, ...]
    pre_request: tuple[PreRequest, ...]
    post_response: tuple[PostResponse, ...]
    endpoint_removed: tuple[EndpointRemoved, ...]
    instances: Mapping[str, Plugin]
    effective: Effective


def build(
    document: Document,
    registry: Registry,
    ports: Ports,
    wrap: Wrap = unwrapped,
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
    return _Assembly(layout, instances, wrap, report).scheduling(
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
    wrap: Wrap
    report: Report

    def scheduling(self, producers: list[str], described: Effective, on_shadow: OnShadow | None) -> Scheduling:
        profiles = [self._profile(profile) for profile in self.layout.profiles]
        return Scheduling(
            scheduler=Scheduler(
                handler=self._at(ProfileHandler, self.layout.handler),
                profiles={profile.name: profile for profile in profiles if not profile.shadow},
                shadows=[profile for profile in profiles if profile.shadow],
                on_shadow=on_shadow,
            ),
            producers=tuple(self._at(DataProducer, name) for name in producers),
            pre_request=self._all(PreRequest),
            post_response=self._all(PostResponse),
            endpoint_removed=self._all(EndpointRemoved),
            instances=self.instances,
            effective=described,
        )

    def _profile(self, profile: ProfileLayout) -> Profile:
        scorers = self._uses(profile, Scorer)
        parts = shares([use.weight for use in scorers])
        (picker,) = self._uses(profile, Picker)
        return Profile(
            name=profile.name,
            filters=tuple(self._filter(profile.name, use.ref) for use in self._uses(profile, Filter)),
            scorers=tuple(
                self._scorer(profile.name, use.ref, share) for use, share in zip(scorers, parts, strict=True)
            ),
            picker=self._at(Picker, picker.ref, profile.name),
            shadow=profile.shadow,
        )

    def _uses(self, profile: ProfileLayout, point: type) -> list[Use]:
        return [use for use in profile.uses if declares(self.instances[use.ref], point)]

    def _filter(self, profile: str, name: str) -> FilterStep:
        exhausts = cast(Filter, self.instances[name]).exhausts
        return FilterStep(name, self._at(Filter, name, profile), exhausts)

    def _scorer(self, profile: str, name: str, share: float) -> ScorerStep:
        guarded = GuardedScorer(cast(Scorer, self.instances[name]), name, self.report)
        return ScorerStep(name, cast(Scorer, self.wrap(guarded, Scorer, profile, name)), share)

    def _all(self, point: Callable[..., P]) -> tuple[P, ...]:
        point_class = cast(type, point)
        return tuple(self._at(point, name) for name, made in self.instances.items() if declares(made, point_class))

    def _at(self, point: Callable[..., P], name: str, profile: str = "") -> P:
        return cast(P, self.wrap(self.instances[name], cast(type, point), profile, name))
