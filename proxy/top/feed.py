"""Asks the admin port: for the dashboard's events, again when they break off, and for what pods say of themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing, suppress
from typing import Any
from urllib.parse import quote

import aiohttp
import orjson

from proxy import outbound
from proxy.core.errors import KvlaneError, cause
from proxy.core.ports import Clock
from proxy.telemetry.prometheus_text import ScrapeError
from proxy.top.engines import Look, between, look
from proxy.top.picture import Picture

AGAIN = 1.0
SILENCE = 15.0
"""Seconds without an event, of which there is one per second, after which the proxy is taken for gone."""

LOOK_INTERVAL = 5.0
MOST_LOOKED_AT = 40
"""Pods, of those that are on the screen: an exposition of a real engine is 69 KB."""

AT_ONCE = 4


class Refused(KvlaneError):
    """The admin port does not want to tell."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Feed:
    """`changed` is called whenever the picture, or what is wrong, is another one."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, picture: Picture, clock: Clock, changed: Callable[[], None]
    ) -> None:
        self._session = session
        self._url = url.rstrip("/")
        self._picture = picture
        self._clock = clock
        self._changed = changed
        self._looks: dict[str, Look] = {}
        self.wrong = ""
        """Why there is no connection; empty while there is one."""
        self.wrong_since = 0.0
        self.refused: Refused | None = None

    async def follow(self) -> None:
        """Until cancelled, or `refused`, which waiting does not mend."""
        while self.refused is None:
            try:
                await self._follow_one()
            except Refused as error:
                self.refused = error
                self._changed()
            except (*outbound.FAILURES, ValueError) as error:
                self._lost(cause(error))
                await asyncio.sleep(AGAIN)

    async def begin(self) -> None:
        """The first picture. Raises what says that there is none."""
        async with aclosing(self.events()) as events:
            async for event, body in events:
                self._picture.take(event, body, self._clock.now())
                return

    async def _follow_one(self) -> None:
        async with aclosing(self.events()) as events:
            async for event, body in events:
                self.wrong = ""
                self._picture.take(event, body, self._clock.now())
                self._changed()

    async def events(self) -> AsyncGenerator[tuple[str, Any], None]:
        """Of one connection, which the proxy ends after some minutes."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5.0, sock_read=SILENCE)
        async with self._session.get(f"{self._url}/dashboard/events", timeout=timeout) as answer:
            if answer.status != 200:
                raise await _refused(answer)
            rest = b""
            async for chunk in answer.content.iter_any():
                *events, rest = (rest + chunk).split(b"\n\n")
                for event in events:
                    name, _, body = event.partition(b"\ndata: ")
                    yield name.removeprefix(b"event: ").decode(), orjson.loads(body)

    async def follow_engines(self, shown: Callable[[], Iterable[str]]) -> None:
        """Looks at the pods that are `shown`, until cancelled."""
        while True:
            await self.look_at(shown())
            await asyncio.sleep(LOOK_INTERVAL)

    async def look_at(self, names: Iterable[str]) -> None:
        places = asyncio.Semaphore(AT_ONCE)
        async with asyncio.TaskGroup() as group:
            for name in list(names)[:MOST_LOOKED_AT]:
                group.create_task(self._look(name, places))

    async def _look(self, name: str, places: asyncio.Semaphore) -> None:
        """A pod that does not answer has no figures."""
        found = None
        with suppress(*outbound.FAILURES, ValueError, ScrapeError):
            async with places:
                answer = await outbound.send(self._session, "GET", self._metrics_of(name), timeout=_SHORT)
            if answer.status == 200:
                found = look(answer.body, self._clock.now())
        before = self._looks.pop(name, None)
        self._picture.figures.pop(name, None)
        if found is not None:
            self._looks[name] = found
            if before is not None and found.at - before.at < 3 * LOOK_INTERVAL:
                self._picture.figures[name] = between(before, found)

    def _metrics_of(self, name: str) -> str:
        return f"{self._url}/admin/pods/{quote(name, safe='')}/proxy/metrics"

    def _lost(self, why: str) -> None:
        if not self.wrong:
            self.wrong_since = self._clock.now()
        self.wrong = why
        self._changed()


_SHORT = aiohttp.ClientTimeout(total=3.0)


async def _refused(answer: aiohttp.ClientResponse) -> Exception:
    """A proxy that is just starting, or a balancer before one that is away, gets another chance."""
    text = await answer.text()
    if answer.status >= 500:
        return ConnectionError(f"the admin port answered {answer.status}")
    try:
        message = str(orjson.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"it answered {answer.status}; is this kvlane's admin port, 9190 unless configured?"
    return Refused(answer.status, message)
