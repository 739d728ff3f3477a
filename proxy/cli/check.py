"""`kvlane check`: all faults of a configuration, or what it amounts to."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import orjson
import yaml

from proxy.app import App
from proxy.cautions import cautions
from proxy.cli.configuration import Misconfigured, config_option, loaded, pod_option
from proxy.cli.settings_reference import markdown
from proxy.core.errors import ConfigError
from proxy.http.admin_config import redacted


@click.command()
@config_option
@pod_option
@click.option("--json", "as_json", is_flag=True, help="Print values and origins as JSON.")
@click.option("--reference", is_flag=True, help="Print all settings there are: the page docs/configuration.md.")
def check(config: Path | None, pods: tuple[str, ...], as_json: bool, reference: bool) -> None:
    """Check a configuration; if it is good, print every value in effect and whether the file says so, it is a
    default, or it was injected. What is allowed and hardly meant is a warning.

    \b
    kvlane check -c kvlane.yaml
    kvlane check -c kvlane.yaml --json | jq .listen
    kvlane check --reference

    Exit code 0 if it is good, 2 and all faults if it is not.
    """
    if reference:
        click.echo(markdown(), nl=False)
        return
    try:
        settings = loaded(config, pods, os.environ)
        described = redacted(App(settings).effective())
    except ConfigError as error:
        raise Misconfigured(error) from None
    if as_json:
        click.echo(orjson.dumps(described, option=orjson.OPT_INDENT_2, default=str))
    else:
        _print(described, "")
        click.secho("The configuration is good.", fg="green", err=True)
    for caution in cautions(settings):
        click.secho(f"Warning: {caution}", fg="yellow", err=True)


def _print(value: Any, indent: str, lead: str | None = None) -> None:
    """YAML, with the origin of every value that is not from the file as a comment."""
    lead = indent if lead is None else lead
    for key, item in value.items():
        if isinstance(item, dict) and set(item) == {"value", "origin"}:
            note = "" if item["origin"] == "file" else f"  # {item['origin']}"
            click.echo(f"{lead}{key}: {_inline(item['value'])}{note}")
        elif isinstance(item, dict):
            click.echo(f"{lead}{key}:" + ("" if item else " {}"))
            _print(item, indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            click.echo(f"{lead}{key}:")
            for entry in item:
                _print(entry, indent + "    ", f"{indent}  - ")
        else:
            click.echo(f"{lead}{key}: {_inline(item)}")
        lead = indent


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")
