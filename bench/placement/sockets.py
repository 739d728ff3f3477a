"""The same experiment over real sockets: pods, router and load are processes of their own, on the machine's clock.

All runs `slower` times slower than the pods' model says, so that what Python costs is little beside it; all results
are in seconds of the fleet.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import uvloop

from bench.placement.client import StreamResult, ask
from bench.placement.pod_server import PodServer, served
from bench.placement.prompts import responses
from bench.placement.routers import Given, Router, started
from bench.rig import Program
from proxy.core.tasks import Tasks
from proxy.lab.kvlane import MODEL
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import GAUGE_SECONDS, Gauges, Restart, SimulationOutcome
from proxy.lab.workload import Job, request_body
from proxy.telemetry.exposition import SampleReader

PATH = "/v1/completions"

HEAD_START = 1.0
"""Real seconds between everything being ready and the first arrival."""

PATIENCE = 600.0
"""Seconds of the fleet after the last arrival; requests without a response then count as failed."""

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE, PREEMPTIONS = "vllm:kv_cache_usage_perc", "vllm:num_preemptions_total"
PREDICTED, OF_PROMPT = "kvlane_prefix_predicted_hit_tokens_total", "kvlane_prefix_predicted_prompt_tokens_total"


@dataclass(slots=True)
class Played:
    """What came of a run. `late` is how many seconds of the fleet after its time each request was sent: if that is
    not far below the times to first token, the machine was too slow for `slower`."""

    outcomes: list[SimulationOutcome]
    gauges: Gauges
    router: str = ""
    preemptions: int = 0
    hit_predicted: float | None = None
    late: list[float] = field(default_factory=list)


def play(
    program: Program | Given,
    jobs: Sequence[Job],
    configs: Sequence[SimConfig],
    slower: float,
    restarts: Sequence[Restart] = (),
    warm_up: float = 0.0,
) -> Played:
    """Plays the jobs through the router. `warm_up`: the share of them that what the router foresaw leaves out."""
    known = responses(jobs)
    slow = [replace(config, time_scale=config.time_scale / slower, responses=known) for config in configs]
    with (
        tempfile.TemporaryDirectory(prefix="kvlane-bench-") as folder,
        served(slow) as pods,
        started(program, pods.ports, Path(folder)) as router,
    ):
        return _until_terminated(_Run(jobs, pods, router, slower, warm_up).play(restarts))


def _until_terminated(playing: Coroutine[Any, Any, Played]) -> Played:
    """SIGTERM ends it as Ctrl-C does, so that pods and router are ended too."""

    async def run() -> Played:
        current = asyncio.current_task()
        assert current is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
        return await playing

    before = signal.getsignal(signal.SIGTERM)
    try:
        return uvloop.run(run())
    except asyncio.CancelledError:
        sys.exit("terminated")
    finally:
        signal.signal(signal.SIGTERM, before)


class _Run:
    def __init__(self, jobs: Sequence[Job], pods: PodServer, router: Router, slower: float, warm_up: float) -> None:
        self._jobs = jobs
        self._pods = pods
        self._router = router
        self._slower = slower
        self._warm = int(len(jobs) * warm_up)
        self._gauges = Gauges()
        self._preemptions = [0] * len(pods.ports)
        self._foreseen: dict[str, float] = {}
        self._index = {f"127.0.0.1:{port}": index for index, port in enumerate(pods.ports)}

    async def play(self, restarts: Sequence[Restart]) -> Played:
        gc.freeze()
        timeout = aiohttp.ClientTimeout(total=10.0)
        async with aiohttp.ClientSession(timeout=timeout) as self._session, Tasks() as tasks:
            self._start = asyncio.get_running_loop().time() + HEAD_START
            tasks.start(self._sample(), "gauges")
            for restart in restarts:
                tasks.start(self._restart(restart), "restart")
            requests = []
            for number, job in enumerate(self._jobs):
                body = request_body(job, MODEL)
                await self._until(job.arrival)
                if number == self._warm:
                    tasks.start(self._note_foreseen(), "what was foreseen while warming up")
                requests.append(tasks.start(ask(self._port(number), PATH, body, job.session), "request"))
            await asyncio.wait(requests, timeout=PATIENCE * self._slower)
            results = [one.result() if one.done() else StreamResult() for one in requests]
            predicted = await self._predicted()
        outcomes = [self._outcome(number, *each) for number, each in enumerate(zip(self._jobs, results, strict=True))]
        late = [self._fleet(one.sent) - job.arrival for job, one in zip(self._jobs, results, strict=True) if one.sent]
        return Played(outcomes, self._gauges, self._router.version, sum(self._preemptions), predicted, late)

    async def _until(self, at: float) -> None:
        """A second of the fleet, counted from the first arrival on."""
        now = asyncio.get_running_loop().time()
        await asyncio.sleep(max(0.0, self._start + at * self._slower - now))

    def _fleet(self, at: float) -> float:
        return (at - self._start) / self._slower

    def _port(self, number: int) -> int:
        given = self._router.given
        return self._pods.ports[given[number]] if given else self._router.port

    def _outcome(self, number: int, job: Job, result: StreamResult) -> SimulationOutcome:
        given = self._router.given
        pod = given[number] if given else self._index.get(result.pod, -1)
        if not result.whole or result.first is None or result.last is None:
            return SimulationOutcome(job, pod)
        cached = result.cached_tokens or 0
        return SimulationOutcome(job, pod, self._fleet(result.first), self._fleet(result.last), cached)

    async def _sample(self) -> None:
        """At the pods, as often as the virtual mode does."""
        at = 0.0
        while True:
            at += GAUGE_SECONDS
            await self._until(at)
            seen = await asyncio.gather(*(self._samples(f"{url}/metrics") for url in self._pods.urls))
            self._gauges.add(
                [pod.get(KV_USAGE, 0.0) for pod in seen],
                [int(pod.get(RUNNING, 0) + pod.get(WAITING, 0)) for pod in seen],
            )
            for index, pod in enumerate(seen):
                self._preemptions[index] = max(self._preemptions[index], int(pod.get(PREEMPTIONS, 0)))

    async def _restart(self, restart: Restart) -> None:
        await self._until(restart.at)
        self._pods.kill(restart.pod)
        await self._until(restart.at + restart.down)
        self._pods.start(restart.pod)

    async def _note_foreseen(self) -> None:
        self._foreseen = await self._samples(self._router.metrics)

    async def _predicted(self) -> float | None:
        """The share of prompt tokens that kvlane expected in the caches; others do not say."""
        seen, before = await self._samples(self._router.metrics), self._foreseen
        of_prompt = seen.get(OF_PROMPT, 0.0) - before.get(OF_PROMPT, 0.0)
        return (seen.get(PREDICTED, 0.0) - before.get(PREDICTED, 0.0)) / of_prompt if of_prompt else None

    async def _samples(self, url: str) -> dict[str, float]:
        """The series of an exposition, summed by name; empty without a response."""
        if not url:
            return {}
        try:
            async with self._session.get(url) as response:
                return totals(await response.read())
        except (aiohttp.ClientError, TimeoutError):
            return {}


def totals(exposition: bytes) -> dict[str, float]:
    return {name: sum(sample.value for sample in found) for name, found in SampleReader().read(exposition).items()}
