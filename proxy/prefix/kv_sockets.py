"""The KV events of one pod over ZeroMQ: the sockets, and the detection of missed messages and restarts."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial

import zmq
import zmq.asyncio

from proxy.core.endpoint import GONE, Endpoint
from proxy.core.log_limit import LogLimit
from proxy.core.ports import AllCleared, KvListener, KvSources
from proxy.prefix import kv_messages
from proxy.prefix.kv_messages import END, SEQUENCE, EventBatch, InvalidEvent
from proxy.prefix.kv_subscriptions import KvSource, is_named

log = logging.getLogger(__name__)

LARGEST = 4 << 20
"""Largest message in bytes, which takes at most 60 ms to unpack. A batch of a hundred thousand tokens has half a
megabyte."""

QUEUED = 10_000
"""Messages that may wait here. Further ones are dropped, noticed, and requested again."""

HEARTBEAT = 5.0
"""Seconds; a source that is silent for three of them is disconnected."""

PATIENCE = 2.0
"""Seconds for each message of a replay."""

BREATH = 32
"""Batches after which the event loop runs other work."""

RETRY = 5.0
"""Seconds before a socket that failed is opened again."""

_UP, _DOWN = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED

Replayed = AsyncGenerator[tuple[int, bytes], None]

Replay = Callable[[int], Replayed]
"""From a sequence number: all later messages that the engine still has, in order. Raises ReplayFailed."""


class ReplayFailed(Exception):
    """The engine has no replay socket, or does not respond to the end."""


class RankEvents:
    """The messages of one rank of a pod. An engine counts its messages from 0, so a sequence without a gap knows all
    blocks of the rank. A lower number than expected is a restart, whatever the engine's clock says, unless it is a
    message that was replayed before, or the last one again."""

    def __init__(self, endpoint: Endpoint, rank: int, listener: KvListener, replay: Replay | None) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._listener = listener
        self._replay = replay
        self._logs = LogLimit()
        self._next = 0
        self._at = 0.0
        self._replayed: dict[int, float] = {}
        """Number and time of replayed messages, which may arrive on the other socket too."""
        self._published: bool | None = None
        """Whether the listener knows the events as complete; None: neither."""
        self._is_whole = True
        """Whether no message was missed."""
        self._is_live = False
        """Whether the engine is connected, and has sent or replayed a message."""

    async def connected(self) -> None:
        """Compare the last message with the engine's, which may have been replaced, and read what was missed."""
        if self._replay is None:
            return
        try:
            if self._next and not await self._is_the_same():
                log.info("pod %s: its KV cache was cleared", self._endpoint.name)
                self._forget(0, is_whole=True)
            await self._catch_up()
        except ReplayFailed:
            return
        self._is_live = True
        self._publish()

    def disconnected(self) -> None:
        self._is_live = False
        self._publish()

    async def arrived(self, number: int, payload: bytes) -> None:
        """Apply a message. One that cannot be read is dropped, and the next one counts as after a gap."""
        try:
            batch = kv_messages.batch(payload)
        except InvalidEvent as error:
            if self._logs.allows():
                log.warning("pod %s: unreadable KV events (logged once a minute): %s", self._endpoint.name, error)
            return
        if number < self._next:
            if batch.at == (self._at if number == self._next - 1 else self._replayed.get(number)):
                return
            log.info("pod %s: its KV cache was cleared", self._endpoint.name)
            self._forget(0, is_whole=True)
        if number == self._next:
            self._replayed.clear()
        else:
            try:
                await self._catch_up()
            except ReplayFailed as error:
                log.debug("pod %s: missed KV events cannot be replayed: %s", self._endpoint.name, error)
        await self._apply_from(number, batch)
        self._is_live = True
        self._publish()

    async def _is_the_same(self) -> bool:
        """Return whether the engine has sent the last message."""
        last = self._next - 1
        async with aclosing(self._replay_from(last)) as messages:
            async for number, payload in messages:
                try:
                    return number > last or kv_messages.batch(payload).at == self._at
                except InvalidEvent:
                    return False
        return False

    async def _catch_up(self) -> None:
        async with aclosing(self._replay_from(self._next)) as messages:
            async for number, payload in messages:
                with suppress(InvalidEvent):
                    batch = kv_messages.batch(payload)
                    await self._apply_from(number, batch)
                    self._replayed[number] = batch.at
                    if len(self._replayed) > QUEUED:  # no more of them wait at the other socket
                        del self._replayed[next(iter(self._replayed))]

    def _replay_from(self, start: int) -> Replayed:
        if self._replay is None:
            raise ReplayFailed("there is no replay socket")
        return self._replay(start)

    async def _apply_from(self, number: int, batch: EventBatch) -> None:
        """Apply a batch that is the next one, or follows a gap. The event loop runs other work between its steps."""
        if number > self._next:
            lost = number - self._next
            log.warning("pod %s: %d batches of KV events are lost; forgetting its blocks", self._endpoint.name, lost)
            self._forget(number, is_whole=False)
        if number < self._next:
            return
        self._next += 1
        self._at = batch.at
        unknown = 0
        for step, (events, odd) in enumerate(batch.steps()):
            if step:
                await asyncio.sleep(0)
                if self._endpoint.state is GONE:
                    return
            unknown += odd
            if any(isinstance(event, AllCleared) for event in events):
                self._is_whole = True
            self._listener.published(self._endpoint, self._rank, events)
        if unknown:
            log.debug("pod %s: ignored %d unknown KV events", self._endpoint.name, unknown)

    def _forget(self, number: int, is_whole: bool) -> None:
        """Go on with a message that follows a restart or a gap."""
        self._listener.lost(self._endpoint, self._rank)
        self._next, self._is_whole, self._published = number, is_whole, None
        self._replayed.clear()

    def _publish(self) -> None:
        known = self._is_whole and self._is_live
        if known is not self._published:
            self._published = known
            self._listener.complete(self._endpoint, self._rank, known)


