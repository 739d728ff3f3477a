"""Decisions as a terminal shows them."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

MOST_PODS = 20
"""Rows of a table, unless all are asked for."""

Json = Mapping[str, Any]

_COLUMNS = ("id", "time", "request", "pod", "margin", "first byte", "cached", "prompt", "waited", "outcome")
"""In parentheses, in two of them, what was expected. What is not streamed has its first byte with all others."""


def console() -> Console:
    """What does not go to a terminal is not wrapped at 80 columns."""
    return Console() if sys.stdout.isatty() else Console(width=200, highlight=False)


def show_list(answer: Json, to: Console) -> None:
    if not answer["on"]:
        to.print(escape(answer["hint"]))
        return
    table = Table(box=box.SIMPLE_HEAD)
    for name in _COLUMNS:
        table.add_column(name, overflow="fold")
    for one in answer["decisions"]:
        table.add_row(*map(escape, _row(one)))
    to.print(table)
    share = f" of a sample of {100 * answer['sample']:g} %" if answer["sample"] < 1 else ""
    to.print(f"{len(answer['decisions'])} shown, {answer['kept']} kept{share}; (…) was expected; --id ID shows why")


def show(one: Json, to: Console, all_pods: bool = False) -> None:
    """All of one decision, made or imagined."""
    for line in _lines(one):
        to.print(escape(line), highlight=False)
    for profile in one["profiles"]:
        _show_profile(one, profile, to, all_pods)
    if one.get("legs"):
        to.print(_legs(one["legs"]))


def _row(one: Json) -> list[str]:
    return [
        one["id"],
        _time(one["at"]),
        _shortened(one["request"]),
        _arrow(one["pod"], one["answeredBy"]),
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
        yield f"nobody was chosen: {one['error']['message']}"
    else:
        yield _choice(one)
    yield f"expected: {_expected(one['predicted'])}"
    if "outcome" in one:
        yield _outcome(one)
    if one.get("ttft") is not None and one["legs"]:
        yield f"of the {_seconds(one['ttft'])}: {', '.join(_spent(one))}"
    if live := one.get("live"):
        ahead = "" if live["margin"] is None else f", {_ahead(live['margin'], live['runnerUp'])}"
        yield f"as configured it would go to {live['pod'] or 'nobody'}{ahead}"
    for name in one.get("fresh", ()):
        yield f"{name} would begin anew: none that runs has its name and its parameters"
    if one["absent"]:
        yield "no candidates: " + ", ".join(f"{absent['pod']} ({absent['why']})" for absent in one["absent"])


def _choice(one: Json) -> str:
    prefill = f", its prompt computed by {one['prefill']}" if one["prefill"] else ""
    ahead = "" if one["margin"] is None else f", {_ahead(one['margin'], one['runnerUp'])}"
    why = f" ({one['why']})" if one["why"] else ""
    return f"chosen: {one['pod']}{prefill} by profile {one['profile']}{ahead}, of {one['candidates']} candidates{why}"


def _ahead(margin: float, other: str) -> str:
    if margin == 0:
        return f"level with {other}"
    if margin > 0:
        return f"{_score(margin)} ahead of {other}"
    return f"{_score(-margin)} behind {other}: its picker goes by more than scores"


def _expected(predicted: Json) -> str:
    cached, ttft = predicted["cachedTokens"], predicted["ttft"]
    first = f"first token after {_seconds(ttft)}" if ttft is not None else "the first token is predicted by nobody"
    return f"{first}, {cached} tokens cached" if cached is not None else first


def _outcome(one: Json) -> str:
    cached = f", {one['cachedTokens']} tokens cached" if one["cachedTokens"] is not None else ""
    tries = f", {one['tries']} tries" if one["tries"] != 1 else ""
    where = f" from {one['answeredBy']}" if one["answeredBy"] not in (None, one["pod"]) else ""
    first = "first byte" if one["stream"] else "not streamed, so its first byte"
    began = f"{first} after {_seconds(one['ttft'])}{where}" if one["ttft"] is not None else "no first byte"
    took = f", all of it {_seconds(one['e2e'])}" if one["e2e"] is not None else ""
    return f"was: {began}{cached}{took}; {one['outcome']} {one['status'] or ''}{tries}".rstrip()


def _spent(one: Json) -> Iterator[str]:
    """Where the time until the first byte went."""
    if one["queued"] is not None and one["queued"] > 0:
        yield f"{_seconds(one['queued'])} in the queue"
        yield f"{_seconds(max(0.0, one['waited'] - one['queued']))} before it"
    else:
        yield f"{_seconds(one['waited'])} before the decision"
    for leg in one["legs"]:
        until = leg["firstByte"] if leg["firstByte"] is not None else leg["lastByte"]
        if until is not None:
            of = "" if leg["stage"] == "whole" else f" ({leg['stage']})"
            yield f"{_seconds(until - leg['sent'])} at {leg['pod']}{of}"


def _show_profile(one: Json, profile: Json, to: Console, all_pods: bool) -> None:
    shadow = ", a shadow" if profile["shadow"] else ""
    to.print(f"\nprofile {escape(profile['profile'])}{shadow}", highlight=False)
    for step in profile["filters"]:
        if step["removed"]:
            to.print(escape(f"  {step['name']} took out {_listed(step['removed'])}"), highlight=False)
    if not profile["totals"]:
        to.print("  no pod was left")
        return
    names = list(dict.fromkeys([*profile["ranked"], *profile["totals"]]))
    shown = names if all_pods else names[:MOST_PODS]
    to.print(_table(one, profile, shown))
    if len(shown) < len(names):
        to.print(f"and {len(names) - len(shown)} more: --all")


def _table(one: Json, profile: Json, names: Sequence[str]) -> Table:
    """Of every scorer the score, and what that is in the total."""
    pods = {pod["pod"]: pod for pod in one["pods"]}
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("pod")
    for name in ("in flight", "waiting", "running", "KV", "cached", "TTFT"):
        table.add_column(name, justify="right")
    for scorer in profile["scorers"]:
        table.add_column(f"{escape(scorer['name'])}\n× {scorer['share']:.2f}", justify="right")
    table.add_column("total", justify="right")
    for name in names:
        style = "bold" if name == profile["picked"] else ""
        mark = "> " if name == profile["picked"] else "  "
        table.add_row(escape(mark + name), *_situation(pods[name]), *_scores(profile, name), style=style)
    return table


def _situation(pod: Json) -> list[str]:
    view = pod["view"]
    stale = "" if pod["fresh"] else " (stale)"
    return [
        str(pod["load"]["requests"]),
        str(view["waiting"]),
        str(view["running"]),
        f"{100 * (view['kvUsage'] or 0):.0f} %{stale}",
        _plain(pod["hitTokens"]),
        _seconds(pod["ttft"]),
    ]


def _scores(profile: Json, pod: str) -> list[str]:
    scores = [scorer["scores"].get(pod) for scorer in profile["scorers"]]
    told = [f"{_score(one['raw'])} → {_score(one['weighted'])}" if one else "-" for one in scores]
    return [*told, _score(profile["totals"].get(pod))]


def _legs(legs: Sequence[Json]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="legs", title_justify="left")
    for name in ("stage", "pod", "sent", "first byte", "last byte", "status", "ending", "cached", "expected cached"):
        table.add_column(name)
    for leg in legs:
        times = [_seconds(leg[name]) for name in ("sent", "firstByte", "lastByte")]
        ends = [_plain(leg[name]) for name in ("status", "ending", "cachedTokens", "predictedCachedTokens")]
        table.add_row(leg["stage"], escape(leg["pod"]), *times, *ends)
    return table


def _listed(names: Sequence[str]) -> str:
    more = len(names) - MOST_PODS
    return ", ".join(names[:MOST_PODS]) + (f" and {more} more" if more > 0 else "")


def _shortened(request: str) -> str:
    """Ids that begin alike are told apart by their ends."""
    return request if len(request) <= 18 else f"{request[:8]}…{request[-9:]}"


def _arrow(pod: str | None, answered_by: str | None) -> str:
    if pod is None:
        return "-"
    return pod if answered_by in (None, pod) else f"{pod} → {answered_by}"


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
