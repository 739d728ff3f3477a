"""Commands about the configuration: check, schema, plugins, metrics; and their options for the configuration file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import orjson
import yaml

from proxy import __version__
from proxy.app import App
from proxy.cli.admin import plugin_types
from proxy.cli.options import config_option, pod_option, reader
from proxy.cluster import redis_transport
from proxy.config.reference import PluginReference, plugins_page, reference, references, settings_page, spell
from proxy.config.schema import schema as written
from proxy.config.warnings import warnings
from proxy.core.errors import ConfigError, cause
from proxy.core.registry import Registry
from proxy.http.admin_config import redacted
from proxy.telemetry.metrics import Catalogue


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
        click.echo(settings_page(), nl=False)
        return
    settings = reader(config, pods, os.environ).again()
    if settings.replicas.is_shared:
        redis_transport.check(settings.replicas)
    described = redacted(App(settings).effective())
    if as_json:
        click.echo(orjson.dumps(described, option=orjson.OPT_INDENT_2, default=str))
    else:
        _print(described, "")
        click.secho("The configuration is good.", fg="green", err=True)
    for caution in warnings(settings):
        click.secho(f"Warning: {caution}", fg="yellow", err=True)


def _print(value: Any, indent: str, lead: str | None = None) -> None:
    """Print YAML, with a comment for the origin of every value that is not from the file."""
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
    text = json.dumps(written(Registry.discover()), indent=1, ensure_ascii=False)
    if output is None:
        click.echo(text)
        return
    try:
        output.write_text(text + "\n")
    except OSError as error:
        raise click.UsageError(f"{output}: {cause(error)}") from None


@click.command("plugins")
@click.argument("type_name", metavar="[TYPE]", required=False, shell_complete=plugin_types)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the reference page docs/plugins.md.")
def plugins(type_name: str | None, as_json: bool, as_markdown: bool) -> None:
    """List the plugin types, or describe one of them.

    \b
    kvlane plugins
    kvlane plugins prefix-cache-scorer

    Plugins that are installed beside kvlane are among them.

    Exit code 0, 1 if an installed package cannot be loaded, 2 if there is no such type.
    """
    described = _described(type_name)
    if as_json:
        found = [one.as_dict() for one in described]
        click.echo(json.dumps(found[0] if type_name else found, indent=2, ensure_ascii=False))
    elif as_markdown:
        click.echo(plugins_page(described), nl=False)
    elif type_name:
        click.echo(_page(described[0]))
    else:
        width = max(len(one.type) for one in described)
        for one in described:
            click.echo(f"{one.type:{width}}  {', '.join(one.points)}")


def _described(type_name: str | None) -> list[PluginReference]:
    try:
        registry = Registry.discover()
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if type_name is None:
        return references(registry)
    cls = registry.get(type_name)
    if cls is None:
        raise click.UsageError(f"there is no plugin type '{type_name}'{registry.suggest(type_name)}")
    return [reference(cls)]


def _page(plugin: PluginReference) -> str:
    lines = [f"{plugin.type} ({', '.join(plugin.points)})", "", plugin.doc]
    for parameter in plugin.parameters:
        lines += [
            "",
            f"  {parameter.name}: {parameter.type}, default {spell(parameter.default)}",
            f"    {parameter.doc}",
        ]
    return "\n".join(lines)


HEAD = """# Series

Written by `kvlane metrics --markdown` from the catalogue itself: everything that `/metrics` at the admin port has,
beside the `process_…` series that all programs have. Of a histogram the buckets stand here; there are `_count` and
`_sum` too. [Queries to begin with](operating.md#six-queries), alerts and dashboards are in another place.

| series | kind | labels | meaning |
|---|---|---|---|
"""


@click.command()
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the reference page docs/metrics.md.")
def metrics(as_markdown: bool) -> None:
    """List the series of /metrics, with what they mean.

    \b
    kvlane metrics
    kvlane metrics | grep queue

    Their values are at the admin port of a proxy that runs: curl localhost:9190/metrics
    """
    if as_markdown:
        click.echo(HEAD, nl=False)
        for name, kind, labels, text in _rows():
            in_code, escaped = ", ".join(f"`{label}`" for label in labels), text.replace("|", "\\|")
            click.echo(f"| `{name}` | {kind} | {in_code} | {escaped} |")
        return
    for name, _, labels, text in _rows():
        click.echo(f"{name}{{{','.join(labels)}}}  {text}" if labels else f"{name}  {text}")


def _rows() -> Iterator[tuple[str, str, tuple[str, ...], str]]:
    for family in Catalogue(__version__).families:
        yield family.sample_names[0], family.kind, family.labels, family.help
