"""One workload before several configurations: what would have come of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from proxy.core.clock import ManualClock
from proxy.core.errors import KvlaneError
from proxy.lab.figures import Fared, Objectives, averaged, fared, figures, judged
from proxy.lab.kvlane import Kvlane
from proxy.lab.pods import Pod, Reading, VirtualPod
from proxy.lab.policy import Policy
from proxy.lab.record import Record, Seen
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import Gauges, Outcome, Simulation
from proxy.lab.workload import Job, Workload
from proxy.settings import Settings


class TooLarge(KvlaneError):
    """No pod of the fleet could take any of the requests."""


@dataclass(frozen=True, slots=True)
class Fleet:
    """The simulated pods, one by one. The first share `warm_up` of all requests is replayed and not counted. Pods say
    how many prompt tokens they had cached, or not: `says_cached`."""

    configs: tuple[SimConfig, ...]
    objectives: Objectives = field(default_factory=Objectives)
    warm_up: float = 0.1
    says_cached: bool = True

    def of_size(self, pods: int) -> Fleet:
        """Further pods are like the first one, at the usual speed."""
        more = [replace(self.configs[0], slowdown=1.0)] * (pods - len(self.configs))
        return replace(self, configs=(*self.configs[:pods], *more))

    def takes(self, record: Record) -> Record:
        """The record without what no pod could hold. Raises TooLarge if that is all."""
        fitting = record.fitting(min(config.context_length for config in self.configs))
        if not fitting.workload.jobs:
            raise TooLarge(f"every request of {record.workload.name} is larger than a pod's KV cache; see --kv-tokens")
        return fitting


@dataclass(frozen=True, slots=True)
class Replayed:
    """`fared` are the requests that count, in order of arrival."""

    fared: Sequence[Fared]
    outcomes: Sequence[Outcome]
    gauges: Gauges

    @property
    def figures(self) -> dict[str, float]:
        return figures(self.fared, self.gauges, sum(one.preemptions for one in self.outcomes))


def replay(settings: Settings, workload: Workload, fleet: Fleet, seed: int) -> Replayed:
    """The production gateway, scheduler, hooks and ledger of these settings on a virtual clock."""
    pods, clock = _pods(fleet), ManualClock()
    policy = Kvlane(settings, pods, clock, Random(seed), says_cached=fleet.says_cached)
    return _run(workload, pods, policy, clock, fleet, seed)


def repeated(record: Record, fleet: Fleet, seed: int) -> Replayed:
    """Every request to the pod that had it: how well the simulation does what the pods of the record did."""
    names = {name: index for index, name in enumerate(record.pods)}
    pods = _pods(fleet)
    placed = [names[seen.pod] % len(pods) for seen in record.seen]
    workload = record.workload.at_rate(record.workload.rate)
    return _run(workload, pods, _AsRecorded(placed), ManualClock(), fleet, seed)


def recorded(record: Record, fleet: Fleet) -> dict[str, float]:
    """The same figures of what was seen; those of streams, as the first token of others is not."""
    pairs = list(zip(record.workload.jobs, record.seen, strict=True))
    counted = pairs[int(len(pairs) * fleet.warm_up) :]
    return figures([_seen(job, seen, fleet.objectives) for job, seen in counted if seen.ttft is not None])


def averages(runs: Sequence[Replayed]) -> dict[str, float]:
    return averaged([run.figures for run in runs])


def _pods(fleet: Fleet) -> list[Pod]:
    return [VirtualPod(index, config) for index, config in enumerate(fleet.configs)]


def _run(
    workload: Workload, pods: Sequence[Pod], policy: Policy, clock: ManualClock, fleet: Fleet, seed: int
) -> Replayed:
    simulation = Simulation(workload.jobs, pods, policy, clock, Random(seed + 1))
    outcomes = simulation.run()
    counted = outcomes[int(len(outcomes) * fleet.warm_up) :]
    return Replayed(fared(counted, fleet.objectives), counted, simulation.gauges)


def _seen(job: Job, seen: Seen, objectives: Objectives) -> Fared:
    assert seen.ttft is not None
    tokens = job.output_tokens - 1
    tpot = (seen.duration - seen.ttft) / tokens if tokens else math.nan
    good = judged(seen.ttft, tpot, (job.asked.ttft, job.asked.tpot), objectives)
    return Fared(seen.ttft, tpot, seen.duration, good, job.prompt_tokens, seen.cached_tokens or 0)


class _AsRecorded(Policy):
    """Decides nothing: it knows the pod of every request."""

    scrapes = 0.0

    def __init__(self, placed: Sequence[int]) -> None:
        self._placed = placed

    def place(self, index: int, job: Job, now: float) -> int | None:
        return self._placed[index]

    def first_byte(self, index: int, now: float) -> None:
        pass

    def ended(self, index: int, now: float, cached_tokens: int) -> None:
        pass

    def failed(self, index: int, now: float) -> int | None:
        return None

    def predicted(self, index: int) -> int | None:
        return None

    def scrape_sent(self, pod: int) -> Any:
        return None

    def scraped(self, pod: int, reading: Reading | None, sent: Any, sent_at: float) -> None:
        pass
