"""What is kept of an event until its batch is counted and logged: a few values, so that no body outlives its request.

Read one by one they take half of what an `attrgetter` of as many names does, which looks each up from scratch.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from proxy.core.exchange import Exchange
from proxy.core.ports import Call

Record = tuple[Any, ...]


def first_byte(exchange: Exchange) -> Record:
    """Of one whose answer begins."""
    request = exchange.request
    return (exchange.status, exchange.first_byte_at, request.received_at, request.model, request.stream)


def leg(exchange: Exchange) -> Record:
    """Of one that is over."""
    request = exchange.request
    return (
        exchange.endpoint,
        exchange.ending,
        exchange.attempt,
        exchange.predicted_cached_tokens,
        request.prompt.tokens,
        exchange.status,
        request.model,
        request.stream,
        exchange.usage,
        exchange.chunks,
        exchange.first_byte_at,
        exchange.last_byte_at,
    )


def call_of(call: Call) -> Record:
    return (call.id, call.method, call.path, call.received_at, call.identity)


def last_leg(exchange: Exchange) -> Record:
    """Of the one that answered a request, or failed last."""
    name = exchange.endpoint.name
    return (
        exchange.request.model,
        name,
        exchange.first_byte_at,
        exchange.usage,
        exchange.response_bytes,
        exchange.attempt,
    )


NO_LEG = (None, None, None, None, 0, -1)
"""In its place where no pod was asked."""

# The record of a request: (what `call_of` takes, when it ended, status, outcome, bytes sent, what `last_leg` takes).
# That of a decision: (the pod that was chosen, seconds that it took).

VALUE = attrgetter("_value_")
"""Of a member of an enum. Its `value` is a property: a Python call before Python 3.12."""
