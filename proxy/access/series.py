"""How often limits refused something."""

from __future__ import annotations

from proxy.telemetry.catalogue import Catalogue
from proxy.telemetry.instruments import OTHER
from proxy.telemetry.labels import is_label

MOST_NAMES = 200
"""Of keys and tenants that become labels: an issuer of tokens can name any number."""


class LimitSeries:
    """Implements `gate.Watcher`."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._limited = catalogue.limited
        self._names: set[tuple[str, str]] = set()

    def limited(self, kind: str, name: str, shadow: bool) -> None:
        if (kind, name) not in self._names:
            if len(self._names) >= MOST_NAMES or not is_label(name):
                name = OTHER
            else:
                self._names.add((kind, name))
        self._limited.cell(kind, name, "true" if shadow else "false").add()
