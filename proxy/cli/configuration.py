"""Commands about the configuration: check, schema, plugins, metrics; and their options for the configuration file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import orjson
import yaml

from proxy import __version__
from proxy.app import App
from proxy.cli.admin import plugin_types
from proxy.cli.options import config_option, output_option, pod_option, reader, write
from proxy.cluster import redis_transport
from proxy.config.reference import (
    PluginReference,
    plugins_page,
    reference,
    section_reference,
    settings_page,
    spell,
    with_units,
)
from proxy.config.schema import schema as written
from proxy.config.warnings import STARTS_NOT, unusable, warnings
from proxy.core.errors import ConfigError
from proxy.core.registry import Registry
from proxy.http.admin_config import redacted
from proxy.scheduling.sections import SECTION_TYPES
from proxy.settings import Settings
from proxy.telemetry.metrics import Catalogue


@click.command()
@config_option
@pod_option
@click.option("--json", "as_json", is_flag=True, help="Print values and origins as JSON.")
@click.option("--reference", is_flag=True, help="Print the reference of all settings (docs/configuration.md).")
def check(config: Path | None, pods: tuple[str, ...], as_json: bool, reference: bool) -> None:
    """Check a configuration, and print every value in effect with its origin: the file, a default, or injected because
    another plugin needs it. With --json, durations are in seconds and sizes in bytes. Values that are valid but
    probably a mistake are reported as warnings.

    \b
    kvlane check -c kvlane.yaml
    kvlane check -c kvlane.yaml --json | jq .listen
    kvlane check --reference

    Exit code 0: the configuration is valid. 2: it is not; every fault of a value is printed, and once all values are
    valid, every contradiction between them.
    """
    if reference:
        click.echo(settings_page(), nl=False)
        return
    settings = reader(config, pods).again()
    remarks = list(warnings(settings))
    try:
        described = _described(settings)
        if as_json:
            click.echo(orjson.dumps(described, option=orjson.OPT_INDENT_2, default=str))
        else:
            _print(with_units(described, Registry.discover()))
            starts = not any(STARTS_NOT in remark for remark in remarks)
            good = "The configuration is good" + ("." if starts else ", but files that kvlane needs are missing here:")
            click.secho(good, fg="green" if starts else "yellow", err=True)
    finally:
        for remark in remarks:
            click.secho(f"Warning: {remark}", fg="yellow", err=True)


def _described(settings: Settings) -> dict[str, Any]:
    """Return every value in effect with its origin. Raise ConfigError with the faults of all checks."""
    faults, described = list(unusable(settings)), dict[str, Any]()
    try:
        described = redacted(App(settings).effective())
    except ConfigError as error:
        faults.extend(error.problems)
    try:
        if settings.replicas.is_shared:
            redis_transport.check(settings.replicas)
    except ConfigError as error:
        faults.extend(error.problems)
    if faults:
        raise ConfigError(list(dict.fromkeys(faults)))
    return described


def _print(values: dict[str, Any], indent: str = "", lead: str = "") -> None:
    """Print YAML, with the origin of each value that is not from the file. `lead` indents the first line."""
    for key, item in values.items():
        if isinstance(item, dict) and set(item) == {"value", "origin"}:
            note = "" if item["origin"] == "file" else f"  # {item['origin']}"
            click.echo(f"{lead}{key}: {_inline(item['value'])}{note}")
        elif isinstance(item, dict) and item:
            click.echo(f"{lead}{key}:")
            _print(item, indent + "  ", indent + "  ")
        elif isinstance(item, list) and item and isinstance(item[0], dict):
            click.echo(f"{lead}{key}:")
            for entry in item:
                _print(entry, indent + "    ", indent + "  - ")
        else:
            click.echo(f"{lead}{key}: {_inline(item)}")
        lead = indent


def _inline(value: Any) -> str:
    text: str = yaml.safe_dump(value, default_flow_style=True, width=10**6, sort_keys=False)
    return text.removesuffix("...\n").rstrip("\n")


@click.command()
@output_option
def schema(output: Path | None) -> None:
    """Print the JSON Schema of the configuration, including installed third-party plugins.

    \b
    kvlane schema -o kvlane.schema.json
    # yaml-language-server: $schema=kvlane.schema.json

    With the second line at the top of a YAML file, editors that use the YAML language server complete keys, show their
    meaning and mark invalid values. `kvlane check` finds further faults, such as settings that contradict each other.
    """
    write(output, json.dumps(written(Registry.discover()), indent=1, ensure_ascii=False) + "\n")


@click.command("plugins")
@click.argument("type_name", metavar="[TYPE]", required=False, shell_complete=plugin_types)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--markdown", "as_markdown", is_flag=True, help="Print the reference page docs/plugins.md.")
def plugins(type_name: str | None, as_json: bool, as_markdown: bool) -> None:
    """List the plugin types, or describe one of them.

    \b
    kvlane plugins
    kvlane plugins prefix-cache-scorer

    Installed third-party plugins are included.

    Exit code 0: success. 1: an installed package cannot be loaded. 2: there is no such type.
    """
    described = _plugins(type_name)
    if as_json:
        found = [plugin.as_dict() for plugin in described]
        click.echo(json.dumps(found[0] if type_name else found, indent=2, ensure_ascii=False))
    elif as_markdown:
        click.echo(plugins_page(described), nl=False)
    elif type_name:
        plugin = described[0]
        click.echo(f"{plugin.type} ({', '.join(plugin.points)})\n\n{plugin.doc}")
        for one in plugin.parameters:
            click.echo(f"\n  {one.name}: {one.type}, default {spell(one.default)}\n    {one.doc}")
    else:
        width = max(len(plugin.type) for plugin in described)
        for plugin in described:
            click.echo(f"{plugin.type:{width}}  {', '.join(plugin.points)}")


def _plugins(type_name: str | None) -> list[PluginReference]:
    try:
        registry = Registry.discover()
    except ConfigError as error:
        raise click.ClickException(str(error)) from None
    if type_name is None:
        return [reference(cls) for cls in registry]
    cls = registry.get(type_name)
    if cls is None and type_name in SECTION_TYPES:
        return [section_reference(type_name)]
    if cls is None:
        near = registry.suggest(type_name) or "; `kvlane plugins` lists all types"
        raise click.UsageError(f"there is no plugin type '{type_name}'{near}")
    return [reference(cls)]


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
    """List the series of /metrics with their meaning.

    \b
    kvlane metrics
    kvlane metrics | grep queue

    A running proxy serves their values at its admin port: curl localhost:9190/metrics
    """
    click.echo(HEAD if as_markdown else "", nl=False)
    for family in Catalogue(__version__).families:
        name, labels = family.sample_names[0], family.labels
        if as_markdown:
            in_code, escaped = ", ".join(f"`{label}`" for label in labels), family.help.replace("|", "\\|")
            click.echo(f"| `{name}` | {family.kind} | {in_code} | {escaped} |")
        else:
            click.echo(f"{name}{{{','.join(labels)}}}  {family.help}" if labels else f"{name}  {family.help}")
