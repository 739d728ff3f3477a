"""What is kept of an event until its batch is counted and logged: a few values, so that no body outlives its request.

An `attrgetter` takes them in C: half the price, on a path that runs once per request, of reading them one by one.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

Record = tuple[Any, ...]

FIRST_BYTE = attrgetter("status", "first_byte_at", "request.received_at", "request.model", "request.stream")
"""Of an exchange whose answer begins."""

LEG = attrgetter(
    "endpoint",
    "ending",
    "attempt",
    "predicted_cached_tokens",
    "request.prompt.tokens",
    "status",
    "request.model",
    "request.stream",
    "usage",
    "chunks",
    "first_byte_at",
    "last_byte_at",
)
"""Of an exchange that is over."""

CALL = attrgetter("id", "method", "path", "received_at", "identity")

LAST_LEG = attrgetter("request.model", "endpoint.name", "first_byte_at", "usage", "response_bytes", "attempt")
"""Of the exchange that answered a request, or failed last."""

NO_LEG = (None, None, None, None, 0, -1)
"""In its place where no pod was asked."""

# The record of a request: (what CALL takes, when it ended, status, outcome, bytes sent, what LAST_LEG takes).
# That of a decision: (the pod that was chosen, seconds that it took).

VALUE = attrgetter("_value_")
"""Of a member of an enum. Its `value` is a property: a Python call before Python 3.12."""

SENDER = attrgetter("name", "tenant")
"""Of an identity."""
