from __future__ import annotations

import math
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.placement import page, plots
from bench.placement.charts import Chart, svg
from bench.placement.report import COLUMNS, Measured, compared, differences, heading, knees, summary

BASE = dict.fromkeys(COLUMNS, 1.0)

ABOUT: dict[str, Any] = {
    "title": "Where requests go",
    "workload": "chat <of> people",
    "command": "python bench/quality.py --trace 'a & b'",
    "versions": {"kvlane": "0.1"},
    "objectives": {"first_token": 2.0, "per_token": 0.05},
    "good": 0.9,
    "sweep": True,
    "seeds": 2,
    "warm_up": 0.1,
}


def measured(policy: str, load: float, **figures: float) -> Measured:
    run = BASE | figures
    return {"policy": policy, "load": load, "figures": summary([run, run]), "runs": [run, run]}


def test_the_knee_is_interpolated_between_two_loads() -> None:
    late = [measured("a", load, ttft_p90=value, goodput=0.95) for load, value in ((0.4, 1.0), (0.6, 1.5), (0.8, 2.5))]
    assert knees(late, 2.0, 0.9) == {"a": ("0.70", "above 0.8")}


def test_a_policy_that_fails_at_the_first_load_has_its_knee_below() -> None:
    assert knees([measured("a", 0.4, ttft_p90=3.0, goodput=0.2)], 2.0, 0.9) == {"a": ("below 0.4", "below 0.4")}


def test_modes_are_compared_run_by_run() -> None:
    runs = [(1.0, 1.02), (2.0, 2.0)]
    found = differences([BASE | {"ttft_mean": a} for a, _ in runs], [BASE | {"ttft_mean": b} for _, b in runs])
    assert found["ttft_mean"][0] == pytest.approx(0.01)
    assert found["ttft_p90"] == (0.0, 0.0)


def test_a_comparison_shows_both_modes_and_their_difference() -> None:
    one = measured("a", 0.7, ttft_mean=1.02)
    one |= {"virtual": summary([BASE, BASE]), "differences": differences([BASE, BASE], one["runs"])}
    _, rows = compared([one])
    assert rows[0] == ["a", "0.7", "TTFT s", "1.000", "1.020", "+2.0% ±0.0%"]
    assert compared([measured("a", 0.7)])[1] == []


def test_a_percentile_names_its_metric() -> None:
    assert heading("ttft_p90") == "TTFT p90"
    assert heading("hit_predicted") == "pred %"


class Reader(HTMLParser):
    """Collects what a page refers to, and that every element is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.refers: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.refers += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_is_self_contained_and_shows_its_command() -> None:
    results = [
        measured(policy, load, goodput=load, ttft_p90=load * 3, hit_predicted=math.nan)
        for policy in ("mine.yaml", "<b>theirs</b>")
        for load in (0.5, 0.8)
    ]
    written, reader = page.html(ABOUT, results), Reader()
    reader.feed(written.partition(">")[2])
    assert reader.open == []
    assert reader.refers == []
    assert "url(" not in written
    assert "@import" not in written
    for shown in (ABOUT["workload"], ABOUT["command"], "<b>theirs</b>", "Load 0.5", "Load 0.8", "0.67"):
        assert shown in reader.text


def test_a_chart_without_data_is_left_out() -> None:
    titles = [chart.title for chart in page.charts(ABOUT, [measured("a", 0.5, hit=math.nan)])]
    assert "Time to first token, mean" in titles
    assert not any("cache" in title for title in titles)


VALUES = st.floats(1e-3, 1e4)


@given(st.lists(st.tuples(st.floats(0.1, 2.0), VALUES, VALUES), min_size=1, max_size=6), st.booleans())
def test_every_point_lies_inside_of_its_chart(points: list[tuple[float, float, float]], logarithmic: bool) -> None:
    drawing = svg(Chart("t", "s", {"a": points}, logarithmic))
    for part in drawing.split("<circle ")[1:]:
        x, y = (float(part.partition(f'{name}="')[2].partition('"')[0]) for name in ("cx", "cy"))
        assert 52 <= x <= 546
        assert 14 <= y <= 262


def test_without_matplotlib_the_installation_is_explained(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(plots.NoMatplotlib, match="pip install"):
        plots.write([], tmp_path)
