"""The layout of a document: plugins and profiles with defaults, and the producers of required data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cache
from graphlib import CycleError, TopologicalSorter
from types import CodeType
from typing import Any, cast, get_args, get_origin, get_type_hints

from proxy.core.errors import Problem
from proxy.core.params import join, suggestion
from proxy.core.plugin import DataProducer, Filter, Picker, Plugin, ProfileHandler, Scorer, points_of
from proxy.core.registry import Registry
from proxy.core.request import DataKey
from proxy.scheduling.document import Document, ProfileEntry
from proxy.scheduling.sections import SECTION_TYPES, SETTINGS_TYPES

DEFAULT_PROFILE = "default"
DEFAULT_PICKER = "max-score-picker"
DEFAULT_PLUGINS = ("candidate-sampling-filter", "latency-scorer", DEFAULT_PICKER)
"""The scorer adds up cached prefix, queue, running responses and the speed of a pod in seconds; several scorers would
need weights. The filter has no effect on up to 128 pods."""
DEFAULT_HANDLER = "single-profile-handler"


class ValueOrigin(Enum):
    """The origin of a piece of the effective configuration."""

    FILE = "file"
    DEFAULT = "default"
    INJECTED = "injected"


@dataclass(frozen=True, slots=True)
class PluginInstance:
    """One plugin instance to create."""

    name: str
    cls: type[Plugin]
    parameters: Mapping[str, Any]
    origin: ValueOrigin

    def is_a(self, *points: type) -> bool:
        return any(point in self.cls.__mro__ for point in points)


@dataclass(frozen=True, slots=True)
class PluginUse:
    """A plugin in a profile."""

    ref: str
    weight: float = 1.0
    origin: ValueOrigin = ValueOrigin.INJECTED
    weight_origin: ValueOrigin = ValueOrigin.INJECTED


@dataclass(frozen=True, slots=True)
class ProfileLayout:
    name: str
    uses: tuple[PluginUse, ...]
    origin: ValueOrigin
    shadow: bool = False


@dataclass(slots=True)
class Layout:
    """The plugins and profiles. It is filled during layout and the injection of default producers; after that it is
    read only."""

    registry: Registry
    path: str
    problems: list[Problem]
    entries: dict[str, PluginInstance] = field(default_factory=dict)
    profiles: list[ProfileLayout] = field(default_factory=list)
    handler: str = ""

    def complain(self, path: str, message: str) -> None:
        self.problems.append(Problem(join(self.path, path), message))

    def inject(self, type_name: str) -> str:
        """Return the name of an instance of the type; create it if the document has no plugin under the type's name."""
        if type_name not in self.entries:
            if (cls := self.registry.get(type_name)) is None:
                self.complain("plugins", f"the default '{type_name}' is not among the installed plugins")
            else:
                self.entries[type_name] = PluginInstance(type_name, cls, {}, ValueOrigin.INJECTED)
        return type_name

    def deciding(self) -> tuple[str, ...]:
        """The names of the profiles that are not shadows."""
        return tuple(dict.fromkeys(profile.name for profile in self.profiles if not profile.shadow))


def lay_out(document: Document, registry: Registry) -> Layout:
    """Collect problems in the layout, after the problems of the document."""
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
    types = [*(cls.plugin_type for cls in layout.registry), *SECTION_TYPES]
    for plugin in document.plugins:
        cls = layout.registry.get(plugin.type)
        if cls is None:
            near = suggestion(plugin.type, types)
            layout.complain(f"plugins.{plugin.label}", f"unknown plugin type '{plugin.type}'{near}")
        else:
            layout.entries.setdefault(
                plugin.label, PluginInstance(plugin.label, cls, plugin.parameters or {}, ValueOrigin.FILE)
            )


def _default_profile(layout: Layout) -> ProfileLayout:
    """Return a profile with every filter, scorer and picker in the order of the file; the default plugins if there are
    no such plugins."""
    members = [name for name, entry in layout.entries.items() if entry.is_a(Filter, Scorer, Picker)]
    if not members and not layout.problems:
        members = [layout.inject(name) for name in DEFAULT_PLUGINS]
    return ProfileLayout(DEFAULT_PROFILE, tuple(map(PluginUse, members)), ValueOrigin.INJECTED)


