"""The transport between hosts: Redis or Valkey; and leases of keys in it."""

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

from proxy.cluster.settings import Address, ReplicaSettings, address_of
from proxy.core.errors import ConfigError, Problem

_PART = object()
"""What the parser gives while a reply is not whole."""


class Pipe(asyncio.Protocol):
    """`said(reply)` for every reply and message: a list, a number, bytes, or an exception that it is. `lost(error)`
    when the other side is gone, or what came was none of it; `said` may raise, which is such a loss too.

    redis-py opens connections, with all there is to that. What it does for each message, a coroutine and a lock or two,
    takes longer than everything else that is done about it; so its parser, hiredis, is asked without it.
    """

    def __init__(self, connection: Any, said: Callable[[Any], None], lost: Callable[[Exception | None], None]) -> None:
        """Over a connection of redis-py all of whose replies were read; it must not be asked for any others."""
        self._said = said
        self._lost = lost
        self._reader = importlib.import_module("hiredis").Reader(notEnoughData=_PART)
        self._room = asyncio.Event()
        self._room.set()
        self.is_slow = False
        """Whether what is written waits, because the other side does not read, or is not there."""
        self._transport = cast(asyncio.Transport, connection._writer.transport)
        self.write: Callable[[bytes], None] = self._transport.write
        self._transport.set_protocol(self)
        if self._transport.is_closing():
            self.connection_lost(None)

    async def has_room(self) -> None:
        """Waits while it is slow."""
        await self._room.wait()

    def close(self) -> None:
        """What was written goes out still, unless it waits already."""
        self.write = _nowhere
        if self.is_slow:
            self._transport.abort()
        else:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        reader, said = self._reader, self._said
        try:
            reader.feed(data)
            while (reply := reader.gets(False)) is not _PART:
                said(reply)
        except Exception as error:  # noqa: BLE001  # asyncio would close and tell nobody who waits for the loss
            self._lost(error)
            self._transport.abort()

    def pause_writing(self) -> None:
        self.is_slow = True
        self._room.clear()

    def resume_writing(self) -> None:
        self.is_slow = False
        self._room.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_slow, self.write = True, _nowhere
        self._room.set()
        self._lost(error)


def _nowhere(data: bytes) -> None:
    """Else asyncio would log each time that nobody is there."""


def command(channel: str, message: bytes) -> bytes:
    """That publishes it, as the store reads it."""
    return b"%b%d\r\n%b\r\n" % (_beginning(channel), len(message), message)


@lru_cache(maxsize=256)
def _beginning(channel: str) -> bytes:
    name = channel.encode()
    return b"*3\r\n$7\r\nPUBLISH\r\n$%d\r\n%b\r\n$" % (len(name), name)


log = logging.getLogger(__name__)

OPEN_TIMEOUT = 2.0
"""Seconds until a connection is given up that does not come about, for each host that may have to be tried."""

FOR_TLS = 3.0
"""Times as long with TLS: where the CPU is scarce, handshakes take a while."""

LONGEST_WHY = 300
"""Characters of what the store, or the library, has against it."""


class StoreLost(Exception):
    """The store cannot be reached, or does not do what it is asked."""


