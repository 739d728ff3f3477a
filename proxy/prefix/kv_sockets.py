"""The KV events of one pod over ZeroMQ: the sockets, and which messages were missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress
from functools import partial

import zmq
import zmq.asyncio

from proxy.core.endpoint import GONE, Endpoint
from proxy.core.ports import AllCleared, KvListener, KvSources
from proxy.prefix import kv_messages
from proxy.prefix.kv_messages import END, SEQUENCE, Batch, Garbled
from proxy.prefix.kv_subscriptions import Source, is_named

log = logging.getLogger(__name__)

Answers = AsyncGenerator[tuple[int, bytes], None]

Replay = Callable[[int], Answers]
"""From a sequence number on: what the engine still has, in order. Raises NoReplay if it cannot be asked."""


LOST = "pod %s: %d batches of KV events are lost; what it holds is forgotten"


class NoReplay(Exception):
    """Nobody answers, or not to the end."""


class Track:
    """The messages of one rank of a pod. An engine counts its messages from 0, so a track without a gap knows all
    blocks of the rank. A lower number than expected is a restart, whatever the engine's clock says, unless it is a
    message that was replayed before, or the last one again.

    `whole`: no message was missed. `heard`: the engine is connected and has sent or replayed messages.
    """

    def __init__(self, endpoint: Endpoint, rank: int, listener: KvListener, replay: Replay | None) -> None:
        self._endpoint = endpoint
        self._rank = rank
        self._listener = listener
        self._replay = replay
        self._next = 0
        self._at = 0.0
        self._replayed: dict[int, float] = {}
        """Number and time of replayed messages, which may also arrive at the other socket."""
        self._told: bool | None = None
        self.whole = True
        self.heard = False

    async def connected(self) -> None:
        """To an engine, maybe another one than before: it is asked for the message that came last, and those since."""
        if self._replay is None:
            return
        try:
            if self._next and not await self._is_the_same():
                self._restarted()
            await self._catch_up()
        except NoReplay:
            return
        self.heard = True
        self._tell()

    def disconnected(self) -> None:
        self.heard = False
        self._tell()

    async def arrived(self, number: int, payload: bytes) -> None:
        """A message; whatever it is, the next one is taken too."""
        try:
            batch = kv_messages.batch(payload)
        except Garbled as error:
            log.warning("pod %s published what is no batch of KV events: %s", self._endpoint.name, error)
            return
        if number < self._next:
            if batch.at == (self._at if number == self._next - 1 else self._replayed.get(number)):
                return
            self._restarted()
        if number == self._next:
            self._replayed.clear()
        else:
            await self._fill()
        if number > self._next:
            self._lost(number)
        if number == self._next:
            await self._take(batch)
        self.heard = True
        self._tell()

    async def _fill(self) -> None:
        try:
            await self._catch_up()
        except NoReplay as error:
            log.debug("pod %s cannot be asked for KV events that were missed: %s", self._endpoint.name, error)

    async def _is_the_same(self) -> bool:
        last = self._next - 1
        async with aclosing(self._asked(last)) as answers:
            async for number, payload in answers:
                try:
                    return number > last or kv_messages.batch(payload).at == self._at
                except Garbled:
                    return False
        return False

    async def _catch_up(self) -> None:
        async with aclosing(self._asked(self._next)) as answers:
            async for number, payload in answers:
                try:
                    batch = kv_messages.batch(payload)
                except Garbled:
                    continue
                if number > self._next:
                    self._lost(number)
                if number == self._next:
                    self._replayed[number] = batch.at
                    await self._take(batch)

    def _asked(self, start: int) -> Answers:
        if self._replay is None:
            raise NoReplay("there is no replay socket")
        return self._replay(start)

    async def _take(self, batch: Batch) -> None:
        """Tell of the events, and let the event loop run in between."""
        self._next += 1
        self._at = batch.at
        unknown = 0
        for number, (events, odd) in enumerate(batch.steps()):
            if number:
                await asyncio.sleep(0)
                if self._endpoint.state is GONE:
                    return
            unknown += odd
            if any(isinstance(event, AllCleared) for event in events):
                self.whole = True
            self._listener.told(self._endpoint, self._rank, events)
        if unknown:
            log.debug("pod %s published %d KV events that are not understood", self._endpoint.name, unknown)

    def _restarted(self) -> None:
        log.info("pod %s: its KV cache begins anew", self._endpoint.name)
        self._listener.lost(self._endpoint, self._rank)
        self._next, self._at, self.whole = 0, 0.0, True
        self._replayed.clear()
        self._told = None

    def _lost(self, number: int) -> None:
        log.warning(LOST, self._endpoint.name, number - self._next)
        self._listener.lost(self._endpoint, self._rank)
        self._next, self.whole = number, False
        self._told = None

    def _tell(self) -> None:
        known = self.whole and self.heard
        if known is not self._told:
            self._told = known
            self._listener.complete(self._endpoint, self._rank, known)


log = logging.getLogger(__name__)

LARGEST = 4 << 20
"""Bytes of a message, which take 60 ms to unpack at worst. A batch of a hundred thousand tokens has half a megabyte."""

QUEUED = 10_000
"""Messages that may wait here; beyond that they are dropped, noticed, and asked for again."""

HEARTBEAT = 5.0
"""Seconds; a source that is silent for three of them is gone."""

PATIENCE = 2.0
"""Seconds for each answer of a replay."""

BREATH = 32
"""Batches after which the event loop has its turn."""

AGAIN = 5.0
"""Seconds until a socket that failed is opened anew."""

_UP, _DOWN = zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED


async def follow(
    context: zmq.asyncio.Context, endpoint: Endpoint, source: Source, topic: str, listener: KvListener
) -> None:
    """Until it is cancelled. The socket connects again by itself."""
    replay = partial(asked, context, source.replay) if source.replay else None
    track = Track(endpoint, source.rank, listener, replay)
    while True:
        try:
            with context.socket(zmq.SUB) as socket:
                _prepare(socket, topic)
                await _listen(socket, source.events, track)
        except zmq.ZMQError as error:
            log.warning("KV events of pod %s at %s: %s", endpoint.name, source.events, error)
            track.disconnected()
        except Exception:
            track.disconnected()
            raise
        await asyncio.sleep(AGAIN)


async def collect(
    context: zmq.asyncio.Context, sources: KvSources, pods: Callable[[], list[Endpoint]], listener: KvListener
) -> None:
    """Listens where pods connect to, until it is cancelled; nobody can be asked for what was missed."""
    tracks: dict[tuple[Endpoint, int], Track] = {}
    while True:
        try:
            with context.socket(zmq.SUB) as socket:
                _prepare(socket, sources.topic)
                socket.bind(sources.bind)
                while True:
                    await _sort(await socket.recv_multipart(), pods(), tracks, listener)
        except zmq.ZMQError as error:
            log.warning("KV events at %s: %s", sources.bind, error)
        await asyncio.sleep(AGAIN)


async def asked(context: zmq.asyncio.Context, address: str, start: int) -> Answers:
    """Raises NoReplay if an answer takes too long or makes no sense."""
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
        except (zmq.ZMQError, TimeoutError, Garbled) as error:
            raise NoReplay(f"{address}: {error!r}") from None


async def _listen(socket: zmq.asyncio.Socket, address: str, track: Track) -> None:
    """Both what the source says, and whether it is there. The monitor comes first: a source that is near is connected
    before the next line is run."""
    monitor = socket.get_monitor_socket(_UP | _DOWN)
    socket.connect(address)
    poller = zmq.asyncio.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(monitor, zmq.POLLIN)
    try:
        while True:
            ready = dict(await poller.poll())
            if monitor in ready:
                what = int.from_bytes((await monitor.recv_multipart())[0][:2], "little")
                if what == _UP:
                    await track.connected()
                elif what == _DOWN:
                    track.disconnected()
            if socket in ready:
                await _drain(socket, track)
    finally:
        socket.disable_monitor()


async def _drain(socket: zmq.asyncio.Socket, track: Track) -> None:
    """What is there, but not without end."""
    for _ in range(BREATH):
        with suppress(Garbled):
            try:
                _, number, payload = kv_messages.message(await socket.recv_multipart(flags=zmq.NOBLOCK))
            except zmq.Again:
                return
            await track.arrived(number, payload)


async def _sort(
    frames: list[bytes], pods: list[Endpoint], tracks: dict[tuple[Endpoint, int], Track], listener: KvListener
) -> None:
    """To the track of the pod and rank that it is from."""
    try:
        topic, number, payload = kv_messages.message(frames)
        rank = kv_messages.batch(payload).rank
    except Garbled as error:
        log.warning("what is no batch of KV events was published: %s", error)
        return
    for gone in [key for key in tracks if key[0] not in pods]:
        del tracks[gone]
    for endpoint in pods:
        if is_named(topic, endpoint) and endpoint.rank in (None, rank % len(endpoint.ranks)):
            key = (endpoint, rank if endpoint.rank is None else 0)
            track = tracks.get(key) or tracks.setdefault(key, Track(*key, listener, None))
            await track.arrived(number, payload)


def _prepare(socket: zmq.asyncio.Socket, topic: str) -> None:
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.RCVHWM, QUEUED)
    socket.setsockopt(zmq.MAXMSGSIZE, LARGEST)
    socket.setsockopt(zmq.HEARTBEAT_IVL, int(1000 * HEARTBEAT))
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, int(3000 * HEARTBEAT))
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, int(1000 * AGAIN))
    socket.setsockopt_string(zmq.SUBSCRIBE, topic)
