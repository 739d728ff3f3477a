"""Replay of one workload through several configurations, with the metrics to compare them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random

from proxy.core.errors import KvlaneError
from proxy.core.ports import ManualClock
from proxy.lab.kvlane import Kvlane
from proxy.lab.record import TraceRecord
from proxy.lab.sim import SimConfig
from proxy.lab.simulation import Gauges, Policy, Simulation, SimulationOutcome, VirtualPod
from proxy.lab.workload import Job, Workload
from proxy.settings import Settings

Figures = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ReplayObjectives:
    """Default objectives in seconds, for requests without their own."""

    ttft: float = 2.0
    tpot: float = 0.05


@dataclass(frozen=True, slots=True)
class RequestResult:
    """Times of one request in seconds: infinite if it never ended; `tpot` is nan for a single token."""

    ttft: float
    tpot: float
    e2e: float
    is_good: bool
    prompt_tokens: int
    cached_tokens: int


ROWS: Mapping[str, tuple[str, str]] = {
    "ttft_mean": ("TTFT mean, s", ".3f"),
    "ttft_p50": ("TTFT p50, s", ".3f"),
    "ttft_p90": ("TTFT p90, s", ".3f"),
    "ttft_p99": ("TTFT p99, s", ".3f"),
    "tpot_mean": ("TPOT mean, s", ".4f"),
    "tpot_p90": ("TPOT p90, s", ".4f"),
    "e2e_mean": ("E2E mean, s", ".2f"),
    "e2e_p90": ("E2E p90, s", ".2f"),
    "goodput": ("within objectives", ".1%"),
    "hit": ("prompt tokens from cache", ".1%"),
    "imbalance": ("busiest pod / mean", ".2f"),
    "kv_mean": ("KV cache in use, mean", ".1%"),
    "preemptions": ("pre-emptions", ".0f"),
    "failed": ("without a response", ".0f"),
}
"""Figure -> title and format."""


def figures(
    found: Sequence[RequestResult], gauges: Gauges | None = None, preemptions: float = math.nan
) -> dict[str, float]:
    """Return the figures. Requests that never ended count as failed and as outside their objectives only."""
    done = [one for one in found if one.e2e < math.inf]
    first, whole = sorted(one.ttft for one in done), sorted(one.e2e for one in done)
    paces = sorted(one.tpot for one in done if not math.isnan(one.tpot))
    prompts = sum(one.prompt_tokens for one in done)
    return {
        "ttft_mean": mean(first),
        "ttft_p50": percentile(first, 0.5),
        "ttft_p90": percentile(first, 0.9),
        "ttft_p99": percentile(first, 0.99),
        "tpot_mean": mean(paces),
        "tpot_p90": percentile(paces, 0.9),
        "e2e_mean": mean(whole),
        "e2e_p90": percentile(whole, 0.9),
        "goodput": sum(one.is_good for one in found) / len(found) if found else math.nan,
        "hit": sum(one.cached_tokens for one in done) / prompts if prompts else math.nan,
        "imbalance": gauges.imbalance if gauges and gauges.balanced_samples else math.nan,
        "kv_mean": gauges.kv_mean if gauges else math.nan,
        "preemptions": preemptions,
        "failed": len(found) - len(done),
    }


def averaged(runs: Sequence[Figures]) -> dict[str, float]:
    return {name: mean([run[name] for run in runs]) for name in runs[0]}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else math.nan


def fared(outcomes: Sequence[SimulationOutcome], objectives: ReplayObjectives) -> list[RequestResult]:
    """Return the times of requests; the first token of a non-streamed response arrives with the last one."""
    found = []
    for one in outcomes:
        job = one.job
        if one.first_token is None or one.ended is None:
            found.append(RequestResult(math.inf, math.nan, math.inf, False, job.prompt_tokens, 0))
        else:
            first = (one.first_token if job.params.stream else one.ended) - job.arrival
            found.append(_of(job, first, one.ended - job.arrival, one.cached_tokens, objectives))
    return found


def _of(job: Job, ttft: float, e2e: float, cached_tokens: int, objectives: ReplayObjectives) -> RequestResult:
    tokens = job.output_tokens - 1
    tpot = (e2e - ttft) / tokens if tokens and job.params.stream else math.nan
    most_ttft = objectives.ttft if job.params.ttft is None else job.params.ttft
    most_tpot = objectives.tpot if job.params.tpot is None else job.params.tpot
    good = ttft <= most_ttft and not tpot > most_tpot
    return RequestResult(ttft, tpot, e2e, good, job.prompt_tokens, cached_tokens)


class TooLarge(KvlaneError):
    """Every request is too large for every pod of the fleet."""


@dataclass(frozen=True, slots=True)
class ReplayedFleet:
    """The configuration of each simulated pod. The first share `warm_up` of all requests is replayed and not counted.
    `says_cached`: pods report cached prompt tokens."""

    configs: tuple[SimConfig, ...]
    objectives: ReplayObjectives = field(default_factory=ReplayObjectives)
    warm_up: float = 0.1
    says_cached: bool = True

    def pods(self) -> list[VirtualPod]:
        return [VirtualPod(index, config) for index, config in enumerate(self.configs)]

    def of_size(self, pods: int) -> ReplayedFleet:
        """Return the fleet with this many pods; additional pods equal the first one, at normal speed."""
        more = [replace(self.configs[0], slowdown=1.0)] * (pods - len(self.configs))
        return replace(self, configs=(*self.configs[:pods], *more))

    def fitting(self, record: TraceRecord) -> TraceRecord:
        """Return the record without requests that fit on no pod. Raise TooLarge if no request remains."""
        fitting = record.fitting(min(config.context_length for config in self.configs))
        if not fitting.workload.jobs:
            raise TooLarge(f"every request of {record.workload.name} is larger than a pod's KV cache; see --kv-tokens")
        return fitting


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a replay. `fared` are the counted requests, in order of arrival."""

    fared: Sequence[RequestResult]
    outcomes: Sequence[SimulationOutcome]
    gauges: Gauges

    @property
    def figures(self) -> dict[str, float]:
        return figures(self.fared, self.gauges, sum(one.preemptions for one in self.outcomes))