class RedisLine:
    """`async with RedisLine(settings, channels, heard)`: `heard(message)` gets whatever is published from then on.
    Raises StoreLost, entered and in `lost`.

    Publishing asks for no replies: whoever hears himself knows that he is heard. That takes a fifth of the CPU.
    """

    def __init__(
        self,
        settings: ReplicaSettings,
        channels: Sequence[str],
        heard: Callable[[bytes], None] = lambda message: None,
    ) -> None:
        self._settings = settings
        self._channels = channels
        self._heard = heard
        self._redis = library()
        self._made: list[Any] = []
        """Connections, of redis-py."""
        self._pipes: list[Pipe] = []

    async def __aenter__(self) -> RedisLine:
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
        """Never waits."""
        self._publisher.write(command(channel, message))

    @property
    def is_slow(self) -> bool:
        """Whether what is published waits."""
        return self._publisher.is_slow

    async def has_room(self) -> None:
        """Waits while the store is slow to read."""
        await self._publisher.has_room()

    async def lost(self) -> None:
        """Raises StoreLost when it is."""
        error = await asyncio.shield(self._loss)
        if error is not None and not isinstance(error, self._failures):
            log.error("replicas: what came from the store", exc_info=error)
        raise _lost(error or ConnectionError("the store has hung up"))

    @property
    def _failures(self) -> tuple[type[Exception], ...]:
        return failures(self._redis)

    async def _open(self) -> None:
        """What may not be published is said while there are replies: the message is of no use to those who get it, so
        nobody listens yet."""
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
        """The first that there is, and a connection to it."""
        *others, last = clients_of(self._settings, self._redis)
        for self._client in others:
            try:
                return self._client, await self._connection(self._client)
            except self._failures:
                await close(self._client)
        self._client = last
        return last, await self._connection(last)

    async def _connection(self, client: Any) -> Any:
        """Of which its pool knows nothing: one that asks for no replies is not for anybody else."""
        connection = client.connection_pool.make_connection()
        self._made.append(connection)
        await connection.connect()
        return connection

    def _pipe(self, connection: Any) -> Pipe:
        pipe = Pipe(connection, self._said, self._ended)
        self._pipes.append(pipe)
        return pipe

    def _said(self, reply: Any) -> None:
        """To what is published nothing is."""
        if isinstance(reply, list) and reply[0] == b"message":
            self._heard(reply[2])
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
        """It may say that the other side did not hang up in time; whoever made the connection makes another one."""
        with suppress(*self._failures):
            await closing


def _lost(error: BaseException) -> StoreLost:
    """Of what redis-py says it is the part that does not show its objects."""
    said = str(error).partition(" : <")[0] or "no answer"
    return StoreLost(f"{type(error).__name__}: {said}"[:LONGEST_WHY])


def failures(redis: Any) -> tuple[type[Exception], ...]:
    """Raised by redis-py when the store cannot be reached or refuses; that of a cluster is no RedisError."""
    return redis.RedisError, importlib.import_module("redis.exceptions").RedisClusterException, OSError, TimeoutError


def library() -> Any:
    """Raises ConfigError where it is not installed."""
    try:
        importlib.import_module("hiredis")
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


_IF_HELD = "if redis.call('get', KEYS[1]) == ARGV[1] then return %s else return 0 end"
_RENEW = _IF_HELD % "redis.call('pexpire', KEYS[1], ARGV[2])"
_RELEASE = _IF_HELD % "redis.call('del', KEYS[1])"


class Lease:
    """Held for `seconds` by the store's clock after it was last taken. Whoever holds it takes it again well before, and
    stops what he does under it when that fails: nobody knows then whether another one has it."""

    def __init__(self, settings: ReplicaSettings, name: str, seconds: float) -> None:
        """Raises ConfigError without the library."""
        redis = library()
        self._failures = failures(redis)
        self._client = keys_of(settings, redis)
        self._key = f"{settings.prefix}:lease:{name}"
        self.seconds = seconds
        self._milliseconds = int(seconds * 1000)
        self._token = secrets.token_hex(8)

    async def take(self) -> bool:
        """Whether it is held from now on, again or for the first time; not if the store does not say so at once."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                if await self._client.set(self._key, self._token, nx=True, px=self._milliseconds):
                    return True
                return bool(await self._client.eval(_RENEW, 1, self._key, self._token, self._milliseconds))
        except self._failures:
            return False

    async def release(self) -> None:
        """If it is held; if the store cannot be told, it runs out."""
        try:
            async with asyncio.timeout(OPEN_TIMEOUT):
                await self._client.eval(_RELEASE, 1, self._key, self._token)
        except self._failures:
            pass

    async def close(self) -> None:
        with suppress(*self._failures):
            await close(self._client)
