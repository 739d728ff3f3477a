"""`kvlane autoscale`: check a scaling policy, evaluate it, replay recorded decisions."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from proxy import yaml_source
from proxy.autoscale import evaluation
from proxy.autoscale import settings as policies
from proxy.autoscale.evaluation import EvaluationStep, summary
from proxy.autoscale.evaluation import replay as replayed
from proxy.autoscale.settings import AutoscaleSettings, ScalingPolicy, warnings
from proxy.core.errors import ConfigError, Problem
from proxy.core.params import suggestion


@click.group()
def autoscale() -> None:
    """Check, evaluate and replay autoscaling policies.

    \b
    kvlane autoscale validate kvlane.yaml                   check the section autoscale
    kvlane autoscale replay history.json -c kvlane.yaml     apply a policy to recorded decisions
    kvlane autoscale eval question.json                     divide a total among roles

    The decisions of a running proxy are at its admin port: GET /autoscale/pools
    """


@autoscale.command("eval")
@click.argument("file", type=click.Path(path_type=Path, allow_dash=True))
def evaluate(file: Path) -> None:
    """Divide a total among roles, once.

    FILE, or - for standard input, is JSON with roles, coordination, total, metrics and panic; the result is JSON too.
    Faults of coordination are warnings on standard error: an unreadable value is ignored, a value outside its range is
    replaced by the nearest valid one, and contradictory bands are applied as far as possible. Exit code 2: the roles or
    the total cannot be used.
    """
    found, overlooked = evaluation.evaluate(yaml_source.read_json(_text(file), str(file)))
    for problem in overlooked:
        click.secho(f"Warning: {problem}", fg="yellow", err=True)
    click.echo(json.dumps(evaluation.result(found), indent=2, ensure_ascii=False))


@autoscale.command("validate", short_help="Check the section autoscale of a YAML file.")
@click.argument("file", type=click.Path(path_type=Path))
def validate(file: Path) -> None:
    """Check the section autoscale of a YAML file, and print all its faults.

    Values that are valid but probably a mistake are reported as warnings. Exit code 2: there is a fault.
    """
    found = _policies(file)
    for caution in warnings(found):
        click.secho(f"Warning: {caution}", fg="yellow", err=True)
    click.secho("The policy is good.", fg="green", err=True)


@autoscale.command("replay")
@click.argument("history", type=click.Path(path_type=Path, allow_dash=True))
@click.option("-c", "--config", required=True, type=click.Path(path_type=Path), help="YAML with the section autoscale.")
@click.option("--pool", help="Pool to replay; required if the history has several.")
@click.option("--json", "as_json", is_flag=True, help="Print every step as JSON.")
def replay(history: Path, config: Path, pool: str | None, as_json: bool) -> None:
    """Apply another policy to recorded decisions.

    HISTORY is a JSON list of decisions, an object with "decisions", or one JSON object per line. For each decision the
    policy gets the fleet and the metrics of that time.

    Exit code 2: a file cannot be used.
    """
    decisions = _of_pool(_decisions(_text(history), str(history)), pool)
    name = str(decisions[0].get("pool", pool))
    pools = _policies(config).pools
    if name not in pools:
        raise click.UsageError(f"the policy has no pool '{name}'{suggestion(name, list(pools))}")
    steps = replayed(decisions, pools[name])
    if as_json:
        click.echo(json.dumps({"pool": name, "steps": [_step(one) for one in steps]}, indent=2, ensure_ascii=False))
    else:
        click.echo(_table(name, pools[name], steps))


def _policies(file: Path) -> AutoscaleSettings:
    data = yaml_source.read(_text(file), str(file), os.environ)
    if not isinstance(data, Mapping) or policies.PATH not in data:
        raise ConfigError([Problem(str(file), f"has no section {policies.PATH}")])
    return policies.load(data[policies.PATH])


def _text(file: Path) -> str:
    return sys.stdin.read() if str(file) == "-" else yaml_source.text_of(file)


def _decisions(text: str, source: str) -> list[Mapping[str, Any]]:
    try:
        found = yaml_source.read_json(text, source)
    except ConfigError:
        found = [
            yaml_source.read_json(line, f"{source}:{at}")
            for at, line in enumerate(text.splitlines(), 1)
            if line.strip()
        ]
    if isinstance(found, Mapping):
        found = found.get("decisions", [found])
    if not isinstance(found, list) or not found or not all(isinstance(one, Mapping) and "pool" in one for one in found):
        raise ConfigError([Problem(source, "holds no decisions")])
    return found


def _of_pool(decisions: Sequence[Mapping[str, Any]], pool: str | None) -> list[Mapping[str, Any]]:
    names = sorted({str(one.get("pool")) for one in decisions})
    if pool is None and len(names) > 1:
        raise click.UsageError(f"the history has several pools: give --pool, one of {', '.join(names)}")
    found = [one for one in decisions if pool is None or str(one.get("pool")) == pool]
    if not found:
        raise click.UsageError(f"the history has no pool '{pool}'{suggestion(str(pool), names)}")
    return found


def _step(step: EvaluationStep) -> dict[str, Any]:
    found = step.replayed
    return {
        "ts": step.at,
        "recorded": dict(step.recorded),
        "replayed": dict(found.replicas) if found else None,
        "raw": found.raw if found else None,
        "corrected": found.corrected if found else None,
        "panic": found is not None and found.panic,
        "gated": found is not None and found.gated,
        "reasons": [reason.value for reason in found.result.reasons] if found else [],
    }


def _table(name: str, pool: ScalingPolicy, steps: Sequence[EvaluationStep]) -> str:
    seen = [(one.at, dict(one.recorded), dict(one.replayed.replicas)) for one in steps if one.replayed is not None]
    other = sum(replicas != recorded for _, recorded, replicas in seen)
    was = summary(pool, [(at, recorded) for at, recorded, _ in seen])
    would = summary(pool, [(at, replicas) for at, _, replicas in seen])
    head = f"pool {name}: {len(steps)} decisions, {len(seen)} of them with metrics, {other} would differ"
    rows = (
        ("replicas moved", was.moves, would.moves),
        ("replica hours", was.hours, would.hours),
        ("GPU hours", was.gpu_hours, would.gpu_hours),
    )
    lines = [f"{title:14}{recorded:>12g}{replayed:>12g}" for title, recorded, replayed in rows]
    return "\n".join([head, f"{'':14}{'recorded':>12}{'replayed':>12}", *lines])
