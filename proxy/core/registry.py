"""Which plugin types exist: those in the package `proxy.plugins` by existing, others by entry point."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from proxy.core.discovery import in_package, installed
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import suggestion
from proxy.core.plugin import Plugin

BUILT_IN = "proxy.plugins"
ENTRY_POINT_GROUP = "kvlane.plugins"
NAMED_BY = "plugin_type"


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
    def discover(cls, package: str = BUILT_IN) -> Registry:
        """Everything there is."""
        return cls([*in_package(package, NAMED_BY), *installed(ENTRY_POINT_GROUP, NAMED_BY)])

    def get(self, type_name: str) -> type[Plugin] | None:
        return self._classes.get(type_name)

    def suggest(self, type_name: str) -> str:
        return suggestion(type_name, list(self._classes))

    def __iter__(self) -> Iterator[type[Plugin]]:
        return iter(sorted(self._classes.values(), key=lambda cls: cls.plugin_type))


def is_built_in(plugin: Plugin) -> bool:
    """Whether the plugin is part of kvlane. The contract tests run all of these, so guards need not check results."""
    return type(plugin).__module__.startswith(f"{BUILT_IN}.")


def _where(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
