"""Find a connector by the name in `disaggregation.connector`: a file here, or an entry point of another package.

Entry points are searched for a name that no file has.
"""

from __future__ import annotations

import importlib
import pkgutil
from typing import TYPE_CHECKING

from proxy.core.params import suggestion
from proxy.core.registry import in_module, installed

if TYPE_CHECKING:
    from proxy.disagg.connector import Connector

ENTRY_POINT_GROUP = "kvlane.connectors"

NAMES = tuple(found.name.replace("_", "-") for found in pkgutil.iter_modules(__path__))
"""The names of the connectors here. A connector has the name of its file."""


def connector_named(name: str) -> type[Connector]:
    """Raise ValueError for an unknown connector, ConfigError for an installed package that cannot be loaded."""
    if name in NAMES:
        return next(in_module(importlib.import_module(f"{__name__}.{name.replace('-', '_')}"), "name"))
    known = {one.name: one for one in installed(ENTRY_POINT_GROUP, "name")}
    if name not in known:
        near = suggestion(name, [*NAMES, *known]) or f"; known are {', '.join(sorted([*NAMES, *known]))}"
        raise ValueError(f"connector: there is no '{name}'{near}")
    return known[name]
