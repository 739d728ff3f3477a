"""Request bodies: read completely under a memory budget of the process, or in part and then streamed."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from proxy.core.errors import BodyTimeout, BodyTooLarge, InvalidHttp, Saturated
from proxy.http.guards import Sweep
from proxy.http.request import Body, BodyBroken
from proxy.http.settings import ListenSettings
from proxy.openai import multipart

if TYPE_CHECKING:
    from proxy.http.request import HttpRequest

KEPT_BEGINNING = 64 * 1024
"""Bytes of a streamed form that are kept, which suffice to find its model."""

COLLECTED = 1024 * 1024
"""Bytes of a body that its connection may collect."""

JOINED = 512
LARGE = 4096
"""This many pieces of a body are joined, or those before a piece of this size: a read of two bytes occupies fifty more,
and the budget counts two."""

BUFFERS = 8
"""Fraction of `listen.retainedBodies` for buffers of connections before a request is served: incomplete heads and
pipelined requests. Bodies have the rest, so neither can displace the other."""

SMALL_BODIES = 1024
"""Number of small bodies that fit into the part of the budget reserved for them, which is as large as that of the
buffers. By default a body of up to 64 KiB is small: clients that declare large bodies and hardly send them can use up
only the rest."""

FREE_BUFFER = 4 * 1024
"""Bytes that each connection may buffer without counting against the budget; most heads are smaller."""

BODY_LATE = "The request body did not arrive in time."
MANY_BODIES = "Too many large request bodies are being read; try again shortly."
NO_MEMORY = "The proxy's memory for requests is used up; try again shortly."

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class MemoryBudget:
    """A limit on the bytes that the process holds. Claims without memory queue; claims that hold a part go
    first. A single claim may exceed the limit. Holders of parts could wait for each other for ever: if
    they hold all of the budget, the last of them is refused. Small requests, of up to a `SMALL_BODIES`th of `for_small`
    bytes, do not wait for others while there is room; others leave `for_small` bytes to them, also one that exceeds the
    limit."""

    def __init__(self, limit: int, for_small: int = 0) -> None:
        self._limit = limit
        self._for_small = for_small
        self._for_all = limit - for_small
        self._small = for_small // SMALL_BODIES
        self._small_waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._growing: dict[asyncio.Future[None], tuple[int, int]] = {}
        """The wanted and the held bytes of waiting holders of parts, in the order in which they started to wait."""
        self._held_by_growing = 0
        self._excess = 0
        """Bytes by which a single claim exceeds what others leave to small ones."""
        self.used = 0

    def acquire_now(self, size: int, held: int = 0) -> bool:
        """Take `size` bytes and return True; return False if that would require waiting."""
        used = self.used + size
        waits = self._waiting or self._growing
        if size and (waits or used > self._for_all):
            must_queue = not held and (self._small_waiting if size <= self._small else waits)
            if must_queue or not self._fits(size, held):
                return False
            self._acquire(size, held)
        else:
            self.used = used
        return True

    def acquire_within(self, size: int) -> bool:
        """As `acquire_now`, but never beyond the limit."""
        return self.used + size <= self._limit and self.acquire_now(size)

    async def acquire(self, size: int, held: int = 0) -> None:
        """Wait for `size` bytes more than the `held` ones. Raise Saturated."""
        if self.acquire_now(size, held):
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if held:
            self._growing[turn] = (size, held)
            self._held_by_growing += held
            self._refuse_if_stuck()
        else:
            (self._small_waiting if size <= self._small else self._waiting).append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn in self._growing:
                self._end_growing(turn)
            if turn.cancelled():
                self.give(0)
            elif turn.exception() is None:
                self.give(size)
            raise

    def give(self, size: int) -> None:
        self.used -= size
        if self._excess:
            self._excess = max(0, min(self._excess, self.used - self._for_all))
        if self._waiting or self._growing or self._small_waiting:
            self._wake()

    def _wake(self) -> None:
        self._wake_first(self._small_waiting)
        for turn, (wanted, held) in list(self._growing.items()):
            if not turn.done() and self._fits(wanted, held):
                self._end_growing(turn)
                self._acquire(wanted, held)
                turn.set_result(None)
        if not self._growing:
            self._wake_first(self._waiting)
        self._refuse_if_stuck()

    def _wake_first(self, queue: deque[tuple[int, asyncio.Future[None]]]) -> None:
        while queue:
            wanted, turn = queue[0]
            if not turn.done():
                if not self._fits(wanted):
                    return
                self._acquire(wanted)
                turn.set_result(None)
            queue.popleft()

    def _acquire(self, size: int, held: int = 0) -> None:
        self.used += size
        self._excess = max(self._excess, size + held - self._for_all)

    def _fits(self, size: int, held: int = 0) -> bool:
        """Return whether `size` more bytes may be taken now by a claim that holds `held`. A body of any size
        may be taken if it is alone."""
        limit = self._limit + self._excess if size + held <= self._small else self._for_all
        return self.used - held <= self._for_small or self.used + size <= limit

    def _end_growing(self, turn: asyncio.Future[None]) -> None:
        self._held_by_growing -= self._growing.pop(turn)[1]

    def _refuse_if_stuck(self) -> None:
        """Refuse the last holder of a part if only such holders could release memory."""
        if self._growing and self._held_by_growing >= self.used - self._for_small:
            turn = next(reversed(self._growing))
            self._end_growing(turn)
            if not turn.done():
                turn.set_exception(Saturated(MANY_BODIES))


class Upload:
    """The rest of a body whose start is in `HttpRequest.body`. `begun` says that a part of it was read, so that the
    request cannot be sent a second time."""

    def __init__(self, payload: Body, already: int, form: multipart.Form, settings: ListenSettings) -> None:
        """`form` has parsed the start, which has `already` bytes."""
        self._payload = payload
        self._size = already
        self._form = form
        self._settings = settings
        self.begun = False

    async def next(self) -> bytes:
        """Return the next piece; empty at the end. Raise RequestError."""
        self.begun = True
        try:
            async with asyncio.timeout(self._settings.body_timeout):
                piece = await self._payload.readany()
        except TimeoutError:
            raise BodyTimeout(BODY_LATE) from None
        except BodyBroken as error:
            raise _malformed(error) from None
        self._size += len(piece)
        if self._size > self._settings.max_body:
            raise too_large(self._settings.max_body)
        if piece:
            self._form.feed(piece)
        else:
            self._form.finish()
        return piece


class BodyReader:
    def __init__(self, settings: ListenSettings, sweep: Sweep) -> None:
        self._settings = settings
        self._sweep = sweep
        self._max_body = settings.max_body
        self._collected = min(COLLECTED, self._max_body)
        buffers = settings.retained_bodies // BUFFERS
        self.budget = MemoryBudget(settings.retained_bodies - buffers, buffers if buffers >= SMALL_BODIES else 0)
        self.buffers = MemoryBudget(buffers)
        self.give_back: Callable[[int], None] = self.budget.give
        """Return bytes to the budget."""

    def prepare_collecting(self, client_request: HttpRequest, size: int) -> bool:
        """Take memory for a body of `size` bytes, to be returned as `client_request.retained`. Return False if its
        connection cannot collect it: it needs waiting, refusal, streaming or a 100 response."""
        fields = client_request.headers
        if (
            size > self._collected
            or "expect" in fields
            or "upgrade" in fields
            or multipart.is_multipart(fields.get("content-type", ""))
            or not self.budget.acquire_now(size)
        ):
            return False
        client_request.retained = size
        return True

    def acquire_complete(self, client_request: HttpRequest) -> bool:
        """Take memory for `client_request.body`, to be returned as `client_request.retained`. Return False if the body
        is incomplete, too large or finds no memory at once; then it must be `read`."""
        if client_request.retained:
            return True
        size = len(client_request.body)
        if client_request.payload is not None or size > self._max_body or not self.budget.acquire_now(size):
            return False
        client_request.retained = size
        return True

    async def read(self, client_request: HttpRequest) -> None:
        """Set `body`, `upload` if the body is streamed, and `retained`, as above. Raise BodyTooLarge,
        BodyTimeout, InvalidHttp or Saturated."""
        payload, declared = client_request.payload, client_request.content_length
        if max(len(client_request.body), declared or 0) > self._max_body:
            raise too_large(self._max_body)
        progress = _Progress(self._settings.body_timeout, self._settings.min_body_rate)
        try:
            async with progress.scope:
                self._sweep.watched.add(progress)
                if payload is None:
                    await self._reserve(client_request, len(client_request.body), progress)
                else:
                    await self._collect(client_request, payload, declared, progress)
        except TimeoutError:
            if progress.queued:
                raise Saturated(MANY_BODIES) from None
            raise BodyTimeout(BODY_LATE) from None
        except BodyBroken as error:
            raise _malformed(error) from None
        finally:
            self._sweep.watched.discard(progress)

    async def _collect(
        self, client_request: HttpRequest, payload: Body, declared: int | None, progress: _Progress
    ) -> None:
        """Collect the body. Its declared length is reserved at once, because bodies that each hold half would wait for
        each other. A form that is larger than `listen.keptUpload`, or for which the budget has no room now, is streamed
        if its start names the model; with the file first it must be read completely."""
        if (
            client_request.speaks_11
            and client_request.headers.get("expect", "").lower() == "100-continue"
            and not payload.is_eof()
        ):
            client_request.transport.write(CONTINUE)
        streamed = multipart.is_multipart(client_request.headers.get("content-type", ""))
        keep, kept_upload = int(self._max_body), self._settings.kept_upload
        if streamed and declared is None:
            keep = kept_upload
        elif streamed and declared is not None and declared <= kept_upload and self.budget.acquire_now(declared):
            client_request.retained, streamed = declared, False
        elif streamed:
            keep = KEPT_BEGINNING
        if declared is not None and not client_request.retained:
            await self._reserve(client_request, min(declared, keep), progress)
        pieces: list[bytes] = []
        small: list[bytes] = []
        size = 0
        while piece := await payload.readany():
            small.append(piece)
            if len(small) >= JOINED or len(piece) >= LARGE:
                pieces.append(b"".join(small))
                small.clear()
            size = progress.received = size + len(piece)
            if size > self._max_body:
                raise too_large(self._max_body)
            if size > client_request.retained:
                await self._reserve(client_request, size - client_request.retained, progress)
            if streamed and size >= keep:
                pieces = [b"".join((*pieces, *small))]
                small.clear()
                form = multipart.Form(client_request.headers["content-type"])
                for start in range(0, size, multipart.STEP):
                    form.feed(pieces[0][start : start + multipart.STEP])
                    await asyncio.sleep(0)  # others are served between two steps
                if form.model is not None:
                    client_request.upload = Upload(payload, size, form, self._settings)
                    break
                streamed = False
        client_request.body = b"".join((*pieces, *small))

    async def _reserve(self, client_request: HttpRequest, size: int, progress: _Progress) -> None:
        """Take `size` more bytes of the budget. While waiting, nothing is read from the client, and what was read
        counts against `buffers`. Raise Saturated."""
        if not self.budget.acquire_now(size, client_request.retained):
            came = len(client_request.body) if client_request.payload is None else client_request.payload.total_bytes
            buffered = max(0, came - client_request.retained - FREE_BUFFER)
            if not self.buffers.acquire_within(buffered):
                raise Saturated(MANY_BODIES)
            is_coming = client_request.payload is not None and not client_request.payload.is_eof()
            if is_coming:
                client_request.connection.pause_reading()
            progress.queued = True
            try:
                await self.budget.acquire(size, client_request.retained)
            finally:
                self.buffers.give(buffered)
                if is_coming:
                    client_request.connection.resume_reading()
            progress.queued = False
        client_request.retained += size


class _Progress:
    """Observes the arrival of one body. It has no timer of its own: the sweep ends it."""

    def __init__(self, limit: float, rate: int) -> None:
        """`limit`: seconds between two pieces, and from the start until `rate`, in bytes per second, is required."""
        self._limit = limit
        self._rate = rate
        self.scope = asyncio.timeout(None)
        self.received = 0
        self.queued = False
        self._seen = -1
        self._seen_at = 0.0
        self._begun_at: float | None = None

    def check(self, now: float) -> None:
        if self._begun_at is None or self.queued:
            self._begun_at = now
        if self.received != self._seen:
            self._seen, self._seen_at = self.received, now
        slow = is_too_slow(self.received, now - self._begun_at, self._limit, self._rate)
        if slow or now - self._seen_at > self._limit:
            self.scope.reschedule(asyncio.get_running_loop().time())


def is_too_slow(received: int, seconds: float, limit: float, rate: int) -> bool:
    """Return whether a body arrives below the minimum rate: byte by byte, it would hold memory for days."""
    return received < rate * (seconds - limit)


def too_large(limit: int) -> BodyTooLarge:
    return BodyTooLarge(f"The request body is larger than the {limit} bytes that are allowed.")


def _malformed(error: BaseException) -> InvalidHttp:
    return InvalidHttp(f"The request body could not be read: {error}.")
