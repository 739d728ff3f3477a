"""Draws the picture as lines of text, as many and as wide as the terminal has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.text import Text

from proxy.top.order import COLUMNS, Column, Order, number, seconds, share
from proxy.top.picture import Json, Picture, Pod

HEAD = 5
"""Lines above the pods; one more is below them."""

NARROWEST_NAME = 8
WIDEST_NAME = 18
"""For which columns are left out."""
OPTIONAL = ("ERR/S", "REQ/S", "ROLE", "TTFT50", "TOK/S", "RUN", "HIT", "TTFT90")
"""Columns that a narrow terminal does without, in this order; nothing else is said twice."""

STYLES = {"ready": "green", "ejected": "bold red", "broken": "bold red", "starting": "cyan", "leaving": "dim"}
OTHERWISE = "yellow"


@dataclass(frozen=True, slots=True)
class View:
    """What its keys have made of it."""

    order: Order = Order()
    top: int = 0
    """The first pod that is shown."""

    def scrolled(self, by: int, pods: int, rows: int) -> View:
        return replace(self, top=max(0, min(self.top + by, pods - rows)))


def screen(picture: Picture, view: View, size: tuple[int, int], now: float, wrong: str = "") -> Text:
    """All of it, in `size` columns and lines. `wrong` says why nothing new comes."""
    width, height = size
    pods, rows = view.order.of(picture.rows()), max(1, height - HEAD - 1)
    shown = pods[view.top : view.top + rows]
    lines = [*head(picture, width, now, wrong), *table(shown, view.order, width)]
    lines += [Text("")] * (height - 1 - len(lines))
    return Text("\n", no_wrap=True).join([*lines[: height - 1], _foot(view, len(pods), len(shown), width)])


def head(picture: Picture, width: int, now: float, wrong: str = "") -> list[Text]:
    return [_cut(line, width) for line in (_who(picture, wrong), *_totals(picture, now))]


def table(pods: Sequence[Pod], order: Order, width: int, for_scripts: bool = False) -> list[Text]:
    """Its title line first. Scripts find the same columns whatever the pods are."""
    longest = max((len(pod.name) for pod in pods), default=0)
    has_roles = for_scripts or any(pod.role for pod in pods)
    columns = fitting(width - min(max(longest, NARROWEST_NAME), WIDEST_NAME), has_roles)
    name = max(NARROWEST_NAME, min(width - _beside(columns), longest))
    if longest > name:
        pods = _without_what_is_common(pods)
    return [_titles(columns, name, COLUMNS[order.at]), *(_row(pod, columns, name) for pod in pods)]


def _without_what_is_common(pods: Sequence[Pod]) -> list[Pod]:
    """The ends of names, from a dot or a colon on: a domain, a port."""
    first, *others = (pod.name for pod in pods)
    ends = (first[at:] for at, sign in enumerate(first) if at and sign in ".:")
    common = next((end for end in ends if others and all(name.endswith(end) for name in others)), "")
    return [replace(pod, name=pod.name.removesuffix(common)) for pod in pods]


def fitting(width: int, has_roles: bool) -> list[Column]:
    """Into a width beside the name. A fleet without roles has no column for them."""
    columns = [column for column in COLUMNS if has_roles or column.title != "ROLE"]
    for title in OPTIONAL:
        if _beside(columns) <= width:
            break
        columns = [column for column in columns if column.title != title]
    return columns


def _beside(columns: Sequence[Column]) -> int:
    """What the name, which is the first of them, leaves free."""
    return sum(1 + column.width for column in columns[1:])


def _titles(columns: Sequence[Column], name: int, sorted_by: Column) -> Text:
    titles = [_cell(column.title, column, name) for column in columns]
    line = Text(" ".join(titles), style="bold reverse")
    if sorted_by in columns:
        at = columns.index(sorted_by)
        begins = sum(len(title) + 1 for title in titles[:at])
        line.stylize("underline", begins, begins + len(titles[at]))
    return line


def _row(pod: Pod, columns: Sequence[Column], name: int) -> Text:
    cells = [_cell(column.show(pod), column, name) for column in columns]
    line = Text(" ".join(cells))
    titles = [column.title for column in columns]
    at = sum(len(cell) + 1 for cell in cells[: titles.index("STATE")])
    line.stylize(STYLES.get(pod.condition, OTHERWISE), at, at + len(pod.condition))
    if pod.failures and "ERR/S" in titles:
        line.stylize("bold red", len(line) - len(cells[-1]))
    return line


def _cell(text: str, column: Column, name: int) -> str:
    width = column.width or name
    if len(text) > width:
        text = f"{text[: width - 9]}…{text[-8:]}" if width > 12 else text[:width]
    return text.ljust(width) if column.title in ("POD", "ROLE", "STATE") else text.rjust(width)


def _who(picture: Picture, wrong: str) -> Text:
    if wrong:
        return Text(wrong, style="bold white on red")
    about, states = picture.about, Counter(pod.condition for pod in picture.pods.values())
    config = about.get("config") or {}
    parts = [f"kvlane {about.get('version', '')}".strip(), f"{len(picture.pods)} pods"]
    parts += [f"{count} {state}" for state, count in states.most_common()]
    parts += [f"configuration {config['version']}"] if "version" in config else []
    parts += ["PANIC: all are asked"] if about.get("panics") else []
    parts += ["STOPPING"] if about.get("stopping") else []
    return Text(" · ".join(parts), style="bold")


def _totals(picture: Picture, now: float) -> list[Text]:
    point, pods = picture.totals(now), picture.pods.values()
    flying = sum(pod.requests for pod in pods)
    usage = sum(pod.kv for pod in pods) / len(pods) if pods else None
    here = [f"in flight {number(flying)}", f"held {number(picture.waits)}"]
    there = [
        f"waiting {number(sum(pod.waiting for pod in pods))}",
        f"running {number(sum(pod.running for pod in pods))}",
    ]
    ttft = f"TTFT p50 {_at(point, 'ttft', 0)} p90 {_at(point, 'ttft', 1)}"
    rates = [f"{number(point.get('good'))} req/s", f"{number(_failing(point))} failing", ttft]
    hits = f"hit {share(point.get('hits'))} ({share(point.get('predicted'))} expected)"
    hits += f" from {point['hitsFrom']}" if point.get("hits") is not None else ""
    return [
        Text(" · ".join([*here, *there, f"KV {share(usage)}"])),
        Text(" · ".join(rates)),
        Text(" · ".join([*_tokens(point), hits])),
    ]


def _tokens(point: Json) -> list[str]:
    """Responses without usage count 0 tokens, so a 0 from responses means that the tokens are not known."""
    source = point.get("tokensFrom")
    out, into = (point.get(key) if source == "pods" else point.get(key) or None for key in ("out", "in"))
    return [f"{number(out)} tok/s out", f"{number(into)} in" + (f" from {source}" if source else "")]


def _failing(point: Json) -> float | None:
    return point["failed"] + point["refused"] if "failed" in point else None


def _at(point: Json, name: str, position: int) -> str:
    found = point.get(name)
    return seconds(found[position] if found and len(found) > position else None)


def _foot(view: View, pods: int, shown: int, width: int) -> Text:
    by = COLUMNS[view.order.at].title + (" reversed" if view.order.is_reversed else "")
    where = f"{view.top + 1}-{view.top + shown} of {pods}" if shown < pods else f"{pods} pods"
    return _cut(Text(f"{where} by {by}   q quit  s/S sort  r reverse  ↑↓ PgUp PgDn scroll", style="dim"), width)


def _cut(line: Text, width: int) -> Text:
    line.truncate(width)
    return line
