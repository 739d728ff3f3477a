"""How much sooner first tokens could come if requests were held, and sent when a pod turns to them, shortest first.

    python bench/holding.py --trace conversation.jsonl.gz [--requests 2000] [--seeds 2] [--load 0.6,0.8,0.95]

The oracle of bench/quality.py sends each request at once, to where it knows that the first token comes soonest. Here
others that know as much hold what would wait: as soon as a pod computes no prompt it gets the one that came first
(`held`), or the one whose first token it would give soonest (`shortest first`), if several pods are free the best of
them. What `held` has over the oracle is what it is worth to choose later; what `shortest first` has over `held`, to let
short prompts overtake, which engines do not.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from heapq import heappop, heappush
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.placement.experiment import Experiment
from bench.placement.pods import VirtualPod
from bench.placement.report import mean, percentile
from bench.rig import say, table
from proxy.lab.engine import CountedRequest
from proxy.lab.workload import Job, prompt_blocks

Times = list[float]


class Holding:
    """A queue before the pods. `shortest`: any of it may be next, otherwise only the first."""

    def __init__(self, jobs: Sequence[Job], pods: Sequence[VirtualPod], *, shortest: bool) -> None:
        self._jobs = jobs
        self._pods = pods
        self._shortest = shortest
        self._held: list[int] = []
        self._due: list[tuple[float, int]] = []
        self._first: dict[int, float] = {}

    def play(self) -> Times:
        """Seconds to the first token of each request."""
        arrivals = 0
        while arrivals < len(self._jobs) or self._due or self._held:
            arrival = self._jobs[arrivals].arrival if arrivals < len(self._jobs) else math.inf
            if self._due and self._due[0][0] <= arrival:
                now, index = heappop(self._due)
                self._end_steps(self._pods[index], now)
            else:
                now = arrival
                self._held.append(arrivals)
                arrivals += 1
            self._send(now)
        return [self._first[at] - job.arrival for at, job in enumerate(self._jobs)]

    def _end_steps(self, pod: VirtualPod, now: float) -> None:
        if pod.engine.until != now:
            return
        for event in pod.engine.finish():
            if event.first:
                self._first.setdefault(event.sequence.index, now)
        self._await(pod)

    def _await(self, pod: VirtualPod) -> None:
        if pod.engine.until < math.inf:
            heappush(self._due, (pod.engine.until, pod.index))

    def _send(self, now: float) -> None:
        while self._held:
            free = [pod for pod in self._pods if _is_free(pod)]
            if not free:
                return
            next_ones = self._held if self._shortest else self._held[:1]
            _, at, index = min(self._soonest(at, free, now) for at in next_ones)
            self._held.remove(at)
            self._pods[index].submit(at, self._jobs[at], now)
            self._await(self._pods[index])

    def _soonest(self, at: int, pods: Sequence[VirtualPod], now: float) -> tuple[float, int, int]:
        """(when its first token would come, the request, the pod)."""
        job, best = self._jobs[at], (math.inf, at, pods[0].index)
        newcomer = CountedRequest(
            -1, job.prompt_tokens, job.output_tokens, prompt_blocks(job, pods[0].config.block_size)
        )
        for pod in pods:
            first, _ = pod.foresee(newcomer, now, best[0])
            best = min(best, (first, at, pod.index))
        return best


def _is_free(pod: VirtualPod) -> bool:
    engine = pod.engine
    return not (engine.waiting or engine.prefilling or engine.partial)  # type: ignore[attr-defined]


def main() -> None:
    options = _options()
    experiment = Experiment(trace=options.trace, requests=options.requests, seeds=options.seeds)
    rows = [["load", "", "TTFT s", "p50", "p90", "p99"]]
    for load in options.load:
        for name, play in POLICIES.items():
            runs = [_figures(play(experiment, load, seed)) for seed in range(options.seeds)]
            means = [mean(list(column)) for column in zip(*runs, strict=True)]
            rows.append([f"{load:g}", name, *(f"{one:.3f}" for one in means)])
            say("  ".join(rows[-1]))
    print(table(rows))


def _figures(waits: Times) -> Times:
    """Mean and percentiles, without the first tenth, which finds empty caches."""
    counted = sorted(waits[len(waits) // 10 :])
    return [mean(counted), *(percentile(counted, share) for share in (0.5, 0.9, 0.99))]


def _placed(policy: str) -> Callable[[Experiment, float, int], Times]:
    def play(experiment: Experiment, load: float, seed: int) -> Times:
        outcomes, _ = experiment.simulated(policy, experiment.workload(seed, load), seed)
        return [one.first_token - one.job.arrival for one in outcomes if one.first_token is not None]

    return play


def _held(*, shortest: bool) -> Callable[[Experiment, float, int], Times]:
    def play(experiment: Experiment, load: float, seed: int) -> Times:
        jobs = experiment.workload(seed, load).jobs
        return Holding(jobs, experiment.scenario.fleet(seed), shortest=shortest).play()

    return play


POLICIES = {
    "oracle": _placed("oracle"),
    "held": _held(shortest=False),
    "shortest first": _held(shortest=True),
}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="JSON lines in Mooncake's format")
    parser.add_argument("--requests", type=int, default=2_000, help="per run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--load", type=_numbers, default=[0.6, 0.8, 0.95], metavar="SHARE,…")
    return parser.parse_args()


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    main()
