"""The fleet in a terminal: columns, screen and keys."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from rich.text import Text

from proxy.dashboard.client import FleetPicture, PodView
from proxy.telemetry.logs import visible

Key = float | str


@dataclass(frozen=True, slots=True)
class Column:
    """A column; a width of 0 is the remaining width. `falls`: the largest values come first unless reversed."""

    title: str
    width: int
    show: Callable[[PodView], str]
    key: Callable[[PodView], Key]
    falls: bool = True


def number(value: float | None) -> str:
    """Return a number in four characters if possible: 7, 12.5, 950, 8.1k."""
    if value is None:
        return "-"
    if value >= 999.5:
        return f"{value / 1000:.1f}k" if value < 99_950 else f"{value / 1000:.0f}k"
    return f"{value:.0f}" if value >= 99.5 or value == round(value) else f"{value:.1f}"


def share(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f}%"


def seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{1000 * value:.0f}ms" if value < 0.9995 else f"{value:.1f}s" if value < 99.95 else f"{value:.0f}s"


def _least(value: float | None) -> float:
    return -1.0 if value is None else value


COLUMNS: Sequence[Column] = (
    Column("POD", 0, lambda pod: pod.name, lambda pod: pod.name, falls=False),
    Column("ROLE", 7, lambda pod: pod.role or "-", lambda pod: pod.role, falls=False),
    Column("STATE", 8, lambda pod: pod.condition, lambda pod: pod.badness),
    Column("FLY", 4, lambda pod: number(pod.requests), lambda pod: pod.requests),
    Column("WAIT", 4, lambda pod: number(pod.waiting), lambda pod: pod.waiting),
    Column("RUN", 4, lambda pod: number(pod.running), lambda pod: pod.running),
    Column("KV", 4, lambda pod: share(pod.kv), lambda pod: pod.kv),
    Column("HIT", 4, lambda pod: share(pod.figures.hit_ratio), lambda pod: _least(pod.figures.hit_ratio)),
    Column("TTFT50", 6, lambda pod: seconds(pod.figures.ttft_50), lambda pod: _least(pod.figures.ttft_50)),
    Column("TTFT90", 6, lambda pod: seconds(pod.figures.ttft_90), lambda pod: _least(pod.figures.ttft_90)),
    Column("TOK/S", 5, lambda pod: number(pod.figures.tokens), lambda pod: _least(pod.figures.tokens)),
    Column("REQ/S", 5, lambda pod: number(pod.rate), lambda pod: _least(pod.rate)),
    Column("ERR/S", 5, lambda pod: number(pod.failures), lambda pod: _least(pod.failures)),
)
TITLES = tuple(column.title for column in COLUMNS)


@dataclass(frozen=True, slots=True)
class SortOrder:
    """The order of rows. `at` is the position of the column in COLUMNS."""

    at: int = TITLES.index("FLY")
    is_reversed: bool = False

    def of(self, pods: Sequence[PodView]) -> list[PodView]:
        """Return the rows in order. Equal pods are ordered by name, so that they do not change places every second."""
        column = COLUMNS[self.at]
        by_name = sorted(pods, key=lambda pod: pod.name)
        return sorted(by_name, key=column.key, reverse=column.falls != self.is_reversed)

    def next(self, steps: int) -> SortOrder:
        return replace(self, at=(self.at + steps) % len(COLUMNS))

    def turned(self) -> SortOrder:
        return replace(self, is_reversed=not self.is_reversed)


HEAD = 5
"""Number of lines above the pods; one more is below them."""

NARROWEST_NAME = 8
WIDEST_NAME = 18
"""Largest width of names, in characters, for which columns are left out."""
OPTIONAL = ("ERR/S", "REQ/S", "ROLE", "TTFT50", "TOK/S", "RUN", "HIT", "TTFT90")
"""Columns that a narrow terminal leaves out, in this order."""

STYLES = {"ready": "green", "ejected": "bold red", "broken": "bold red", "starting": "cyan", "leaving": "dim"}


@dataclass(frozen=True, slots=True)
class View:
    """The choices of the user."""

    order: SortOrder = SortOrder()
    top: int = 0
    """Index of the first visible row."""
    shows_ranks: bool = False
    """Whether to show the data-parallel ranks of each pod below it."""

    def rows(self, picture: FleetPicture) -> list[PodView]:
        pods = self.order.of(picture.rows())
        return [row for pod in pods for row in (pod, *pod.ranks)] if self.shows_ranks else pods

    def scrolled(self, by: int, total: int, rows: int) -> View:
        return replace(self, top=max(0, min(self.top + by, total - rows)))


def screen(picture: FleetPicture, view: View, size: tuple[int, int], now: float, wrong: str = "") -> Text:
    """Draw the screen, in `size` columns and lines. `wrong` is the reason for missing updates."""
    width, height = size
    total, rows = view.rows(picture), max(1, height - HEAD - 1)
    shown = total[view.top : view.top + rows]
    lines = [*head(picture, width, now, wrong), *table(shown, view.order, width)]
    lines += [Text("")] * (height - 1 - len(lines))
    foot = _foot(view, total, len(shown))
    foot.truncate(width)
    return Text("\n", no_wrap=True).join([*lines[: height - 1], foot])


def head(picture: FleetPicture, width: int, now: float, wrong: str) -> list[Text]:
    lines = [_who(picture, wrong), *_totals(picture, now)]
    for line in lines:
        line.truncate(width)
    return lines


def table(pods: Sequence[PodView], order: SortOrder, width: int, for_scripts: bool = False) -> list[Text]:
    """Return the table, with the title line first. The columns do not depend on the pods, for scripts."""
    longest = max((len(pod.name) for pod in pods), default=0)
    has_roles = for_scripts or any(pod.role for pod in pods)
    columns = fitting(width - min(max(longest, NARROWEST_NAME), WIDEST_NAME), has_roles)
    name = max(NARROWEST_NAME, min(width - _width_of_rest(columns), longest))
    if longest > name:
        pods = _without_what_is_common(pods)
    return [_titles(columns, name, COLUMNS[order.at]), *(_row(pod, columns, name) for pod in pods)]


def _without_what_is_common(pods: Sequence[PodView]) -> list[PodView]:
    """Return the names without their common ending, from a dot or a colon on: a domain, a port."""
    first, *others = (pod.name for pod in pods)
    ends = (first[at:] for at, sign in enumerate(first) if at and sign in ".:")
    common = next((end for end in ends if others and all(name.endswith(end) for name in others)), "")
    return [replace(pod, name=pod.name.removesuffix(common)) for pod in pods]


def fitting(width: int, has_roles: bool) -> list[Column]:
    """Return the columns that fit into a width beside the name. A fleet without roles has no column for them."""
    columns = [column for column in COLUMNS if has_roles or column.title != "ROLE"]
    for title in OPTIONAL:
        if _width_of_rest(columns) <= width:
            break
        columns = [column for column in columns if column.title != title]
    return columns


def _width_of_rest(columns: Sequence[Column]) -> int:
    """Return the width of all columns except the first, the name."""
    return sum(1 + column.width for column in columns[1:])


def _titles(columns: Sequence[Column], name: int, sorted_by: Column) -> Text:
    cells = [(_cell(column.title, column, name), "underline" if column is sorted_by else "") for column in columns]
    line = Text(" ").join(Text(*cell) for cell in cells)
    line.stylize("bold reverse")
    return line


def _row(pod: PodView, columns: Sequence[Column], name: int) -> Text:
    styles = {"STATE": STYLES.get(pod.condition, "yellow"), "ERR/S": "bold red" if pod.failures else ""}
    cells = [(_cell(column.show(pod), column, name), styles.get(column.title, "")) for column in columns]
    return Text(" ").join(Text(*cell) for cell in cells)


def _cell(text: str, column: Column, name: int) -> str:
    width, text = column.width or name, visible(text)
    if len(text) > width:
        text = f"{text[: width - 9]}…{text[-8:]}" if width > 12 else text[:width]
    return text.ljust(width) if column.title in ("POD", "ROLE", "STATE") else text.rjust(width)


def _who(picture: FleetPicture, wrong: str) -> Text:
    if wrong:
        return Text(wrong, style="bold white on red")
    about, pods = picture.about, picture.rows()
    config, states = about.get("config") or {}, Counter(pod.condition for pod in pods)
    parts = [f"kvlane {about.get('version', '')}".strip(), _pods(len(pods))]
    parts += [f"{count} {state}" for state, count in states.most_common()]
    parts += [f"configuration {config['number']}"] if "number" in config else []
    parts += ["PANIC: requests go to all pods"] if about.get("panics") else []
    parts += ["STOPPING"] if about.get("stopping") else []
    return Text(" · ".join(parts), style="bold")


def _pods(count: int) -> str:
    return f"{count} pod{'s' * (count != 1)}"


def _totals(picture: FleetPicture, now: float) -> list[Text]:
    point, pods = picture.totals(now), picture.pods.values()
    flying = sum(pod.requests for pod in pods)
    usage = sum(pod.kv for pod in pods) / len(pods) if pods else None
    here = [f"in flight {number(flying)}", f"held {number(picture.waits)}"]
    there = [
        f"waiting {number(sum(pod.waiting for pod in pods))}",
        f"running {number(sum(pod.running for pod in pods))}",
    ]
    percentiles: Sequence[float] = point.get("ttft") or ()
    median, p90, *_ = *percentiles, None, None
    ttft = f"TTFT p50 {seconds(median)} p90 {seconds(p90)}"
    outcomes = {"good": "req/s", "failed": "failed/s", "refused": "refused/s"}
    rates = [*(f"{number(point.get(key))} {unit}" for key, unit in outcomes.items()), ttft]
    # Responses without usage count 0 tokens, so a 0 from responses means that the number is unknown.
    source = point.get("tokensFrom")
    out, into = (point.get(key) if source == "pods" else point.get(key) or None for key in ("out", "in"))
    tokens = [f"{number(out)} tok/s out", f"{number(into)} in" + (f" from {source}" if source else "")]
    hits = f"hit {share(point.get('hits'))} ({share(point.get('predicted'))} expected)"
    hits += f" from {point['hitsFrom']}" if point.get("hits") is not None else ""
    return [
        Text(" · ".join([*here, *there, f"KV {share(usage)}"])),
        Text(" · ".join(rates)),
        Text(" · ".join([*tokens, hits])),
    ]


def _foot(view: View, rows: Sequence[PodView], shown: int) -> Text:
    by = COLUMNS[view.order.at].title + (" reversed" if view.order.is_reversed else "")
    pods = sum(row.rank_of is None for row in rows)
    where = f"{view.top + 1}-{view.top + shown} of {len(rows)}" if shown < len(rows) else _pods(pods)
    ranks = "  o ranks" if any(row.ranks for row in rows) else ""
    keys = f"q quit  s/S sort  r reverse{ranks}  ↑↓ PgUp PgDn scroll"
    return Text(f"{where} by {by}   {keys}", style="dim")


_KEYS = {
    "up": ("\x1b[A", "\x1bOA", "k"),
    "down": ("\x1b[B", "\x1bOB", "j"),
    "page up": ("\x1b[5~",),
    "page down": ("\x1b[6~", " "),
    "home": ("\x1b[H", "\x1b[1~", "g"),
    "end": ("\x1b[F", "\x1b[4~", "G"),
    "next": ("s", "\x1b[C", "\x1bOC"),
    "previous": ("S", "\x1b[D", "\x1bOD"),
    "reverse": ("r",),
    "open": ("o",),
    "quit": ("q", "Q"),
}
SEQUENCES = {sequence: key for key, sequences in _KEYS.items() for sequence in sequences}
"""Keys by what a terminal sends for them."""


def keys_in(typed: str) -> Iterator[str]:
    while typed:
        length = next((n for n in range(4, 0, -1) if typed[:n] in SEQUENCES), 0)
        if length:
            yield SEQUENCES[typed[:length]]
        typed = typed[length or 1 :]


def pressed(key: str, view: View, total: int, rows: int) -> View:
    """Return the view after a key; `rows` of the `total` rows fit on the screen."""
    if key in ("next", "previous"):
        return replace(view, order=view.order.next(1 if key == "next" else -1), top=0)
    if key == "reverse":
        return replace(view, order=view.order.turned(), top=0)
    if key == "open":
        return replace(view, shows_ranks=not view.shows_ranks, top=0)
    steps = {"up": -1, "down": 1, "page up": -rows, "page down": rows, "home": -total, "end": total}
    return view.scrolled(steps.get(key, 0), total, rows)


@contextmanager
def typed(call: Callable[[str], None]) -> Iterator[None]:
    """Call a function with each key until the end of the context, which restores the terminal."""
    if not sys.stdin.isatty():
        yield
        return
    number, loop = sys.stdin.fileno(), asyncio.get_running_loop()
    before = termios.tcgetattr(number)

    def read() -> None:
        for key in keys_in(os.read(number, 1024).decode("utf-8", "replace")):
            call(key)

    try:
        tty.setcbreak(number)
        loop.add_reader(number, read)
        yield
    finally:
        loop.remove_reader(number)
        termios.tcsetattr(number, termios.TCSADRAIN, before)
