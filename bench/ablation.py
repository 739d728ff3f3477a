"""What each term of the default placement is worth: the default, and the default without one of them.

    python bench/ablation.py --trace conversation.jsonl.gz [--requests 2000] [--seeds 3] [--load 0.8] [--engine NAME]

Runs on the virtual clock of bench/quality.py, in six situations: the trace, the trace with a pod three times slower,
200 users under one system prompt, 40 requests per second of tenants whose prefixes the fleet can hold once, agents, and
conversations. Prints mean times to first token in seconds; `--json` writes all figures.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


from bench.placement.engines import ENGINES
from bench.placement.experiment import Experiment
from bench.placement.report import mean
from bench.placement.scenario import Scenario
from bench.rig import say, table
from proxy.core.endpoint import Endpoint, LoadView
from proxy.latency.pod import PodModel, Work
from proxy.latency.rates import FleetModel, Rates
from proxy.latency.sharing import Sharing
from proxy.plugins.producers.predicted_latency import Forecast
from proxy.plugins.scorers import latency as scorer

SLOW = 3.0
"""Times."""

TENANT_CAPACITY, TENANT_RATE = 100_000, 40.0
"""Tokens that a pod can hold, requests per second."""

CONFIG = """
pods: {static: [{url: "http://127.0.0.1:1"}]}
scheduling:
  plugins:
    - {type: approx-prefix-cache-producer}
    - {type: predicted-latency-producer, parameters: {workCost: %g, decodeCost: %g}}
    - {type: latency-scorer}
    - {type: max-score-picker}
"""

WORK_COST, DECODE_COST = 0.2, 0.03


def main() -> None:
    options = _options()
    situations = {name: each for name, each in _situations(options) if name in (options.only or [name])}
    rows, found = [["the default", *situations]], {}
    for name, (without, config) in _variants(options.variants).items():
        found[name] = {}
        for situation, (experiment, load) in situations.items():
            with ExitStack() as stack:
                policy = stack.enter_context(_written(config)) if config else "default"
                stack.enter_context(without())
                runs = [experiment.virtual(policy, load, seed) for seed in range(experiment.seeds)]
            found[name][situation] = {figure: mean([run[figure] for run in runs]) for figure in runs[0]}
            say(f"{name}, {situation}: {found[name][situation]['ttft_mean']:.3f} s")
        rows.append([name, *(f"{one['ttft_mean']:.3f}" for one in found[name].values())])
    print(table(rows))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


Variant = tuple[Callable[[], AbstractContextManager[Any]], str]
"""What is changed while it runs, and its configuration, empty for none."""


def _variants(names: Sequence[str] | None) -> Mapping[str, Variant]:
    variants: Mapping[str, Variant] = {
        "whole": (nullcontext, ""),
        "without prefix match": (lambda: changed((Forecast, "costs", _unmatched)), ""),
        "without reservation": (lambda: changed((PodModel, "dispatch", _unreserved)), ""),
        "without work cost": (nullcontext, CONFIG % (0.0, DECODE_COST)),
        "without decode cost": (nullcontext, CONFIG % (WORK_COST, 0.0)),
        "without equal costs": (lambda: changed((scorer, "ALIKE", 0.0), (scorer, "ALIKE_SHARE", 0.0)), ""),
        "without speed": (lambda: changed((Rates, "_apply_slowness", _at_usual_pace)), ""),
        "without sharing": (lambda: changed((FleetModel, "observe_discipline", _in_turn)), ""),
        "without slots": (lambda: changed((Sharing, "wait", _no_wait)), ""),
    }
    return {name: variant for name, variant in variants.items() if name in (names or variants)}


def _situations(options: argparse.Namespace) -> Iterator[tuple[str, tuple[Experiment, float]]]:
    """Fleet and load of one measurement."""

    def traffic(slow_pod: float = 1.0, kv_tokens: int = 0, **source: Any) -> Experiment:
        fleet = Scenario(engine=options.engine, slow_pod=slow_pod, kv_tokens=kv_tokens)
        return Experiment(fleet, requests=options.requests, seeds=options.seeds, **source)

    yield "trace", (traffic(trace=options.trace), options.load)
    yield "a slow pod", (traffic(SLOW, trace=options.trace), options.load)
    yield "shared prompt", (traffic(generator="shared-prompt"), options.load)
    yield "tenants", (traffic(generator="tenants", kv_tokens=TENANT_CAPACITY, known_capacity=TENANT_RATE), 1.0)
    yield "agents", (traffic(generator="agents"), options.load)
    yield "conversations", (traffic(generator="conversations"), options.load)


@contextmanager
def _written(config: str) -> Iterator[str]:
    with TemporaryDirectory() as folder:
        path = Path(folder, "ablation.yaml")
        path.write_text(config)
        yield str(path)


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Other attributes of classes and modules, for a while."""
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changes]
    for owner, name, value in changes:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


_costs, _dispatch, _apply_slowness = Forecast.costs, PodModel.dispatch, Rates._apply_slowness


def _unmatched(forecast: Forecast, endpoints: Sequence[Endpoint]) -> list[float]:
    """Predict as if no pod had cached anything."""
    return _costs(forecast._replace(match=None), endpoints)


def _unreserved(model: PodModel, *attempt: Any) -> Work:
    """Add the request to the queue, but publish nothing until the pod changes otherwise."""
    before = {name: getattr(model, name) for name in ("rest", "due", "overdue_factor", "valid_until", "head")}
    sent = _dispatch(model, *attempt)
    for name, value in before.items():
        setattr(model, name, value)
    model.view = model.endpoint.view
    return sent


def _at_usual_pace(rates: Rates) -> None:
    """Forget the slowness; only the coefficients remain."""
    rates._seen = rates._expected = 0.0
    rates._fleet.slowness = 1.0
    _apply_slowness(rates)


def _in_turn(fleet: FleetModel, in_turn: float, weight: float) -> None:
    """Take all pods to compute prompts in turn."""


def _no_wait(sharing: Sharing, view: LoadView) -> float:
    """Return no wait, as if every pod had a slot for one more request."""
    return 0.0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="JSON lines in Mooncake's format")
    parser.add_argument("--requests", type=int, default=2_000, help="per run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.8)
    parser.add_argument("--engine", choices=ENGINES, default="vllm")
    parser.add_argument("--only", type=_names, metavar="SITUATION,…", help="[all]")
    parser.add_argument("--variants", type=_names, metavar="NAME,…", help="[all]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="all figures")
    return parser.parse_args()


def _names(text: str) -> list[str]:
    return text.split(",")


if __name__ == "__main__":
    main()
