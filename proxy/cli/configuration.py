"""How commands take their configuration, and how they say what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from proxy.configurations import Reader
from proxy.core.errors import ConfigError, KvlaneError
from proxy.settings import Settings

config_option = click.option(
    "-c", "--config", type=click.Path(path_type=Path), help="YAML file: kvlane's own, or an EndpointPickerConfig."
)
pod_option = click.option("--pod", "pods", multiple=True, metavar="URL", help="URL of a pod; repeatable.")


class Misconfigured(click.ClickException):
    """Every fault on a line of its own."""

    exit_code = 2

    def __init__(self, error: ConfigError) -> None:
        count = len(error.problems)
        head = f"the configuration has {count} faults:" if count > 1 else "the configuration has a fault:"
        super().__init__("\n".join([head, *(f"  {problem}" for problem in error.problems)]))


def loaded(
    config: Path | None,
    pods: tuple[str, ...],
    environ: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Settings:
    """Raises Misconfigured. `pods` stand in place of the file's static ones."""
    return settings_of(reader(config, pods, environ, overrides))


def reader(
    config: Path | None,
    pods: tuple[str, ...],
    environ: Mapping[str, str],
    overrides: Mapping[str, Mapping[str, Any]] | None = None,
) -> Reader:
    """As `loaded`, to read it again."""
    if config is None and not pods:
        raise click.UsageError("there is nothing to serve: give -c FILE, or --pod URL for each pod")
    overrides = dict(overrides or {})
    if pods:
        overrides["pods"] = {"static": [{"url": url} for url in pods]}
    return Reader(config, overrides, environ)


def settings_of(source: Reader) -> Settings:
    """Raises Misconfigured."""
    try:
        return source.again()
    except ConfigError as error:
        raise Misconfigured(error) from None
    except KvlaneError as error:
        raise click.ClickException(str(error)) from None
