"""Construction of the data path's scheduler from the `scheduling` section."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
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
    Layout,
    PluginUse,
    ProfileLayout,
    ValueOrigin,
    check_keys,
    declares,
    in_order,
    lay_out,
    satisfy,
)
from proxy.scheduling.profile import GuardedFilter, GuardedPicker, GuardedScorer, Profile, shares
from proxy.scheduling.scheduler import Scheduler

P = TypeVar("P", bound=Plugin)
T = TypeVar("T")

PORTS: tuple[Any, ...] = (Clock, Random, KvEvents, Tokenizers, Timer, InstanceName, ProfileNames, Deciders, PluginState)
"""Annotations of plugin fields that are injected. `build` takes the first two, and optionally the next three."""


@dataclass(frozen=True, slots=True)
class Scheduling(Hooks):
    """The scheduler of a pool, and the PreRequest and PostResponse hooks of its plugins. `producers` are in the order
    in which they run; `instances` are all plugins by name."""

    scheduler: Scheduler
    producers: tuple[DataProducer, ...]
    endpoint_removed: tuple[EndpointRemoved, ...]
    instances: Mapping[str, Plugin]
    effective: Effective
    faults: PluginFaults
    pre_request_hooks: tuple[Hook, ...] = ()
    post_response_hooks: tuple[Hook, ...] = ()

    def call_recorded(self, hook: Hook, attempt: Attempt) -> None:
        plugin, record = _plugin_of(hook), attempt.record
        if record is not None:
            record.call(_point(hook), plugin, self.name_of(plugin), hook, attempt, attempt.endpoint)

    def hook_failed(self, hook: Hook, attempt: Attempt, error: Exception) -> None:
        when = "before request {} was sent" if _point(hook) == "PreRequest" else "after request {} ended"
        self.raised(_plugin_of(hook), f"failed {when.format(attempt.request.id)}", error)

    def forget(self, endpoint: Endpoint) -> None:
        """Have every plugin drop its state of a pod that is gone or lost its memory."""
        for plugin in self.endpoint_removed:
            try:
                plugin.endpoint_removed(endpoint)
            except Exception as error:  # noqa: BLE001  # the other plugins still forget it
                self.raised(plugin, f"failed to forget pod {endpoint.name}", error)

    def raised(self, plugin: Plugin, complaint: str, error: Exception) -> None:
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
        return next((name for name, made in self.instances.items() if made is plugin), plugin.plugin_type)

    def plugins(self, kind: type[T]) -> list[T]:
        return [plugin for plugin in self.instances.values() if isinstance(plugin, kind)]


def _plugin_of(hook: Hook) -> Plugin:
    return cast(Plugin, cast(MethodType, hook).__self__)


def _point(hook: Hook) -> str:
    """Return the extension point of a bound method of a plugin."""
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
    """Build the plugins and the scheduler of a document. Raise ConfigError with every fault of the document. `ports`
    has a Clock and a Random. Without KvEvents, Tokenizers and a Timer there are no KV events and no token ids, and no
    producer waits. With a draft, plugins of the pool with unchanged parameters are reused, and with `keeps_state` the
    others get the state of their predecessor."""
    unconnected = Unconnected()
    ports = {KvEvents: unconnected, Tokenizers: unconnected, Timer: unconnected, **ports}
    plugins = _Plugins(lay_out(document, registry), ports, draft, pool, keeps_state)
    return plugins.scheduling(faults or PluginFaults(ports[Clock]))


def faults(document: Document, registry: Registry, ports: Ports) -> tuple[Problem, ...]:
    """Return every fault that `build` would raise."""
    try:
        build(document, registry, ports)
    except ConfigError as error:
        return error.problems
    return ()


class _Plugins:
    """Makes the instances of a layout, and puts each where it is called."""

    def __init__(self, layout: Layout, ports: Ports, draft: Draft | None, pool: str, keeps_state: bool) -> None:
        self._layout = layout
        self._draft = draft
        self._pool = pool
        self._keeps_state = keeps_state
        self._instances: dict[str, Plugin] = {}
        self._deciders: dict[str, Decider] = {}
        own = {ProfileNames: ProfileNames(layout.deciding()), Deciders: Deciders(self._deciders)}
        self._ports = {**ports, **own, InstanceName: None, PluginState: None}

    def scheduling(self, faults: PluginFaults) -> Scheduling:
        """Raise ConfigError with every fault."""
        layout, entries = self._layout, self._layout.entries
        for name in sorted(entries, key=lambda name: entries[name].is_a(ProfileHandler)):  # they get the deciders
            self._make(name)
            if entries[name].is_a(Decider):  # a faulty one has been reported
                self._deciders[name] = cast(Decider, self._instances.get(name))
        satisfy(layout, self._instances, self._make)
        check_keys(layout, self._instances)
        producers = in_order(layout, self._instances)
        if layout.problems:
            raise ConfigError(layout.problems)
        return Scheduling(
            scheduler=self._scheduler(faults),
            producers=tuple(cast(DataProducer, self._instances[name]) for name in producers),
            pre_request_hooks=tuple(plugin.pre_request for plugin in self._all(PreRequest)),
            post_response_hooks=tuple(plugin.post_response for plugin in self._all(PostResponse)),
            endpoint_removed=self._all(EndpointRemoved),
            instances=self._instances,
            effective=effective(layout, self._instances, self._ports),
            faults=faults,
        )

    def _make(self, name: str) -> None:
        entry, path = self._layout.entries.get(name), join(self._layout.path, f"plugins.{name}")
        if entry is None:
            return
        state = PluginState(self._draft if self._keeps_state else None, (self._pool, name, entry.cls.plugin_type))
        ports = {**self._ports, InstanceName: InstanceName(name), PluginState: state}
        make = partial(make_plugin, entry.cls, entry.parameters, path, ports)
        try:
            if self._draft is None:
                self._instances[name] = make()
            else:
                of = (entry.cls, entry.parameters, injected(entry.cls, ports))
                self._instances[name] = self._draft.get(("plugin", self._pool, name), make, of)
        except Invalid as invalid:
            self._layout.problems.extend(invalid.problems)

    def _scheduler(self, faults: PluginFaults) -> Scheduler:
        profiles = [self._profile(profile, faults) for profile in self._layout.profiles]
        return Scheduler(
            handler=cast(ProfileHandler, self._instances[self._layout.handler]),
            profiles={profile.name: profile for profile in profiles if not profile.shadow},
            faults=faults,
            name=self._layout.handler,
            shadows=[profile for profile in profiles if profile.shadow],
        )

    def _profile(self, profile: ProfileLayout, faults: PluginFaults) -> Profile:
        filters, scorers, ((picker, picks),) = (self._used(profile, point) for point in (Filter, Scorer, Picker))
        return Profile(
            profile.name,
            [GuardedFilter(cast(Filter, made), use.ref, faults) for use, made in filters],
            [GuardedScorer(cast(Scorer, made), use.ref, faults) for use, made in scorers],
            tuple(shares([use.weight for use, _ in scorers])),
            GuardedPicker(cast(Picker, picks), picker.ref, faults),
            profile.shadow,
        )

    def _used(self, profile: ProfileLayout, point: type) -> list[tuple[PluginUse, Plugin]]:
        uses = [(use, self._instances[use.ref]) for use in profile.uses]
        return [(use, made) for use, made in uses if declares(made, point)]

    def _all(self, point: Callable[..., P]) -> tuple[P, ...]:
        return tuple(cast(P, made) for made in self._instances.values() if declares(made, cast(type, point)))


@dataclass(frozen=True, slots=True)
class EffectivePlugin:
    """`parameters` are values with their origins."""

    name: str
    type: str
    origin: ValueOrigin
    parameters: Mapping[str, tuple[Any, ValueOrigin]]


@dataclass(frozen=True, slots=True)
class Effective:
    """The effective configuration: every instance, including injected ones, and every profile."""

    plugins: tuple[EffectivePlugin, ...]
    profiles: tuple[ProfileLayout, ...]
    handler: str

    def as_dict(self) -> dict[str, Any]:
        """Return it in the shape of the `scheduling` section; every value is `{"value": …, "origin": …}`, every plugin
        and profile has an `origin`."""
        return {
            "plugins": [
                {
                    "name": plugin.name,
                    "type": plugin.type,
                    "origin": plugin.origin.value,
                    "parameters": {key: _value(*value) for key, value in plugin.parameters.items()},
                }
                for plugin in self.plugins
            ],
            "profileHandler": self.handler,
            "schedulingProfiles": [
                {
                    "name": profile.name,
                    "origin": profile.origin.value,
                    **({"shadow": True} if profile.shadow else {}),
                    "plugins": [
                        {
                            "pluginRef": use.ref,
                            "origin": use.origin.value,
                            "weight": _value(use.weight, use.weight_origin),
                        }
                        for use in profile.uses
                    ],
                }
                for profile in self.profiles
            ],
        }


def _value(value: Any, origin: ValueOrigin) -> dict[str, Any]:
    return {"value": value, "origin": origin.value}


def effective(layout: Layout, instances: Mapping[str, Plugin], ports: Ports) -> Effective:
    plugins = []
    for name, entry in layout.entries.items():
        parameters = {}
        for field in parameters_of(entry.cls, ports):
            keys = (yaml_key(field), *field.metadata.get("aliases", ()))
            origin = ValueOrigin.FILE if any(key in entry.parameters for key in keys) else ValueOrigin.DEFAULT
            parameters[keys[0]] = (plain(getattr(instances[name], field.name)), origin)
        plugins.append(EffectivePlugin(name, entry.cls.plugin_type, entry.origin, parameters))
    return Effective(tuple(plugins), tuple(layout.profiles), layout.handler)
