"""Who wants to hear the KV events of pods; and, while the proxy serves, a listener for every pod there is.

The packages that it takes are an extra, so what needs them is imported when somebody wants to hear.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from proxy.core.endpoint import Endpoint
from proxy.core.kv import KvSources
from proxy.core.ports import KvEvents, KvListener
from proxy.core.tasks import Tasks
from proxy.kvevents import sources as places

if TYPE_CHECKING:
    import zmq.asyncio

MISSING = "needs the package {name}: pip install 'kvlane[precise]'"

Hook = Callable[[Endpoint], None]
Watch = Callable[[Hook, Hook], Callable[[], None]]
"""(added, removed) -> stop: calls them for every pod there is and that comes, and for those that go."""


class KvSubscriptions(KvEvents):
    """Collects wishes while plugins are made; inside of `async with subscriptions.following(watch)` they are fulfilled,
    those that come later as soon as `keep` says so."""

    def __init__(self) -> None:
        self._wishes: list[_Wish] = []
        self._watch: Watch | None = None
        self._context: zmq.asyncio.Context | None = None

    def follow(self, sources: KvSources, listener: KvListener) -> None:
        try:
            import_module("proxy.kvevents.sockets")
        except ImportError as error:
            raise ValueError(MISSING.format(name="pyzmq" if error.name == "zmq" else error.name)) from None
        places.check(sources)
        self._wishes.append(_Wish(sources, listener))

    @asynccontextmanager
    async def following(self, watch: Watch) -> AsyncIterator[None]:
        self._watch = watch
        try:
            await self.keep(lambda listener: True)
            yield
        finally:
            self._watch = None
            await self.keep(lambda listener: False)
            if self._context is not None:
                self._context.destroy(linger=0)

    async def keep(self, wanted: Callable[[object], bool]) -> None:
        """Listeners that are not wanted are not told any more."""
        left = [wish for wish in self._wishes if not wanted(wish.listener)]
        self._wishes = [wish for wish in self._wishes if wish not in left]
        for wish in left:
            await wish.end()
        if self._watch is None or not self._wishes:
            return
        self._context = self._context or _context()
        for wish in self._wishes:
            wish.begin(self._context, self._watch)


def _context() -> zmq.asyncio.Context:
    import zmq.asyncio

    return zmq.asyncio.Context()


class _Wish:
    """Opens and closes the sockets of pods as they come and go."""

    def __init__(self, sources: KvSources, listener: KvListener) -> None:
        self.listener = listener
        self._sources = sources
        self._tasks = Tasks()
        self._pods: dict[Endpoint, list[asyncio.Task[None]]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._stop: Callable[[], None] | None = None

    def begin(self, context: zmq.asyncio.Context, watch: Watch) -> None:
        """Does nothing where that was done."""
        from proxy.kvevents import sockets

        if self._stop is not None:
            return
        self._context = context
        if self._sources.bind:
            work = partial(sockets.collect, context, self._sources, lambda: list(self._pods), self.listener)
            self._tasks.keep(work, "KV-events", self._sources.bind)
        self._stop = watch(self._added, self._removed)

    async def end(self) -> None:
        if self._stop is not None:
            self._stop()
        await self._tasks.stop()

    def _added(self, endpoint: Endpoint) -> None:
        from proxy.kvevents import sockets

        assert self._context is not None
        tasks, sources = self._pods.setdefault(endpoint, []), self._sources
        for source in places.of(endpoint, sources) if not sources.bind else ():
            work = partial(sockets.follow, self._context, endpoint, source, sources.topic, self.listener)
            tasks.append(self._tasks.keep(work, "KV-events", f"{endpoint.name}, rank {source.rank}"))

    def _removed(self, endpoint: Endpoint) -> None:
        for task in self._pods.pop(endpoint, ()):
            task.cancel()
        self.listener.gone(endpoint)
