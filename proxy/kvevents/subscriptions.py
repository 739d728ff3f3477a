"""Who wants to hear the KV events of pods; and, while the proxy serves, a listener for every pod there is.

The packages that it takes are an extra, so what needs them is imported when somebody wants to hear.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING

from proxy.core.endpoint import Endpoint
from proxy.core.kv import KvSources
from proxy.core.ports import KvEvents, KvListener
from proxy.core.state import Draft
from proxy.core.tasks import Tasks
from proxy.kvevents import sources as places

if TYPE_CHECKING:
    import zmq.asyncio

MISSING = "needs the package {name}: pip install 'kvlane[precise]'"

Hook = Callable[[Endpoint], None]
Watch = Callable[[Hook, Hook], Callable[[], None]]
"""(added, removed) -> stop: calls them for every pod there is and that comes, and for those that go."""


def watch_nothing(added: Hook, removed: Hook) -> Callable[[], None]:
    """Watch no pods: for the check of a configuration."""
    return lambda: None


@dataclass(frozen=True, slots=True)
class KvSubscriptions(KvEvents):
    """Subscriptions to the pods of one pool. Each belongs to the plugin that asks for it, and runs as long as the
    configuration names that plugin."""

    pool: str
    watch: Watch = field(compare=False)
    draft: Draft = field(compare=False)

    def follow(self, sources: KvSources, listener: KvListener) -> None:
        try:
            import_module("proxy.kvevents.sockets")
        except ImportError as error:
            raise ValueError(MISSING.format(name="pyzmq" if error.name == "zmq" else error.name)) from None
        places.check(sources)
        self.draft.get(object(), lambda: Subscription(sources, listener, self.watch))


class Subscription:
    """`async with`: inside of it the sockets of pods are opened and closed as pods come and go."""

    def __init__(self, sources: KvSources, listener: KvListener, watch: Watch) -> None:
        self.listener = listener
        self._sources = sources
        self._watch = watch
        self._tasks = Tasks()
        self._pods: dict[Endpoint, list[asyncio.Task[None]]] = {}
        self._context: zmq.asyncio.Context | None = None
        self._stop: Callable[[], None] | None = None

    async def __aenter__(self) -> Subscription:
        import zmq.asyncio

        from proxy.kvevents import sockets

        self._context = context = zmq.asyncio.Context()
        if self._sources.bind:
            work = partial(sockets.collect, context, self._sources, lambda: list(self._pods), self.listener)
            self._tasks.keep(work, "KV-events", self._sources.bind)
        self._stop = self._watch(self._added, self._removed)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stop is not None:
            self._stop()
        await self._tasks.stop()
        if self._context is not None:
            self._context.destroy(linger=0)

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
