"""A worker as its supervisor sees it: a process, the other end of its bus, and what it last said of itself."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Sequence

from proxy.supervisor.setup import Setup

MODULE = "proxy.supervisor.worker"


class Child:
    """`seat` says whose sockets it has, `number` tells it from all other workers that ever were."""

    def __init__(
        self, number: int, seat: int, process: asyncio.subprocess.Process, setup: Setup, started: float
    ) -> None:
        self.number = number
        self.seat = seat
        self.metrics_path = setup.metrics_path
        self.started = started
        self.ready = asyncio.Event()
        self.leaving = asyncio.Event()
        """It takes nobody new, whoever told it to stop; nor does one that is gone."""
        self.unlinked = asyncio.Event()
        """Its end of the bus is closed: all that it said has been heard."""
        self.exposition = b""
        """Of its last answer to a scrape, or its farewell."""
        self.alive_at = started
        """When the process last said that its event loop turns, in monotonic seconds."""
        self.is_silent = False
        """Whether it serves and has not said so for a while: see `Crew`."""
        self._process = process
        self._asked = False

    @classmethod
    async def start(
        cls, seat: int, setup: Setup, sockets: Sequence[socket.socket], bus: socket.socket, started: float
    ) -> Child:
        """The process has its setup; it says that it is ready over the bus, of which `bus` is its end."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            MODULE,
            stdin=asyncio.subprocess.PIPE,
            pass_fds=(bus.fileno(), *(sock.fileno() for sock in sockets)),
        )
        assert process.stdin is not None
        process.stdin.write(setup.packed())
        process.stdin.close()
        return cls(setup.worker, seat, process, setup, started)

    @property
    def takes_requests(self) -> bool:
        """Whether it has said that it serves, and not that it leaves."""
        return self.ready.is_set() and not self.leaving.is_set()

    @property
    def pid(self) -> int:
        return self._process.pid

    async def ended(self) -> int:
        """The exit code; the negative number of a signal that ended it."""
        code = await self._process.wait()
        await self.unlinked.wait()
        return code

    async def stop(self, grace: float) -> None:
        """Asked to end, once, and killed if it has not within `grace` seconds."""
        if not self._asked:
            self._asked = True
            self._signal(15)
        try:
            async with asyncio.timeout(grace):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()

    def kill(self) -> None:
        self._signal(9)

    def _signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the loop is about to hear of it
                os.kill(self._process.pid, number)
