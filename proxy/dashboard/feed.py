"""One picture of everything per second for all who look, of which they are sent what has changed."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from proxy.core.errors import Saturated
from proxy.core.ports import Clock
from proxy.core.tasks import Tasks
from proxy.dashboard.pods import FIELDS, PodRows
from proxy.dashboard.samples import Samples

log = logging.getLogger(__name__)

INTERVAL = 1.0
MOST_VIEWERS = 32
MOST_BEHIND = 4
"""Pictures that a viewer may not have read yet; after that it is sent all of the latest one."""

LONGEST = 600
"""Pictures for one connection: whoever looks for longer comes again, and shows its key again."""


@dataclass(slots=True)
class Panel:
    """A part of the picture, read every `every` pictures and told when it is another one than before. `last` is in
    JSON."""

    name: str
    read: Callable[[], Awaitable[Any]]
    every: int = 1
    last: bytes = field(init=False, default=b"null")


class Viewer:
    """One connection, while it lasts."""

    def __init__(self) -> None:
        self.behind: list[bytes] = []
        self.needs_all = True
        self.news = asyncio.Event()
        self.over = False

    def tell(self, change: bytes) -> None:
        if not self.needs_all:
            self.behind.append(change)
            if len(self.behind) > MOST_BEHIND:
                self.behind.clear()
                self.needs_all = True
        self.news.set()

    def end(self) -> None:
        self.over = True
        self.news.set()


class Feed:
    """`async with`: inside of it there may be viewers. `sample` brings the samples up to date, unless they are."""

    def __init__(
        self,
        pods: PodRows,
        samples: Samples,
        sample: Callable[[], Awaitable[None]],
        panels: Sequence[Panel],
        clock: Clock,
        interval: float = INTERVAL,
    ) -> None:
        self._interval = interval
        self._pods = pods
        self._samples = samples
        self._sample = sample
        self._panels = panels
        self._clock = clock
        self._viewers: list[Viewer] = []
        self._tasks = Tasks()
        self._building: asyncio.Task[None] | None = None
        self._is_built = False
        """There is a picture, and it is not older than the interval."""
        self._told: dict[str, Any] | None = None
        """The latest point that viewers have."""
        self.pictures = 0
        """That were built."""

    async def __aenter__(self) -> Feed:
        return self

    async def __aexit__(self, *_: object) -> None:
        for viewer in self._viewers:
            viewer.end()
        await self._tasks.stop()

    @property
    def is_building(self) -> bool:
        return self._building is not None

    async def look(self) -> AsyncGenerator[bytes, None]:
        """Events for one viewer, the first of which has everything. Raises Saturated where too many look already."""
        if len(self._viewers) >= MOST_VIEWERS:
            raise Saturated(f"{MOST_VIEWERS} people look at the dashboard already; close one of its pages.")
        viewer = Viewer()
        self._viewers.append(viewer)
        if self._building is None:
            self._building = self._tasks.start(self._build_while_seen(), "dashboard")
        elif self._is_built:
            viewer.news.set()
        try:
            for _ in range(LONGEST):
                await viewer.news.wait()
                if viewer.over:
                    return
                yield self._news_of(viewer)
        finally:
            self._viewers.remove(viewer)

    def _news_of(self, viewer: Viewer) -> bytes:
        """What it has not seen; from here on it has."""
        news = self._all() if viewer.needs_all else b"".join(viewer.behind)
        viewer.needs_all = False
        viewer.behind.clear()
        viewer.news.clear()
        return news

    async def _build_while_seen(self) -> None:
        try:
            for number in itertools.count():
                if not self._viewers:
                    return
                try:
                    change = await self._build(number)
                except Exception:  # the next one may be better
                    log.exception("dashboard: a picture is missing")
                else:
                    self._is_built = True
                    for viewer in self._viewers:
                        viewer.tell(change)
                await asyncio.sleep(self._interval)
        finally:
            self._building, self._is_built = None, False

    async def _build(self, number: int) -> bytes:
        """An event with all that is not as it was; everything is looked at for the first of those who look."""
        parts = {}
        await self._sample()
        pods = await self._pods.changes()
        if pods:
            parts["pods"] = _object({name: row or b"null" for name, row in pods.items()})
        for panel in self._panels:
            if number % panel.every == 0 and await self._read(panel):
                parts[panel.name] = panel.last
        if (points := self._samples.points) and points[-1] is not self._told:
            self._told = points[-1]
            parts["point"] = orjson.dumps(self._told)
        self.pictures += 1
        return self._event(b"change", parts)

    async def _read(self, panel: Panel) -> bool:
        """Whether it is another one. A panel that cannot be read is empty, and the others are not."""
        try:
            value = orjson.dumps(await panel.read())
        except Exception:
            log.exception("dashboard: %s cannot be shown", panel.name)
            value = b"null"
        changed, panel.last = value != panel.last, value
        return changed

    def _all(self) -> bytes:
        parts = {"fields": orjson.dumps(FIELDS), "pods": _object(self._pods.rows)}
        parts |= {panel.name: panel.last for panel in self._panels}
        parts["points"] = orjson.dumps(list(self._samples.points))
        return self._event(b"all", parts)

    def _event(self, name: bytes, parts: dict[str, bytes]) -> bytes:
        body = _object({"at": orjson.dumps(round(self._clock.wall(), 1)), **parts})
        return b"event: %s\ndata: %s\n\n" % (name, body)


def _object(parts: dict[str, bytes]) -> bytes:
    return b"{%s}" % b",".join(b"%s:%s" % (orjson.dumps(name), value) for name, value in parts.items())
