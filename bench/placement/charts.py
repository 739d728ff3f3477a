"""Charts as SVG that takes its colours from the page around it: no library, no files beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 560, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 14, 38

COLOURS = 8

Point = tuple[float, float, float]
"""Load, value, half of the interval around it (nan if unknown)."""


@dataclass(frozen=True, slots=True)
class Chart:
    """`limit` is drawn as a line across: an objective, or what would be perfect."""

    title: str
    unit: str
    series: Mapping[str, Sequence[Point]]
    logarithmic: bool = False
    limit: float | None = None


def svg(chart: Chart) -> str:
    """One line for each series, in the colours `--c0`, `--c1`, …; hovering over a point says its value."""
    points = [point for series in chart.series.values() for point in series if not math.isnan(point[1])]
    if not points:
        return ""
    scale = _Scale(chart, points)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">']
    parts += [_grid(scale, value) for value in scale.ticks]
    parts += [_load(scale, load) for load in sorted({point[0] for point in points})]
    if chart.limit is not None and scale.low <= chart.limit <= scale.high:
        y = scale.y(chart.limit)
        parts.append(f'<line class="limit" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for number, (name, series) in enumerate(chart.series.items()):
        parts.append(_line(scale, chart, number, name, [point for point in series if not math.isnan(point[1])]))
    return "".join(
        (*parts, f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 4}" text-anchor="end">load</text></svg>')
    )


def colour(number: int, role: str = "") -> str:
    """Attributes of what shows the series of this number: eight colours, then the same ones `again`."""
    roles = " ".join((role, "again" * (number >= COLOURS))).strip()
    return (f'class="{roles}" ' if roles else "") + f'style="--c:var(--c{number % COLOURS})"'


class _Scale:
    """Where values lie on the drawing."""

    def __init__(self, chart: Chart, points: Sequence[Point]) -> None:
        self._log = chart.logarithmic and min(value for _, value, _ in points) > 0
        loads, values = [load for load, _, _ in points], [value for _, value, _ in points]
        if chart.limit is not None:
            values.append(chart.limit)
        self.ticks = _decades(min(values), max(values)) if self._log else _round_steps(min(values), max(values))
        self.low, self.high = self.ticks[0], self.ticks[-1]
        spread = max(loads) - min(loads)
        pad = max(spread * 0.04, 0.01)
        self._first, self._last = min(loads) - pad, max(loads) + pad

    def x(self, load: float) -> float:
        return LEFT + (load - self._first) / (self._last - self._first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self.low, self.high
        if self._log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-9))
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


def _decades(low: float, high: float) -> list[float]:
    """Round numbers from the one below all values to the one above, the fewer the more decades there are."""
    decades = math.log10(high / low)
    steps = (1, 1.5, 2, 3, 5, 7) if decades < 0.8 else (1, 2, 5) if decades < 3 else (1,)
    first, last = math.floor(math.log10(low)), math.floor(math.log10(high)) + 1
    ticks = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    below = max(number for number, tick in enumerate(ticks) if tick <= low * (1 + 1e-9))
    above = next(number for number, tick in enumerate(ticks) if tick > max(high, ticks[below]))
    return ticks[below : above + 1]


def _round_steps(low: float, high: float) -> list[float]:
    span = max(high - low, 1e-3 * abs(high)) or 1.0
    rough = span / 4
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough)
    first = math.floor(low / step)
    return [number * step for number in range(first, max(math.ceil(high / step), first + 1) + 1)]


def _grid(scale: _Scale, value: float) -> str:
    y = scale.y(value)
    return (
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="axis" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    )


def _load(scale: _Scale, load: float) -> str:
    return f'<text class="axis" x="{scale.x(load):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{load:g}</text>'


def _line(scale: _Scale, chart: Chart, number: int, name: str, series: Sequence[Point]) -> str:
    path = " ".join(f"{scale.x(load):.1f},{scale.y(value):.1f}" for load, value, _ in series)
    parts = [f'<g {colour(number, "series")}><polyline points="{path}"/>']
    aside = 3 * (number - (len(chart.series) - 1) / 2)
    for load, value, half in series:
        x, y = scale.x(load), scale.y(value)
        sure = "" if math.isnan(half) else f" ± {half:.3g}"
        if sure:
            low, high = scale.y(value - half), scale.y(value + half)
            parts.append(
                f'<line class="error" x1="{x + aside:.1f}" x2="{x + aside:.1f}" y1="{low:.1f}" y2="{high:.1f}"/>'
            )
        label = f"{name}, load {load:g}: {value:.3g}{sure} {chart.unit}"
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{escape(label)}</title></circle>')
    return "".join((*parts, "</g>"))
