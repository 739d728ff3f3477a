"""WebSockets: after the upgrade, bytes go both ways as they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from proxy.core.attempt import Ending
from tests.helpers.http.support import BUFFER, Pod, Received, plain, rig, timeouts
from tests.helpers.waiting import PATIENCE, until

UPGRADE = (
    b"GET /v1/realtime?model=m HTTP/1.1\r\nhost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
SWITCHED = (
    b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n"
)


async def until_still(size: Callable[[], int]) -> None:
    """Wait until a size that is not 0 stays as it is."""
    seen = 0
    while seen == 0 or seen != size():
        seen = size()
        await asyncio.sleep(0.2)


async def read_until(reader: asyncio.StreamReader, end: bytes) -> int:
    """Read until `end` and return the number of bytes."""
    size, tail = 0, b""
    while not tail.endswith(end):
        data = await asyncio.wait_for(reader.read(2**20), PATIENCE)
        assert data
        size, tail = size + len(data), (tail + data)[-len(end) :]
    return size


async def echo(request: Received) -> None:
    await request.send(SWITCHED + b"hello ")
    while data := await request.reader.read(65536):
        await request.send(data)
    request.break_off()


async def test_bytes_pass_in_both_directions() -> None:
    async with Pod(echo) as pod, rig(pod) as port, port.client() as client:
        client.send(UPGRADE + b"early ")
        head = await client.until(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 Switching Protocols\r\n")
        assert b"connection: Upgrade\r\nupgrade: websocket\r\n" in head
        assert b"Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n" in head
        await client.until(b"hello early ")
        client.send(b"\x81\x05later")
        await client.until(b"later")
        assert pod.requests[0].line == b"GET /v1/realtime?model=m HTTP/1.1"
        assert pod.requests[0].all(b"sec-websocket-key") == [b"dGhlIHNhbXBsZSBub25jZQ=="]
        assert pod.requests[0].all(b"upgrade") == [b"websocket"]


async def test_a_pod_that_disconnects_ends_the_tunnel() -> None:
    async def script(request: Received) -> None:
        await request.send(SWITCHED, b"bye")
        request.break_off()

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(UPGRADE)
        assert (await client.until_closed("GET")).raw.endswith(b"bye")
        await port.until_ended()
        assert port.attempt.ending is Ending.COMPLETE
        assert port.attempt.status == 101


async def test_a_client_that_disconnects_ends_the_tunnel() -> None:
    gone = asyncio.Event()

    async def script(request: Received) -> None:
        await request.send(SWITCHED)
        await request.gone()
        gone.set()

    async with Pod(script) as pod, rig(pod) as port:
        async with port.client() as client:
            client.send(UPGRADE)
            await client.until(b"\r\n\r\n")
        await asyncio.wait_for(gone.wait(), PATIENCE)
        await port.until_ended()
        assert port.attempt.ending is Ending.CLIENT_GONE


async def test_a_refused_upgrade_is_an_ordinary_response() -> None:
    async def script(request: Received) -> None:
        await request.send(plain(b"no").replace(b"200 OK", b"403 Forbidden"))

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        for _ in range(2):
            client.send(UPGRADE)
            assert (await client.response()).startswith(b"HTTP/1.1 403 Forbidden\r\n")


async def test_neither_side_is_read_faster_than_the_other_reads() -> None:
    sent = 0

    async def script(request: Received) -> None:
        nonlocal sent
        await request.send(SWITCHED)
        while sent < 64 * 2**20:
            await request.send(b"x" * 65536)
            sent += 65536

    async with Pod(script) as pod, rig(pod) as port, port.client(BUFFER) as client:
        client.send(UPGRADE)
        await client.until(b"\r\n\r\n")
        client.reader._transport.pause_reading()  # type: ignore[attr-defined]
        seen = -1
        while seen != sent:
            seen = sent
            await asyncio.sleep(0.2)
        assert sent < 64 * 2**20


async def test_a_client_that_resumes_reading_gets_every_byte() -> None:
    size, starts, blocked = 64 * 2**20, asyncio.Event(), asyncio.Event()

    async def script(request: Received) -> None:
        await request.send(SWITCHED)
        await starts.wait()
        sending = asyncio.ensure_future(request.send(b"x" * size + b"end"))
        await until_still(lambda: request.writer.transport.get_write_buffer_size())
        blocked.set()
        await sending
        await request.gone()

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(UPGRADE)
        await client.until(b"\r\n\r\n")
        transport: asyncio.Transport = client.reader._transport  # type: ignore[attr-defined]
        transport.pause_reading()
        starts.set()
        await asyncio.wait_for(blocked.wait(), PATIENCE)
        transport.resume_reading()
        received = await read_until(client.reader, b"end")
        assert received == size + 3


async def test_a_pod_that_resumes_reading_gets_every_byte() -> None:
    size, reads, received = 64 * 2**20, asyncio.Event(), 0

    async def script(request: Received) -> None:
        nonlocal received
        await request.send(SWITCHED)
        await reads.wait()
        received = await read_until(request.reader, b"end")
        await request.send(b"thanks")

    async with Pod(script) as pod, rig(pod) as port, port.client() as client:
        client.send(UPGRADE)
        await client.until(b"\r\n\r\n")
        client.send(b"x" * size + b"end")
        await until_still(lambda: client.writer.transport.get_write_buffer_size())
        reads.set()
        await client.until(b"thanks")
        assert received == size + 3


async def test_a_pod_that_does_not_read_pauses_the_client() -> None:
    async def script(request: Received) -> None:
        await request.send(SWITCHED)
        await asyncio.sleep(30)

    async with Pod(script, buffer=BUFFER) as pod, rig(pod) as port, port.client() as client:
        client.send(UPGRADE)
        await client.until(b"\r\n\r\n")
        client.send(b"x" * 64 * 2**20)
        left = -1
        while left != client.writer.transport.get_write_buffer_size():
            left = client.writer.transport.get_write_buffer_size()
            await asyncio.sleep(0.2)
        assert left > 2**20
        await until(lambda: len(pod.requests) == 1)


async def test_a_tunnel_may_last_longer_than_a_request() -> None:
    async with Pod(echo) as pod, rig(pod, timeouts=timeouts(request=0.1)) as port, port.client() as client:
        client.send(UPGRADE)
        await client.until(b"hello ")
        await asyncio.sleep(0.4)
        client.send(b"still here")
        await client.until(b"still here")
