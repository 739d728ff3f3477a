"""The charts as PNG files, by matplotlib."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.placement.charts import Chart

MISSING = "--png needs matplotlib; install it with: pip install 'matplotlib>=3.9' (the dependency group bench)"


class NoMatplotlib(RuntimeError):
    """It is not installed."""


def write(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One file for each chart. Raises NoMatplotlib."""
    drawing = pyplot()
    folder.mkdir(parents=True, exist_ok=True)
    return [_write(drawing, chart, folder) for chart in charts]


def check() -> None:
    """Raises NoMatplotlib: before hours of measuring rather than after them."""
    pyplot()


def pyplot() -> Any:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as drawing
    except ImportError:
        raise NoMatplotlib(MISSING) from None
    return drawing


def _write(pyplot: Any, chart: Chart, folder: Path) -> Path:
    figure, axes = pyplot.subplots(figsize=(7, 4), dpi=150, layout="constrained")
    for name, series in chart.series.items():
        loads, values, halves = zip(*series, strict=True)
        errors = [0.0 if math.isnan(half) else half for half in halves]
        axes.errorbar(loads, values, errors, label=name, marker="o", markersize=4, capsize=2)
    if chart.limit is not None:
        axes.axhline(chart.limit, color="grey", linestyle="--", linewidth=1)
    if chart.logarithmic:
        axes.set_yscale("log")
        plain = pyplot.matplotlib.ticker.LogFormatter  # 0.06, and not 6 times ten to the power of -2
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(plain(labelOnlyBase=False, minor_thresholds=(1.5, 0.5)))
    axes.set(title=chart.title, xlabel="load", ylabel=chart.unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    path = folder / (re.sub(r"[^a-z0-9]+", "-", chart.title.lower()).strip("-") + ".png")
    figure.savefig(path)
    pyplot.close(figure)
    return path
