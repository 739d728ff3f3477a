"""The command `explain`: decisions of a running proxy, and decisions about described pods."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote

import click
import orjson
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from proxy import yaml_source
from proxy.cli.admin import DEFAULT_URL, fail, fetched, files, in_full, key_option, pods_in
from proxy.cli.options import config_option
from proxy.config.load import load
from proxy.core.attempt import Ending
from proxy.core.endpoint import DEFAULT_POOL
from proxy.core.errors import ConfigError, Reason, cause
from proxy.core.params import suggestion
from proxy.core.ports import Clock, SystemClock
from proxy.core.ports import Random as RandomPort
from proxy.core.registry import Registry
from proxy.scheduling import explain as explaining
from proxy.scheduling.explained_decision import IN_FLIGHT

MOST_PODS = 20
"""Largest number of rows in a table, unless all are requested."""

OUTCOMES = tuple(dict.fromkeys((IN_FLIGHT, *(one.value for one in (*Ending, *Reason)))))
"""Values of --outcome: how a request ended, or why it was refused."""

Json = Mapping[str, Any]


def console() -> Console:
    """Return a console; output that does not go to a terminal is not wrapped at 80 columns."""
    return Console() if sys.stdout.isatty() else Console(width=200, highlight=False)


def show_list(found: Json, to: Console) -> None:
    """Print a table of decisions. Predicted values are in parentheses."""
    if not found["on"]:
        to.print(escape(found["hint"]))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("id", "time", "request", "pod", "margin", "first byte", "cached", "prompt", "waited", "outcome"):
        table.add_column(name, overflow="fold")
    for one in found["decisions"]:
        table.add_row(*map(escape, _row(one)))
    to.print(table)
    share = f" of a sample of {100 * found['sample']:g} %" if found["sample"] < 1 else ""
    to.print(f"{len(found['decisions'])} shown, {found['kept']} kept{share}; (…) was expected; --id ID shows why")


def show(one: Json, to: Console, all_pods: bool = False) -> None:
    """Print one real or hypothetical decision in full."""
    for line in _lines(one):
        to.print(escape(line), highlight=False)
    for profile in one["profiles"]:
        _show_profile(one, profile, to, all_pods)
    if attempts := one.get("legs"):
        names = ("stage", "pod", "sent", "first byte", "last byte", "status", "ending", "cached", "expected cached")
        table = Table(*names, box=box.SIMPLE_HEAD, title="attempts", title_justify="left")
        for attempt in attempts:
            times = [_seconds(attempt[name]) for name in ("sent", "firstByte", "lastByte")]
            ends = [_plain(attempt[name]) for name in ("status", "ending", "cachedTokens", "predictedCachedTokens")]
            table.add_row(attempt["stage"], escape(attempt["pod"]), *times, *ends)
        to.print(table)


def _row(one: Json) -> list[str]:
    request, pod, responder = one["request"], one["pod"], one["answeredBy"]
    return [
        one["id"],
        _time(one["at"]),
        # in the middle, because ids often differ only at their ends
        request if len(request) <= 18 else f"{request[:8]}…{request[-9:]}",
        _plain(pod) if pod is None or responder in (None, pod) else f"{pod} → {responder}",
        _score(one["margin"]),
        _seconds(one["ttft"]) + (f" ({_seconds(one['predicted']['ttft'])})" if one["stream"] else " whole"),
        f"{_plain(one['cachedTokens'])} ({_plain(one['predicted']['cachedTokens'])})",
        str(one["promptTokens"]),
        _seconds(one["waited"]),
        f"{one['outcome']} {one['status'] or ''}",
    ]


def _lines(one: Json) -> Iterator[str]:
    if "request" in one:
        who = f" of tenant {one['tenant']}" if one["tenant"] else ""
        yield f"decision {one['id']}, request {one['request']}{who}, {_time(one['at'])}"
    yield f"{one['path']}, model {one['model'] or '-'}, pool {one['pool']}, {one['promptTokens']} prompt tokens"
    if one["error"]:
        yield f"no pod was chosen: {one['error']['message']}"
    else:
        yield _choice(one)
    cached, ttft = one["predicted"]["cachedTokens"], one["predicted"]["ttft"]
    first = f"first token after {_seconds(ttft)}" if ttft is not None else "the first token is not predicted"
    yield f"expected: {first}" + (f", {cached} tokens cached" if cached is not None else "")
    if "outcome" in one:
        yield _outcome(one)
    if one.get("ttft") is not None and one["legs"]:
        yield f"of the {_seconds(one['ttft'])}: {', '.join(_spent(one))}"
    if live := one.get("live"):
        yield f"as configured it would go to {live['pod'] or 'no pod'}{_ahead(live)}"
    for name in one.get("fresh", ()):
        yield f"{name} would start without state: no running plugin has its name and its parameters"
    if one["absent"]:
        yield "no candidates: " + ", ".join(f"{absent['pod']} ({absent['why']})" for absent in one["absent"])


def _choice(one: Json) -> str:
    prefill = f", its prompt computed by {one['prefill']}" if one["prefill"] else ""
    why = f" ({one['why']})" if one["why"] else ""
    chosen = f"chosen: {one['pod']}{prefill} by profile {one['profile']}{_ahead(one)}"
    return f"{chosen}, of {one['candidates']} candidates{why}"


def _ahead(one: Json) -> str:
    margin, other = one["margin"], one["runnerUp"]
    if margin is None:
        return ""
    if margin == 0:
        return f", level with {other}"
    if margin > 0:
        return f", {_score(margin)} ahead of {other}"
    return f", {_score(-margin)} behind {other}: its picker goes by more than scores"


def _outcome(one: Json) -> str:
    cached = f", {one['cachedTokens']} tokens cached" if one["cachedTokens"] is not None else ""
    tries = f", {one['tries']} tries" if one["tries"] != 1 else ""
    where = f" from {one['answeredBy']}" if one["answeredBy"] not in (None, one["pod"]) else ""
    first = "first byte" if one["stream"] else "not streamed, so its first byte"
    began = f"{first} after {_seconds(one['ttft'])}{where}" if one["ttft"] is not None else "no first byte"
    took = f", all of it {_seconds(one['e2e'])}" if one["e2e"] is not None else ""
    return f"was: {began}{cached}{took}; {one['outcome']} {one['status'] or ''}{tries}".rstrip()


def _spent(one: Json) -> Iterator[str]:
    """Yield the parts of the time to the first byte."""
    if one["queued"] is not None and one["queued"] > 0:
        yield f"{_seconds(one['queued'])} in the queue"
        yield f"{_seconds(max(0.0, one['waited'] - one['queued']))} before it"
    else:
        yield f"{_seconds(one['waited'])} before the decision"
    for attempt in one["legs"]:
        until = attempt["firstByte"] if attempt["firstByte"] is not None else attempt["lastByte"]
        if until is not None:
            of = "" if attempt["stage"] == "whole" else f" ({attempt['stage']})"
            yield f"{_seconds(until - attempt['sent'])} at {attempt['pod']}{of}"


def _show_profile(one: Json, profile: Json, to: Console, all_pods: bool) -> None:
    shadow = ", a shadow" if profile["shadow"] else ""
    to.print(f"\nprofile {escape(profile['profile'])}{shadow}", highlight=False)
    for step in profile["filters"]:
        if removed := step["removed"]:
            more = f" and {len(removed) - MOST_PODS} more" if len(removed) > MOST_PODS else ""
            to.print(escape(f"  {step['name']} removed {', '.join(removed[:MOST_PODS])}{more}"), highlight=False)
    if not profile["totals"]:
        to.print("  all pods were removed")
        return
    names = list(dict.fromkeys([*profile["ranked"], *profile["totals"]]))
    shown = names if all_pods else names[:MOST_PODS]
    to.print(_table(one, profile, shown))
    if len(shown) < len(names):
        to.print(f"and {len(names) - len(shown)} more: --all")


def _table(one: Json, profile: Json, names: Sequence[str]) -> Table:
    pods = {pod["pod"]: pod for pod in one["pods"]}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("pod")
    scorers = [f"{escape(scorer['name'])}\n× {scorer['share']:.2f}" for scorer in profile["scorers"]]
    for name in ("in flight", "waiting", "running", "KV", "cached", "TTFT", *scorers, "total"):
        table.add_column(name, justify="right")
    for name in names:
        pod, view, stale = pods[name], pods[name]["view"], "" if pods[name]["fresh"] else " (stale)"
        cells = [str(pod["load"]["requests"]), str(view["waiting"]), str(view["running"])]
        cells += [f"{100 * (view['kvUsage'] or 0):.0f} %{stale}", _plain(pod["hitTokens"]), _seconds(pod["ttft"])]
        mark, style = ("> ", "bold") if name == profile["picked"] else ("  ", "")
        found = [scorer["scores"].get(name) for scorer in profile["scorers"]]
        scores = [f"{_score(score['raw'])} → {_score(score['weighted'])}" if score else "-" for score in found]
        total = _score(profile["totals"].get(name))
        table.add_row(escape(mark + name), *cells, *scores, total, style=style)
    return table


def _time(at: float) -> str:
    return datetime.fromtimestamp(at).astimezone().strftime("%H:%M:%S.%f")[:-3]


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.1f} ms"


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _plain(value: Any) -> str:
    return "-" if value is None else str(value)


def _outcome_of(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value and value not in OUTCOMES:
        known = f"; there are {', '.join(OUTCOMES)}"
        raise click.BadParameter(f"there is no outcome '{value}'{suggestion(value, OUTCOMES) or known}")
    return value


@click.command("explain")
@click.argument("body", required=False, shell_complete=files)
@click.option(
    "--state",
    "source",
    shell_complete=files,
    help="JSON or YAML file with scheduling, request and endpoints; - for standard input.",
)
@config_option
@click.option("--url", callback=in_full, help=f"URL of the proxy's admin port.  [default: {DEFAULT_URL}]")
@key_option
@click.option("--id", "name", help="Id of a decision, or x-request-id of a request.")
@click.option("--last", is_flag=True, help="Show the latest matching decision in full.")
@click.option(
    "--slow",
    metavar="TIME",
    help="Only decisions with a longer time to the first byte: 500ms, 2s or a number of seconds.",
)
@click.option("--pod", shell_complete=pods_in(), help="Only decisions for this pod.")
@click.option("--tenant", help="Only decisions for requests of this tenant.")
@click.option(
    "--outcome",
    callback=_outcome_of,
    help="Only requests with this outcome: complete, upstream-failed, timed-out, in-flight, ...",
)
@click.option(
    "--limit", type=click.IntRange(1, 1000), default=20, show_default=True, help="Largest number of decisions."
)
@click.option(
    "--weight", "weights", multiple=True, metavar="SCORER=N", help="Schedule BODY with another weight of a scorer."
)
@click.option("--profile", default="", help="Schedule BODY with this profile only; it may be a shadow profile.")
@click.option("--pool", help="Pool whose scheduling or decisions are used; with --state: default.")
@click.option("--all", "all_pods", is_flag=True, help="Show all pods of a large fleet in the tables.")
@click.option("--json", "as_json", is_flag=True, help="Print the JSON of the admin port.")
def explain(source: str | None, config: Path | None, url: str | None, **rest: Any) -> None:
    """Explain why a pod was chosen for a request, or which one would be.

    \b
    kvlane explain                            list the latest decisions
    kvlane explain --slow 2s --last           the latest with a first byte after more than 2 s
    kvlane explain --id REQUEST               one decision in full
    kvlane explain BODY.json                  the pod that a request would go to; it is not sent
    kvlane explain --state situation.yaml     a decision about given pods, without a proxy

    The first three need `telemetry: {decisions: {}}` in the proxy's configuration. BODY.json is the body of a request,
    or `{"request": ..., "path": ..., "headers": ..., "scheduling": ..., "weights": ...}`; - for standard input.

    --state runs the scheduler offline and prints the result of each filter and scorer as JSON. With -c, the scheduling
    of the configuration replaces that of the file.

    Exit code 0: success. 2: there is no such decision, the admin port does not respond, or a file cannot be used.
    """
    if source is not None:
        if url is not None:
            raise click.UsageError("Give either --url, for a running proxy, or --state, for a file.")
        _offline(source, config, rest["pool"] or DEFAULT_POOL)
        return
    found = _response(url or DEFAULT_URL, rest)
    if rest["as_json"]:
        click.echo(json.dumps(found, indent=2, ensure_ascii=False))
    elif "decisions" in found:
        show_list(found, console())
    else:
        show(found, console(), rest["all_pods"])


def _response(url: str, options: Mapping[str, Any]) -> Any:
    """Return the admin port's response: to a request to try, for one decision, or a list of decisions."""
    fetch = partial(fetched, url, key=options["key"])
    weights = dict(map(_weight, options["weights"]))
    if options["body"] is not None:
        body = _read(options["body"])
        given = body if isinstance(body, dict) and "request" in body else {"request": body}
        changes = {"pool": options["pool"], "profile": options["profile"], "weights": weights}
        trial = {**given, **{name: value for name, value in changes.items() if value}}
        return fetch("/debug/explain", body=orjson.dumps(trial))
    if weights or options["profile"]:
        raise click.UsageError("--weight and --profile need a BODY.")
    name = options["name"]
    if name is None:
        filters = {key: options[key] for key in ("slow", "pod", "tenant", "outcome", "pool") if options[key]}
        limit = "1" if options["last"] else str(options["limit"])
        found = fetch("/debug/decisions", query={**filters, "limit": limit})
        if options["pod"] and not found.get("decisions", True):
            _check_pod(options["pod"], [pod["name"] for pod in fetch("/admin/pods")["pods"]])
        if not options["last"] or not found["on"]:
            return found
        if not found["decisions"]:
            fail("No decision that is kept matches.")
        name = found["decisions"][0]["id"]
    return fetch(f"/debug/decisions/{quote(name, safe='')}")


