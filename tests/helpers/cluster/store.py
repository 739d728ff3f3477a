"""A real Redis for a test, and a wall that can be put between it and its clients."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.helpers.ports import free_port
from tests.helpers.waiting import PATIENCE

needs_redis = pytest.mark.skipif(
    shutil.which("redis-server") is None or find_spec("redis") is None,
    reason="needs redis-server and pip install 'kvlane[redis]'",
)


class Store:
    """Keeps nothing on disk: started again, it is empty."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self._folder = folder
        self._options = options
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self._launch()
        async with asyncio.timeout(PATIENCE):
            while not await self._responds():
                await asyncio.sleep(0.02)

    def _launch(self) -> None:
        command = ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(
            [*command, "--dir", str(self._folder), *self._options], stdout=subprocess.DEVNULL
        )

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self, goes_on: bool = False) -> None:
        """It takes connections, and does nothing."""
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT if goes_on else signal.SIGSTOP)

    async def _responds(self) -> bool:
        with suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
            writer.write(b"PING\r\n")
            raw = await reader.readline()
            writer.close()
            return bool(raw)
        return False


@asynccontextmanager
async def store(folder: Path, *options: str) -> AsyncIterator[Store]:
    found = Store(folder, *options)
    try:
        await found.start()
        yield found
    finally:
        found.kill()


class Wall:
    """A relay before a port: while it is up, bytes wait in it, in both directions, and connections seem to stand. It
    makes the way longer by `seconds`, each way."""

    def __init__(self, port: int, seconds: float = 0.0) -> None:
        self._to = port
        self._seconds = seconds
        self._open = asyncio.Event()
        self._open.set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Wall:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = int(self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def up(self) -> None:
        self._open.clear()

    def down(self) -> None:
        self._open.set()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._open.wait()
            with suppress(OSError):
                await self._between(reader, writer)
        except asyncio.CancelledError:
            pass  # the test is over: the server that accepted would log it
        finally:
            writer.close()
            self._tasks.discard(task)

    async def _between(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to = await asyncio.open_connection("127.0.0.1", self._to)
        try:
            await asyncio.gather(self._pump(reader, to), self._pump(there, writer))
        finally:
            to.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            await self._open.wait()
            if self._seconds:
                await asyncio.sleep(self._seconds)
            writer.write(data)
        writer.close()
