"""Discovery of plugins, their construction from the configuration, and the handling of their faults."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from proxy.core import params
from proxy.core.errors import ConfigError, Problem
from proxy.core.log_limit import LogLimit
from proxy.core.params import Invalid, suggestion, unknown_key
from proxy.core.plugin import REQUIRED_METHODS, Plugin, points_of
from proxy.core.ports import Clock

log = logging.getLogger(__name__)


@cache
def in_package(package: str, named_by: str) -> tuple[type[Any], ...]:
    """Return the classes with a class variable `named_by` of their own."""
    root = importlib.import_module(package)
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(root.__path__, package + ".")]
    return tuple(cls for module in modules for cls in in_module(module, named_by))


def installed(group: str, named_by: str) -> Iterator[type[Any]]:
    """Return the plugins of an entry point, which names a module or one class. Raise ConfigError if it cannot be
    loaded."""
    for entry in entry_points(group=group):
        try:
            found = entry.load()
        except Exception as error:
            where = f"entry point {entry.name} = {entry.value}"
            raise ConfigError([Problem(where, f"cannot be loaded: {error!r}; repair or uninstall it")]) from error
        if inspect.ismodule(found):
            yield from in_module(found, named_by)
        else:
            yield found


def in_module(module: ModuleType, named_by: str) -> Iterator[type[Any]]:
    """Return the classes of a module, without imported ones, that have a class variable `named_by` of their own."""
    for member in vars(module).values():
        if isinstance(member, type) and member.__module__ == module.__name__ and vars(member).get(named_by):
            yield member


BUILT_IN = "proxy.plugins"
ENTRY_POINT_GROUP = "kvlane.plugins"
NAMED_BY = "plugin_type"


class Registry:
    """Plugin classes by type. Two classes of one type are an error."""

    def __init__(self, classes: Iterable[type[Plugin]]) -> None:
        self._classes: dict[str, type[Plugin]] = {}
        for cls in classes:
            if not cls.__module__.startswith(f"{BUILT_IN}.") and (fault := _incomplete(cls)):
                raise ConfigError([Problem("", f"plugin type '{cls.plugin_type}': {_where(cls)} {fault}")])
            other = self._classes.setdefault(cls.plugin_type, cls)
            if other is not cls:
                raise ConfigError(
                    [Problem("", f"two plugins of type '{cls.plugin_type}': {_where(other)}, {_where(cls)}")]
                )

    @classmethod
    def discover(cls, package: str = BUILT_IN) -> Registry:
        """Return all built-in and installed plugins."""
        return cls([*in_package(package, NAMED_BY), *installed(ENTRY_POINT_GROUP, NAMED_BY)])

    def get(self, type_name: str) -> type[Plugin] | None:
        return self._classes.get(type_name)

    def suggest(self, type_name: str) -> str:
        return suggestion(type_name, list(self._classes))

    def __iter__(self) -> Iterator[type[Plugin]]:
        return iter(sorted(self._classes.values(), key=lambda cls: cls.plugin_type))


def is_built_in(plugin: Plugin) -> bool:
    """Return whether the plugin is part of kvlane. Contract tests run all of these, so guards need not check the
    results of built-in filters and pickers."""
    return type(plugin).__module__.startswith(f"{BUILT_IN}.")


def _incomplete(cls: type[Plugin]) -> str:
    """Return what a class lacks to be a plugin; "" for a complete one."""
    if getattr(cls, "__dataclass_fields__", None) is None:
        return "is not a dataclass; write @dataclass below @plugin"
    points = points_of(cls)
    if not points:
        return "has no extension point as a base, such as Scorer"
    for point in points:
        method = REQUIRED_METHODS.get(point.__name__)
        if method is not None and getattr(cls, method) is getattr(point, method):
            return f"has no method '{method}', which a {point.__name__} needs"
    return ""


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


Ports = Mapping[Any, Any]
"""Annotated type -> value that is injected into fields of this type."""


def parameters_of(cls: type[Plugin], ports: Ports) -> list[dataclasses.Field[Any]]:
    """Return the fields that YAML sets."""
    kinds = params.hints(cls)
    return [field for field in dataclasses.fields(cls) if field.init and kinds[field.name] not in ports]  # type: ignore[arg-type]


def make_plugin(cls: type[Plugin], parameters: Any, path: str, ports: Ports) -> Plugin:
    """Raise params.Invalid with every fault of the parameters."""
    try:
        return params.build(cls, params.without_nulls(cls, parameters), cls.plugin_type, injected(cls, ports))
    except Invalid as invalid:
        raise Invalid(*(_moved(problem, cls.plugin_type, path) for problem in invalid.problems)) from None


def _moved(problem: Problem, root: str, path: str) -> Problem:
    """Return the problem of a parameter at its path; a problem without a key has the path of the plugin."""
    below = problem.path.removeprefix(root)
    return dataclasses.replace(problem, path=f"{path}.parameters{below}" if below or unknown_key(problem) else path)


def injected(cls: type[Plugin], ports: Ports) -> dict[str, Any]:
    """Return the fields that are ports, with their values."""
    kinds = params.hints(cls)
    return {
        field.name: ports[kinds[field.name]]
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.init and kinds[field.name] in ports
    }


Count = Callable[[str, str], None]
"""Called once per faulty call with the name of the plugin and the kind of fault."""

OUT_OF_RANGE = "out-of-range"
NOT_A_NUMBER = "nan"
WRONG_LENGTH = "wrong-length"
RAISED = "raised"
UNUSABLE = "unusable"
"""The plugin returned a value of the wrong type or length."""


class PluginFaults:
    """Counts and logs the faults of plugins, with one rate limit for all."""

    def __init__(self, clock: Clock, count: Count = lambda name, fault: None) -> None:
        self._logs = LogLimit(clock.now)
        self._count = count

    def report(self, name: str, fault: str, complaint: str, error: BaseException | None = None) -> None:
        """Count a fault of the plugin `name`. `complaint` states what happened and what happens instead."""
        self._count(name, fault)
        if self._logs.allows((name, fault)):
            log.error("plugin %s %s (logged once a minute, counted always)", name, complaint, exc_info=error)
