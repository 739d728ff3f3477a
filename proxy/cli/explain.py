"""`kvlane explain`: what the scheduler did, or would do, and why."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import click
import orjson

from proxy import yaml_source
from proxy.cli import explained_tables as tables
from proxy.cli.admin_port import asked as ask
from proxy.cli.admin_port import in_full, key_option
from proxy.cli.completing import files, pods_in
from proxy.cli.configuration import config_option
from proxy.core.clock import SystemClock
from proxy.core.endpoint import DEFAULT_POOL
from proxy.core.errors import ConfigError, Problem, cause
from proxy.core.ports import Clock
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Registry
from proxy.scheduling import explain as explaining
from proxy.settings import load


@dataclass(frozen=True, slots=True)
class Asked:
    """Of a proxy that runs: `body` is of a request to try, else decisions are looked up; `name` or `last` is one."""

    url: str
    key: str
    body: str | None = None
    name: str | None = None
    last: bool = False
    query: Mapping[str, str] = field(default_factory=dict)
    beside: Mapping[str, Any] = field(default_factory=dict)
    """What is asked beside the request."""


@click.command("explain")
@click.argument("body", required=False, shell_complete=files)
@click.option(
    "--state",
    "source",
    shell_complete=files,
    help="JSON or YAML file with scheduling, request and endpoints; - is stdin.",
)
@config_option
@click.option("--url", callback=in_full, help="Admin port of a proxy that runs, as http://localhost:9190.")
@key_option
@click.option("--id", "name", help="Of a decision, or the x-request-id of a request.")
@click.option("--last", is_flag=True, help="The latest of those that the filters leave.")
@click.option("--slow", metavar="TIME", help="Those with a longer time to the first byte, as 2s or 0.5.")
@click.option("--pod", shell_complete=pods_in(), help="Those that had to do with this pod.")
@click.option("--tenant", help="Those of this tenant.")
@click.option("--outcome", help="Those that ended so: complete, upstream-failed, timed-out, in-flight, ...")
@click.option("--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="So many at most.")
@click.option("--weight", "weights", multiple=True, metavar="SCORER=N", help="Try BODY with another weight.")
@click.option("--profile", default="", help="Try BODY with this profile alone, which may be a shadow.")
@click.option("--pool", help="Whose scheduling is meant, or decisions; for --state: default.")
@click.option("--all", "all_pods", is_flag=True, help="All pods in the tables of a large fleet.")
@click.option("--json", "as_json", is_flag=True, help="Print what the admin port says.")
def explain(source: str | None, config: Path | None, url: str | None, **rest: Any) -> None:
    """Why a pod was chosen, or would be.

    \b
    kvlane explain --url http://localhost:9190                     the latest decisions
    kvlane explain --url http://localhost:9190 --slow 2s --last    all of the latest that took longer
    kvlane explain --url http://localhost:9190 --id REQUEST        all of one
    kvlane explain --url http://localhost:9190 BODY.json           where a request would go; it goes nowhere
    kvlane explain --state situation.yaml                          on a situation that you state, without a proxy

    The first three need `telemetry: {decisions: {}}` in the proxy's configuration. BODY.json is what a client would
    send, or `{"request": ..., "path": ..., "headers": ..., "scheduling": ..., "weights": ...}`; - is stdin.

    --state runs the scheduler offline and prints what every filter and scorer did, as JSON. With a configuration its
    scheduling stands in for that of the state.

    Exit code 0 if it is explained, 2 if it cannot be: no such decision, no answer, a file that cannot be used.
    """
    if (source is None) == (url is None):
        raise click.UsageError("Give one of --url, for a proxy that runs, and --state, for a situation.")
    if url is None:
        _offline(source or "", config, rest["pool"] or DEFAULT_POOL)
    elif rest["as_json"]:
        click.echo(json.dumps(_answer(_asked(url, rest)), indent=2, ensure_ascii=False))
    else:
        _show(_answer(_asked(url, rest)), rest["all_pods"])


def _asked(url: str, options: Mapping[str, Any]) -> Asked:
    pool = {"pool": options["pool"]} if options["pool"] else {}
    names = ("slow", "pod", "tenant", "outcome")
    filters = {name: options[name] for name in names if options[name]}
    weights = dict(_weight(written) for written in options["weights"])
    profile = {"profile": options["profile"]} if options["profile"] else {}
    beside = {**pool, **profile, **({"weights": weights} if weights else {})}
    if options["body"] is None and (weights or profile):
        raise click.UsageError("--weight and --profile are for trying a BODY.")
    limit = {"limit": "1" if options["last"] else str(options["limit"])}
    query = {**filters, **pool, **limit}
    return Asked(url, options["key"], options["body"], options["name"], options["last"], query, beside)


def _answer(asked: Asked) -> Any:
    if asked.body is not None:
        body = _read(asked.body)
        given = body if isinstance(body, dict) and "request" in body else {"request": body}
        return ask(asked.url, "/debug/explain", asked.key, {}, orjson.dumps({**given, **asked.beside}))
    name = asked.name
    if name is None:
        found = ask(asked.url, "/debug/decisions", asked.key, asked.query)
        if not asked.last or not found["on"]:
            return found
        if not found["decisions"]:
            click.echo("No decision that is kept is like that.", err=True)
            raise SystemExit(2)
        name = found["decisions"][0]["id"]
    return ask(asked.url, f"/debug/decisions/{quote(name, safe='')}", asked.key, {})


def _show(answer: Any, all_pods: bool) -> None:
    if "decisions" in answer:
        tables.show_list(answer, tables.console())
    else:
        tables.show(answer, tables.console(), all_pods)


def _weight(written: str) -> tuple[str, float]:
    name, _, value = written.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise click.BadParameter(f"{written!r} is no weight; write queue-scorer=2", param_hint="--weight") from None


def _offline(source: str, config: Path | None, pool: str) -> None:
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
        return yaml_source.read_json(text, source)
    except ConfigError:
        return yaml_source.read(text, source, os.environ)


def _text(source: str) -> str:
    if source == "-":
        return sys.stdin.read()
    try:
        return Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        click.echo(f"{source}: {cause(error)}", err=True)
        raise SystemExit(2) from None
