"""`kvlane check`: all faults of a configuration, or what it amounts to."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import orjson
import yaml

from proxy.app import App
from proxy.cli.configuration import NO_PODS, Misconfigured, config_option, loaded, pod_option
from proxy.cli.settings_reference import markdown
from proxy.core.endpoint import DEFAULT_POOL, ROLE_LABEL
from proxy.core.errors import ConfigError
from proxy.disagg import cautions as disagg
from proxy.http.admin_config import redacted
from proxy.http.upstream.dial import is_address
from proxy.reliability import cautions as reliability
from proxy.settings import Settings


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
    for caution in _cautions(settings):
        click.secho(f"Warning: {caution}", fg="yellow", err=True)
    if not settings.has_pods:
        click.secho(f"Warning: {NO_PODS}", fg="yellow", err=True)


def _cautions(settings: Settings) -> Iterator[str]:
    yield from _of_addresses(settings)
    yield from map(str, settings.remarks)
    pools = settings.all_pools
    yield from reliability.cautions(settings.reliability, [pool.pods.most for pool in pools.values()])
    for name, pool in pools.items():
        types = {entry.type for entry in pool.scheduling.plugins}
        roles = {pod.role or pod.labels.get(ROLE_LABEL, "") for pod in pool.pods.static} if pool.pods.most else None
        yield from disagg.cautions(pool.disaggregation.connector, name, types, roles)


def _of_addresses(settings: Settings) -> Iterator[str]:
    if not settings.admin.api_key and not _is_loopback(settings.admin.host):
        yield f"admin.host: whoever reaches {settings.admin.host} may change everything, as there is no admin.apiKey."
    for name, pool in settings.all_pools.items():
        if pool.pods.file is not None and not Path(pool.pods.file).exists():
            path = "" if name == DEFAULT_POOL else f"pools.{name}."
            yield f"{path}pods.file: {pool.pods.file} is not there; until it is, no pods come from it."


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


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
