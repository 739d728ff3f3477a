"""Load, faults, churn and clients that leave, all at once; then the books are checked.

    python bench/chaos.py [--requests 100000] [--seed 1] [--pods 8] [--workers 1] [--json FILE]

A proxy stands before simulated pods that meet the faults of `bench/disorder/faults.py`: each by the seed and the
request's id, so that a run can be repeated. Meanwhile pods are drained, removed and added, and, where the proxy reads
its configuration again on SIGHUP, it gets that signal. Then the load stops, and what clients saw, what the proxy
logged and counted and what the pods remember must agree: `bench/disorder/ledger.py` has the claims. Exits with 1 if
one fails.

Lost is a request that got an error, or no response, before any byte of a response had been sent, although a
pod was well, known and not asked for it, from two seconds before the request to its end; unless a limit that is
configured forbade it (attempts, deadline, two pods that died under it, two that said 429), which is counted apart.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import uvloop
from rig import free_ports, say, table

from bench.disorder import faults
from bench.disorder.clients import Clients, Seen, asks
from bench.disorder.ledger import Evidence, Finding, accounts, cancel_seconds, findings, unserved
from bench.disorder.program import Footprint, Program, running
from bench.disorder.trouble import Churn, Watch
from proxy.lab.sim import FaultKind, SimConfig, SimFleet, SimPod

AT_ONCE = 64
TIME_SCALE = 20.0
WARM_UP = 1_000
"""Requests without a fault, after which memory and descriptors are taken for what they should be in the end."""

QUIET_SECONDS = 8.0
"""Longer than idle connections are kept and states last."""

PAUSE_EVERY = 0.05
EXAMPLES = 5
MORE_RSS = 32 * 1024
"""KiB that may have been added beside the prefix index: pages that are kept for what comes."""

MORE_DESCRIPTORS = 8
SERVING = frozenset({FaultKind.UNHEALTHY, FaultKind.SLOW_START})


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="kvlane-chaos-") as folder:
        result = uvloop.run(_run(Path(folder), options))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1))
    sys.exit(any(result["against"].values()))


@dataclass(frozen=True)
class Outcome:
    """What came of a run. `met` counts faults; of the footprints one is from before, one from after the quiet."""

    found: list[Finding]
    evidence: Evidence
    met: Counter[str]
    done: dict[str, int]
    seconds: float
    before: Footprint
    after: Footprint
    longest_pause: float
    """Seconds for which this process, with its clients and pods, did nothing; see `Pauses`."""


class Pauses:
    """The pauses of this process, in which clients cannot leave and pods cannot notice it.

    A full garbage collection of the records of 100,000 requests takes four seconds, so what exists is left out of
    the next collection once a second."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        now = asyncio.get_running_loop().time
        collected = now()
        while True:
            since = now()
            await asyncio.sleep(PAUSE_EVERY)
            self.longest = max(self.longest, now() - since - PAUSE_EVERY)
            if now() - collected > 1.0:
                gc.collect()
                gc.freeze()
                collected = now()


