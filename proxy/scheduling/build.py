"""From the `scheduling` section to everything the data path runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import inf
from typing import Any, TypeVar, cast

from proxy.core import wiring
from proxy.core.attempt import Attempt
from proxy.core.endpoint import GONE, Endpoint
from proxy.core.errors import ConfigError, Problem
from proxy.core.listener import Listener
from proxy.core.params import Invalid, join
from proxy.core.plugin import (
    DataProducer,
    Decider,
    EndpointRemoved,
    Filter,
    Picker,
    Plugin,
    PostResponse,
    PreRequest,
    ProfileHandler,
    Scorer,
)
from proxy.core.plugin_faults import RAISED, PluginFaults
from proxy.core.ports import (
    Clock,
    Deciders,
    InstanceName,
    KvEvents,
    ProfileNames,
    Random,
    Timer,
    Tokenizers,
    Unconnected,
)
from proxy.core.registry import Registry
from proxy.core.wiring import Ports
from proxy.scheduling.dependencies import check_keys, declares, in_order, satisfy
from proxy.scheduling.document import Document
from proxy.scheduling.effective import Effective, effective
from proxy.scheduling.guard import GuardedFilter, GuardedPicker, GuardedScorer
from proxy.scheduling.layout import Layout, ProfileLayout, Use, lay_out
from proxy.scheduling.profile import FilterStep, Profile, Steps, shares
from proxy.scheduling.scheduler import OnShadow, Scheduler, Schedules
from proxy.scheduling.scoring import Scoring, Totals, unguarded

log = logging.getLogger(__name__)

P = TypeVar("P", bound=Plugin)
T = TypeVar("T")

PORTS: tuple[Any, ...] = (Clock, Random, KvEvents, Tokenizers, Timer, InstanceName, ProfileNames, Deciders)
"""Annotations that are injected; `build` is handed the first two, may be handed three more, and knows the others."""

Wrap = Callable[[Plugin, type, str, str], Plugin]
"""(plugin, extension point, profile or "", instance name) -> what is called in its place at that point, unless that is
the point of profile handlers or of removed pods. A wrapped producer keeps its `waits`; filters, scorers and pickers
come guarded."""


def unwrapped(plugin: Plugin, point: type, profile: str, name: str) -> Plugin:
    return plugin


Keep = Callable[[str, Callable[[], Plugin], object], Plugin]
"""(instance name, make, of) -> the plugin of this name that is in use, if it was made of something equal, or else what
`make` returns; see `core.state.Draft.get`."""


def make_anew(name: str, make: Callable[[], Plugin], of: object) -> Plugin:
    return make()


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

MadeScheduler = Callable[[Wrap, OnShadow | None], Scheduler]
"""Another scheduler of the same plugins; filters, scorers and pickers are called as `Wrap` gives them, every time, and
inside of that as the watch has it."""


@dataclass(frozen=True, slots=True)
class Scheduling(Listener):
    """What decides about the requests of a pool, and the listener that calls its PreRequest and PostResponse hooks.

    `producers` stand in the order in which they run; `instances` are the bare plugins by name. The rounds hand out,
    without end, the producers of the next request and the hooks of the next leg: the plugins, or who watches them."""

    scheduler: Schedules
    made: MadeScheduler
    producers: tuple[DataProducer, ...]
    producer_rounds: Iterator[tuple[DataProducer, ...]]
    pre_request_rounds: Iterator[tuple[PreRequest, ...]]
    post_response_rounds: Iterator[tuple[PostResponse, ...]]
    endpoint_removed: tuple[EndpointRemoved, ...]
    instances: Mapping[str, Plugin]
    effective: Effective
    faults: PluginFaults

    def attempt_started(self, attempt: Attempt) -> None:
        for hook in next(self.pre_request_rounds):
            try:
                hook.pre_request(attempt, attempt.endpoint)
            except Exception as error:  # noqa: BLE001  # the request goes on
                self.raised(hook, f"failed before request {attempt.request.id} was sent", error)

    def attempt_ended(self, attempt: Attempt, error: BaseException | None) -> None:
        endpoint = attempt.endpoint
        for hook in next(self.post_response_rounds):
            try:
                hook.post_response(attempt, endpoint)
            except Exception as raised:  # noqa: BLE001  # the other hooks still run
                self.raised(hook, f"failed after request {attempt.request.id} ended", raised)
        if endpoint.state is GONE:
            self.forget(endpoint)  # the hooks of the attempt have stored state of it again

    def forget(self, endpoint: Endpoint) -> None:
        """Have every plugin forget a pod that is gone, or that lost its memory."""
        for plugin in self.endpoint_removed:
            try:
                plugin.endpoint_removed(endpoint)
            except Exception as error:  # noqa: BLE001  # the other plugins still forget it
                self.raised(plugin, f"failed to forget pod {endpoint.name}", error)

    def raised(self, plugin: Plugin, complaint: str, error: Exception) -> None:
        """Count and log an error of a plugin."""
        name = next((name for name, made in self.instances.items() if made is plugin), plugin.plugin_type)
        self.faults.report(name, RAISED, complaint, error)

    def succeed(self, predecessor: Scheduling) -> None:
        """Takes over what it knows; one of its plugins that cannot begins anew: by then there is no other way."""
        for name, made in self.instances.items():
            old = predecessor.instances.get(name)
            if type(old) is type(made) and old is not made:
                try:
                    made.adopt(old)
                except Exception:
                    log.exception("%s cannot take over what the one before it knew", name)


def build(
    document: Document,
    registry: Registry,
    ports: Ports,
    watch: Watch = NOBODY,
    faults: PluginFaults | None = None,
    on_shadow: OnShadow | None = None,
    keep: Keep = make_anew,
) -> Scheduling:
    """`ports` has a Clock and a Random; without KvEvents, Tokenizers and a Timer nothing is heard of pods, prompts have
    no token ids, and nobody waits. `keep` returns the plugins that are in use already. Raises ConfigError with every
    fault of the document."""
    layout = lay_out(document, registry)
    instances: dict[str, Plugin] = {}
    nowhere = Unconnected()
    deciders: dict[str, Decider] = {}
    own = {ProfileNames: ProfileNames(layout.deciding()), InstanceName: None, Deciders: Deciders(deciders)}
    all_ports = {KvEvents: nowhere, Tokenizers: nowhere, Timer: nowhere, **ports, **own}

    def make(name: str) -> None:
        if name in layout.entries:
            _make(layout, instances, name, all_ports, keep)

    for name in _handlers_last(layout):
        make(name)
        if layout.entries[name].is_a(Decider):  # a faulty one is there all the same: it has been complained about
            deciders[name] = cast(Decider, instances.get(name))
    satisfy(layout, instances, make)
    check_keys(layout, instances)
    producers = in_order(layout, instances)
    if layout.problems:
        raise ConfigError(layout.problems)
    described = effective(layout, instances, all_ports)
    faults = faults or PluginFaults(all_ports[Clock])
    return _Assembly(layout, instances, watch, faults).scheduling(producers, described, on_shadow)


def faults(document: Document, registry: Registry, ports: Ports) -> tuple[Problem, ...]:
    """Every fault that `build` would raise."""
    try:
        build(document, registry, ports)
    except ConfigError as error:
        return error.problems
    return ()


def _handlers_last(layout: Layout) -> list[str]:
    """They are handed the deciders."""
    return sorted(layout.entries, key=lambda name: layout.entries[name].is_a(ProfileHandler))


def _make(layout: Layout, instances: dict[str, Plugin], name: str, ports: Ports, keep: Keep) -> None:
    entry, own = layout.entries[name], {**ports, InstanceName: InstanceName(name)}
    path = join(layout.path, f"plugins.{name}")
    try:
        instances[name] = keep(
            name,
            lambda: wiring.make(entry.cls, entry.parameters, path, own),
            (entry.cls, entry.parameters, wiring.injected(entry.cls, own)),
        )
    except Invalid as invalid:
        layout.problems.extend(invalid.problems)


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Puts the instances where they are called."""

    layout: Layout
    instances: Mapping[str, Plugin]
    watch: Watch
    faults: PluginFaults

    def scheduling(self, producers: list[str], described: Effective, on_shadow: OnShadow | None) -> Scheduling:
        return Scheduling(
            scheduler=self.scheduler(unwrapped, on_shadow),
            made=self.scheduler,
            producers=self._at(DataProducer, producers, unwrapped),
            producer_rounds=self._rounds(DataProducer, producers),
            pre_request_rounds=self._rounds(PreRequest, self._all(PreRequest)),
            post_response_rounds=self._rounds(PostResponse, self._all(PostResponse)),
            endpoint_removed=self._at(EndpointRemoved, self._all(EndpointRemoved), unwrapped),
            instances=self.instances,
            effective=described,
            faults=self.faults,
        )

    def scheduler(self, around: Wrap, on_shadow: OnShadow | None) -> Scheduler:
        profiles = [self._profile(profile, around) for profile in self.layout.profiles]
        return Scheduler(
            handler=cast(ProfileHandler, self.instances[self.layout.handler]),
            profiles={profile.name: profile for profile in profiles if not profile.shadow},
            faults=self.faults,
            name=self.layout.handler,
            shadows=[profile for profile in profiles if profile.shadow],
            on_shadow=on_shadow,
        )

    def _profile(self, profile: ProfileLayout, around: Wrap) -> Profile:
        uses, wrap = self._uses(profile, Scorer), _within(around, self.watch.wrap)
        guards = [GuardedScorer(cast(Scorer, self.instances[use.ref]), use.ref, self.faults) for use in uses]
        parts = shares([use.weight for use in uses])
        totals = unguarded(guards, parts) if around is unwrapped else self._totals(profile, guards, parts, around)
        rounds = self.watch.rounds(
            self._steps(profile, around, totals),
            self._steps(profile, wrap, self._totals(profile, guards, parts, wrap)),
        )
        return Profile(profile.name, rounds, profile.shadow)

    @staticmethod
    def _totals(profile: ProfileLayout, guards: Sequence[GuardedScorer], parts: Sequence[float], wrap: Wrap) -> Totals:
        scorers = [cast(Scorer, wrap(guard, Scorer, profile.name, guard.name)) for guard in guards]
        return Scoring(scorers, parts).totals

    def _steps(self, profile: ProfileLayout, wrap: Wrap, totals: Totals) -> Steps:
        filters, (picker,) = self._uses(profile, Filter), self._uses(profile, Picker)
        guarded = GuardedPicker(cast(Picker, self.instances[picker.ref]), picker.ref, self.faults)
        wrapped_picker = cast(Picker, wrap(guarded, Picker, profile.name, picker.ref))
        steps = tuple(self._filter(profile.name, use.ref, wrap) for use in filters)
        spared = min((cast(Filter, self.instances[use.ref]).spares for use in filters), default=inf)
        return Steps(steps, totals, wrapped_picker.pick, wrapped_picker.order, spared if wrap is unwrapped else 0)

    def _filter(self, profile: str, name: str, wrap: Wrap) -> FilterStep:
        guarded = GuardedFilter(cast(Filter, self.instances[name]), name, self.faults)
        return FilterStep(name, cast(Filter, wrap(guarded, Filter, profile, name)), guarded.exhausts)

    def _uses(self, profile: ProfileLayout, point: type) -> list[Use]:
        return [use for use in profile.uses if declares(self.instances[use.ref], point)]

    def _all(self, point: type) -> list[str]:
        return [name for name, made in self.instances.items() if declares(made, point)]

    def _rounds(self, point: Callable[..., P], names: Sequence[str]) -> Iterator[tuple[P, ...]]:
        return self.watch.rounds(self._at(point, names, unwrapped), self._at(point, names, self.watch.wrap))

    def _at(self, point: Callable[..., P], names: Sequence[str], wrap: Wrap) -> tuple[P, ...]:
        return tuple(cast(P, wrap(self.instances[name], cast(type, point), "", name)) for name in names)


def _within(around: Wrap, wrap: Wrap) -> Wrap:
    """`around` what `wrap` gives."""
    if around is unwrapped:
        return wrap
    return lambda plugin, point, profile, name: around(wrap(plugin, point, profile, name), point, profile, name)
