"""Who sends a request, as far as kvlane has checked it."""

from __future__ import annotations

from proxy.core.cycle_state import DataKey
from proxy.core.request import frozen


@frozen
class Identity:
    """Of a key or a token. `name` is what logs and metrics say, never the secret; `models` and `objectives` are what it
    may ask for, None: any."""

    name: str
    tenant: str = ""
    models: frozenset[str] | None = None
    objectives: frozenset[str] | None = None
    limits: str = ""
    """The name of those that it has."""


IDENTITY: DataKey[Identity] = DataKey("Identity")
"""Who sends the request; absent where no keys are asked for."""
