"""What other processes send: workers on the bus of a host, and other hosts over the channel of the store."""

from __future__ import annotations

import asyncio
import math
import random
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType

from bench.fuzzing.inputs import Check
from bench.fuzzing.talk import CHAT, PATIENCE, STREAMED, exchange, respond_well, settings_before
from proxy.cluster.deployment import Connect
from proxy.cluster.membership import peer_id
from proxy.cluster.messages import ID_BYTES, PacketKind, message, packet
from proxy.cluster.settings import ReplicaSettings
from proxy.cluster.sharing import Replicated
from proxy.cluster.supervisor import Supervisor
from proxy.cluster.workers import Workers
from proxy.core.endpoint import Endpoint
from proxy.settings import from_mapping
from tests.helpers.waiting import until

POD = "p"
PEER = b"h" * ID_BYTES


class FakeLine:
    """A store on which only the fuzzer publishes."""

    def __init__(self, received: Callable[[bytes], None]) -> None:
        self.received = received
        self.waiting = 0

    async def __aenter__(self) -> FakeLine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return

    def publish(self, channel: str, message: bytes) -> None:
        """Return what this host says of itself, as the store does."""
        self.received(message)

    async def lost(self) -> None:
        await asyncio.Event().wait()


@asynccontextmanager
async def messages() -> AsyncIterator[Check]:
    """An input is a packet, or the records of one member of another host; a sibling worker says the same."""
    lines: list[FakeLine] = []

    def listen(settings: ReplicaSettings, channels: Sequence[str], received: Callable[[bytes], None]) -> FakeLine:
        lines.append(FakeLine(received))
        return lines[-1]

    async with AsyncExitStack() as stack:
        pod = await stack.enter_async_context(await asyncio.start_server(respond_well, "127.0.0.1", 0))
        settings = from_mapping(_settings(pod))
        proxy, supervisor = Replicated(settings), Supervisor(settings, 2)
        others = supervisor._deployment
        assert others is not None
        for deployment in (proxy._deployment, others):
            _connect_by(deployment, listen)
        app = await stack.enter_async_context(proxy)
        broker = supervisor._broker
        supervisor._workers = Workers(broker, supervisor._clock, supervisor._catalogue)
        await stack.enter_async_context(others)
        stack.push_async_callback(supervisor._replica.close)
        for each in settings.pods.static:
            supervisor.fleet.add(each, "static")
        await until(lambda: len(lines) == 2, PATIENCE)
        number = 1
        watched = [app.fleet.endpoints[0], supervisor.fleet.endpoints[0]]

        async def check(data: bytes, rng: random.Random) -> str:
            nonlocal number
            number += 1
            peers = {PEER, data[5 : 5 + ID_BYTES].ljust(ID_BYTES, b"\0"), peer_id(app._replica.host, 5)}
            kind = rng.choice((PacketKind.NEWS, PacketKind.STATE))
            for line, to in zip(lines, (app._replica.id, supervisor._replica.id), strict=True):
                line.received(data)
                line.received(message(data))
                line.received(
                    message(packet(kind, PEER, number, data, to if kind is PacketKind.STATE else None).packed)
                )
                line.received(message(packet(PacketKind.HELLO, PEER, number + 1, data).packed))
            app._replica.received(packet(PacketKind.NEWS, peer_id(app._replica.host, 5), number, data))
            await _on_the_bus(number, data, rng)
            await asyncio.sleep(0)
            for peer in peers:
                for line in lines:
                    line.received(message(packet(PacketKind.BYE, peer, 0, b"").packed))
            app._replica.received(packet(PacketKind.BYE, peer_id(app._replica.host, 5), 0, b""))
            number += 1
            return _left_of(watched) or _limits(app) or ("" if number % 40 else await _serves(app))

        async def _on_the_bus(worker: int, data: bytes, rng: random.Random) -> None:
            ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            await broker.attach(worker, ours)
            id, kind = peer_id(broker.host, worker), rng.choice((PacketKind.NEWS, PacketKind.DIRECT))
            to = supervisor._replica.id if kind is PacketKind.DIRECT else None
            theirs.send(packet(kind, id, 1, data, to).packed + (data if rng.randrange(2) else b""))
            theirs.shutdown(socket.SHUT_WR)
            await until(lambda: worker not in broker.links, PATIENCE)
            theirs.close()

        yield check


def _settings(pod: asyncio.Server) -> dict[str, object]:
    producer = {"type": "session-id-producer", "parameters": {"cookieName": "session"}}
    affinity = {
        "type": "session-affinity-scorer",
        "parameters": {"strategy": "session_id", "sessionIdConfig": {"sources": [{"header": "x-session-id"}]}},
    }
    scorers = [{"pluginRef": "session-affinity-scorer"}, {"pluginRef": "prefix-cache-scorer"}]
    limits = {"requestsPerMinute": 10_000, "tokensPerDay": 10**12, "concurrentRequests": 10_000}
    made = settings_before(
        pod,
        replicas={"store": "redis://127.0.0.1:9"},
        flowControl={"saturation": {"detector": "concurrency", "requests": 1000}},
        security={"apiKeys": [{"name": "team", "key": "k", "limits": "default"}], "limits": {"default": limits}},
        scheduling={
            "plugins": [producer, affinity, {"type": "prefix-cache-scorer"}],
            "schedulingProfiles": [{"name": "default", "plugins": scorers}],
        },
    )
    made["pods"]["static"][0]["name"] = POD
    return made


def _connect_by(deployment: object, connect: Connect) -> None:
    deployment._connect = connect  # type: ignore[attr-defined]


def _left_of(pods: Sequence[Endpoint]) -> str:
    """Return what pods still have in flight for processes that are gone."""
    for pod in pods:
        load = pod.load
        if load.requests or load.tokens or load.remote_requests or load.remote_tokens:
            return f"left on the pod: {load.requests} requests ({load.remote_requests} remote), {load.tokens} tokens"
        if not math.isfinite(load.recent) and load.recent > 0:
            return f"recent work is {load.recent}"
    return ""


def _limits(app: Replicated) -> str:
    limits = app.serving.limits
    assert limits is not None
    bad = [(who, used) for who, _, used in limits.known() if not all(map(math.isfinite, used))]
    return f"limits are {bad}" if bad else ""


async def _serves(app: Replicated) -> str:
    request = CHAT % (len(STREAMED), STREAMED)
    response = await exchange(app.port, [request.replace(b"host: a", b"host: a\r\nauthorization: Bearer k", 1)])
    return "" if response is not None and response.startswith(b"HTTP/1.1 ") else f"the next request got {response!r}"
