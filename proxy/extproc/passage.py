"""The body of a pod's answer as a gateway shows it: what is learnt from it, and what the client is to see of it."""

from __future__ import annotations

from proxy.core.attempt import Attempt
from proxy.http.framing import Framing
from proxy.http.pipeline import Pipeline, WholeBody, changes, event_stages, is_changed
from proxy.http.upstream.connection import Meter

UNSETTLED = 64
"""Pieces after which the meter is settled."""


class Passage:
    """Of one answer. `changes` says whether its length may be another one than the head says."""

    def __init__(self, attempt: Attempt, content_type: str, coded: bool) -> None:
        """`coded`: it is compressed, and passes as it is."""
        events = content_type.startswith("text/event-stream") and not coded
        changed = is_changed(attempt) and not coded and (attempt.status or 0) < 300
        self._attempt = attempt
        self._meter = Meter()
        self._framing: Framing | None = None
        if events and (changed or attempt.request.asks_usage):
            self._framing = Pipeline(event_stages(attempt, named=changed), chunked=False)
        elif changed and "json" in content_type:
            self._framing = WholeBody(changes(attempt, whole=True))
        self.changes = self._framing is not None

    def feed(self, body: bytes, last: bool) -> bytes:
        """What goes to the client of the next piece."""
        meter = self._meter
        if body:
            meter.pieces.append(body)
        out = self._shown(body, last)
        if last:
            meter.finish(self._attempt)
        elif len(meter.pieces) > UNSETTLED:
            meter.settle(self._attempt)
        return out

    def settle(self) -> None:
        """What has come is all that comes."""
        self._meter.settle(self._attempt)

    def _shown(self, body: bytes, last: bool) -> bytes:
        if self._framing is None:
            return body
        bodies = [body] if body else []
        return self._framing.finish(b"", bodies, True) if last else self._framing.feed(b"", bodies, [])
