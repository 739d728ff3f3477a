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
from proxy.core.clock import SystemClock
from proxy.core.errors import ConfigError
from proxy.core.ports import Clock
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Registry
from proxy.scheduling import explain as explaining


@click.command("explain")
@click.option(
    "--state", "source", required=True, help="JSON or YAML file with scheduling, request and endpoints; - is stdin."
)
def explain(source: str) -> None:
    """Run the scheduler offline on a stated situation and print what every filter and scorer did, as JSON."""
    try:
        ports = {Clock: SystemClock(), RandomPort: Random()}
        explanation = asyncio.run(explaining.explain(_read(source), Registry.discover(), ports))
    except ConfigError as error:
        for problem in error.problems:
            click.echo(str(problem), err=True)
        raise SystemExit(2) from None
    click.echo(json.dumps(explanation, indent=2, ensure_ascii=False))


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
