"""Which plugins and profiles there are, once everything that the document leaves out has been filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from proxy.core.errors import Problem
from proxy.core.params import join, suggestion
from proxy.core.plugin import Filter, Picker, Plugin, ProfileHandler, Scorer
from proxy.core.registry import Registry
from proxy.scheduling.data_layer import SETTINGS_TYPES
from proxy.scheduling.document import Document, ProfileEntry
from proxy.scheduling.flow_control import FLOW_TYPES

DEFAULT_PROFILE = "default"
DEFAULT_PICKER = "max-score-picker"
DEFAULT_PLUGINS = ("candidate-sampling-filter", "latency-scorer", DEFAULT_PICKER)
"""One scorer, because it weighs in seconds what others would have to weigh against each other: cached prefix, queue,
answers that run, how fast a pod is. The filter does nothing until there are more than a hundred pods."""
DEFAULT_HANDLER = "single-profile-handler"
DEFAULT_WEIGHT = 1.0


class Origin(Enum):
    """Where a piece of the effective configuration comes from."""

    FILE = "file"
    DEFAULT = "default"
    INJECTED = "injected"


@dataclass(frozen=True, slots=True)
class Entry:
    """One plugin instance to be made."""

    name: str
    cls: type[Plugin]
    parameters: Mapping[str, Any]
    origin: Origin

    def is_a(self, *points: type) -> bool:
        return any(point in self.cls.__mro__ for point in points)


@dataclass(frozen=True, slots=True)
class Use:
    """A plugin in a profile."""

    ref: str
    weight: float
    origin: Origin
    weight_origin: Origin


@dataclass(frozen=True, slots=True)
class ProfileLayout:
    name: str
    uses: tuple[Use, ...]
    origin: Origin
    shadow: bool = False


@dataclass(slots=True)
class Layout:
    """Filled while it is laid out and while default producers are injected; then only read."""

    registry: Registry
    path: str
    problems: list[Problem]
    entries: dict[str, Entry] = field(default_factory=dict)
    profiles: list[ProfileLayout] = field(default_factory=list)
    handler: str = ""

    def complain(self, path: str, message: str) -> None:
        self.problems.append(Problem(join(self.path, path), message))

    def inject(self, type_name: str) -> str:
        """The name of an instance of the type; it is made up if the document has none under the type's name."""
        entry = self.entries.get(type_name)
        if entry is not None:
            return type_name
        cls = self.registry.get(type_name)
        if cls is None:
            self.complain("plugins", f"the default '{type_name}' is not among the installed plugins")
        else:
            self.entries[type_name] = Entry(type_name, cls, {}, Origin.INJECTED)
        return type_name

    def deciding(self) -> tuple[str, ...]:
        """The names of the profiles that are not shadows."""
        return tuple(dict.fromkeys(profile.name for profile in self.profiles if not profile.shadow))


def lay_out(document: Document, registry: Registry) -> Layout:
    """Problems are collected in the layout, those of the document first."""
    layout = Layout(registry, document.path, list(document.problems))
    _declare(layout, document)
    if document.profiles is None:
        layout.profiles.append(_default_profile(layout))
    else:
        layout.profiles.extend(_declared_profile(layout, profile) for profile in document.profiles)
    layout.profiles[:] = [_with_picker(layout, profile) for profile in layout.profiles]
    _choose_handler(layout, document)
    return layout


def _declare(layout: Layout, document: Document) -> None:
    types = [*(cls.plugin_type for cls in layout.registry), *SETTINGS_TYPES, *FLOW_TYPES]
    for plugin in document.plugins:
        cls = layout.registry.get(plugin.type)
        if cls is None:
            near = suggestion(plugin.type, types)
            layout.complain(f"plugins.{plugin.label}", f"unknown plugin type '{plugin.type}'{near}")
        else:
            layout.entries.setdefault(plugin.label, Entry(plugin.label, cls, plugin.parameters or {}, Origin.FILE))


def _default_profile(layout: Layout) -> ProfileLayout:
    """Every filter, scorer and picker in the order of the file; with none of them, what serves most fleets best."""
    members = [name for name, entry in layout.entries.items() if entry.is_a(Filter, Scorer, Picker)]
    weights = [(name, DEFAULT_WEIGHT) for name in members]
    if not members and not layout.problems:
        weights = [(layout.inject(name), DEFAULT_WEIGHT) for name in DEFAULT_PLUGINS]
    uses = tuple(Use(name, weight, Origin.INJECTED, Origin.INJECTED) for name, weight in weights)
    return ProfileLayout(DEFAULT_PROFILE, uses, Origin.INJECTED)


def _declared_profile(layout: Layout, profile: ProfileEntry) -> ProfileLayout:
    uses: list[Use] = []
    for ref in profile.plugins:
        entry = layout.entries.get(ref.plugin_ref)
        if entry is not None and not entry.is_a(Filter, Scorer, Picker):
            continue  # guides of llm-d name producers too: these run for every request anyway
        if any(use.ref == ref.plugin_ref for use in uses):
            layout.problems.append(Problem(profile.path, f"refers to '{ref.plugin_ref}' twice"))
        given = ref.weight is not None
        weight = DEFAULT_WEIGHT if ref.weight is None else ref.weight
        uses.append(Use(ref.plugin_ref, weight, Origin.FILE, Origin.FILE if given else Origin.DEFAULT))
    return ProfileLayout(profile.name, tuple(uses), Origin.FILE, profile.shadow)


def _with_picker(layout: Layout, profile: ProfileLayout) -> ProfileLayout:
    pickers = [use.ref for use in profile.uses if _is_picker(layout, use.ref)]
    if len(pickers) > 1:
        names = " and ".join(f"'{name}'" for name in pickers)
        layout.complain(f"schedulingProfiles.{profile.name}", f"has the pickers {names}; a profile has one")
    if pickers:
        return profile
    defined = [name for name in layout.entries if _is_picker(layout, name)]
    picker = defined[0] if len(defined) == 1 else layout.inject(DEFAULT_PICKER)
    use = Use(picker, DEFAULT_WEIGHT, Origin.INJECTED, Origin.INJECTED)
    return ProfileLayout(profile.name, (*profile.uses, use), profile.origin, profile.shadow)


def _is_picker(layout: Layout, name: str) -> bool:
    entry = layout.entries.get(name)
    return entry is not None and entry.is_a(Picker)


def _choose_handler(layout: Layout, document: Document) -> None:
    handlers = [name for name, entry in layout.entries.items() if entry.is_a(ProfileHandler)]
    deciding: Sequence[str] = layout.deciding()
    if len(handlers) > 1:
        names = " and ".join(f"'{name}'" for name in handlers)
        layout.complain("plugins", f"there are the profile handlers {names}; there can be one")
    if not deciding and layout.profiles:
        layout.complain("schedulingProfiles", "every profile is a shadow; one must decide")
    elif not handlers and len(deciding) > 1 and not _names_a_handler(layout, document):
        names = ", ".join(deciding)
        layout.complain("schedulingProfiles", f"several profiles ({names}) and no profile handler that chooses")
    elif not handlers and len(deciding) == 1:
        handlers.append(layout.inject(DEFAULT_HANDLER))
    layout.handler = handlers[0] if handlers else ""


def _names_a_handler(layout: Layout, document: Document) -> bool:
    """One whose type is misspelt or not yet supported has been complained about: it is not missing as well."""
    known = (*(cls.plugin_type for cls in layout.registry), *SETTINGS_TYPES)
    missing = (type_name for type_name in document.names.values() if type_name not in known)
    return any("profile" in type_name or "handler" in type_name for type_name in missing)
