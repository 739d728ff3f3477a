"""`kvlane replay`: what would have come of recorded requests under other configurations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import orjson

from proxy.cli.simulated_fleet import Situation, aligned, options, settings_of
from proxy.lab.figures import ROWS
from proxy.lab.replay import averages, recorded, repeated
from proxy.lab.replay import replay as replayed
from proxy.settings import Settings

DEFAULT = "default"


@click.command()
@options
@click.option(
    "-c", "--config", "configs", multiple=True, type=click.Path(path_type=Path), help="Of kvlane; repeatable."
)
@click.option("--seeds", type=click.IntRange(1), default=1, help="Runs per configuration, of which the mean is shown.")
@click.option("--json", "as_json", is_flag=True, help="Print all figures as JSON.")
def replay(configs: Sequence[Path], seeds: int, as_json: bool, **about: Any) -> None:
    """What if: run recorded requests through the scheduler of each configuration, before simulated pods.

    \b
    kvlane replay /var/log/kvlane/record.jsonl -c now.yaml -c other.yaml
    kvlane replay record.jsonl -c now.yaml --pods 6 --load 1.5
    kvlane replay conversation.jsonl.gz --hardware h100-llama-3.1-8b

    FILE is what telemetry.record has written, with its rotated parts if you like, or a trace in Mooncake's format,
    gzipped or not. It runs on a virtual clock, a thousand times faster than it came, through the same gateway,
    scheduler, index and ledger that serve. Without -c it is the default configuration.

    What a step of an engine costs is fitted to the times in the record, and the error of the fit is printed; with
    --hardware it is that of a GPU and a model. "recorded" is what was seen of streams, "repeated" the same placement
    before the simulated pods: as far as these two differ, the simulation is wrong.

    Exit code 2 if a file or a configuration cannot be used.
    """
    situation = Situation.of(**about)
    columns = dict(_seen(situation))
    for name, config in _named(configs):
        columns[name] = _replayed(situation, settings_of(config, about["pool"]), seeds)
    if as_json:
        click.echo(orjson.dumps(_described(situation, columns), option=orjson.OPT_INDENT_2))
        return
    for line in situation.describe():
        click.echo(line)
    click.echo(_table(columns))


def _seen(situation: Situation) -> list[tuple[str, dict[str, float]]]:
    """What was, if it can be compared with: the same pods under the same load."""
    record, fleet = situation.record, situation.fleet
    if not record.seen or situation.load != 1.0 or len(fleet.configs) != len(record.pods):
        return []
    return [("recorded", recorded(record, fleet)), ("repeated", repeated(record, fleet, situation.seed).figures)]


def _replayed(situation: Situation, settings: Settings, seeds: int) -> dict[str, float]:
    workload = situation.record.workload
    workload = workload.at_rate(workload.rate * situation.load)
    return averages([replayed(settings, workload, situation.fleet, situation.seed + at) for at in range(seeds)])


def _named(configs: Sequence[Path]) -> list[tuple[str, Path | None]]:
    """By the files' names, as far as these tell them apart."""
    if not configs:
        return [(DEFAULT, None)]
    short = [config.stem for config in configs]
    return [
        (name if short.count(name) == 1 else str(config), config) for name, config in zip(short, configs, strict=True)
    ]


def _described(situation: Situation, columns: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    record, fit = situation.record, situation.fit
    return {
        "requests": len(record.workload.jobs),
        "left_out": record.left_out,
        "pods": len(situation.fleet.configs),
        "load": situation.load,
        "hardware": None if fit else situation.hardware,
        "fit": dataclasses.asdict(fit) if fit else None,
        "figures": {name: _known(figures) for name, figures in columns.items()},
    }


def _known(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if math.isnan(value) else value for name, value in figures.items()}


def _table(columns: Mapping[str, Mapping[str, float]]) -> str:
    lines = [["", *columns]]
    for figure, (title, form) in ROWS.items():
        values = [figures[figure] for figures in columns.values()]
        lines.append([title, *("-" if math.isnan(value) else format(value, form) for value in values)])
    return aligned(lines)
