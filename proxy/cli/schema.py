"""`kvlane schema`: what a configuration may say, for editors."""

from __future__ import annotations

import json
from pathlib import Path

import click

from proxy.cli.configuration import Misconfigured
from proxy.cli.settings_schema import schema as written
from proxy.core.errors import ConfigError, cause
from proxy.core.registry import Registry


@click.command()
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Where to write.  [standard output]")
def schema(output: Path | None) -> None:
    """Print the JSON Schema of the configuration, plugins that are installed beside kvlane included.

    \b
    kvlane schema -o kvlane.schema.json
    # yaml-language-server: $schema=kvlane.schema.json

    With the second line at the top of a YAML file, editors that use the YAML language server complete its keys, show
    what they mean, and mark what is wrong. `kvlane check` finds more: what only shows when all is read together.
    """
    try:
        text = json.dumps(written(Registry.discover()), indent=1, ensure_ascii=False)
    except ConfigError as error:
        raise Misconfigured(error) from None
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(text + "\n")
    except OSError as error:
        raise click.UsageError(f"{output}: {cause(error)}") from None
