"""Plugins that a document declares, and that decide nothing."""

from __future__ import annotations

from collections.abc import Iterator

from proxy.core.plugin import DataProducer, Filter, Picker, Scorer
from proxy.core.registry import Registry
from proxy.scheduling.document import Document


def cautions(document: Document, registry: Registry) -> Iterator[str]:
    """A sentence for each, beginning with its path. Where there are no profiles every plugin is in the one that is made
    up; producers and handlers run without being referred to, and so does the only picker, where a profile has none."""
    if document.profiles is None:
        return
    used = {ref.plugin_ref for profile in document.profiles for ref in profile.plugins}
    pickers = {entry.label for entry in document.plugins if _is_a(registry, entry.type, Picker)}
    if len(pickers) == 1 and any(
        pickers.isdisjoint(ref.plugin_ref for ref in profile.plugins) for profile in document.profiles
    ):
        used |= pickers
    for entry in document.plugins:
        if entry.label not in used and _only_decides(registry, entry.type):
            path = f"{document.path}.plugins" if document.path else "plugins"
            yield f"{path}.{entry.label}: no profile refers to it, so it decides nothing."


def _only_decides(registry: Registry, type_name: str) -> bool:
    return _is_a(registry, type_name, Filter, Scorer, Picker) and not _is_a(registry, type_name, DataProducer)


def _is_a(registry: Registry, type_name: str, *points: type) -> bool:
    made = registry.get(type_name)
    return made is not None and any(point in made.__mro__ for point in points)
