"""The listener for gateways: connections end between two frames, and are served until they are closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from proxy.extproc.messages import GO_AWAY, GrpcFrames
from proxy.extproc.server import CHECK_INTERVAL, EnvoyListener
from tests.helpers.waiting import PATIENCE, until
from tests.wire.extproc.test_protocol import BODY, gateway, set_by, talk

HEADERS, CONTINUATION, DATA, SETTINGS = 1, 9, 0, 4
END_HEADERS = 4


def frame(kind: int, flags: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3) + bytes((kind, flags)) + (1).to_bytes(4) + payload


FRAMES = [
    frame(SETTINGS, 0),
    frame(HEADERS, 0, b"h" * 3),
    frame(CONTINUATION, 0, b"c" * 2),
    frame(CONTINUATION, END_HEADERS, b"c"),
    frame(DATA, 0, b"d" * 300),
    frame(HEADERS, END_HEADERS, b"t" * 4),
]
BETWEEN = [len(b"".join(FRAMES[:count])) for count in (1, 4, 5, 6)]
"""Not before the settings, and not where headers go on."""


@pytest.mark.parametrize("step", [1, 2, 7, 64, 1000])
def test_frames_may_be_inserted_between_two_frames(step: int) -> None:
    stream, frames = b"".join(FRAMES), GrpcFrames()
    found: list[int] = [0] if frames.is_between else []
    for at in range(0, len(stream), step):
        assert frames.passed(stream[at : at + step]) == len(stream[at : at + step])
        if frames.is_between:
            found.append(min(at + step, len(stream)))
    assert found == [end for end in BETWEEN if end % step == 0 or end == len(stream)]


def test_the_first_frame_boundary_is_found_from_any_position() -> None:
    stream = b"".join(FRAMES)
    for start in range(len(stream)):
        frames = GrpcFrames()
        frames.passed(stream[:start])
        if not frames.is_between:
            assert start + frames.passed(stream[start:], stops=True) == min(end for end in BETWEEN if end > start)


@asynccontextmanager
async def before(path: Path, raw: bytes) -> AsyncIterator[tuple[EnvoyListener, asyncio.Queue[asyncio.StreamWriter]]]:
    """Run a front before a server that sends `raw` at once. Yield it and its connections."""
    inside: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

    async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        inside.put_nowait(writer)
        while await reader.read(1 << 16):
            pass
        writer.close()

    server = await asyncio.start_unix_server(accepted, str(path))
    one = EnvoyListener(str(path))
    await one.start("127.0.0.1", 0, None)
    try:
        yield one, inside
    finally:
        await one.leave(0.0, lambda: False)
        await one.close()
        await until(lambda: not one.open)
        server.close()
        await asyncio.sleep(0.05)


async def test_an_insertion_within_a_frame_waits_for_its_end(tmp_path: Path) -> None:
    stream = b"".join(FRAMES)
    start = BETWEEN[1] + 20
    async with before(tmp_path / "s", stream[:start]) as (one, inside):
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        assert await reader.readexactly(start) == stream[:start]
        writer.write(b"acknowledged")
        leaving = asyncio.ensure_future(one.leave(20.0, lambda: True))
        within = await inside.get()
        await asyncio.sleep(3 * CHECK_INTERVAL)
        within.write(stream[start:])
        sent = stream[start : BETWEEN[2]] + GO_AWAY + stream[BETWEEN[2] :]
        assert await reader.readexactly(len(sent)) == sent
        assert not leaving.done(), "it is served until it goes"
        writer.close()
        async with asyncio.timeout(PATIENCE):
            await leaving


async def test_a_gateway_that_has_not_acknowledged_the_settings_gets_no_goaway(tmp_path: Path) -> None:
    """gRPC's client library would wait on that connection without sending its request."""
    async with before(tmp_path / "s", FRAMES[0]) as (one, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        writer.write(b"sent before the settings arrive")
        leaving = asyncio.ensure_future(one.leave(20.0, lambda: True))
        assert await reader.readexactly(len(FRAMES[0])) == FRAMES[0]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5 * CHECK_INTERVAL):
                await reader.readexactly(1)
        writer.write(b"acknowledged")
        assert await reader.readexactly(len(GO_AWAY)) == GO_AWAY
        writer.close()
        async with asyncio.timeout(PATIENCE):
            await leaving


async def test_a_lost_connection_on_one_side_closes_the_other(tmp_path: Path) -> None:
    async with before(tmp_path / "s", FRAMES[0]) as (one, inside):
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        await reader.readexactly(len(FRAMES[0]))
        within = await inside.get()
        writer.close()
        await until(within.transport.is_closing)
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        await reader.readexactly(len(FRAMES[0]))
        (await inside.get()).close()
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not one.open)


async def test_without_an_inner_server_the_connection_ends(tmp_path: Path) -> None:
    one = EnvoyListener(str(tmp_path / "nobody"))
    await one.start("127.0.0.1", 0, None)
    reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
    with contextlib.suppress(ConnectionError):
        assert await reader.read() == b""
    writer.close()
    await one.leave(0.0, lambda: False)
    await one.close()


async def test_a_gateway_that_does_not_read_pauses_the_inner_server(tmp_path: Path) -> None:
    much = frame(DATA, 0, bytes(1 << 23))
    async with before(tmp_path / "s", FRAMES[0] + much) as (one, inside):
        reader, writer = await asyncio.open_connection("127.0.0.1", one.port)
        within = await inside.get()
        within.write(much)
        await asyncio.sleep(0.3)
        assert within.transport.get_write_buffer_size() > 1 << 22
        assert await reader.readexactly(len(FRAMES[0] + much + much))
        await within.drain()
        writer.close()


class Late:
    """Between a gateway and kvlane: insertions of kvlane arrive at frame boundaries."""

    def __init__(self) -> None:
        self.may = asyncio.Event()
        self.may.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        inner = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(self._pass(reader, inner[1], asyncio.Event()), self._pass(inner[0], writer, self.may))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, may: asyncio.Event) -> None:
        while data := await reader.read(1 << 16):
            if may is self.may:
                await may.wait()
            writer.write(data)
        writer.close()


async def test_a_request_sent_before_goaway_arrives_is_served() -> None:
    late = Late()
    async with gateway() as (s, _):
        assert s.app.picker_port
        port = s.app.picker_port
        server = await asyncio.start_server(lambda r, w: late.serve(r, w, port), "127.0.0.1", 0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.sockets[0].getsockname()[1]}") as channel:
            first = talk(channel)
            await first.head()
            await first.say(request_body={"body": BODY, "end_of_stream": True})
            assert "x-request-id" in set_by((await first.hear()).request_headers.response.header_mutation)
            late.may.clear()
            picker = s.app._picker
            assert picker is not None
            stopping = asyncio.ensure_future(picker.stop(20.0))
            await asyncio.sleep(0.3)
            second = talk(channel)
            await second.head()
            await second.say(request_body={"body": BODY, "end_of_stream": True})
            await asyncio.sleep(0.3)
            late.may.set()
            assert "x-request-id" in set_by((await second.hear()).request_headers.response.header_mutation)
            await first.end()
            await second.end()
            async with asyncio.timeout(PATIENCE):
                await stopping
        server.close()
