"""`kvlane tune`: weights that would have served recorded requests better."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import yaml

from proxy.cli.configuration import config_option
from proxy.cli.replay import Situation, Unusable, options, settings_of
from proxy.core.endpoint import DEFAULT_POOL
from proxy.core.errors import cause
from proxy.lab.tune import OBJECTIVES, TooFew, Tunable, Tuned
from proxy.lab.tune import tune as search

NOTHING_FOUND = 1


@click.command()
@options
@config_option
@click.option("--objective", type=click.Choice(list(OBJECTIVES)), default="ttft", help="What is to improve.  [ttft]")
@click.option("--trials", type=click.IntRange(1), default=40, help="Random candidates to begin with.  [40]")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write the patch.  [standard output]")
def tune(config: Path | None, objective: str, trials: int, output: Path | None, **about: Any) -> None:
    """Search the weights of scorers, and what the latency scorer counts in, over recorded requests.

    \b
    kvlane tune /var/log/kvlane/record.jsonl -c now.yaml -o patch.yaml

    The first six tenths of the requests are searched: random candidates on a quarter of them, the best third of those
    on half, and so on, then one value after the other. The rest is held out: what was found is replayed on it
    beside what there is, and the difference is printed with its 95 % interval, by a bootstrap over stretches of
    requests. The patch is a `scheduling` section, complete; take it in place of the one you have. How the pods are
    simulated, and how well that does: see `kvlane replay --help`.

    Exit code 0 if there is a patch, 1 if no change is significant, 2 if a file or a configuration cannot be used.
    """
    pool: str = about["pool"]
    tunable = Tunable(settings_of(config, pool))
    situation = Situation.of(**about)
    for line in situation.describe():
        click.echo(line, err=True)
    workload = situation.record.workload
    measure, meaning = OBJECTIVES[objective]
    try:
        found = search(
            tunable,
            workload.at_rate(workload.rate * situation.load),
            situation.fleet,
            measure,
            trials,
            situation.seed,
            lambda line: click.echo(f"  {line}", err=True),
        )
    except TooFew as error:
        raise Unusable(str(error)) from None
    verdict = _verdict(found, meaning)
    if not found.gain.is_significant:
        click.echo(f"No change is significant. The best of {found.runs} runs, on requests held out:", err=True)
        click.echo("\n".join(f"  {line}" for line in verdict), err=True)
        raise SystemExit(NOTHING_FOUND)
    patch = _patch(tunable, found, verdict, config, pool)
    if output is None:
        click.echo(patch, nl=False)
    else:
        _write(output, patch)
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


def _write(output: Path, patch: str) -> None:
    try:
        output.write_text(patch)
    except OSError as error:
        raise Unusable(f"{output}: {cause(error)}") from None
