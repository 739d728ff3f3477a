"""One connection to Redis or Valkey: what is published, and what those say that it listens to."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

from proxy.core.errors import ConfigError, Problem
from proxy.replicas.settings import ReplicaSettings

OPEN_TIMEOUT = 2.0
"""Seconds until a connection is given up that does not come about."""


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
            async with asyncio.timeout(OPEN_TIMEOUT):
                await self._open()
        except BaseException as error:
            await self._close()
            if isinstance(error, self._failures):
                raise StoreLost(f"{type(error).__name__}: {error}") from None
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
            raise StoreLost(f"{type(error).__name__}: {error}") from None

    async def receive(self) -> bytes:
        """The next message."""
        try:
            while True:
                said = await self._listener.get_message(ignore_subscribe_messages=True, timeout=None)
                if said is not None and said["type"] == "message":
                    message: bytes = said["data"]
                    return message
        except self._failures as error:
            raise StoreLost(f"{type(error).__name__}: {error}") from None

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return self._redis.RedisError, OSError, TimeoutError

    async def _open(self) -> None:
        self._client = client = client_of(self._settings, self._redis)
        self._publisher = await client.connection_pool.get_connection()
        await self._publisher.send_command("CLIENT", "REPLY", "OFF")
        self._listener = client.pubsub()
        await self._listener.subscribe(*self._channels)
        for _ in self._channels:
            while await self._listener.get_message(timeout=None) is None:
                pass

    async def _close(self) -> None:
        """A connection that asks for no replies is not for anybody else."""
        if (publisher := self.__dict__.get("_publisher")) is not None:
            await publisher.disconnect(nowait=True)
        if (listener := self.__dict__.get("_listener")) is not None:
            await listener.aclose()
        if (client := self.__dict__.get("_client")) is not None:
            await close(client)


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


def client_of(settings: ReplicaSettings, redis: Any) -> Any:
    """For channels; any node of a cluster does."""
    parts = urlsplit(settings.store)
    if not parts.scheme.endswith("+sentinel"):
        return redis.Redis.from_url(settings.store.replace("+cluster", "", 1), **_options(settings))
    tls: dict[str, Any] = {"ssl": True} if parts.scheme.startswith("rediss") else {}
    hosts = [host.rpartition(":") for host in parts.netloc.split(",")]
    sentinel = importlib.import_module("redis.asyncio.sentinel").Sentinel(
        [(host, int(port)) for host, _, port in hosts],
        sentinel_kwargs={"socket_connect_timeout": OPEN_TIMEOUT / 2, "socket_timeout": OPEN_TIMEOUT / 2, **tls},
        **{**_options(settings), **tls},
    )
    return sentinel.master_for(parts.path.strip("/"))


def keys_of(settings: ReplicaSettings, redis: Any) -> Any:
    """For keys, which a cluster has on the one node or the other."""
    if "+cluster" not in urlsplit(settings.store).scheme:
        return client_of(settings, redis)
    options = {key: value for key, value in _options(settings).items() if key != "retry"}
    return redis.RedisCluster.from_url(settings.store.replace("+cluster", "", 1), **options)


async def close(client: Any) -> None:
    """And what it asked the sentinels with."""
    pool = getattr(client, "connection_pool", None)  # a cluster has one for each node
    manager = getattr(pool, "sentinel_manager", None)
    for sentinel in [] if manager is None else manager.sentinels:
        await sentinel.aclose()
    await client.aclose()


def _options(settings: ReplicaSettings) -> dict[str, Any]:
    """It fails at once, and is tried again by who knows when."""
    retry = importlib.import_module("redis.asyncio.retry").Retry(
        importlib.import_module("redis.backoff").NoBackoff(), retries=0
    )
    named = {"username": settings.username, "password": settings.password}
    return {
        "socket_connect_timeout": OPEN_TIMEOUT / 2,
        "socket_timeout": None,
        "health_check_interval": 0,
        "retry": retry,
        **{key: value for key, value in named.items() if value},
    }
