"""A pod's answer that is for kvlane itself: gathered, and given to whoever sent the request."""

from __future__ import annotations

import asyncio

from proxy.core.attempt import Attempt, Ending
from proxy.core.errors import Garbled, KvlaneError, UpstreamFailed, UpstreamTimedOut
from proxy.http.answer import ASK_AFTER, Rim
from proxy.http.head import AnswerHead, declined_with
from proxy.http.upstream.connection import Connection

LARGEST = 4 * 1024 * 1024
"""Bytes of an answer: a token, and where its cache is."""


class Collected:
    """A `Receiver`."""

    reads_head = False

    def __init__(self, attempt: Attempt, rim: Rim, connection: Connection) -> None:
        self.head: AnswerHead | None = None
        self._attempt = attempt
        self._rim = rim
        self._connection = connection
        self._heard_at = rim.clock.now()
        self._body = b""
        self._done: asyncio.Future[KvlaneError | None] = rim.loop.create_future()

    async def body(self, seconds: float) -> bytes:
        """Waits for it, but no longer than the request has. Raises what `Relay.collect` raises."""
        seconds = min(seconds, self._attempt.request.deadline - self._heard_at)
        try:
            async with asyncio.timeout(seconds):
                while not self._done.done():
                    await asyncio.wait((self._done,), timeout=ASK_AFTER)
                    self._ask()
        except TimeoutError:
            self._stop(Ending.TIMED_OUT)
            raise UpstreamTimedOut(f"not answered within {seconds:g} s") from None
        except asyncio.CancelledError:
            self._stop(Ending.CLIENT_GONE)
            raise
        error = self._done.result()
        if error is not None:
            raise error
        return self._body

    # what the pod's connection calls

    def begin(self, head: AnswerHead) -> None:
        if head.status == 101:
            raise Garbled("switched protocols unasked")
        self._connection.until_close = not head.sized and not head.chunked

    def received(self, raw: bytes) -> None:
        self._heard_at = self._rim.clock.now()
        self._take()
        if len(self._body) > LARGEST:
            self._connection.abort()
            self.failed(Garbled("more than an answer of one token has"))

    def finished(self, raw: bytes, exact: bool) -> None:
        attempt, head = self._attempt, self.head
        self._take()
        self._connection.meter.finish_at_once(attempt, self._body)
        self._connection.meter.take()
        attempt.first_byte_at = attempt.last_byte_at = self._rim.clock.now()
        if head is None or not head.declines:
            attempt.ending = Ending.COMPLETE
        attempt.status = None if head is None else head.status
        self._settle(declined_with(head, self._body) if head is not None and head.declines else None)

    def upgraded(self, rest: bytes) -> None:
        self.failed(Garbled("switched protocols unasked"))

    def failed(self, error: UpstreamFailed) -> None:
        self._settle(error)

    def broke(self, error: Exception) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass

    def _take(self) -> None:
        self._body += b"".join(self._connection.meter.pieces)
        self._connection.meter.pieces.clear()

    def _ask(self) -> None:
        if not self._done.done() and (why := self._rim.given_up(self._attempt, self._heard_at)):
            self._connection.abort()
            self.failed(UpstreamFailed(why))

    def _stop(self, ending: Ending) -> None:
        """Nobody waits for it any more."""
        if not self._done.done():
            self._attempt.ending = ending
            self._attempt.last_byte_at = self._rim.clock.now()
            self._connection.abort()
            self._done.cancel()

    def _settle(self, error: KvlaneError | None) -> None:
        if not self._done.done():
            self._done.set_result(error)
