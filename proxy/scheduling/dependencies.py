"""Who provides the data that plugins require, and in which order producers run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from types import CodeType
from typing import Any, cast, get_args, get_origin, get_type_hints

from proxy.core.cycle_state import DataKey
from proxy.core.params import suggestion
from proxy.core.plugin import DataProducer, Plugin
from proxy.scheduling.layout import Layout

DEFAULT_PRODUCERS: Mapping[str, str] = {
    "PrefixCacheMatchInfo": "approx-prefix-cache-producer",
    "TokenizedPrompt": "token-producer",
    "TokenIds": "tokenizer",
    "OutputEstimate": "inflight-load-producer",
    "LatencyPredictionInfo": "predicted-latency-producer",
    "SessionID": "session-id-producer",
    "EncoderCacheMatchInfo": "mm-embeddings-cache-producer",
}
"""Kind of a datum -> the type that is injected where something requires the datum and nothing provides it."""

Instances = dict[str, Plugin]


def satisfy(layout: Layout, instances: Instances, make: Callable[[str], None]) -> None:
    """Injects default producers until every requirement has its provider, or complains. `make` adds the instance of
    an entry of the layout to the instances."""
    settled: set[tuple[str, DataKey[Any]]] = set()
    while missing := [need for need in _needs(instances) if need not in settled]:
        for name, key in missing:
            settled.add((name, key))
            default = _missing_default(layout, instances, name, key)
            if default:
                make(layout.inject(default))


def check_keys(layout: Layout, instances: Instances) -> None:
    """Report two producers of one key, and data of another type than their key or their readers have."""
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
    """The names of the producers, each after those whose data it requires; as far as that allows, those that may wait
    come last, since they may use up the time of all, and otherwise as in the file. Who says not whose data it reads
    gets what was written first: so those that bear the name of their type, which is what it means, come before."""
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
    """Whether its class declares the extension point; protocols are told apart by name, not by shape."""
    return point in type(made).__mro__


def _check_annotated_types(layout: Layout, name: str, made: Plugin) -> None:
    """Compare the annotation of `provides` with the types of its keys; any other fault shows at the first write."""
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
    """Report keys that a method names and reads without the plugin's having declared them. Keys that are computed, or
    read by functions outside the class, cannot be seen here."""
    declared = {key.kind for key in (*made.provides, *made.requires, *made.uses)}
    found: set[str] = set()
    for cls in type(made).__mro__:
        for member in vars(cls).values():
            method = getattr(member, "fget", member)
            names = _names_in(getattr(method, "__code__", None))
            if "read" not in names:
                continue
            named = (method.__globals__.get(each) for each in names)
            found |= {key.kind for key in named if isinstance(key, DataKey) and key.kind not in declared}
    for kind in sorted(found):
        layout.complain(f"plugins.{name}", f"reads {kind} without declaring it in its `requires` or `uses`")


def _names_in(code: CodeType | None) -> set[str]:
    """Globals and attributes of a function, and of the comprehensions and functions inside."""
    if code is None:
        return set()
    return set(code.co_names).union(*(_names_in(each) for each in code.co_consts if isinstance(each, CodeType)))


def _needs(instances: Instances) -> Iterator[tuple[str, DataKey[Any]]]:
    for name, made in instances.items():
        for key in made.requires:
            yield name, key


def _missing_default(layout: Layout, instances: Instances, name: str, key: DataKey[Any]) -> str | None:
    """The type to inject for a requirement, or None if it is met or cannot be; the latter is complained about."""
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
