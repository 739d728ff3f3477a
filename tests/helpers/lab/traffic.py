"""Requests, and a fleet in whose record they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import orjson

from proxy.core.ports import ManualClock
from proxy.lab.kvlane import Kvlane
from proxy.lab.record import ObservedRequest, TraceRecord
from proxy.lab.replay import ReplayedFleet
from proxy.lab.sim import SimConfig, StepTiming
from proxy.lab.simulation import Simulation, VirtualPod
from proxy.lab.workload import Job, Workload, named
from proxy.settings import from_mapping
from proxy.telemetry.recorder import BLOCK_TOKENS, VERSION

ROUND_ROBIN = from_mapping({"scheduling": {"plugins": [{"type": "round-robin-picker"}]}})

TIMING = StepTiming(base=0.008, per_prefill_token=50e-6, per_sequence=0.0003)


def conversations(count: int, rate: float, seed: int = 1, pieces: int = 12) -> Workload:
    """Conversations of four turns, each turn a piece longer than the one before."""
    rng, now, fresh = Random(seed), 0.0, 0
    jobs: list[Job] = []
    while len(jobs) < count:
        now += rng.expovariate(rate / 4)
        ids = tuple(range(fresh, fresh + rng.randint(1, pieces)))
        fresh += len(ids) + 4
        at = now
        for turn in range(4):
            ids = (*ids, fresh - 4 + turn)
            jobs.append(Job(at, len(ids) * 512 - rng.randint(1, 200), rng.randint(10, 120), ids))
            at += 3.0 + rng.expovariate(0.5)
    return Workload("conversations", named(jobs[:count]))


def fleet(pods: int = 3, slow: float = 1.0, **fields: Any) -> ReplayedFleet:
    """Pod 0 is the slow one."""
    config = SimConfig(timing=TIMING, num_gpu_blocks=8_000)
    configs = [replace(config, slowdown=1.0 if index else slow) for index in range(pods)]
    return ReplayedFleet(tuple(configs), **fields)


def record(workload: Workload, of: ReplayedFleet) -> TraceRecord:
    """What a proxy would have recorded of it that takes one pod after the other."""
    pods, clock = [VirtualPod(index, config) for index, config in enumerate(of.configs)], ManualClock()
    policy = Kvlane(ROUND_ROBIN, pods, clock, Random(3), says_cached=True)
    seen = []
    for outcome in Simulation(workload.jobs, pods, policy, clock, Random(4)).run():
        assert outcome.first_token is not None
        assert outcome.ended is not None
        start = outcome.job.arrival
        seen.append(
            ObservedRequest(
                f"pod-{outcome.pod}", outcome.first_token - start, outcome.ended - start, outcome.cached_tokens, True
            )
        )
    return TraceRecord(workload, tuple(seen), {f"pod-{index}": 128_000 for index in range(len(pods))})


def head(**fields: Any) -> dict[str, Any]:
    return {"kvlane_record": VERSION, "started": 0.0, "block_tokens": BLOCK_TOKENS, "salt": "x", **fields}


def request(at: float = 1.0, **fields: Any) -> dict[str, Any]:
    """A line of a record; a field that is None is left out."""
    line = {
        "t": at,
        "kind": "chat",
        "model": "sim",
        "stream": True,
        "estimated_tokens": 150,
        "prompt_tokens": 150,
        "output_tokens": 20,
        "cached_tokens": 0,
        "attempts": 1,
        "ttft": 0.1,
        "chain": ["AAAAAAAABBBBBBBBCCCCCCCC"],
        "pod": "pod-0",
        "status": 200,
        "outcome": "complete",
        "duration": 0.5,
        **fields,
    }
    return {name: value for name, value in line.items() if value is not None}


def written(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return path
