"""`kvlane explain`: what would the scheduler do, and why."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from random import Random
from typing import Any

import click

from proxy import yaml_source
from proxy.cli.configuration import config_option
from proxy.core.clock import SystemClock
from proxy.core.endpoint import DEFAULT_POOL
from proxy.core.errors import ConfigError, Problem
from proxy.core.ports import Clock
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Registry
from proxy.scheduling import explain as explaining
from proxy.settings import load


@click.command("explain")
@click.option(
    "--state", "source", required=True, help="JSON or YAML file with scheduling, request and endpoints; - is stdin."
)
@config_option
@click.option("--pool", default=DEFAULT_POOL, help="Of the configuration: whose scheduling is meant.  [default]")
def explain(source: str, config: Path | None, pool: str) -> None:
    """Run the scheduler offline on a stated situation and print what every filter and scorer did, as JSON. With a
    configuration its scheduling stands in for that of the state."""
    try:
        ports = {Clock: SystemClock(), RandomPort: Random()}
        state = _read(source)
        if config is not None and isinstance(state, dict):
            state = {**state, "scheduling": _scheduling(config, pool)}
        explanation = asyncio.run(explaining.explain(state, Registry.discover(), ports))
    except ConfigError as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        raise SystemExit(2) from None
    click.echo(json.dumps(explanation, indent=2, ensure_ascii=False))


def _scheduling(config: Path, pool: str) -> Any:
    """Raises ConfigError."""
    settings = load(config, os.environ)
    if pool not in settings.all_pools:
        raise ConfigError([Problem(str(config), f"there is no pool {pool!r}")])
    return (settings.source if pool == DEFAULT_POOL else settings.pools[pool].given).get("scheduling")


def _read(source: str) -> Any:
    text = _text(source)
    try:
        return json.loads(text)
    except ValueError:
        return yaml_source.read(text, source, os.environ)


def _text(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    try:
        return Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        click.echo(f"{source}: {error}", err=True)
        raise SystemExit(2) from None