async def subscribe(
    context: zmq.asyncio.Context, endpoint: Endpoint, source: KvSource, topic: str, listener: KvListener
) -> None:
    """Read the events of one rank until cancelled. The socket reconnects by itself."""
    replay = partial(replayed, context, source.replay) if source.replay else None
    rank_events = RankEvents(endpoint, source.rank, listener, replay)
    while True:
        try:
            with context.socket(zmq.SUB) as socket:
                _prepare(socket, topic)
                await _listen(socket, source.events, rank_events)
        except zmq.ZMQError as error:
            log.warning("KV events of pod %s at %s: %s", endpoint.name, source.events, error)
            rank_events.disconnected()
        except Exception:
            rank_events.disconnected()
            raise
        await asyncio.sleep(RETRY)


async def collect(
    context: zmq.asyncio.Context, sources: KvSources, pods: Callable[[], list[Endpoint]], listener: KvListener
) -> None:
    """Listen at an address that pods connect to, until cancelled. Missed messages cannot be replayed."""
    all_events: dict[tuple[Endpoint, int], RankEvents] = {}
    logs = LogLimit()
    while True:
        try:
            with context.socket(zmq.SUB) as socket:
                _prepare(socket, sources.topic)
                socket.bind(sources.bind)
                while True:
                    try:
                        await _dispatch(await socket.recv_multipart(), pods(), all_events, listener)
                    except InvalidEvent as error:
                        if logs.allows():
                            log.warning("unreadable KV events at %s (logged once a minute): %s", sources.bind, error)
        except zmq.ZMQError as error:
            log.warning("KV events at %s: %s", sources.bind, error)
        await asyncio.sleep(RETRY)


async def replayed(context: zmq.asyncio.Context, address: str, start: int) -> Replayed:
    """Yield the messages of a replay socket. Raise ReplayFailed if a response takes too long or cannot be read."""
    with context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
        try:
            socket.connect(address)
            await socket.send_multipart([b"", start.to_bytes(SEQUENCE, "big")])
            count = 0
            while True:
                async with asyncio.timeout(PATIENCE):
                    number, payload = kv_messages.replayed(await socket.recv_multipart())
                if number == END:
                    return
                yield number, payload
                count += 1
                if count % BREATH == 0:
                    await asyncio.sleep(0)
        except (zmq.ZMQError, TimeoutError, InvalidEvent) as error:
            raise ReplayFailed(f"{address}: {error!r}") from None


async def _listen(socket: zmq.asyncio.Socket, address: str, rank_events: RankEvents) -> None:
    """Read messages, and events of the connection. The monitor comes first: a source on this host may be connected
    before the next line runs."""
    monitor = socket.get_monitor_socket(_UP | _DOWN)
    socket.connect(address)
    poller = zmq.asyncio.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    try:
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:
                event = int.from_bytes((await monitor.recv_multipart())[0][:2], "little")
                if event == _UP:
                    await rank_events.connected()
                elif event == _DOWN:
                    rank_events.disconnected()
            if socket in ready:
                await _drain(socket, rank_events)
    finally:
        socket.disable_monitor()


async def _drain(socket: zmq.asyncio.Socket, rank_events: RankEvents) -> None:
    """Read the messages that are there, but no more than BREATH."""
    for _ in range(BREATH):
        with suppress(InvalidEvent):
            try:
                _, number, payload = kv_messages.message(await socket.recv_multipart(flags=zmq.NOBLOCK))
            except zmq.Again:
                return
            await rank_events.arrived(number, payload)


async def _dispatch(
    frames: list[bytes], pods: list[Endpoint], all_events: dict[tuple[Endpoint, int], RankEvents], listener: KvListener
) -> None:
    """Pass a message to the events of its pod and rank. Raise InvalidEvent."""
    topic, number, payload = kv_messages.message(frames)
    rank = kv_messages.batch(payload).rank
    for gone in [key for key in all_events if key[0] not in pods]:
        del all_events[gone]
    for endpoint in pods:
        if is_named(topic, endpoint) and endpoint.rank in (None, rank % len(endpoint.ranks)):
            key = (endpoint, rank if endpoint.rank is None else 0)
            rank_events = all_events.get(key) or all_events.setdefault(key, RankEvents(*key, listener, None))
            await rank_events.arrived(number, payload)


def _prepare(socket: zmq.asyncio.Socket, topic: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(3000 * HEARTBEAT))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(1000 * RETRY))
    socket.setsockopt_string(zmq.SUBSCRIBE, topic)
