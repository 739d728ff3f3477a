"""What a side says before it goes is heard."""

from __future__ import annotations

import asyncio
import socket

from proxy.cluster.transport import Link
from proxy.telemetry.metrics import Counter
from tests.helpers.waiting import PATIENCE

NOBODY = 0


async def test_all_messages_before_the_end_are_received_by_a_busy_reader() -> None:
    ours, theirs = socket.socketpair()
    heard: list[bytes] = []

    def answer(_: int, records: bytes) -> None:
        heard.append(records)
        hub.publish(b"so did the others", NOBODY)

    hub = await Link.over(ours, answer, _nothing, _nothing, Counter())
    worker = await Link.over(theirs, lambda *_: None, _nothing, _nothing, Counter())
    said = [bytes([number]) * 50_000 for number in range(20)]
    for records in said:
        worker.publish(records, NOBODY)
    ending = asyncio.create_task(worker.end())
    await asyncio.sleep(0)
    worker.publish(b"too late", NOBODY)
    async with asyncio.timeout(PATIENCE):
        await ending
        await hub.closed.wait()
    assert heard == said


def _nothing() -> None:
    pass