async def _run(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    config = SimConfig(time_scale=TIME_SCALE)
    async with SimFleet(options.pods, config, remembered=4 * options.requests) as fleet:
        data, admin = free_ports(2)
        with running(folder, fleet.urls, (data, admin), options.workers) as program:
            await program.ready(options.pods)
            outcome = await _put_to_the_test(program, fleet, options)
            if options.keep:
                _keep(folder, options.keep)
    _show(outcome)
    return _plain(outcome)


async def _put_to_the_test(program: Program, fleet: SimFleet, options: argparse.Namespace) -> Outcome:
    now = asyncio.get_running_loop().time
    await Clients(program.url, AT_ONCE).run(asks(WARM_UP, options.seed, "warm-up", leavers=0.0))
    await asyncio.sleep(QUIET_SECONDS)
    before = await program.footprint()
    say(f"{options.requests} requests, {options.pods} pods, before: {before}")
    churn, watch, pauses = Churn(program, fleet.urls, Random(options.seed)), Watch(program), Pauses()
    faults.give(fleet.pods, options.of_requests, options.of_pods, options.seed)
    began = now()
    seen = await _disturbed(program, (churn, watch, pauses), options)
    seconds, met = now() - began, faults.met(fleet.pods)
    faults.lift(fleet.pods)
    await churn.restore()
    await asyncio.sleep(QUIET_SECONDS)
    after = await program.footprint()
    evidence = Evidence(
        seen=seen,
        lines=program.access_log(),
        records=[[record for record in pod.requests if record.method == "POST"] for pod in fleet.pods],
        unwell=[*churn.away, *(each for number, pod in enumerate(fleet.pods) for each in _unwell(number, pod))],
        ejections=watch.ejections,
        resets=[reset for number, pod in enumerate(fleet.pods) for reset in _resets(number, pod)],
        samples=await program.metrics(),
        still_open=[len(pod.requests.open) for pod in fleet.pods],
        complaints=program.complaints(),
        requested=options.requests,
        replaced=options.workers > 1 and churn.done["reloads"] > 0,
        leftovers=_leftovers(before, after),
    )
    return Outcome(findings(evidence), evidence, met, churn.done, seconds, before, after, pauses.longest)


async def _disturbed(
    program: Program, disturbances: Sequence[Churn | Watch | Pauses], options: argparse.Namespace
) -> list[Seen]:
    """Raise the errors of the disturbances."""
    loop = asyncio.get_running_loop()
    meanwhile = [loop.create_task(each.run()) for each in disturbances]
    try:
        return await Clients(program.url, AT_ONCE).run(asks(options.requests, options.seed))
    finally:
        for task in meanwhile:
            if task.done():
                task.result()
            task.cancel()
        await asyncio.wait(meanwhile)


def _unwell(number: int, pod: SimPod) -> list[tuple[int, float, float]]:
    """States in which the pod still responds are excluded."""
    return [(number, since, until) for kind, since, until in pod.condition.history if kind not in SERVING]


def _resets(number: int, pod: SimPod) -> list[tuple[int, float]]:
    """A crash is one at once, who shuts down ends with one."""
    crashes = [(number, since) for kind, since, _ in pod.condition.history if kind is FaultKind.CRASH]
    return crashes + [(number, until) for kind, _, until in pod.condition.history if kind is FaultKind.SHUTTING_DOWN]


def _leftovers(before: Footprint, after: Footprint) -> list[str]:
    found = []
    memory = after.rss - before.rss - (after.index - before.index)
    if memory > MORE_RSS:
        found.append(f"{memory / 1024:.0f} MiB more, beside the prefix index")
    if after.descriptors - before.descriptors > MORE_DESCRIPTORS:
        found.append(f"{after.descriptors - before.descriptors} descriptors more")
    return found


def _show(outcome: Outcome) -> None:
    evidence = outcome.evidence
    for title, counted in (
        ("clients saw", Counter(each.saw.value for each in evidence.seen)),
        ("faults met", outcome.met),
        ("not served, because", unserved(evidence)),
        ("claim, and how many speak against it", {each.claim: len(each.against) for each in outcome.found}),
    ):
        print(table([[title, ""], *[[what, str(number)] for what, number in counted.items()]]), "\n")
    waits = cancel_seconds(evidence)
    if waits:
        print(f"cancels: {len(waits)}, until the pod knew: {median(waits) * 1e3:.1f} ms, at most {waits[-1] * 1e3:.1f}")
    print(f"longest pause of clients and pods: {outcome.longest_pause * 1e3:.0f} ms")
    print(f"{outcome.seconds:.0f} s; {outcome.done}; before: {outcome.before}, after: {outcome.after}")
    for each in outcome.found:
        for example in each.against[:EXAMPLES]:
            print(f"  {each.claim}: {example}")


def _plain(outcome: Outcome) -> dict[str, Any]:
    evidence = outcome.evidence
    waits = cancel_seconds(evidence)
    return {
        "seconds": outcome.seconds,
        "requests": len(evidence.seen),
        "saw": Counter(each.saw.value for each in evidence.seen),
        "faults": outcome.met,
        "done": outcome.done,
        "unserved": unserved(evidence),
        "accounts": accounts(evidence, 100),
        "cancel_seconds": {"number": len(waits), "median": median(waits), "max": waits[-1]} if waits else None,
        "before": asdict(outcome.before),
        "after": asdict(outcome.after),
        "longest_pause": outcome.longest_pause,
        "against": {each.claim: len(each.against) for each in outcome.found},
        "examples": {each.claim: each.against[:100] for each in outcome.found if each.against},
    }


def _keep(folder: Path, kept: Path) -> None:
    kept.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        (kept / path.name).write_bytes(path.read_bytes())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--pods", type=int, default=40)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--of-requests", type=float, default=0.018, help="chance of a request to meet each of its faults"
    )
    parser.add_argument("--of-pods", type=float, default=0.018, help="chance of a request to begin each state of a pod")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder for the proxy's logs")
    return parser.parse_args()


if __name__ == "__main__":
    main()