def _declared_profile(layout: Layout, profile: ProfileEntry) -> ProfileLayout:
    uses: list[PluginUse] = []
    for ref in profile.plugins:
        entry = layout.entries.get(ref.plugin_ref)
        if entry is not None and not entry.is_a(Filter, Scorer, Picker):
            continue  # guides of llm-d name producers too: these run for every request anyway
        if any(use.ref == ref.plugin_ref for use in uses):
            layout.problems.append(Problem(profile.path, f"refers to '{ref.plugin_ref}' twice"))
        weight, origin = (1.0, ValueOrigin.DEFAULT) if ref.weight is None else (ref.weight, ValueOrigin.FILE)
        uses.append(PluginUse(ref.plugin_ref, weight, ValueOrigin.FILE, origin))
    return ProfileLayout(profile.name, tuple(uses), ValueOrigin.FILE, profile.shadow)


def _with_picker(layout: Layout, profile: ProfileLayout) -> ProfileLayout:
    defined = [name for name, entry in layout.entries.items() if entry.is_a(Picker)]
    pickers = [use.ref for use in profile.uses if use.ref in defined]
    if len(pickers) > 1:
        names = " and ".join(f"'{name}'" for name in pickers)
        layout.complain(f"schedulingProfiles.{profile.name}", f"has the pickers {names}; a profile has one")
    if pickers:
        return profile
    picker = defined[0] if len(defined) == 1 else layout.inject(DEFAULT_PICKER)
    return replace(profile, uses=(*profile.uses, PluginUse(picker)))


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
    """Return whether the document names a profile handler. A misspelt or unsupported type counts: its fault is reported
    already."""
    known = (*(cls.plugin_type for cls in layout.registry), *SETTINGS_TYPES)
    missing = (type_name for type_name in document.names.values() if type_name not in known)
    return any("profile" in type_name or "handler" in type_name for type_name in missing)


DEFAULT_PRODUCERS: Mapping[str, str] = {
    "PrefixCacheMatchInfo": "approx-prefix-cache-producer",
    "TokenizedPrompt": "token-producer",
    "TokenIds": "tokenizer",
    "OutputEstimate": "inflight-load-producer",
    "LatencyPredictionInfo": "predicted-latency-producer",
    "SessionID": "session-id-producer",
    "EncoderCacheMatchInfo": "mm-embeddings-cache-producer",
}
"""Kind of a datum -> the type that is injected if a plugin requires the datum and no plugin provides it."""

Instances = dict[str, Plugin]


def satisfy(layout: Layout, instances: Instances, make: Callable[[str], None]) -> None:
    """Inject default producers until every requirement has a provider, or report a problem. `make` adds the instance of
    an entry of the layout to the instances."""
    handled: set[tuple[str, DataKey[Any]]] = set()
    while missing := [
        (name, key) for name, made in instances.items() for key in made.requires if (name, key) not in handled
    ]:
        for name, key in missing:
            handled.add((name, key))
            default = _missing_default(layout, instances, name, key)
            if default:
                make(layout.inject(default))


def check_keys(layout: Layout, instances: Instances) -> None:
    """Report keys with two producers, and data whose type differs from the type of the key or of its readers."""
    provided = [(name, key) for name, made in instances.items() for key in made.provides]
    for at, (name, key) in enumerate(provided):
        for other, theirs in provided[:at]:
            if other != name and key.kind == theirs.kind and (key == theirs or not (key.producer and theirs.producer)):
                problem = f"'{other}' and '{name}' both provide {key.kind} without a name of their own"
                layout.complain(f"plugins.{name}", f"{problem}; remove one, or provide {key.kind}.of(name) in both")
    for name, made in instances.items():
        _check_annotated_types(layout, name, made)
        _check_reads(layout, name, made)
        for key in made.requires:
            for other, theirs in provided:
                same = key.kind == theirs.kind and key.producer in ("", theirs.producer)
                if same and not (key.accepts(theirs.value_type) or theirs.value_type is object):
                    has, wants = theirs.value_type.__name__, key.value_type.__name__
                    layout.complain(f"plugins.{name}", f"reads {key} as {wants}, but '{other}' provides {has}")


def in_order(layout: Layout, instances: Instances) -> list[str]:
    """Return the names of the producers, each after the producers of the data that it requires. As far as that allows,
    producers that may wait come last, since they may use up the time of all, then the order of the file decides. A
    reader that names no producer gets the datum that was written first, so producers with the name of their type come
    before others."""
    graph: dict[str, list[str]] = {name: [] for name, made in instances.items() if declares(made, DataProducer)}
    for name, providers in graph.items():
        for key in instances[name].requires:
            providers.extend(other for other in _providers(instances, key) if other in graph)
    sorter = TopologicalSorter(graph)
    try:
        sorter.prepare()
    except CycleError as cycle:
        path = " needs ".join(f"'{name}'" for name in reversed(cycle.args[1]))
        layout.complain("plugins", f"producers need each other's data: {path}")
        return list(graph)
    rank = {
        name: (cast(DataProducer, instances[name]).waits, name not in DEFAULT_PRODUCERS.values(), at)
        for at, name in enumerate(graph)
    }
    ordered: list[str] = []
    startable: list[str] = []
    while sorter.is_active():
        startable = sorted([*startable, *sorter.get_ready()], key=rank.__getitem__)
        ordered.append(startable.pop(0))
        sorter.done(ordered[-1])
    return ordered


