"""One connection to Redis or Valkey: what is published, and what those say that it listens to."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Iterable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any

from proxy.core.errors import ConfigError, Problem
from proxy.replicas.address import Address, address_of
from proxy.replicas.settings import ReplicaSettings

OPEN_TIMEOUT = 2.0
"""Seconds until a connection is given up that does not come about, for each host that may have to be tried."""

FOR_TLS = 3.0
"""Times as long with TLS: where the CPU is scarce, handshakes take a while."""

LONGEST_WHY = 300
"""Characters of what the store, or the library, has against it."""


class StoreLost(Exception):
    """The store cannot be reached, or does not do what it is asked."""


class RedisLine:
    """`async with RedisLine(settings, channels)`: whatever is published from then on is received. Raises StoreLost,
    entered and in all that it does.

    Publishing asks for no replies: whoever hears himself knows that he is heard. That takes a fifth of the CPU.
    """

    def __init__(self, settings: ReplicaSettings, channels: Sequence[str]) -> None:
        self._settings = settings
        self._channels = channels
        self._redis = library()

    async def __aenter__(self) -> RedisLine:
        try:
            address = address_of(self._settings.store)
            async with asyncio.timeout(2 * _patience(address) * max(1, len(address.hosts))):
                await self._open()
        except BaseException as error:
            await self._close()
            if isinstance(error, self._failures):
                raise _lost(error) from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    async def publish(self, messages: Iterable[tuple[str, bytes]]) -> None:
        """(channel, message) of each. Waits while the store is slow to read."""
        try:
            await self._publisher.send_packed_command([commands(messages)], check_health=False)
        except self._failures as error:
            raise _lost(error) from None

    async def receive(self) -> bytes:
        """The next message."""
        try:
            while True:
                said = await self._listener.get_message(ignore_subscribe_messages=True, timeout=None)
                if said is not None and said["type"] == "message":
                    message: bytes = said["data"]
                    return message
        except self._failures as error:
            raise _lost(error) from None

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return self._redis.RedisError, OSError, TimeoutError

    async def _open(self) -> None:
        client, self._publisher = await self._reached()
        await self._publisher.send_command("CLIENT", "REPLY", "OFF")
        self._listener = client.pubsub()
        await self._listener.subscribe(*self._channels)
        for _ in self._channels:
            while await self._listener.get_message(timeout=None) is None:
                pass

    async def _reached(self) -> tuple[Any, Any]:
        """The first that there is, and a connection to it."""
        *others, last = clients_of(self._settings, self._redis)
        for self._client in others:
            try:
                return self._client, await self._client.connection_pool.get_connection()
            except self._failures:
                await close(self._client)
        self._client = last
        return last, await last.connection_pool.get_connection()

    async def _close(self) -> None:
        """A connection that asks for no replies is not for anybody else."""
        if (publisher := self.__dict__.get("_publisher")) is not None:
            await self._closed(publisher.disconnect(nowait=True))
        if (listener := self.__dict__.get("_listener")) is not None:
            await self._closed(listener.aclose())
        if (client := self.__dict__.get("_client")) is not None:
            await self._closed(close(client))

    async def _closed(self, closing: Awaitable[None]) -> None:
        """It may say that the other side did not hang up in time; whoever made the connection makes another one."""
        with suppress(*self._failures):
            await closing


def _lost(error: BaseException) -> StoreLost:
    """Of what redis-py says it is the part that does not show its objects."""
    return StoreLost(f"{type(error).__name__}: {str(error).partition(' : <')[0]}"[:LONGEST_WHY])


def commands(messages: Iterable[tuple[str, bytes]]) -> bytes:
    """That publish (channel, message) of each, as the store reads them."""
    packed: list[bytes] = []
    for channel, message in messages:
        name = channel.encode()
        packed.append(b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, len(message)))
        packed.append(message)
        packed.append(b"\r\n")
    return b"".join(packed)


def library() -> Any:
    """Raises ConfigError where it is not installed."""
    try:
        return importlib.import_module("redis.asyncio")
    except ImportError:
        raise ConfigError([Problem("replicas.store", "needs the extra: pip install 'kvlane[redis]'")]) from None


def check(settings: ReplicaSettings) -> None:
    """Raises ConfigError where the library is not installed, or can make nothing of what the URL asks for."""
    redis = library()
    try:
        for client in clients_of(settings, redis):
            client.connection_pool.make_connection()
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("replicas.store", f"redis-py does not take it: {error}")]) from None


def clients_of(settings: ReplicaSettings, redis: Any) -> list[Any]:
    """For channels, of which any does: nodes of a cluster tell each other."""
    address, options = address_of(settings.store), _options(settings)
    if address.service:
        return [_watched(address, settings, redis)]
    return [redis.Redis.from_url(url, **options) for url in address.urls or [address.url]]


def keys_of(settings: ReplicaSettings, redis: Any) -> Any:
    """For keys, which a cluster has on the one node or the other."""
    address = address_of(settings.store)
    if address.service or not address.hosts:
        return clients_of(settings, redis)[0]
    node = importlib.import_module("redis.asyncio.cluster").ClusterNode
    options = {key: value for key, value in _options(settings).items() if key != "retry"}
    nodes = [node(host, port) for host, port in address.hosts]
    return redis.RedisCluster(startup_nodes=nodes, **{**_of_url(address), **options})


def _watched(address: Address, settings: ReplicaSettings, redis: Any) -> Any:
    """The master that the sentinels name."""
    of_url, options = _of_url(address), _options(settings)
    named = {"username": settings.sentinel_username, "password": settings.sentinel_password}
    ask = {
        **of_url,
        "socket_connect_timeout": _patience(address),
        "socket_timeout": _patience(address),
        "retry": options["retry"],  # else those that are dead take all the time there is
        **{key: value for key, value in named.items() if value},
    }
    sentinel = importlib.import_module("redis.asyncio.sentinel").Sentinel(
        address.hosts, sentinel_kwargs=ask, **{**of_url, **options}
    )
    return sentinel.master_for(address.service)


def _of_url(address: Address) -> dict[str, Any]:
    """What the URL of several hosts says of each connection."""
    read = importlib.import_module("redis.asyncio.connection").parse_url(address.url)
    options = {key: value for key, value in read.items() if key not in ("host", "port", "connection_class")}
    return {**options, "ssl": True} if address.has_tls else options


async def close(client: Any) -> None:
    """And what it asked the sentinels with."""
    pool = getattr(client, "connection_pool", None)  # a cluster has one for each node
    manager = getattr(pool, "sentinel_manager", None)
    for sentinel in [] if manager is None else manager.sentinels:
        await sentinel.aclose()
    await client.aclose()


def _patience(address: Address) -> float:
    """With one host."""
    return OPEN_TIMEOUT / 2 * (FOR_TLS if address.has_tls else 1.0)


def _options(settings: ReplicaSettings) -> dict[str, Any]:
    """It fails at once, and is tried again by who knows when."""
    retry = importlib.import_module("redis.asyncio.retry").Retry(
        importlib.import_module("redis.backoff").NoBackoff(), retries=0
    )
    named = {"username": settings.username, "password": settings.password}
    return {
        "socket_connect_timeout": _patience(address_of(settings.store)),
        "socket_timeout": None,
        "health_check_interval": 0,
        "retry": retry,
        **{key: value for key, value in named.items() if value},
    }
