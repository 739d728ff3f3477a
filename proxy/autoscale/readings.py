"""What was measured, as it may come from anywhere: a reading is a finite number that is not negative."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def number(value: Any) -> float | None:
    """None for whatever is not a finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def reading(value: Any) -> float | None:
    """None is missing; 0 is a reading."""
    found = number(value)
    return None if found is None or found < 0 else found


def of_role(metrics: Any, role: str) -> Mapping[Any, Any]:
    """What is written of a role in {role: {signal: value}}."""
    found = metrics.get(role) if isinstance(metrics, Mapping) else None
    return found if isinstance(found, Mapping) else {}
