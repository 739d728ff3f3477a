"""Builds what the data path runs from the `scheduling` section."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from types import MethodType
from typing import Any, TypeVar, cast

from proxy.core.attempt import Attempt
from proxy.core.endpoint import Endpoint
from proxy.core.errors import ConfigError, Problem
from proxy.core.listener import Hook, Hooks
from proxy.core.params import Invalid, join, plain, yaml_key
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
from proxy.core.registry import RAISED, PluginFaults, Ports, Registry, injected, make_plugin, parameters_of
from proxy.core.state import Draft, PluginState
from proxy.scheduling.document import Document
from proxy.scheduling.layout import (
    Entry,
    Layout,
    Origin,
    ProfileLayout,
    Use,
    check_keys,
    declares,
    in_order,
    lay_out,
    satisfy,
)
from proxy.scheduling.profile import FilterStep, GuardedFilter, GuardedPicker, GuardedScorer, Profile, Scoring, shares
from proxy.scheduling.scheduler import Scheduler

P = TypeVar("P", bound=Plugin)
T = TypeVar("T")

PORTS: tuple[Any, ...] = (Clock, Random, KvEvents, Tokenizers, Timer, InstanceName, ProfileNames, Deciders, PluginState)
"""Annotations of plugin fields that are injected. `build` takes the first two, and optionally the next three."""


@dataclass(frozen=True, slots=True)
class Scheduling(Hooks):
    """What decides about the requests of a pool, and the PreRequest and PostResponse hooks of its plugins.

    `producers` stand in the order in which they run; `instances` are all plugins by name."""

    scheduler: Scheduler
    producers: tuple[DataProducer, ...]
    pre_request: tuple[PreRequest, ...]
    post_response: tuple[PostResponse, ...]
    endpoint_removed: tuple[EndpointRemoved, ...]
    instances: Mapping[str, Plugin]
    effective: Effective
    faults: PluginFaults

    @property
    def on_attempt_started(self) -> Sequence[Hook]:
        return tuple(plugin.pre_request for plugin in self.pre_request)

    @property
    def on_attempt_ended(self) -> Sequence[Hook]:
        return tuple(plugin.post_response for plugin in self.post_response)

    def call_recorded(self, hook: Hook, attempt: Attempt) -> None:
        """Call a hook for an attempt that has a record, and note how long it took."""
        plugin, record = _plugin_of(hook), attempt.record
        if record is not None:
            record.call(_point(hook), plugin, self.name_of(plugin), hook, attempt, attempt.endpoint)

    def hook_failed(self, hook: Hook, attempt: Attempt, error: Exception) -> None:
        when = "before request {} was sent" if _point(hook) == "PreRequest" else "after request {} ended"
        self.raised(_plugin_of(hook), f"failed {when.format(attempt.request.id)}", error)

    def forget(self, endpoint: Endpoint) -> None:
        """Have every plugin forget a pod that is gone, or that lost its memory."""
        for plugin in self.endpoint_removed:
            try:
                plugin.endpoint_removed(endpoint)
            except Exception as error:  # noqa: BLE001  # the other plugins still forget it
                self.raised(plugin, f"failed to forget pod {endpoint.name}", error)

    def raised(self, plugin: Plugin, complaint: str, error: Exception) -> None:
        """Count and log an error of a plugin."""
        self.faults.report(self.name_of(plugin), RAISED, complaint, error)

    def shares(self) -> dict[str, dict[str, tuple[float, float]]]:
        """Return the weight of each scorer and its share of the total, by profile."""
        found = {}
        for profile in self.effective.profiles:
            uses = [use for use in profile.uses if declares(self.instances[use.ref], Scorer)]
            portions = shares([use.weight for use in uses])
            found[profile.name] = {use.ref: (use.weight, part) for use, part in zip(uses, portions, strict=True)}
        return found

    def name_of(self, plugin: Plugin) -> str:
        """Return its name in the configuration."""
        return next((name for name, made in self.instances.items() if made is plugin), plugin.plugin_type)

    def plugins(self, kind: type[T]) -> list[T]:
        """Return the plugins of this class."""
        return [plugin for plugin in self.instances.values() if isinstance(plugin, kind)]


def _plugin_of(hook: Hook) -> Plugin:
    return cast(Plugin, cast(MethodType, hook).__self__)


def _point(hook: Hook) -> str:
    """The extension point of a bound method of a plugin."""
    return "PreRequest" if cast(MethodType, hook).__name__ == "pre_request" else "PostResponse"


def build(
    document: Document,
    registry: Registry,
    ports: Ports,
    faults: PluginFaults | None = None,
    draft: Draft | None = None,
    pool: str = "",
    *,
    keeps_state: bool = True,
) -> Scheduling:
    """Build the plugins and the scheduler of a document. Raise ConfigError with every fault of the document.

    `ports` has a Clock and a Random. Without KvEvents, Tokenizers and a Timer there are no KV events and no token ids,
    and no producer waits. With a draft, plugins of the pool whose parameters stay the same are used again, and with
    `keeps_state` the others get the state of the plugin before them."""
    layout = lay_out(document, registry)
    instances: dict[str, Plugin] = {}
    nowhere = Unconnected()
    deciders: dict[str, Decider] = {}
    own = {
        ProfileNames: ProfileNames(layout.deciding()),
        InstanceName: None,
        Deciders: Deciders(deciders),
        PluginState: None,
    }
    all_ports = {KvEvents: nowhere, Tokenizers: nowhere, Timer: nowhere, **ports, **own}

    def make(name: str) -> None:
        if name in layout.entries:
            _make(layout, instances, name, all_ports, draft, pool, keeps_state)

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
    return _Assembly(layout, instances, faults).scheduling(producers, described)


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


def _make(
    layout: Layout,
    instances: dict[str, Plugin],
    name: str,
    ports: Ports,
    draft: Draft | None,
    pool: str,
    keeps_state: bool,
) -> None:
    entry, path = layout.entries[name], join(layout.path, f"plugins.{name}")
    state = PluginState(draft if keeps_state else None, (pool, name, entry.cls.plugin_type))
    own = {**ports, InstanceName: InstanceName(name), PluginState: state}

    def made() -> Plugin:
        return make_plugin(entry.cls, entry.parameters, path, own)

    try:
        if draft is None:
            instances[name] = made()
        else:
            of = (entry.cls, entry.parameters, injected(entry.cls, own))
            instances[name] = draft.get(("plugin", pool, name), made, of)
    except Invalid as invalid:
        layout.problems.extend(invalid.problems)


@dataclass(frozen=True, slots=True)
class _Assembly:
    """Puts the instances where they are called."""

    layout: Layout
    instances: Mapping[str, Plugin]
    faults: PluginFaults

    def scheduling(self, producers: list[str], described: Effective) -> Scheduling:
        return Scheduling(
            scheduler=self._scheduler(),
            producers=self._at(DataProducer, producers),
            pre_request=self._all(PreRequest),
            post_response=self._all(PostResponse),
            endpoint_removed=self._all(EndpointRemoved),
            instances=self.instances,
            effective=described,
            faults=self.faults,
        )

    def _scheduler(self) -> Scheduler:
        profiles = [self._profile(profile) for profile in self.layout.profiles]
        return Scheduler(
            handler=cast(ProfileHandler, self.instances[self.layout.handler]),
            profiles={profile.name: profile for profile in profiles if not profile.shadow},
            faults=self.faults,
            name=self.layout.handler,
            shadows=[profile for profile in profiles if profile.shadow],
        )

    def _profile(self, profile: ProfileLayout) -> Profile:
        filters, uses, (picker,) = (self._uses(profile, point) for point in (Filter, Scorer, Picker))
        scorers = [GuardedScorer(cast(Scorer, self.instances[use.ref]), use.ref, self.faults) for use in uses]
        return Profile(
            profile.name,
            tuple(self._filter(use.ref) for use in filters),
            Scoring(scorers, shares([use.weight for use in uses])),
            GuardedPicker(cast(Picker, self.instances[picker.ref]), picker.ref, self.faults),
            profile.shadow,
            min((cast(Filter, self.instances[use.ref]).spares for use in filters), default=inf),
        )

    def _filter(self, name: str) -> FilterStep:
        guarded = GuardedFilter(cast(Filter, self.instances[name]), name, self.faults)
        return FilterStep(name, guarded, guarded.exhausts)

    def _uses(self, profile: ProfileLayout, point: type) -> list[Use]:
        return [use for use in profile.uses if declares(self.instances[use.ref], point)]

    def _all(self, point: Callable[..., P]) -> tuple[P, ...]:
        """All plugins of an extension point."""
        names = [name for name, made in self.instances.items() if declares(made, cast(type, point))]
        return self._at(point, names)

    def _at(self, point: Callable[..., P], names: Sequence[str]) -> tuple[P, ...]:
        return tuple(cast(P, self.instances[name]) for name in names)


@dataclass(frozen=True, slots=True)
class EffectiveValue:
    value: Any
    origin: Origin


@dataclass(frozen=True, slots=True)
class EffectivePlugin:
    name: str
    type: str
    origin: Origin
    parameters: tuple[tuple[str, EffectiveValue], ...]


@dataclass(frozen=True, slots=True)
class Effective:
    """Every instance, the injected ones too, and every profile."""

    plugins: tuple[EffectivePlugin, ...]
    profiles: tuple[ProfileLayout, ...]
    handler: str

    def as_dict(self) -> dict[str, Any]:
        """In the shape of the `scheduling` section; every value is `{"value": …, "origin": …}`, every plugin and
        profile has an `origin`."""
        return {
            "plugins": [_plugin_dict(plugin) for plugin in self.plugins],
            "profileHandler": self.handler,
            "schedulingProfiles": [_profile_dict(profile) for profile in self.profiles],
        }


def effective(layout: Layout, instances: dict[str, Plugin], ports: Ports) -> Effective:
    plugins = tuple(_effective_plugin(entry, instances[name], ports) for name, entry in layout.entries.items())
    return Effective(plugins, tuple(layout.profiles), layout.handler)


def _effective_plugin(entry: Entry, made: Plugin, ports: Ports) -> EffectivePlugin:
    parameters = []
    for field in parameters_of(entry.cls, ports):
        spellings = (yaml_key(field), *field.metadata.get("aliases", ()))
        origin = Origin.FILE if any(key in entry.parameters for key in spellings) else Origin.DEFAULT
        parameters.append((yaml_key(field), EffectiveValue(plain(getattr(made, field.name)), origin)))
    return EffectivePlugin(entry.name, entry.cls.plugin_type, entry.origin, tuple(parameters))


def _plugin_dict(plugin: EffectivePlugin) -> dict[str, Any]:
    parameters = {key: {"value": value.value, "origin": value.origin.value} for key, value in plugin.parameters}
    return {"name": plugin.name, "type": plugin.type, "origin": plugin.origin.value, "parameters": parameters}


def _profile_dict(profile: ProfileLayout) -> dict[str, Any]:
    plugins = [_use_dict(use) for use in profile.uses]
    shadow = {"shadow": True} if profile.shadow else {}
    return {"name": profile.name, "origin": profile.origin.value, **shadow, "plugins": plugins}


def _use_dict(use: Use) -> dict[str, Any]:
    weight = {"value": use.weight, "origin": use.weight_origin.value}
    return {"pluginRef": use.ref, "origin": use.origin.value, "weight": weight}