def declares(made: Plugin, point: type) -> bool:
    """Return whether its class declares the extension point as a base."""
    return point in type(made).__mro__


def _check_annotated_types(layout: Layout, name: str, made: Plugin) -> None:
    """Compare the annotation of `provides` with the types of its keys; other faults are found at the first write."""
    getter = getattr(type(made).provides, "fget", None)
    try:
        annotated = get_args(get_type_hints(getter)["return"])
    except (AttributeError, KeyError, NameError, TypeError):
        return
    kinds = [each for each in annotated if each is not Ellipsis]
    if len(kinds) == 1:
        kinds *= len(made.provides)
    for key, kind in zip(made.provides, kinds, strict=False):
        for value in get_args(kind):
            cls = get_origin(value) or value
            if isinstance(cls, type) and cls not in (Any, object) and not key.accepts(cls):
                has, wants = cls.__name__, key.value_type.__name__
                layout.complain(f"plugins.{name}", f"provides {key} as {has}, but the values of this key are {wants}")


def _check_reads(layout: Layout, name: str, made: Plugin) -> None:
    """Report keys that a method names and reads although the plugin does not declare them. Keys that are computed, or
    read by functions outside the class, are not found."""
    declared = {key.kind for key in (*made.provides, *made.requires, *made.uses)}
    for kind in sorted(_kinds_read_by(type(made)) - declared):
        layout.complain(f"plugins.{name}", f"reads {kind} without declaring it in its `requires` or `uses`")


@cache
def _kinds_read_by(plugin: type[Plugin]) -> frozenset[str]:
    found: set[str] = set()
    for cls in plugin.__mro__:
        for member in vars(cls).values():
            method = getattr(member, "fget", member)
            names = _names_in(getattr(method, "__code__", None))
            if "read" in names:
                named = (method.__globals__.get(each) for each in names)
                found |= {key.kind for key in named if isinstance(key, DataKey)}
    return frozenset(found)


def _names_in(code: CodeType | None) -> set[str]:
    """Return the globals and attributes of a function, and of its comprehensions and inner functions."""
    if code is None:
        return set()
    return set(code.co_names).union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _missing_default(layout: Layout, instances: Instances, name: str, key: DataKey[Any]) -> str | None:
    """Return the type to inject for a requirement; None if it is met, or cannot be met, which is reported."""
    providers = _providers(instances, key)
    default = DEFAULT_PRODUCERS.get(key.kind)
    path = f"plugins.{name}"
    if providers:
        return None
    if default and (not key.producer or key.producer == default) and default not in layout.entries:
        return default
    if not key.producer:
        if layout.entries.keys() <= instances.keys():  # else one that has a fault of its own might provide it
            layout.complain(path, f"nothing provides {key.kind}; add a producer of it to plugins")
    elif key.producer not in layout.entries or key.producer in instances:
        of_kind = [other for other, made in instances.items() if any(has.kind == key.kind for has in made.provides)]
        near = suggestion(key.producer, of_kind)
        layout.complain(path, f"no producer of {key.kind} is named '{key.producer}'{near}")
    return None


def _providers(instances: Instances, key: DataKey[Any]) -> list[str]:
    if key.producer:
        return [name for name, made in instances.items() if key in made.provides]
    found = [name for name, made in instances.items() if any(has.kind == key.kind for has in made.provides)]
    return [name for name in found if not any(key.of(name) in instances[other].requires for other in found)]


def warnings(document: Document, registry: Registry) -> Iterator[str]:
    """Yield a sentence for each warning, starting with its path. Without profiles every plugin is in the default
    profile; producers and handlers run without references, and so does a sole picker in a profile without one."""
    if document.profiles is None:
        return
    references = [{ref.plugin_ref for ref in profile.plugins} for profile in document.profiles]
    used = set[str]().union(*references)
    points = {entry.label: set(points_of(cls)) for entry in document.plugins if (cls := registry.get(entry.type))}
    pickers = {label for label, its in points.items() if Picker in its}
    if len(pickers) == 1 and any(map(pickers.isdisjoint, references)):
        used |= pickers
    for label, its in points.items():
        if label not in used and DataProducer not in its and its & {Filter, Scorer, Picker}:
            yield f"{join(document.path, f'plugins.{label}')}: no profile refers to it, so it has no effect."
