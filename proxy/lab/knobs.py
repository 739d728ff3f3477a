"""What of a configuration can be tuned: the weights of scorers, and what the latency scorer counts in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from types import MappingProxyType
from typing import Any

from proxy.core.clock import ManualClock
from proxy.core.ports import Clock
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Registry
from proxy.scheduling.build import build
from proxy.scheduling.document import read
from proxy.scheduling.effective import Effective, EffectivePlugin
from proxy.scheduling.layout import Origin, ProfileLayout
from proxy.settings import Settings

PARAMETERS: Mapping[str, Mapping[str, tuple[float, float]]] = MappingProxyType(
    {
        "latency-scorer": {"scaleSeconds": (0.02, 50.0)},
        "predicted-latency-producer": {"workCost": (0.0, 5.0), "decodeCost": (0.0, 1.0)},
    }
)
"""Plugin type -> parameter -> the least and the most that is tried."""

REACH = 32.0
"""A weight is at most multiplied or divided by so much."""

SMALLEST = 0.01
"""What a parameter or weight that is 0 is taken for when it is multiplied."""


@dataclass(frozen=True, slots=True)
class Knob:
    """A weight in a profile, or a parameter of a plugin: `owner` is the profile, or empty."""

    owner: str
    plugin: str
    name: str
    value: float
    least: float
    most: float

    def within(self, value: float) -> float:
        """The nearest that may be tried, to three digits."""
        return float(f"{min(self.most, max(self.least, value)):.3g}")

    def __str__(self) -> str:
        return f"{self.owner}: weight of {self.plugin}" if self.owner else f"{self.plugin}: {self.name}"


Values = tuple[float, ...]
"""One for every knob."""


class Tunable:
    """One configuration and its variants."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        registry = Registry.discover()
        ports = {Clock: ManualClock(), RandomPort: Random(0)}
        self._effective = build(settings.scheduling, registry, ports).effective
        scorers = {cls.plugin_type for cls in registry if cls.plugin_type.endswith("-scorer")}
        self.knobs = tuple(_knobs(self._effective, scorers))

    @property
    def values(self) -> Values:
        """As they are."""
        return tuple(knob.value for knob in self.knobs)

    @property
    def apart(self) -> list[str]:
        """Names of the document that belong to the data layer: sections do not have them."""
        document = self._settings.scheduling
        known = {entry.label for entry in document.plugins}
        return [name for name in document.names if name not in known]

    def settings(self, values: Values) -> Settings:
        return replace(self._settings, scheduling=read(self.section(values), "scheduling"))

    def section(self, values: Values) -> dict[str, Any]:
        """The `scheduling` section with these values; what is by default as it is stays unsaid."""
        found = dict(zip(self.knobs, values, strict=True))
        weights = {(knob.owner, knob.plugin): value for knob, value in found.items() if knob.owner}
        parameters = {
            (knob.plugin, knob.name): value for knob, value in found.items() if not knob.owner and value != knob.value
        }
        return {
            "plugins": [_plugin(plugin, parameters) for plugin in self._effective.plugins],
            "schedulingProfiles": [_profile(profile, weights) for profile in self._effective.profiles],
        }


def _knobs(effective: Effective, scorers: set[str]) -> Iterator[Knob]:
    types = {plugin.name: plugin.type for plugin in effective.plugins}
    for profile in effective.profiles:
        uses = [use for use in profile.uses if types[use.ref] in scorers]
        if profile.shadow or len(uses) < 2:
            continue
        largest = max(use.weight for use in uses) or 1.0
        for use in uses:
            yield Knob(profile.name, use.ref, "weight", use.weight, 0.0, REACH * largest)
    for plugin in effective.plugins:
        limits = PARAMETERS.get(plugin.type, {})
        for name, value in plugin.parameters:
            if name in limits:
                yield Knob("", plugin.name, name, value.value, *limits[name])


def _plugin(plugin: EffectivePlugin, changed: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    given = {name: value.value for name, value in plugin.parameters if value.origin is Origin.FILE}
    given |= {name: value for (owner, name), value in changed.items() if owner == plugin.name}
    named = {"name": plugin.name} if plugin.name != plugin.type else {}
    return {"type": plugin.type, **named, **({"parameters": given} if given else {})}


def _profile(profile: ProfileLayout, weights: Mapping[tuple[str, str], float]) -> dict[str, Any]:
    uses = []
    for use in profile.uses:
        weight = weights.get((profile.name, use.ref), use.weight if use.weight_origin is Origin.FILE else None)
        uses.append({"pluginRef": use.ref, **({} if weight is None else {"weight": weight})})
    shadow = {"shadow": True} if profile.shadow else {}
    return {"name": profile.name, **shadow, "plugins": uses}