def replay(settings: Settings, workload: Workload, fleet: ReplayedFleet, seed: int) -> Replayed:
    """Replay the workload through the proxy of these settings on a virtual clock."""
    pods, clock = fleet.pods(), ManualClock()
    policy = Kvlane(settings, pods, clock, Random(seed), says_cached=fleet.says_cached)
    return _run(workload, pods, policy, clock, fleet, seed)


def repeated(record: TraceRecord, fleet: ReplayedFleet, seed: int) -> Replayed:
    """Send every request to the pod of the record, to compare the simulated pods with the recorded ones."""
    names = {name: index for index, name in enumerate(record.pods)}
    pods = fleet.pods()
    placed = [names[seen.pod] % len(pods) for seen in record.seen]
    workload = record.workload.at_rate(record.workload.rate)
    return _run(workload, pods, _AsRecorded(placed), ManualClock(), fleet, seed)


def recorded(record: TraceRecord, fleet: ReplayedFleet) -> dict[str, float]:
    """Return the recorded figures of streams; the first token of whole responses is not recorded."""
    pairs = list(zip(record.workload.jobs, record.seen, strict=True))
    counted = pairs[int(len(pairs) * fleet.warm_up) :]
    return figures(
        [
            _of(job, seen.ttft, seen.duration, seen.cached_tokens or 0, fleet.objectives)
            for job, seen in counted
            if seen.ttft is not None
        ]
    )


def _run(
    workload: Workload, pods: Sequence[VirtualPod], policy: Policy, clock: ManualClock, fleet: ReplayedFleet, seed: int
) -> Replayed:
    simulation = Simulation(workload.jobs, pods, policy, clock, Random(seed + 1))
    outcomes = simulation.run()
    counted = outcomes[int(len(outcomes) * fleet.warm_up) :]
    return Replayed(fared(counted, fleet.objectives), counted, simulation.gauges)


@dataclass(frozen=True)
class _AsRecorded(Policy):
    """The pods of the record."""

    placed: Sequence[int]

    def place(self, index: int, job: Job, now: float) -> int | None:
        return self.placed[index]
