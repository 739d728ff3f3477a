"""Which plugin types exist: those in the package `proxy.plugins` by existing, others by entry point."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Iterator
from importlib.metadata import entry_points
from types import ModuleType

from proxy.core.errors import ConfigError, Problem
from proxy.core.params import suggestion
from proxy.core.plugin import Plugin

ENTRY_POINT_GROUP = "kvlane.plugins"


class Registry:
    """Plugin classes by type. Two classes of one type are an error."""

    def __init__(self, classes: Iterable[type[Plugin]]) -> None:
        self._classes: dict[str, type[Plugin]] = {}
        for cls in classes:
            other = self._classes.setdefault(cls.plugin_type, cls)
            if other is not cls:
                raise ConfigError(
                    [Problem("", f"two plugins of type '{cls.plugin_type}': {_where(other)}, {_where(cls)}")]
                )

    @classmethod
    def discover(cls, package: str = "proxy.plugins") -> Registry:
        """Everything there is. An entry point names a module full of plugins, or one class."""
        return cls([*_in_package(package), *_installed()])

    def get(self, type_name: str) -> type[Plugin] | None:
        return self._classes.get(type_name)

    def suggest(self, type_name: str) -> str:
        return suggestion(type_name, list(self._classes))

    def __iter__(self) -> Iterator[type[Plugin]]:
        return iter(sorted(self._classes.values(), key=lambda cls: cls.plugin_type))


def _in_package(package: str) -> Iterator[type[Plugin]]:
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, package + "."):
        yield from _in_module(importlib.import_module(info.name))


def _installed() -> Iterator[type[Plugin]]:
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        try:
            found = entry.load()
        except Exception as error:
            where = f"entry point {entry.name} = {entry.value}"
            raise ConfigError([Problem(where, f"cannot be loaded: {error!r}; repair or uninstall it")]) from error
        if inspect.ismodule(found):
            yield from _in_module(found)
        else:
            yield found


def _in_module(module: ModuleType) -> Iterator[type[Plugin]]:
    for member in vars(module).values():
        if isinstance(member, type) and member.__module__ == module.__name__ and vars(member).get("plugin_type"):
            yield member


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
