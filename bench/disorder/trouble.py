"""What operators do meanwhile: pods are drained, removed and added, the configuration is read again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from random import Random

import aiohttp

from bench.disorder.program import Program

EVERY = 0.5
AWAY = 0.6
RELOAD_EVERY = 10.0
READ_EVERY = 0.1


class Churn:
    """One pod at a time is unreachable. `away` has the pod, start and end, in seconds of the event loop."""

    def __init__(self, program: Program, urls: Sequence[str], random: Random) -> None:
        self._program = program
        self._urls = urls
        self._random = random
        self.away: list[tuple[int, float, float]] = []
        self.done = {"drained": 0, "removed": 0, "reloads": 0}

    async def run(self) -> None:
        """Until cancelled; then call `restore`."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._pods())
            if self._program.reloads:
                group.create_task(self._reloads())

    async def restore(self) -> None:
        async with aiohttp.ClientSession(self._program.admin) as session:
            for pod in range(len(self._urls)):
                await self._bring_back(session, pod)

    async def _pods(self) -> None:
        now = asyncio.get_running_loop().time
        async with aiohttp.ClientSession(self._program.admin) as session:
            while True:
                await asyncio.sleep(EVERY)
                pod, drained = self._random.randrange(len(self._urls)), self._random.random() < 0.5
                began = now()
                if drained:
                    await session.post(f"/admin/pods/pod-{pod}/drain")
                else:
                    await session.delete(f"/admin/pods/pod-{pod}")
                self.done["drained" if drained else "removed"] += 1
                self.away.append((pod, began, began + AWAY))
                await asyncio.sleep(AWAY)
                await self._bring_back(session, pod)
                self.away[-1] = (pod, began, now())

    async def _bring_back(self, session: aiohttp.ClientSession, pod: int) -> None:
        """Removed, it may be there still while its last requests end; added again, it stays."""
        await session.post("/admin/pods", json={"name": f"pod-{pod}", "url": self._urls[pod]})
        await session.post(f"/admin/pods/pod-{pod}/undrain")

    async def _reloads(self) -> None:
        while True:
            await asyncio.sleep(RELOAD_EVERY)
            self.done["reloads"] += 1
            self._program.reload(1 + self.done["reloads"] % 2)


class Watch:
    """What the proxy thinks of its pods. `doubts` says which one it did not take for ready, from and to: from the look
    before it was seen to be so, to the look after."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self.ejections: list[tuple[int, float, float]] = []

    async def run(self) -> None:
        """Until cancelled."""
        now = asyncio.get_running_loop().time
        last = now()
        unready: set[int] = set()
        async with aiohttp.ClientSession(self._program.admin) as session:
            while True:
                async with session.get("/admin/pods") as response:
                    pods = (await response.json())["pods"]
                looked = now()
                found = {int(pod["name"].removeprefix("pod-")) for pod in pods if pod["state"] != "ready"}
                self.ejections += [(pod, last, looked) for pod in found | unready]
                last, unready = looked, found
                await asyncio.sleep(READ_EVERY)
