"""Draws tables of bench/README.md, for it: what is in the pictures is what stands in the tables.

python bench/pictures.py
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "bench" / "README.md"
FOLDER = ROOT / "docs" / "pictures"

WIDTH, LEFT, RIGHT, TOP, ROW, BOTTOM = 760, 190, 24, 62, 24, 34
TICKS = (1, 2, 5)

STYLE = """
    text { font: 13px system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; fill: #1d2733; }
    .small { font-size: 12px; fill: #51606e; }
    .bold { font-weight: 600; }
    .grid { stroke: #d8dfe4; }
    .span { stroke: #8fa0ad; stroke-width: 2; }
    .mark { stroke: #ffffff; }
    .c0 { fill: #8ccfc5; } .c1 { fill: #009485; } .c2 { fill: #b46a12; } .c3 { fill: #5d4fb3; }
    .card { fill: #ffffff; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e4e9ee; }
      .small { fill: #a9b6c2; }
      .grid { stroke: #3a4150; }
      .span { stroke: #66758a; }
      .mark { stroke: #1e2129; }
      .c0 { fill: #12695f; } .c1 { fill: #1fb5a3; } .c2 { fill: #d9943f; } .c3 { fill: #a79bf0; }
      .card { fill: #1e2129; }
    }
"""


@dataclass(frozen=True, slots=True)
class Drawn:
    """A table, by its first line, and its columns to draw."""

    table: str
    columns: Sequence[str]
    title: str
    unit: str


DRAWN: Mapping[str, Drawn] = {
    "bench-routers.svg": Drawn(
        "| router | 0.6 | 0.8 | 0.95 |", ("0.6", "0.8", "0.95"), "Mean time to first token, at three loads", "s"
    ),
    "bench-cpu.svg": Drawn(
        "| | 1k | 32k | 128k | burst | paced |", ("1k", "32k", "128k", "burst"), "CPU per request", "µs"
    ),
    "bench-replicas.svg": Drawn(
        "| proxies | prefix hits | TTFT mean | p90 |",
        ("TTFT mean", "p90"),
        "Time to first token behind several proxies, which share what they know, or do not",
        "ms",
    ),
}

Rows = Mapping[str, Sequence[float]]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    for name, text in pictures(PAGE.read_text()).items():
        (FOLDER / name).write_text(text)
        sys.stdout.write(f"{(FOLDER / name).relative_to(ROOT)}: {len(text)} bytes\n")


def pictures(page: str) -> dict[str, str]:
    return {name: svg(drawn, rows(page, drawn)) for name, drawn in DRAWN.items()}


def rows(page: str, drawn: Drawn) -> Rows:
    """Those with a figure in every column that is wanted. Raises ValueError if there is no such table."""
    lines = page.splitlines()
    at = lines.index(drawn.table)
    places = [_cells(drawn.table).index(column) for column in drawn.columns]
    found: dict[str, Sequence[float]] = {}
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        name, *_ = cells = _cells(line)
        figures = [_FIGURE.fullmatch(cells[place]) for place in places]
        if " / " not in name:  # a ratio
            found |= {name: [float(one[1]) for one in figures if one]} if all(figures) else {}
    return found


def svg(drawn: Drawn, rows: Rows) -> str:
    """A line for each row, with a mark for each column, on a logarithmic scale."""
    height = TOP + ROW * len(rows) + BOTTOM
    scale = _Scale([value for values in rows.values() for value in values])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
        f' role="img" aria-labelledby="title">\n  <title id="title">{escape(drawn.title)}; the table has the figures'
        f'</title>\n  <style>{STYLE}  </style>\n  <rect class="card" width="{WIDTH}" height="{height}" rx="8"/>',
        f'  <text class="bold" x="16" y="24">{escape(drawn.title)}, {drawn.unit}</text>',
        *_legend(drawn.columns),
        *_grid(scale, height - BOTTOM),
    ]
    for number, (name, values) in enumerate(rows.items()):
        parts += _row(scale, TOP + ROW * number + ROW / 2, name, values)
    return "\n".join((*parts, "</svg>\n"))


def _legend(columns: Sequence[str]) -> Iterator[str]:
    x = 16.0
    for number, name in enumerate(columns):
        yield f'  <circle class="mark c{number}" cx="{x + 5:.0f}" cy="43" r="6"/>'
        yield f'  <text class="small" x="{x + 16:.0f}" y="47">{escape(name)}</text>'
        x += 40 + 8 * len(name)


def _grid(scale: _Scale, bottom: float) -> Iterator[str]:
    for tick in scale.ticks:
        x = scale.x(tick)
        yield f'  <line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 4}" y2="{bottom}"/>'
        yield f'  <text class="small" x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick:g}</text>'


def _row(scale: _Scale, y: float, name: str, values: Sequence[float]) -> Iterator[str]:
    weight = ' class="bold"' if name.startswith("kvlane") else ""
    yield f'  <text{weight} x="{LEFT - 14}" y="{y + 4:.0f}" text-anchor="end">{escape(name)}</text>'
    first, last = scale.x(min(values)), scale.x(max(values))
    yield f'  <line class="span" x1="{first:.1f}" x2="{last:.1f}" y1="{y:.0f}" y2="{y:.0f}"/>'
    for number, value in enumerate(values):
        yield f'  <circle class="mark c{number}" cx="{scale.x(value):.1f}" cy="{y:.0f}" r="6"/>'


class _Scale:
    """Logarithmic: what is twice as long is as far away everywhere."""

    def __init__(self, values: Sequence[float]) -> None:
        self._low, self._high = math.log(min(values) / 1.1), math.log(max(values) * 1.1)
        steps = [tick * 10.0**power for power in range(-3, 6) for tick in TICKS]
        self.ticks = [step for step in steps if self._low <= math.log(step) <= self._high]

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * (math.log(value) - self._low) / (self._high - self._low)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


_FIGURE = re.compile(r"([\d.]+)(?: ms)?")


if __name__ == "__main__":
    main()
