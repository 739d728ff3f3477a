"""One connection to Redis or Valkey, and leases of keys in it."""

from __future__ import annotations

import asyncio
import importlib
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from types import TracebackType
from typing import Any, cast

from proxy.cluster.settings import ReplicaSettings, StoreAddress, address_of
from proxy.core.errors import ConfigError, Problem, without_extra

log = logging.getLogger(__name__)


_PART = object()
"""The parser's result while a reply is incomplete."""


class Pipe(asyncio.Protocol):
    """A connection of redis-py, once it is open. `received(reply)` is called for each reply and message: a
    list, a number, bytes, or an exception. `lost(error)` when the other side is gone or sends unreadable bytes, or
    `received` raises.

    redis-py opens connections, to servers, sentinels and clusters, with TLS. Its own client costs a coroutine and locks
    for each message: 138 us of CPU to publish one and 15 us to receive one, instead of 3 and 1 us
    (`bench/replicas.py --only transport`). So bytes go to the asyncio transport and to the parser, hiredis, directly.
    """

    def __init__(
        self, connection: Any, received: Callable[[Any], None], lost: Callable[[Exception | None], None]
    ) -> None:
        """All replies of the connection must have been read; other code must not use it afterwards."""
        self._received = received
        self._lost = lost
        self._reader = importlib.import_module("hiredis").Reader(notEnoughData=_PART)
        self._transport = cast(asyncio.Transport, connection._writer.transport)
        self.write: Callable[[bytes], None] = self._transport.write
        self.waiting: Callable[[], int] = self._transport.get_write_buffer_size
        """Returns the number of written bytes that wait because the other side does not read."""
        self._transport.set_protocol(self)
        if self._transport.is_closing():
            self.connection_lost(None)

    def close(self) -> None:
        """Close the connection. Written data is still sent, unless it waits already."""
        self.write = _nowhere
        if self.waiting():
            self._transport.abort()
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        reader, received = self._reader, self._received
        try:
            reader.feed(data)
            while (reply := reader.gets(False)) is not _PART:
                received(reply)
        except Exception as error:  # noqa: BLE001  # asyncio would close the connection without reporting the loss
            self._lost(error)
            self._transport.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self.write = _nowhere
        self._lost(error)


def _nowhere(data: bytes) -> None:
    """Drop the data: asyncio would log a warning for each write to a closed connection."""


def command(channel: str, message: bytes) -> bytes:
    """Return the bytes of a PUBLISH."""
    return b"%b%d\r\n%b\r\n" % (_beginning(channel), len(message), message)


@lru_cache(maxsize=256)
def _beginning(channel: str) -> bytes:
    name = channel.encode()
    return b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$" % (len(name), name)


OPEN_TIMEOUT = 2.0
"""Seconds to connect to each host that may be tried."""

FOR_TLS = 3.0
"""Factor on the timeout with TLS: handshakes are slow when the CPU is busy."""

LONGEST_WHY = 300
"""Largest number of characters of an error of the store or the library."""


class StoreLost(Exception):
    """The store is unreachable or refuses the command."""


