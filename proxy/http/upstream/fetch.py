"""Questions of our own to pods: how they are, what they serve, and prompts that warm them up."""

from __future__ import annotations

import asyncio
import logging
from functools import lru_cache
from types import TracebackType
from urllib.parse import quote, urlsplit

from proxy.core.errors import ConnectFailed, Disconnected, Garbled, UpstreamFailed, UpstreamTimedOut
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.http.head import BODYLESS, AnswerHead, header_line
from proxy.http.rank import rank_line
from proxy.http.tls import Trust
from proxy.http.upstream.connection import Connection
from proxy.http.upstream.pool import Address, Pod, UpstreamPool

log = logging.getLogger(__name__)

LONGEST = 4 * 1024 * 1024
"""Bytes of an answer."""

IDLE_LIMIT = 60.0
"""Seconds; longer than for requests, because large fleets are asked rarely, and a question may be asked twice."""

REAP_INTERVAL = 4.0

_HEAD = b"host: %b\r\nuser-agent: kvlane\r\naccept: text/plain, application/json\r\naccept-encoding: identity\r\n"
_SAFE = "/?%:@!$&'()*+,;=~[]"


class PooledFetcher:
    """Implements `fleet.refresh.Fetcher` between `async with` and its end. Its connections are its own: a scrape takes
    none from a request and never waits for one."""

    def __init__(self, timeout: float, clock: Clock, trust: Trust | None = None) -> None:
        """`timeout`: seconds for one answer, with all that it takes to get it. `trust`: see `UpstreamPool`."""
        self.timeout = timeout
        self._pool = UpstreamPool(timeout, clock, idle_limit=IDLE_LIMIT, trust=trust)
        self._tasks = Tasks()

    async def __aenter__(self) -> PooledFetcher:
        self._tasks.keep(self._reap, "idle-connections-of-scrapes")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._tasks.stop()
        self._pool.close()

    async def get(self, url: str, api_key: str | None) -> tuple[int, bytes]:
        """See the port."""
        return await self._fetch(url, api_key, None)

    async def post(self, url: str, body: bytes, api_key: str | None, rank: int | None = None) -> tuple[int, bytes]:
        """Implements `ports.Poster`."""
        return await self._fetch(url, api_key, body, rank)

    async def _fetch(
        self, url: str, api_key: str | None, body: bytes | None, rank: int | None = None
    ) -> tuple[int, bytes]:
        origin, head = _request(url, api_key, None if body is None else len(body), rank)
        try:
            async with asyncio.timeout(self.timeout):
                return await self._ask(self._pool.pods[origin], head, body or b"")
        except TimeoutError as error:
            raise UpstreamTimedOut(f"no answer within {self.timeout:g} s") from error

    async def _ask(self, pod: Pod, head: bytes, body: bytes) -> tuple[int, bytes]:
        """A connection that was used before may be closing at the other end: if it dies without a byte, there is a
        fresh one."""
        used = pod.take()
        if used is not None:
            try:
                return await _answer(used, head, body)
            except Disconnected as error:
                if not error.silent:
                    raise
        return await _answer(await self._pool.connect(pod), head, body)

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(REAP_INTERVAL)
            self._pool.reap()


class Collected:
    """One answer, kept until it is whole."""

    __slots__ = ("_connection", "_size", "head", "reads_head", "whole")

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._size = 0
        self.head: AnswerHead | None = None
        self.reads_head = False
        self.whole: asyncio.Future[tuple[int, bytes]] = asyncio.get_running_loop().create_future()

    def begin(self, head: AnswerHead) -> None:
        if head.status == 101:
            raise Garbled("switched protocols unasked")
        self._connection.until_close = not (head.chunked or head.sized or head.status in BODYLESS)

    def received(self, raw: bytes) -> None:
        self._size += len(raw)
        if self._size > LONGEST:
            self._connection.abort()
            self.failed(Garbled("the answer is too long"))

    def finished(self, raw: bytes, exact: bool) -> None:
        body = self._connection.meter.take()
        if self.head is not None and not self.whole.done():
            self.whole.set_result((self.head.status, body))

    def upgraded(self, rest: bytes) -> None:
        self._connection.abort()
        self.failed(Garbled("switched protocols unasked"))

    def failed(self, error: UpstreamFailed) -> None:
        if not self.whole.done():
            self.whole.set_exception(error)

    def broke(self, error: Exception) -> None:
        log.error("failed to read an answer of a pod", exc_info=error)
        self.failed(Garbled(f"the answer could not be read: {error!r}"))

    def pause_writing(self) -> None: ...

    def resume_writing(self) -> None: ...


async def _answer(connection: Connection, head: bytes, body: bytes) -> tuple[int, bytes]:
    """Cancelled, it takes the connection with it."""
    collected = Collected(connection)
    connection.send(collected, head, body)
    try:
        return await collected.whole
    except asyncio.CancelledError:
        connection.abort()
        raise


@lru_cache(maxsize=4096)
def _request(url: str, api_key: str | None, length: int | None, rank: int | None) -> tuple[str, bytes]:
    """Scheme and host of the URL, and the head of a request for the rest of it, with a body of so many bytes if there
    is one. Raises ConnectFailed if it is none."""
    try:
        parts = urlsplit(url)
        origin = f"{parts.scheme}://{parts.netloc}"
        lines = _HEAD % Address.of(origin).host_header
        if api_key:
            lines += header_line("authorization", f"Bearer {api_key}")
        if rank is not None:
            lines += rank_line(rank)
        if length is not None:
            lines += b"content-type: application/json\r\ncontent-length: %d\r\n" % length
        target = quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_SAFE)
    except ValueError as error:
        raise ConnectFailed(str(error)) from error
    return origin, b"%b %b HTTP/1.1\r\n%b\r\n" % (b"GET" if length is None else b"POST", target.encode(), lines)
