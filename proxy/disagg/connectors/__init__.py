"""All connectors, by the name that `disaggregation.connector` gives: a file here, or an entry point of another package.

Entry points are searched for a name that none of these has.
"""

from __future__ import annotations

from collections.abc import Mapping

from proxy.core.params import suggestion
from proxy.core.registry import in_package, installed
from proxy.disagg.connector import Connector

ENTRY_POINT_GROUP = "kvlane.connectors"

CONNECTORS: Mapping[str, type[Connector]] = {one.name: one for one in in_package(__name__, "name")}


def connector_named(name: str) -> type[Connector]:
    """Raise ValueError for an unknown connector, ConfigError for an installed package that cannot be loaded."""
    if name in CONNECTORS:
        return CONNECTORS[name]
    known = {**{one.name: one for one in installed(ENTRY_POINT_GROUP, "name")}, **CONNECTORS}
    if name not in known:
        near = suggestion(name, list(known)) or f"; known are {', '.join(sorted(known))}"
        raise ValueError(f"connector: there is no '{name}'{near}")
    return known[name]