class RedisConnection:
    """A connection to the store: `async with RedisConnection(settings, channels, received)`. `received(message)` is
    called for each message on these channels. Raises StoreLost when it is entered, and from `lost`. Publishing requests
    no replies: a host that receives its own messages knows that they are delivered."""

    def __init__(
        self,
        settings: ReplicaSettings,
        channels: Sequence[str],
        received: Callable[[bytes], None] = lambda message: None,
    ) -> None:
        self._settings = settings
        self._channels = channels
        self._received = received
        self._redis = library()
        self._failures = failures(self._redis)
        self._made: list[Any] = []
        """Open connections of redis-py."""
        self._pipes: list[Pipe] = []

    async def __aenter__(self) -> RedisConnection:
        try:
            address = address_of(self._settings.store)
            async with asyncio.timeout(2 * _patience(address) * max(1, len(address.hosts))):
                await self._open()
        except BaseException as error:
            await self._close()
            if isinstance(error, (*self._failures, AttributeError)):  # which another redis-py than those known may give
                raise _lost(error) from None
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    def publish(self, channel: str, message: bytes) -> None:
        """Publish a message without waiting."""
        self._publisher.write(command(channel, message))

    @property
    def waiting(self) -> int:
        """The number of published bytes that wait because the store does not read."""
        return self._publisher.waiting()

    async def lost(self) -> None:
        """Wait until the connection is lost, and then raise StoreLost."""
        error = await asyncio.shield(self._loss)
        if error is not None and not isinstance(error, self._failures):
            log.error("dropped an unreadable message of the replica store", exc_info=error)
        raise _lost(error or ConnectionError("the store closed the connection"))

    async def _open(self) -> None:
        """Open the connection. An empty message is published while replies are still on, to check the permission to
        publish."""
        self._loss: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        self._subscribed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        client, publisher = await self._reached()
        await publisher.send_command("PUBLISH", self._channels[-1], b"")
        await publisher.read_response()
        await publisher.send_command("CLIENT", "REPLY", "OFF")
        listener = await self._connection(client)
        self._publisher = self._pipe(publisher)
        self._pipe(listener).write(b"".join(listener.pack_command("SUBSCRIBE", *self._channels)))
        await asyncio.wait((self._subscribed, self._loss), return_when=asyncio.FIRST_COMPLETED)
        if self._loss.done():
            await self.lost()

    async def _reached(self) -> tuple[Any, Any]:
        """Return the first reachable host and a connection to it."""
        *others, last = clients_of(self._settings, self._redis)
        for self._client in others:
            try:
                return self._client, await self._connection(self._client)
            except self._failures:
                await close(self._client)
        self._client = last
        return last, await self._connection(last)

    async def _connection(self, client: Any) -> Any:
        """Return a connection outside the pool, because a connection without replies cannot be reused."""
        connection = client.connection_pool.make_connection()
        self._made.append(connection)
        await connection.connect()
        return connection

    def _pipe(self, connection: Any) -> Pipe:
        pipe = Pipe(connection, self._reply, self._ended)
        self._pipes.append(pipe)
        return pipe

    def _reply(self, reply: Any) -> None:
        """There are no replies to what is published."""
        if isinstance(reply, list) and reply[0] == b"message":
            self._received(reply[2])
        elif isinstance(reply, Exception):
            raise self._redis.RedisError(str(reply))
        elif isinstance(reply, list) and reply[0] == b"subscribe" and reply[2] == len(self._channels):
            self._subscribed.set_result(None)

    def _ended(self, error: Exception | None) -> None:
        if not self._loss.done():
            self._loss.set_result(error)

    async def _close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for connection in self._made:
            await self._closed(connection.disconnect(nowait=True))
        if (client := self.__dict__.get("_client")) is not None:
            await self._closed(close(client))

    async def _closed(self, closing: Awaitable[None]) -> None:
        """Ignore an error on closing: it only means that the other side did not close in time."""
        with suppress(*self._failures):
            await closing


def _lost(error: BaseException) -> StoreLost:
    """Keep the part of the error that does not show objects of redis-py."""
    reason = str(error).partition(" : <")[0] or "no reply"
    return StoreLost(f"{type(error).__name__}: {reason}"[:LONGEST_WHY])


def failures(redis: Any) -> tuple[type[Exception], ...]:
    """Return the errors that redis-py raises when the store is unreachable or refuses; the error of a cluster is no
    RedisError."""
    return redis.RedisError, importlib.import_module("redis.exceptions").RedisClusterException, OSError, TimeoutError


def library() -> Any:
    """Return the library. Raise ConfigError where it is not installed."""
    try:
        importlib.import_module("hiredis")
        return importlib.import_module("redis.asyncio")
    except ImportError:
        raise without_extra("replicas.store", "redis") from None


def check(settings: ReplicaSettings) -> None:
    """Raise ConfigError if the library is missing, or does not support an option of the URL."""
    redis = library()
    try:
        for client in clients_of(settings, redis):
            client.connection_pool.make_connection()
    except (TypeError, ValueError) as error:
        raise ConfigError([Problem("replicas.store", f"redis-py does not take it: {error}")]) from None


