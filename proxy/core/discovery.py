"""Classes that exist by their files in a package of kvlane's, or by the entry points of packages of others."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any

from proxy.core.errors import ConfigError, Problem


def in_package(package: str, named_by: str) -> Iterator[type[Any]]:
    """Those that have a class variable `named_by` of their own."""
    root = importlib.import_module(package)
    for found in pkgutil.walk_packages(root.__path__, package + "."):
        yield from _in_module(importlib.import_module(found.name), named_by)


def installed(group: str, named_by: str) -> Iterator[type[Any]]:
    """An entry point names a module full of them, or one class. Raises ConfigError for one that cannot be loaded."""
    for entry in entry_points(group=group):
        try:
            found = entry.load()
        except Exception as error:
            where = f"entry point {entry.name} = {entry.value}"
            raise ConfigError([Problem(where, f"cannot be loaded: {error!r}; repair or uninstall it")]) from error
        if inspect.ismodule(found):
            yield from _in_module(found, named_by)
        else:
            yield found


def _in_module(module: ModuleType, named_by: str) -> Iterator[type[Any]]:
    for member in vars(module).values():
        if isinstance(member, type) and member.__module__ == module.__name__ and vars(member).get(named_by):
            yield member
