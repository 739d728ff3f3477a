"""Commands about recorded requests: `replay` and `tune`."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import click
import orjson
import yaml

from proxy.cli.options import config_option, output_option, write
from proxy.config.load import load as load_settings
from proxy.core.endpoint import DEFAULT_POOL
from proxy.core.params import parse_duration
from proxy.lab.fit import Fit, TooLittle, fit
from proxy.lab.record import TraceRecord, load
from proxy.lab.replay import ROWS, ReplayedFleet, ReplayObjectives, TooLarge, averaged, recorded, repeated
from proxy.lab.replay import replay as replayed
from proxy.lab.sim import SimConfig
from proxy.lab.sim.config import HARDWARE, Hardware
from proxy.lab.tune import OBJECTIVES, TooFew, Tunable, Tuned
from proxy.lab.tune import tune as search
from proxy.lab.workload import BadTrace, Workload
from proxy.settings import Settings

F = TypeVar("F", bound=Callable[..., Any])

BLOCK = 16
"""Tokens per block of the simulated KV cache."""

DEFAULT_HARDWARE = "generic-8b"

DOUBTFUL = 0.5
"""Median error of a fit above which its pods do not resemble the recorded ones."""


class UnusableTrace(click.ClickException):
    exit_code = 2


def _seconds(ctx: click.Context, param: click.Parameter, value: str) -> float:
    try:
        return float(parse_duration(value))
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


_OPTIONS: Sequence[Callable[[F], F]] = (
    click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE..."),
    click.option(
        "--pods", type=click.IntRange(1), help="Number of simulated pods.  [default: as in the record; 4 for a trace]"
    ),
    click.option(
        "--load", type=click.FloatRange(0, min_open=True), default=1.0, help="Factor of the request rate.  [default: 1]"
    ),
    click.option(
        "--hardware",
        type=click.Choice(list(HARDWARE)),
        help="GPU and model of the simulated pods, by published figures.",
    ),
    click.option(
        "--fit",
        "fitted",
        is_flag=True,
        help="Fit the speed of the simulated pods to the record.  [default for records]",
    ),
    click.option(
        "--kv-tokens",
        type=click.IntRange(1),
        help="KV cache of a pod, in tokens.  [default: as in the record, else of the hardware]",
    ),
    click.option(
        "--step-tokens",
        type=click.IntRange(257),
        help="Most tokens that an engine computes in a step.  [default: of the hardware]",
    ),
    click.option(
        "--ttft",
        callback=_seconds,
        default="2s",
        help="Objective for the time to first token of requests without one.  [default: 2s]",
    ),
    click.option(
        "--tpot",
        callback=_seconds,
        default="50ms",
        help="Objective for the time per output token of requests without one.  [default: 50ms]",
    ),
    click.option(
        "--warm-up",
        type=click.FloatRange(0, 0.9),
        default=0.1,
        help="Share of requests at the start that is left out of the figures.  [default: 0.1]",
    ),
    click.option(
        "--seed", type=int, default=0, help="Seed of the random numbers; equal seeds give equal figures.  [default: 0]"
    ),
    click.option(
        "--pool",
        default=DEFAULT_POOL,
        help="Pool whose requests are replayed, with its pods and scheduling.  [default: default]",
    ),
)


def options(command: F) -> F:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@dataclass(frozen=True, slots=True)
class ReplaySetup:
    """The recorded requests and the simulated pods. `fit` is None if `--hardware` names the pods."""

    record: TraceRecord
    fleet: ReplayedFleet
    load: float
    seed: int
    hardware: str
    fit: Fit | None

    @classmethod
    def of(cls, about: Mapping[str, Any]) -> ReplaySetup:
        """Return the situation of these options. Raise UnusableTrace for files without a usable record."""
        hardware, fitted, seed = about["hardware"], about["fitted"], about["seed"]
        if fitted and hardware:
            raise click.UsageError("--fit and --hardware exclude each other")
        try:
            record = load(about["files"], Random(seed), about["pool"])
            if fitted and not record.seen:
                raise TooLittle("a trace does not say how fast its pods were; name them with --hardware")
            like = HARDWARE[hardware or DEFAULT_HARDWARE]
            budget = about["step_tokens"] or like.max_num_batched_tokens
            found = fit(record, budget) if record.seen and not hardware else None
            known = min((tokens for tokens in record.pods.values() if tokens), default=like.kv_tokens)
            configs = _configs(record, like, found, budget, about["kv_tokens"] or known)
            says_cached = not record.seen or any(seen.cached_tokens is not None for seen in record.seen)
            fleet = ReplayedFleet(
                configs, ReplayObjectives(about["ttft"], about["tpot"]), about["warm_up"], says_cached
            )
            fleet = fleet.of_size(about["pods"] or len(record.pods) or 4)
            return cls(fleet.fitting(record), fleet, about["load"], seed, hardware or DEFAULT_HARDWARE, found)
        except (BadTrace, TooLittle, TooLarge) as error:
            raise UnusableTrace(str(error)) from None

    @property
    def workload(self) -> Workload:
        """The recorded requests at the rate to replay."""
        recorded = self.record.workload
        return recorded.at_rate(recorded.rate * self.load)

    def describe(self) -> list[str]:
        record, workload = self.record, self.record.workload
        jobs = workload.jobs
        prompt = sum(job.prompt_tokens for job in jobs) / len(jobs)
        response = sum(job.output_tokens for job in jobs) / len(jobs)
        on = f", on {len(record.pods)} pods" if record.pods else ""
        lines = [
            f"{workload.name}: {len(jobs)} requests, {workload.rate:.3g} per second, of {prompt:.0f} + {response:.0f}"
            f" tokens on average{on}"
        ]
        lines += [f"  left out: {number} that {why}" for why, number in record.left_out.items()]
        return [*lines, *(_fit_lines(self.fit) if self.fit else [f"pods: {self.hardware}"])]


def settings_of(config: Path | None, pool: str) -> Settings:
    """Return the settings with this pool at the top level. Raise ConfigError, and UnusableTrace without such a pool."""
    try:
        return (load_settings(config, os.environ) if config else Settings()).alone(pool)
    except KeyError:
        raise UnusableTrace(f"{config or 'the defaults'}: there is no pool {pool!r}") from None


def _configs(
    record: TraceRecord, like: Hardware, found: Fit | None, budget: int, kv_tokens: int
) -> tuple[SimConfig, ...]:
    config = SimConfig(
        timing=found.timing if found else like.timing,
        max_num_batched_tokens=budget,
        num_gpu_blocks=max(1, kv_tokens // BLOCK),
        block_size=BLOCK,
    )
    slowdowns = found.slowdowns if found else {}
    return tuple(replace(config, slowdown=slowdowns.get(pod, 1.0)) for pod in record.pods) or (config,)


def _fit_lines(found: Fit) -> list[str]:
    timing = found.timing
    slow = [f"{pod} {factor:.1f}" for pod, factor in found.slowdowns.items() if factor != 1.0]
    lines = [
        f"pods, fitted: {timing.base * 1e3:.2f} ms a step, {timing.per_prefill_token * 1e6:.1f} us a prompt token,"
        f" {timing.per_sequence * 1e6:.0f} us a request, {timing.per_attended * 1e9:.3f} ns a pair,"
        f" {timing.per_token_read * 1e9:.2f} ns a token read",
        f"  median error: {found.first_token:.1%} of {found.first_tokens} first tokens on idle pods,"
        f" {found.pace:.1%} of {found.paces} responses",
    ]
    if slow:
        lines.append(f"  times slower: {', '.join(slow)}")
    if max(found.first_token, found.pace) > DOUBTFUL:
        lines.append("  that is a bad fit: do not rely on what follows. A longer record may do, or --hardware")
    return lines


@click.command()
@options
@click.option(
    "-c",
    "--config",
    "configs",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Configuration of kvlane; repeatable.",
)
@click.option(
    "--seeds", type=click.IntRange(1), default=1, help="Number of runs per configuration; their mean is printed."
)
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def replay(configs: Sequence[Path], seeds: int, as_json: bool, **about: Any) -> None:
    """Compare configurations: run recorded requests through the scheduler of each, with simulated pods.

    \b
    kvlane replay /var/log/kvlane/record.jsonl -c now.yaml -c other.yaml
    kvlane replay record.jsonl -c now.yaml --pods 6 --load 1.5
    kvlane replay conversation.jsonl.gz --hardware h100-llama-3.1-8b

    FILE is a record that telemetry.record has written, or several of its rotated files, or a trace in Mooncake's
    format, gzipped or not. The requests run on a virtual clock, about a thousand times faster than they arrived,
    through the gateway, scheduler, index and ledger that serve real requests. Without -c, the default configuration is
    used.

    The time of an engine step is fitted to the times in the record, and the error of the fit is printed; with
    --hardware it is that of a GPU and a model. The column "recorded" has the measured figures of the streams,
    "repeated" the figures of the same placement on the simulated pods. Their difference is the error of the simulation.

    Exit code 2: a file or a configuration cannot be used.
    """
    situation = ReplaySetup.of(about)
    columns = dict(_seen(situation))
    for name, config in _named(configs):
        settings, workload = settings_of(config, about["pool"]), situation.workload
        runs = (replayed(settings, workload, situation.fleet, situation.seed + at) for at in range(seeds))
        columns[name] = averaged([run.figures for run in runs])
    if as_json:
        click.echo(orjson.dumps(_described(situation, columns), option=orjson.OPT_INDENT_2))
        return
    for line in situation.describe():
        click.echo(line)
    click.echo(_table(columns))


def _seen(situation: ReplaySetup) -> list[tuple[str, dict[str, float]]]:
    """Return the recorded figures if they are comparable: the same pods under the same load."""
    record, fleet = situation.record, situation.fleet
    if not record.seen or situation.load != 1.0 or len(fleet.configs) != len(record.pods):
        return []
    return [("recorded", recorded(record, fleet)), ("repeated", repeated(record, fleet, situation.seed).figures)]


def _named(configs: Sequence[Path]) -> list[tuple[str, Path | None]]:
    """Return the configurations by the names of their files, as far as these are distinct."""
    if not configs:
        return [("default", None)]
    short = [config.stem for config in configs]
    return [
        (name if short.count(name) == 1 else str(config), config) for name, config in zip(short, configs, strict=True)
    ]


def _described(situation: ReplaySetup, columns: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    record, fit = situation.record, situation.fit
    return {
        "requests": len(record.workload.jobs),
        "left_out": record.left_out,
        "pods": len(situation.fleet.configs),
        "load": situation.load,
        "hardware": None if fit else situation.hardware,
        "fit": dataclasses.asdict(fit) if fit else None,
        "figures": columns,  # JSON has null for a figure that is not a number
    }


def _table(columns: Mapping[str, Mapping[str, float]]) -> str:
    lines = [["", *columns]]
    for figure, (title, form) in ROWS.items():
        values = [figures[figure] for figures in columns.values()]
        lines.append([title, *("-" if math.isnan(value) else format(value, form) for value in values)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join((first.ljust(widths[0]), *map(str.rjust, rest, widths[1:]))) for first, *rest in lines)


@click.command()
@options
@config_option
@click.option(
    "--objective", type=click.Choice(list(OBJECTIVES)), default="ttft", help="Figure to improve.  [default: ttft]"
)
@click.option(
    "--trials", type=click.IntRange(1), default=40, help="Number of random candidates at the start.  [default: 40]"
)
@output_option
def tune(config: Path | None, objective: str, trials: int, output: Path | None, **about: Any) -> None:
    """Search for better weights of the scorers, and parameters of the latency scorer, on recorded requests.

    \b
    kvlane tune /var/log/kvlane/record.jsonl -c now.yaml -o patch.yaml

    The search uses the first 60 % of the requests: random candidates run on a quarter of them, the best third of these
    on half, and so on; then each value is varied by itself. The other 40 % are held out: the best candidate and your
    configuration are replayed on them, and the difference is printed with its 95 % interval, by a bootstrap over blocks
    of consecutive requests. The patch is a complete `scheduling` section, which replaces yours. `kvlane replay --help`
    says how pods are simulated and how the error of the simulation is measured.

    Exit code 0: a patch was written. 1: no change is significant. 2: a file or a configuration cannot be used.
    """
    pool: str = about["pool"]
    tunable = Tunable(settings_of(config, pool))
    situation = ReplaySetup.of(about)
    for line in situation.describe():
        click.echo(line, err=True)

    def say(line: str) -> None:
        click.echo(f"  {line}", err=True)

    measure, meaning = OBJECTIVES[objective]
    try:
        found = search(tunable, situation.workload, situation.fleet, measure, trials, situation.seed, say)
    except TooFew as error:
        raise UnusableTrace(str(error)) from None
    verdict = _verdict(found, meaning)
    if not found.gain.is_significant:
        click.echo(f"No change is significant. The best of {found.runs} runs, on requests held out:", err=True)
        for line in verdict:
            say(line)
        raise SystemExit(1)
    write(output, _patch(tunable, found, verdict, config, pool))
    if output is not None:
        click.echo("\n".join(verdict))


def _verdict(found: Tuned, meaning: str) -> list[str]:
    gain = found.gain
    change = f"{abs(gain.share):.1%} {'less' if gain.share >= 0 else 'more'}"
    return [
        f"{meaning}: {gain.after:.4g} instead of {gain.before:.4g}",
        f"that is {change}; in 95 of 100 cases it is between {gain.low:.1%} and {gain.high:.1%} less",
    ]


def _patch(tunable: Tunable, found: Tuned, verdict: Sequence[str], config: Path | None, pool: str) -> str:
    changed = [
        f"{knob}: {value:g}, was {knob.value:g}"
        for knob, value in zip(tunable.knobs, found.values, strict=True)
        if value != knob.value
    ]
    kept = [f"keep the plugins {', '.join(tunable.apart)} of your file"] if tunable.apart else []
    about = [f"In place of the scheduling of {config or 'the defaults'}. On requests that were held out:"]
    comments = "".join(f"# {line}\n" for line in [*about, *verdict, *changed, *kept])
    section: dict[str, Any] = {"scheduling": tunable.section(found.values)}
    if pool != DEFAULT_POOL:
        section = {"pools": {pool: section}}
    return comments + yaml.safe_dump(section, sort_keys=False, width=120)