def clients_of(settings: ReplicaSettings, redis: Any) -> list[Any]:
    """Return clients for publishing, in the order in which to try them: the nodes of a cluster pass messages on."""
    address, options = address_of(settings.store), _options(settings)
    if address.service:
        return [_watched(address, settings, redis)]
    return [redis.Redis.from_url(url, **options) for url in address.urls or [address.url]]


def keys_of(settings: ReplicaSettings, redis: Any) -> Any:
    """Return a client for keys, which a cluster distributes over its nodes."""
    address = address_of(settings.store)
    if address.service or not address.hosts:
        return clients_of(settings, redis)[0]
    node = importlib.import_module("redis.asyncio.cluster").ClusterNode
    options = {key: value for key, value in _options(settings).items() if key != "retry"}
    nodes = [node(host, port) for host, port in address.hosts]
    return redis.RedisCluster(startup_nodes=nodes, **{**_of_url(address), **options})


def _watched(address: StoreAddress, settings: ReplicaSettings, redis: Any) -> Any:
    """Return a client of the master that the sentinels report."""
    of_url, options = _of_url(address), _options(settings)
    named = {"username": settings.sentinel_username, "password": settings.sentinel_password}
    ask = {
        **of_url,
        "socket_connect_timeout": _patience(address),
        "socket_timeout": _patience(address),
        "retry": options["retry"],  # else dead sentinels take all the time there is
        **{key: value for key, value in named.items() if value},
    }
    sentinel = importlib.import_module("redis.asyncio.sentinel").Sentinel(
        address.hosts, sentinel_kwargs=ask, **{**of_url, **options}
    )
    return sentinel.master_for(address.service)


def _of_url(address: StoreAddress) -> dict[str, Any]:
    """Return the options of each connection in a URL of several hosts."""
    read = importlib.import_module("redis.asyncio.connection").parse_url(address.url)
    options = {key: value for key, value in read.items() if key not in ("host", "port", "connection_class")}
    return {**options, "ssl": True} if address.has_tls else options


async def close(client: Any) -> None:
    """Close a client, and its clients of the sentinels."""
    pool = getattr(client, "connection_pool", None)  # a cluster has one for each node
    manager = getattr(pool, "sentinel_manager", None)
    for sentinel in [] if manager is None else manager.sentinels:
        await sentinel.aclose()
    await client.aclose()


def _patience(address: StoreAddress) -> float:
    """Return the seconds to connect to one host."""
    return OPEN_TIMEOUT / 2 * (FOR_TLS if address.has_tls else 1.0)


def _options(settings: ReplicaSettings) -> dict[str, Any]:
    """Return the options of a connection. Nothing is retried here, because the deployment connects again."""
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


_IF_HELD = "if redis.call('get', KEYS[1]) == ARGV[1] then return %s else return 0 end"
_RENEW = _IF_HELD % "redis.call('pexpire', KEYS[1], ARGV[2])"
_RELEASE = _IF_HELD % "redis.call('del', KEYS[1])"


class Lease:
    """A key that one process of a deployment holds at a time, for `seconds` by the store's clock after it was last
    acquired. The holder renews it well before the end, and stops the work under it if that fails."""

    def __init__(self, settings: ReplicaSettings, name: str, seconds: float) -> None:
        """Raise ConfigError without the library."""
        redis = library()
        self._failures = failures(redis)
        self._client = keys_of(settings, redis)
        self._key = f"{settings.prefix}:lease:{name}"
        self.seconds = seconds
        self._milliseconds = int(seconds * 1000)
        self._token = secrets.token_hex(8)

    async def acquire(self) -> bool:
        """Return whether it is held from now on, again or for the first time. False if the store does not respond."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                if await self._client.set(self._key, self._token, nx=True, px=self._milliseconds):
                    return True
                return bool(await self._client.eval(_RENEW, 1, self._key, self._token, self._milliseconds))
        except self._failures:
            return False

    async def release(self) -> None:
        """Release the lease. If the store is unreachable, the lease expires."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                await self._client.eval(_RELEASE, 1, self._key, self._token)
        except self._failures:
            pass

    async def close(self) -> None:
        with suppress(*self._failures):
            await close(self._client)
