from __future__ import annotations

import pytest

from bench.pictures import DRAWN, FOLDER, PAGE, Drawn, pictures, rows, svg
from tests.helpers.docs.pages import ROOT

PAGE_TEXT = """
| router | 0.6 | 0.8 | 0.95 |
|---|---|---|---|
| ours | 1 ms | 2 | 4.0 |
| a / b | 1 | 1 | 1 |
| theirs | over 100 | 2 | 2 |

| after | 1 | 2 | 3 |
"""

TABLE = Drawn("| router | 0.6 | 0.8 | 0.95 |", ("0.95", "0.6"), "Times <of> ours", "s")


def test_the_pictures_agree_with_the_tables() -> None:
    drawn = pictures(PAGE.read_text())
    assert {name: (FOLDER / name).read_text() == text for name, text in drawn.items()} == dict.fromkeys(DRAWN, True), (
        "python bench/pictures.py draws them again"
    )


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_small_and_linked(name: str) -> None:
    assert (FOLDER / name).stat().st_size < 20_000
    assert f"](../docs/pictures/{name})" in (ROOT / "bench" / "README.md").read_text()


def test_rows_without_all_figures_and_ratios_are_left_out() -> None:
    assert rows(PAGE_TEXT, TABLE) == {"ours": [4.0, 1.0]}
    with pytest.raises(ValueError, match="not in list"):
        rows("nothing", TABLE)


def test_the_scale_is_logarithmic() -> None:
    text = svg(TABLE, {"a": [1.0, 2.0], "b": [4.0, 2.0]})
    at = [float(part.split('"')[0]) for part in text.split('cx="')[3:]]
    assert at[1] - at[0] == pytest.approx(at[2] - at[3], abs=0.2)
    assert "Times &lt;of&gt; ours" in text
