"""Agreement of the emulated `cache-aware` with sglang-router: each decision is compared.

    python bench/agreement.py [--venv DIR] [--requests 400] [--generator conversations,shared-prompt,documents,burst]

The program runs before four simulated pods and gets a generated workload, one request at a time while earlier ones are
served. For each request, the emulation first chooses a pod and then records the program's choice, so that one
difference does not cause others. A request agrees if the program's choice is one of the pods that the emulation ranks
as equal. `alone` leaves out the requests with several equal pods.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
import peers
from rig import table

from bench.placement import routers
from bench.placement.generators import generate
from bench.placement.pods import VirtualPod
from bench.placement.rivals.sglang import CacheAware
from proxy.lab.sim import SimConfig, SimFleet, SimPod, StepTiming
from proxy.lab.workload import Job, request_body

PODS = 4
PATH = "/v1/completions"
SLOW = SimConfig(timing=StepTiming(base=0.02), num_gpu_blocks=100_000, max_num_seqs=64)
PATIENCE = 20.0


@dataclass(slots=True)
class Agreement:
    requests: int = 0
    agreed: int = 0
    alone: int = 0
    agreed_alone: int = 0
    affine: int = 0

    def add(self, acceptable: list[int], chosen: int, *, affine: bool) -> None:
        self.requests += 1
        self.agreed += chosen in acceptable
        self.affine += affine
        if len(acceptable) == 1:
            self.alone += 1
            self.agreed_alone += chosen in acceptable


class Comparison:
    """One router that serves, and the emulation that watches it."""

    def __init__(self, session: aiohttp.ClientSession, fleet: SimFleet, url: str) -> None:
        self._session = session
        self._fleet = fleet
        self._url = url
        self._emulated = CacheAware([VirtualPod(index, SLOW) for index in range(PODS)], Random(1))
        self._open: set[asyncio.Task[None]] = set()
        self.found = Agreement()

    async def compare(self, jobs: tuple[Job, ...], pause: float) -> None:
        for index, job in enumerate(jobs):
            acceptable = self._emulated.acceptable(job, range(PODS))
            affine = self._emulated.owner(job, range(PODS)) is not None
            came = [_served(pod) for pod in self._fleet.pods]
            sent = asyncio.ensure_future(self._send(job))
            self._open.add(sent)
            chosen = await self._arrival(came)
            self.found.add(acceptable, chosen, affine=affine)
            self._emulated.remember(job, chosen)
            self._emulated.in_flight[chosen] += 1
            sent.add_done_callback(lambda task, pod=chosen: self._ended(task, pod))
            await asyncio.sleep(pause * (index % 8 == 7))
        await asyncio.gather(*self._open)

    async def _send(self, job: Job) -> None:
        body, headers = request_body(job, "sim"), {"Content-Type": "application/json"}
        async with self._session.post(self._url + PATH, data=body, headers=headers) as response:
            await response.read()
            response.raise_for_status()

    async def _arrival(self, came: list[int]) -> int:
        async with asyncio.timeout(PATIENCE):
            while True:
                for index, pod in enumerate(self._fleet.pods):
                    if _served(pod) > came[index]:
                        return index
                await asyncio.sleep(0.001)

    def _ended(self, task: asyncio.Task[None], pod: int) -> None:
        self._open.discard(task)
        self._emulated.in_flight[pod] -= 1
        task.result()


def _served(pod: SimPod) -> int:
    return sum(record.path == PATH for record in pod.requests)


async def main() -> None:
    options = _options()
    rows = [["workload", "requests", "sent for their prefix", "agree", "agree, alone", "of"]]
    for name in options.generator:
        found = await _agreement(name, options)
        alone = f"{found.agreed_alone / max(1, found.alone):.1%}"
        agreed = f"{found.agreed / found.requests:.1%}"
        rows.append([name, str(found.requests), str(found.affine), agreed, alone, str(found.alone)])
    print(table(rows))


async def _agreement(name: str, options: argparse.Namespace) -> Agreement:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        fleet = await stack.enter_async_context(SimFleet(PODS, SLOW))
        program = peers.program("sglang-router", options.venv)
        starting = routers.started(program, [pod.port for pod in fleet.pods], folder)
        router = await asyncio.to_thread(starting.__enter__)
        stack.push_async_callback(asyncio.to_thread, starting.__exit__, None, None, None)
        connector = aiohttp.TCPConnector(limit=0)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        comparison = Comparison(session, fleet, f"http://127.0.0.1:{router.port}")
        made = generate(name, options.requests, 30.0, Random(1))
        await comparison.compare(made.jobs, options.pause)
        return comparison.found


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, default=peers.VENV, help=peers.VENV_HELP)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--pause", type=float, default=0.2, help="seconds after every eight requests")
    parser.add_argument(
        "--generator",
        type=lambda text: text.split(","),
        default=["conversations", "shared-prompt", "documents", "burst"],
        metavar="NAME,…",
    )
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main())
