"""The sockets: one that listens to a source, and one that asks it for what was missed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import zmq
import zmq.asyncio

from proxy.core.endpoint import Endpoint
from proxy.core.kv import KvSources
from proxy.core.ports import KvListener
from proxy.kvevents import wire
from proxy.kvevents.sources import Source, named
from proxy.kvevents.track import Answers, NoReplay, Track
from proxy.kvevents.wire import END, SEQUENCE, Garbled

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
                    number, payload = wire.replayed(await socket.recv_multipart())
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
                _, number, payload = wire.message(await socket.recv_multipart(flags=zmq.NOBLOCK))
            except zmq.Again:
                return
            await track.arrived(number, payload)


async def _sort(
    frames: list[bytes], pods: list[Endpoint], tracks: dict[tuple[Endpoint, int], Track], listener: KvListener
) -> None:
    """To the track of the pod and rank that it is from."""
    try:
        topic, number, payload = wire.message(frames)
        rank = wire.batch(payload).rank
    except Garbled as error:
        log.warning("what is no batch of KV events was published: %s", error)
        return
    for gone in [key for key in tracks if key[0] not in pods]:
        del tracks[gone]
    for endpoint in pods:
        if named(topic, endpoint) and endpoint.rank in (None, rank % len(endpoint.ranks)):
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
