"""One kind of traffic before one fleet, and what is measured of it: on the virtual clock, or over sockets."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random

from bench.placement import policies, report
from bench.placement.capacity import capacity
from bench.placement.generators import generate
from bench.placement.report import Figures, Objectives
from bench.placement.scenario import Scenario
from proxy.core.ports import ManualClock
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import Simulation, SimulationOutcome
from proxy.lab.workload import Job, Workload, load_trace

GENERATED = 8_000
"""The default number of requests."""

FIRST_GUESS = 50.0
"""Requests per second that a workload is made up for, before it is known how many the fleet takes."""

ENOUGH = 2_000
"""Requests of a trace for a load 1 of their own: of fewer, most are the first and the last ones that a pod takes."""


@dataclass(frozen=True)
class Experiment:
    """`trace` or `generator` is the traffic; `requests` 0 takes all of it. Each seed spreads the arrivals of a trace
    again, uses another part of it if not all is requested, or generates another workload."""

    scenario: Scenario = field(default_factory=Scenario)
    trace: Path | None = None
    generator: str = ""
    requests: int = 0
    seeds: int = 3
    known_capacity: float = 0.0
    objectives: Objectives = field(default_factory=Objectives)
    warm_up: float = 0.1
    says_cached: bool = True
    complete: float = 0.0
    """The share of requests that are not streamed; on the virtual clock only."""

    def workload(self, seed: int, load: float) -> Workload:
        rate = load * self.capacities[seed]
        return self._made(seed, rate) if self.generator else self._part(self._whole(seed), seed).at_rate(rate)

    @cached_property
    def source(self) -> Workload:
        """All there is, as it comes."""
        return self._made(0, self.capacities[0]) if self.generator else self._whole(0)

    @cached_property
    def capacities(self) -> list[float]:
        """The requests per second that are load 1, for each seed. The parts of a trace differ in it, the seeds of a
        whole one do not."""
        if self.known_capacity:
            return [self.known_capacity] * self.seeds
        fleet = self.scenario.fleet
        if self.generator:
            most = FIRST_GUESS
            for _ in range(3):
                most = capacity(self._made(0, most).jobs, fleet())
            return [most] * self.seeds
        whole = self._whole(0)
        if not ENOUGH <= self.requests < len(whole.jobs):
            return [capacity(whole.jobs, fleet())] * self.seeds
        return [capacity(self._part(whole, seed).jobs, fleet()) for seed in range(self.seeds)]

    def virtual(self, policy: str, load: float, seed: int, draw: int = 0) -> Figures:
        """`draw` selects another random state of the router."""
        outcomes, simulation = self.simulated(policy, self.workload(seed, load), seed, draw)
        return self._figures(outcomes, simulation.gauges, simulation.now)

    def simulated(
        self, policy: str, workload: Workload, seed: int, draw: int = 0
    ) -> tuple[list[SimulationOutcome], Simulation]:
        pods = self.scenario.fleet(seed)
        clock, dice = ManualClock(), Random(seed + 1_000 * draw)
        router = policies.make(policy, pods, clock, dice, says_cached=self.says_cached)
        scrapes = Random(seed + 1 + 1_000 * draw)
        gauges = report.PrefillGauges()
        jobs = tuple(self._sent(at, job) for at, job in enumerate(workload.jobs))
        simulation = Simulation(jobs, pods, router, clock, scrapes, self.scenario.restarts, gauges)
        return simulation.run(), simulation

    def over_sockets(self, policy: str, load: float, seed: int, slower: float, venv: Path) -> Figures:
        """A policy that no program has chooses on the virtual clock, and every request is sent to the pod it got there.
        Raises NoSuchRouter if pods are to restart meanwhile: what was under way is in another state then."""
        from bench.placement import routers, sockets  # they need what a virtual run does not: aiohttp, uvloop, peers

        workload = self.workload(seed, load)
        if routers.is_program(policy):
            by = routers.program(policy, slower, venv)
        elif self.scenario.restarts:
            raise routers.NoSuchRouter(f"{policy} needs --virtual where pods restart: no program places like that")
        else:
            by = routers.Given(policy, [one.pod for one in self.simulated(policy, workload, seed)[0]])
        jobs, restarts = workload.jobs, self.scenario.restarts
        played = sockets.play(by, jobs, self._configs(seed), slower, restarts, self.warm_up)
        ends = [one.ended for one in played.outcomes if one.ended is not None]
        found = self._figures(played.outcomes, played.gauges, max(ends, default=0.0))
        late = sorted(played.late)
        return {
            **found,
            "hit_predicted": math.nan if played.hit_predicted is None else played.hit_predicted,
            "preemptions": played.preemptions,
            "late_p99": report.percentile(late, 0.99),
        }

    def _figures(self, outcomes: list[SimulationOutcome], gauges: report.Gauges, seconds: float) -> Figures:
        found = report.figures(outcomes, gauges, self.objectives, self.warm_up, self.scenario.restarts)
        return {**found, "seconds": seconds}

    def _sent(self, at: int, job: Job) -> Job:
        is_complete = int((at + 1) * self.complete) > int(at * self.complete)
        return replace(job, params=replace(job.params, stream=False)) if is_complete else job

    def _configs(self, seed: int) -> list[SimConfig]:
        return [replace(config, prompt_tokens_details=self.says_cached) for config in self.scenario.configs(seed)]

    def _part(self, whole: Workload, seed: int) -> Workload:
        spare = len(whole.jobs) - self.requests
        if not self.requests or spare <= 0:
            return whole
        return whole.window(seed * spare // max(1, self.seeds - 1), self.requests)

    def _made(self, seed: int, rate: float) -> Workload:
        made = generate(self.generator, self.requests or GENERATED, rate, Random(seed))
        return made.fitting(self.scenario.context_length)

    def _whole(self, seed: int) -> Workload:
        assert self.trace is not None
        return load_trace(self.trace, Random(seed)).fitting(self.scenario.context_length)
