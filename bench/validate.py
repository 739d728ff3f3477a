"""How far the simulated engine is from a real one that is asked the same.

    python bench/validate.py                          # starts vLLM on the CPU: .venv-vllm, see `make test-vllm`
    python bench/validate.py --url http://host:8000   # a running idle engine that serves MODEL

The constants of the simulated engine's steps are measured by probes, before each run: prompts of several lengths alone,
and batches that decode together. Both get the same script (`bench/validation/script.py`): conversations under shared
system prompts that continue their own engine's responses, several at once, and documents that push them out of the
cache. Compared are the time to first token, the time per token, and `cached_tokens`, request by request. The real
engine gets the script several times, with other words: what else happens on the machine is in the times of some run
only. `chrt -r 10 python bench/validate.py` keeps it away, as root and at the cost of whatever it is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import aiohttp
from rig import say, table

from bench.placement.report import mean, percentile
from bench.validation import real
from bench.validation.calibrate import Constants, Probes
from bench.validation.script import TurnResult, ids, script
from bench.validation.simulated import Simulated
from proxy.lab.sim import SimConfig

KEPT = 2.0
"""Seconds for which idle connections are kept; the engine's server closes them after five."""


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the engine ends with us then, too
    engine = nullcontext((options.url, options.model)) if options.url else real.running(options.python)
    with engine as (url, model):
        found = asyncio.run(_compare(url, model, options))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


async def _compare(url: str, model: str, options: argparse.Namespace) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        blocks, block_size = await real.memory(session, url)
        engine = real.Real(session, url, model)
        say(f"{blocks} blocks of {block_size} tokens")
        probes = Probes(engine, options.budget, Random(options.seed))
        await engine.ask(ids(Random(0), 600), 100)
        played = []
        for run in range(options.runs):
            await probes.round()
            sessions = script(options.seed, options.seed * 1_000 + run, options.requests, options.rate)
            played.append(await engine.play(sessions))
            first = mean([response.first_token for response in played[-1]])
            say(f"run {run + 1}: {len(played[-1])} requests, TTFT {first:.3f} s")
    constants = probes.constants()
    _describe(constants)
    config = SimConfig(
        timing=constants.timing,
        max_num_batched_tokens=options.budget,
        max_num_seqs=options.max_num_seqs,
        num_gpu_blocks=blocks,
        block_size=block_size,
    )
    simulated = Simulated(config, constants.overhead).play(sessions)
    print(table(_rows(played, simulated)))
    return {
        "constants": asdict(constants),
        "probes": {"alone": list(probes.alone.items()), "together": list(probes.together.items())},
        "real": [[asdict(response) for response in run] for run in played],
        "simulated": [asdict(response) for response in simulated],
    }


def _rows(played: Sequence[Sequence[TurnResult]], simulated: Sequence[TurnResult]) -> list[list[str]]:
    measured = [_median(repeated) for repeated in zip(*played, strict=True)]
    rows = [["", "real", "simulated", "error"]]
    for title, name in (("TTFT", "first_token"), ("TPOT", "per_token")):
        one, other = ([getattr(response, name) for response in side] for side in (measured, simulated))
        for head, figure in (
            ("mean", mean),
            ("p50", lambda all_: percentile(sorted(all_), 0.5)),
            ("p90", lambda all_: percentile(sorted(all_), 0.9)),
        ):
            rows.append(_row(f"{title} {head}", figure(one), figure(other)))
    cached = [sum(response.cached_tokens for response in side) for side in (*played, simulated)]
    rows.append(["cached tokens", f"{min(cached[:-1])} to {max(cached[:-1])}", str(cached[-1]), ""])
    equal = sum(a.cached_tokens == b.cached_tokens for run in played for a, b in zip(run, simulated, strict=True))
    rows.append(["requests with equal cached_tokens", f"{equal} of {len(played) * len(simulated)}", "", ""])
    return rows


def _median(repeated: Sequence[TurnResult]) -> TurnResult:
    """Of the same request in all runs: what else the machine does disturbs one or the other."""
    first_token = median(response.first_token for response in repeated)
    return replace(repeated[0], first_token=first_token, per_token=median(response.per_token for response in repeated))


def _row(title: str, one: float, other: float) -> list[str]:
    return [title, f"{one * 1000:.1f} ms", f"{other * 1000:.1f} ms", f"{other / one - 1:+.1%}"]


def _describe(constants: Constants) -> None:
    timing = constants.timing
    say(
        f"a step takes {timing.base * 1e3:.2f} ms, {timing.per_prefill_token * 1e6:.1f} µs per prompt token,"
        f" {timing.per_sequence * 1e3:.3f} ms per sequence, {timing.per_attended * 1e9:.2f} ns per pair of attention,"
        f" {timing.per_token_read * 1e9:.1f} ns per token of KV cache read; a request {constants.overhead * 1e3:.2f} ms"
        " outside of steps"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", type=Path, default=Path(".venv-vllm/bin/python"), help="the one that has vLLM")
    parser.add_argument("--url", default="", help="an engine that runs, instead of one that is started")
    parser.add_argument("--model", default="tiny", help="its model")
    parser.add_argument("--budget", type=int, default=512, help="its --max-num-batched-tokens")
    parser.add_argument("--max-num-seqs", type=int, default=16, help="its --max-num-seqs")
    parser.add_argument("--requests", type=int, default=80, help="per run, about")
    parser.add_argument("--rate", type=float, default=3.0, help="requests per second, about")
    parser.add_argument("--runs", type=int, default=5, help="of probes and script; the median of each counts")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write every request")
    options = parser.parse_args()
    options.python = options.python.absolute()
    return options


if __name__ == "__main__":
    main()
