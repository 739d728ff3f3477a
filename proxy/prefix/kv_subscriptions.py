"""Subscriptions to the KV events of the pods of a pool. The sockets need an extra, so they are imported late."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from proxy.core.endpoint import RANK_LABEL, SIZE_LABEL, Endpoint
from proxy.core.errors import without_extra
from proxy.core.ports import KvEvents, KvListener, KvSources
from proxy.core.state import Draft
from proxy.core.tasks import Tasks

if TYPE_CHECKING:
    import zmq.asyncio

EVENTS_PORT = "kvlane/kv-events-port"
REPLAY_PORT = "kvlane/kv-replay-port"


@dataclass(frozen=True, slots=True)
class KvSource:
    """`replay` is empty without a replay socket."""

    rank: int
    events: str
    replay: str = ""


def check(sources: KvSources) -> None:
    """Raise ValueError for an invalid address."""
    try:
        made = sources.endpoint.format(host="pod", port=1)
    except (LookupError, ValueError):
        raise ValueError(
            f"endpoint: {sources.endpoint!r} may have {{host}} and {{port}} in it, no other names"
        ) from None
    for address in (made, sources.bind or made):
        if "://" not in address:
            raise ValueError(f"{address!r} is no address; write tcp://host:port")


def sources_of(endpoint: Endpoint, sources: KvSources) -> list[KvSource]:
    """Return one source per data-parallel rank, with increasing ports; for an endpoint that is a rank, its own. Invalid
    labels are ignored."""
    host = urlsplit(endpoint.url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    port = _number(endpoint.labels, EVENTS_PORT, sources.port)
    replay = _number(endpoint.labels, REPLAY_PORT, sources.replay_port)
    ranks = _number(endpoint.labels, SIZE_LABEL, sources.ranks)

    def address(number: int) -> str:
        return sources.endpoint.format(host=host, port=number)

    own = endpoint.rank if endpoint.rank is not None else _number(endpoint.labels, RANK_LABEL, -1)
    if own >= 0:
        return [KvSource(0, address(port + own), address(replay + own) if replay else "")]
    return [KvSource(rank, address(port + rank), address(replay + rank) if replay else "") for rank in range(ranks)]


def is_named(topic: str, endpoint: Endpoint) -> bool:
    """Return whether the topic of a message, kv@pod@model, names the pod: by name, host:port or host."""
    parts = topic.split("@")
    if len(parts) < 2:
        return False
    url = urlsplit(endpoint.url)
    return parts[1] in (endpoint.name, endpoint.pod_name, url.netloc, url.hostname)


def _number(labels: Mapping[str, str], name: str, default: int) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 6 and int(text) < 65536 else default


Hook = Callable[[Endpoint], None]
Watch = Callable[[Hook, Hook], Callable[[], None]]
"""(added, removed) -> stop: calls `added` for present and new pods, and `removed` for pods that leave."""


def watch_nothing(added: Hook, removed: Hook) -> Callable[[], None]:
    """Watch no pods, for a check of a configuration."""
    return lambda: None


@dataclass(frozen=True, slots=True)
class KvSubscriptions(KvEvents):
    """The subscriptions of one pool. Each belongs to a plugin, and runs as long as the configuration names it."""

    pool: str
    watch: Watch = field(compare=False)
    draft: Draft = field(compare=False)

    def subscribe(self, sources: KvSources, listener: KvListener) -> None:
        try:
            import_module("proxy.prefix.kv_sockets")
        except ImportError as error:
            raise without_extra("", "precise", "pyzmq" if error.name == "zmq" else error.name or "") from None
        check(sources)
        self.draft.get(object(), lambda: Subscription(sources, listener, self.watch))


class Subscription:
    """Inside `async with` the sockets of pods are opened and closed as pods come and go."""

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

        from proxy.prefix import kv_sockets

        self._context = context = zmq.asyncio.Context()
        if self._sources.bind:
            work = partial(kv_sockets.collect, context, self._sources, lambda: list(self._pods), self.listener)
            self._tasks.keep(work, "KV-events", self._sources.bind)
        self._stop = self._watch(self._added, self._removed)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._stop is not None:
            self._stop()
        await self._tasks.stop()
        if self._context is not None:
            self._context.destroy(linger=0)

    def _added(self, endpoint: Endpoint) -> None:
        from proxy.prefix import kv_sockets

        assert self._context is not None
        tasks, sources = self._pods.setdefault(endpoint, []), self._sources
        for source in sources_of(endpoint, sources) if not sources.bind else ():
            work = partial(kv_sockets.subscribe, self._context, endpoint, source, sources.topic, self.listener)
            tasks.append(self._tasks.keep(work, "KV-events", f"{endpoint.name}, rank {source.rank}"))

    def _removed(self, endpoint: Endpoint) -> None:
        for task in self._pods.pop(endpoint, ()):
            task.cancel()
        self.listener.gone(endpoint)
