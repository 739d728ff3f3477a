"""The options that name a configuration or an output."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from proxy.config.load import ConfigReader
from proxy.core.errors import cause


def _one(context: click.Context, parameter: click.Parameter, files: tuple[Path, ...]) -> Path | None:
    """Return the file. Raise BadParameter for several: click would ignore all but the last."""
    if len(files) > 1:
        raise click.BadParameter(f"give one file, not {len(files)}; files are not merged")
    return files[0] if files else None


config_option = click.option(
    "-c",
    "--config",
    type=click.Path(path_type=Path),
    multiple=True,
    callback=_one,
    help="YAML file: kvlane's own, or an EndpointPickerConfig.",
)
pod_option = click.option("--pod", "pods", multiple=True, metavar="URL", help="URL of a pod; repeatable.")
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File to write to.  [default: standard output]"
)


def write(output: Path | None, text: str) -> None:
    """Write to a file, or to standard output without one. Raise UsageError."""
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise click.UsageError(f"{output}: {cause(error)}") from None


def reader(
    config: Path | None, pods: tuple[str, ...], overrides: Mapping[str, Mapping[str, Any]] | None = None
) -> ConfigReader:
    """Return the reader of the configuration. `pods` replace the static pods of the file."""
    if config is None and not pods:
        raise click.UsageError("no pods are configured: give -c FILE, or --pod URL for each pod")
    overrides = dict(overrides or {})
    if pods:
        overrides["pods"] = {"static": [{"url": url} for url in pods]}
    return ConfigReader(config, overrides, os.environ)
