"""Entry points of installed packages, read once per process.

A development environment has a hundred packages, and kvlane reads the entry points of all of them twice per start. That
took half of the CPU time of a test that starts a proxy."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points

from proxy.core import registry


def install() -> None:
    """Read them again only where a test has put a package on the path."""
    vars(registry)["entry_points"] = lambda group: _entry_points(group, tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group=group)
