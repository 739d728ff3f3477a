"""Messages of a side before its end are received."""

from __future__ import annotations

import asyncio
import socket

from proxy.cluster.messages import Packet, PacketKind, packet
from proxy.cluster.transport import Link
from proxy.telemetry.metrics import Counter
from tests.helpers.waiting import PATIENCE


async def test_all_messages_before_the_end_are_received_by_a_busy_reader() -> None:
    ours, theirs = socket.socketpair()
    received: list[bytes] = []

    def receive(packet: Packet) -> None:
        received.append(packet.body)
        broker.publish(local(b"so did the others"))

    broker = Link(receive, _nothing, _nothing, Counter())
    worker = Link(lambda *_: None, _nothing, _nothing, Counter())
    await broker.open(ours)
    await worker.open(theirs)
    sent = [bytes([number]) * 50_000 for number in range(20)]
    for records in sent:
        worker.publish(local(records))
    ending = asyncio.create_task(worker.end())
    await asyncio.sleep(0)
    worker.publish(local(b"too late"))
    async with asyncio.timeout(PATIENCE):
        await ending
        await broker.closed.wait()
    assert received == sent


def local(body: bytes) -> Packet:
    return packet(PacketKind.NEWS, bytes(8), 0, body)


def _nothing() -> None:
    pass