def _check_pod(name: str, pods: Sequence[str]) -> None:
    """End the command if there is no such pod."""
    if name not in pods:
        some = f"; there are {', '.join(pods[:MOST_PODS])}{', …' if len(pods) > MOST_PODS else ''}" if pods else ""
        fail(f"There is no pod '{name}'{suggestion(name, pods) or some}.")


def _weight(written: str) -> tuple[str, float]:
    name, _, value = written.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise click.BadParameter(f"{written!r} is not a weight; write queue-scorer=2", param_hint="--weight") from None


def _offline(source: str, config: Path | None, pool: str) -> None:
    try:
        ports = {Clock: SystemClock(), RandomPort: Random()}
        state = _read(source)
        if config is not None and isinstance(state, dict):
            settings = load(config, os.environ)
            if pool not in settings.all_pools:
                fail(f"{config}: there is no pool {pool!r}")
            given = settings.source if pool == DEFAULT_POOL else settings.pools[pool].given
            state = {**state, "scheduling": given.get("scheduling")}
        explanation = asyncio.run(explaining.explain(state, Registry.discover(), ports))
    except ConfigError as error:
        fail("\n".join(map(str, error.problems)))
    click.echo(json.dumps(explanation, indent=2, ensure_ascii=False))


def _read(source: str) -> Any:
    try:
        text = sys.stdin.read() if source == "-" else Path(source).read_text()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{source}: {cause(error)}")
    try:
        return yaml_source.read_json(text, source)
    except ConfigError:
        pass  # it may be YAML
    try:
        return yaml_source.read(text, source, os.environ)
    except ConfigError as error:
        fail("\n".join(map(str, error.problems)))
