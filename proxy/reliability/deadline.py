"""How long a client is willing to wait."""

from __future__ import annotations

from collections.abc import Mapping

from proxy.core.errors import BadRequest
from proxy.core.request import TIME_LIMIT

HEADER = TIME_LIMIT


def time_limit(headers: Mapping[str, str], most: float) -> float:
    """Seconds from receipt to the end of the answer: `most`, or less if the client says so. Raises BadRequest."""
    asked = headers.get(HEADER)
    if asked is None:
        return most
    try:
        seconds = float(asked) / 1000
    except ValueError:
        seconds = 0.0
    if not seconds > 0.0:
        raise BadRequest(f"The header {HEADER} must be a positive number of milliseconds, not '{asked[:40]}'.")
    return min(most, seconds)
