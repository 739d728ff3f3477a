"""The configuration as it is in effect, every value with where it comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from proxy.core.params import plain, yaml_key
from proxy.core.plugin import Plugin
from proxy.core.wiring import Ports, parameters_of
from proxy.scheduling.layout import Entry, Layout, Origin, ProfileLayout, Use


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
            "plugins": [_plugin(plugin) for plugin in self.plugins],
            "profileHandler": self.handler,
            "schedulingProfiles": [_profile(profile) for profile in self.profiles],
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


def _plugin(plugin: EffectivePlugin) -> dict[str, Any]:
    parameters = {key: {"value": value.value, "origin": value.origin.value} for key, value in plugin.parameters}
    return {"name": plugin.name, "type": plugin.type, "origin": plugin.origin.value, "parameters": parameters}


def _profile(profile: ProfileLayout) -> dict[str, Any]:
    plugins = [_use(use) for use in profile.uses]
    shadow = {"shadow": True} if profile.shadow else {}
    return {"name": profile.name, "origin": profile.origin.value, **shadow, "plugins": plugins}


def _use(use: Use) -> dict[str, Any]:
    weight = {"value": use.weight, "origin": use.weight_origin.value}
    return {"pluginRef": use.ref, "origin": use.origin.value, "weight": weight}
