"""Simulated pods behind real sockets, in a process of their own."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

import uvloop

from proxy.lab.sim import SimConfig, SimFleet

PATIENCE = 30.0
"""Seconds for the pods to listen."""


class PodServer:
    """The other process as seen from here. `ports` are the pods' ports, in order."""

    def __init__(self, ports: Sequence[int], pipe: Connection) -> None:
        self.ports = tuple(ports)
        self._pipe = pipe

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def kill(self, pod: int) -> None:
        """Reset its connections; its port refuses until it is started."""
        self._pipe.send(("kill", pod))

    def start(self, pod: int) -> None:
        """Again, on its port and with nothing in its memory."""
        self._pipe.send(("start", pod))


@contextmanager
def served(configs: Sequence[SimConfig]) -> Iterator[PodServer]:
    """One pod for each configuration. The process ends with this one, however that ends."""
    spawning = multiprocessing.get_context("spawn")
    here, there = spawning.Pipe()
    other = spawning.Process(target=_run, args=(list(configs), there), daemon=True, name="pods")
    other.start()
    there.close()
    try:
        if not here.poll(PATIENCE):
            raise TimeoutError(f"the pods do not listen after {PATIENCE:g} s")
        yield PodServer(here.recv(), here)
    finally:
        here.close()
        other.terminate()
        other.join()


def _run(configs: list[SimConfig], pipe: Connection) -> None:
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # some routers greet a pod in HTTP/2 and gRPC
    with suppress(KeyboardInterrupt):
        uvloop.run(_serve(configs, pipe))


async def _serve(configs: list[SimConfig], pipe: Connection) -> None:
    """Until the other end of the pipe is closed."""
    async with SimFleet(len(configs), configs) as fleet:
        ports = [pod.port for pod in fleet.pods]
        pipe.send(ports)
        events: asyncio.Queue[tuple[str, int] | None] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(pipe.fileno(), _listen, pipe, events)
        while (command := await events.get()) is not None:
            what, index = command
            pod = fleet.pods[index]
            await (pod.kill() if what == "kill" else pod.start(port=ports[index]))


def _listen(pipe: Connection, events: asyncio.Queue[tuple[str, int] | None]) -> None:
    try:
        events.put_nowait(pipe.recv())
    except (EOFError, OSError):
        asyncio.get_running_loop().remove_reader(pipe.fileno())
        events.put_nowait(None)
