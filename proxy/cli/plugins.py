"""`kvlane plugins`: which plugins there are, and what they can be told."""

from __future__ import annotations

import json

import click

from proxy.cli.completing import plugin_types
from proxy.core.errors import ConfigError
from proxy.core.registry import Registry
from proxy.scheduling.reference import PluginReference, markdown, reference, references, spell


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
        click.echo(markdown(described), nl=False)
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
