"""The body of a pod's answer as a gateway shows it: what is learnt from it, and what the client is to see of it."""

from __future__ import annotations

from proxy.core.attempt import Attempt
from proxy.http.framing import Framing, UntilClose
from proxy.http.meter import Meter
from proxy.http.rewritten import LARGEST, Rewritten, is_rewritten, of_events, of_whole
from proxy.http.without_usage import WithoutUsage

UNSETTLED = 64
"""Pieces after which the meter is settled."""


class Passage:
    """Of one answer. `changes` says whether its length may be another one than the head says."""

    def __init__(self, attempt: Attempt, content_type: str, coded: bool) -> None:
        """`coded`: it is compressed, and passes as it is."""
        events = content_type.startswith("text/event-stream") and not coded
        rewritten = is_rewritten(attempt) and not coded and (attempt.status or 0) < 300
        self._attempt = attempt
        self._meter = Meter()
        self._framing: Framing | None = None
        if events and attempt.request.asks_usage:
            self._framing = WithoutUsage(UntilClose(), False)
        if events and rewritten:
            self._framing = Rewritten(self._framing or UntilClose(), False, of_events(attempt))
        self._whole: bytes | None = b"" if rewritten and "json" in content_type else None
        """A JSON answer that is to be changed, as far as it has come."""
        self.changes = self._framing is not None or self._whole is not None

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
        if self._framing is not None:
            bodies = [body] if body else []
            return self._framing.finish(b"", bodies, True) if last else self._framing.feed(b"", bodies, [])
        if self._whole is None:
            return body
        return self._collected(self._whole + body, last)

    def _collected(self, whole: bytes, last: bool) -> bytes:
        """Nothing of it goes out before its end, unless it is too large for that."""
        if last:
            changed = of_whole(self._attempt, whole)
            return whole if changed is None else changed
        too_large = len(whole) > LARGEST
        self._whole = None if too_large else whole
        return whole if too_large else b""
